"""Whether what steps left may become native code of this user's: receipts come along with directories that others made.

A receipt of an own build holds a code that only this user can make, over what it says and the SHA-256 of outputs that
native code is made of. Where others built, a signature that the user trusts covers those outputs.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llama_npu2 import trust
from llama_npu2.errors import UserError
from stages.engine.files import content_sha256
from stages.engine.places import NATIVE

MAC = "mac"
"""Of a receipt."""

_PURPOSE = "receipt"


def is_native(label: str) -> bool:
    """Whether a step's output becomes native code, or says what of that is run."""
    return any(Path(label).is_relative_to(place) for place in NATIVE)


class Vouching:
    """For the steps of one artifact `directory`, each by the name of its receipt."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def mac(self, step: str, receipt: Mapping[str, Any]) -> str:
        """The code of a receipt. Raises UserError."""
        return trust.own_mac(self._said(step, receipt), _PURPOSE)

    def is_own(self, step: str, receipt: Mapping[str, Any]) -> bool:
        """Whether this user made what native code is made of. Raises UserError."""
        native = any(map(is_native, receipt["outputs"]))
        return not native or trust.is_own_mac(str(receipt.get(MAC)).encode(), self._said(step, receipt), _PURPOSE)

    def is_trusted(self, step: str, receipt: Mapping[str, Any]) -> bool:
        """Whether this user did, or somebody whom the user trusts. Raises UserError."""
        return self.is_own(step, receipt) or all(
            self._signed.get(label, "") == self.sha256(label) for label in receipt["outputs"] if is_native(label)
        )

    def _said(self, step: str, receipt: Mapping[str, Any]) -> bytes:
        told = {key: value for key, value in receipt.items() if key != MAC}
        native = {label: self.sha256(label) for label in receipt["outputs"] if is_native(label)}
        return json.dumps([step, told, native], sort_keys=True).encode()

    def sha256(self, label: str) -> str | None:
        """SHA-256, hex, of an output, None where it cannot be read. The file is read each time: what decides whose code
        runs rests on no memory of what a file was. There are a few MB of them."""
        try:
            return content_sha256(self._directory / label)
        except OSError:
            return None

    @functools.cached_property
    def _signed(self) -> Mapping[str, str]:
        """SHA-256 of the files that a signature covers which the user trusts, by label."""
        try:
            return trust.covered(self._directory)
        except UserError:
            return {}
