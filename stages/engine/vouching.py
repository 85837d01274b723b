"""Decides whether outputs of steps may become native code that this user runs: others may have made a directory.

A receipt of an own build has an authentication code that only this user can make, over the receipt and the SHA-256 of
those outputs from which native code is made. Where others built, a signature that the user trusts covers them.
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
"""The key of the authentication code in a receipt."""

_PURPOSE = "receipt"


@functools.lru_cache(1 << 16)
def is_native(label: str) -> bool:
    """Return whether a step's output becomes native code, or says which native code is run."""
    return any(Path(label).is_relative_to(place) for place in NATIVE)


class Vouching:
    """Judges the steps of one artifact directory, each by the name of its receipt."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def mac(self, step: str, receipt: Mapping[str, Any]) -> str:
        """Return the authentication code of a receipt. Raises UserError."""
        return trust.own_mac(self._authenticated(step, receipt), _PURPOSE)

    def is_own(self, step: str, receipt: Mapping[str, Any]) -> bool:
        """Return whether this user made the outputs from which native code is made. Raises UserError."""
        if not any(map(is_native, receipt["outputs"])):
            return True
        return trust.is_own_mac(str(receipt.get(MAC)).encode(), self._authenticated(step, receipt), _PURPOSE)

    def is_trusted(self, step: str, receipt: Mapping[str, Any]) -> bool:
        """Return whether this user, or somebody whom the user trusts, made them. Raises UserError."""
        return self.is_own(step, receipt) or all(
            self._signed.get(label, "") == self.sha256(label) for label in receipt["outputs"] if is_native(label)
        )

    def _authenticated(self, step: str, receipt: Mapping[str, Any]) -> bytes:
        fields = {key: value for key, value in receipt.items() if key != MAC}
        native = {label: self.sha256(label) for label in receipt["outputs"] if is_native(label)}
        return json.dumps([step, fields, native], sort_keys=True).encode()

    def sha256(self, label: str) -> str | None:
        """Return the SHA-256, hex, of an output, None where it cannot be read.

        The file is read each time: the decision whose code runs rests on no remembered digest. There are a few MB.
        """
        try:
            return content_sha256(self._directory / label)
        except OSError:
            return None

    @functools.cached_property
    def _signed(self) -> Mapping[str, str]:
        """The SHA-256 of the files that a trusted signature covers, by label."""
        try:
            return trust.covered(self._directory)
        except UserError:
            return {}
