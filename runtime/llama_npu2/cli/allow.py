"""`llama-npu2 trust`: whose native code this user runs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from llama_npu2 import trust
from llama_npu2.artifact.manifest import Manifest
from llama_npu2.errors import UserError
from llama_npu2.trust.envelopes import own_key
from llama_npu2.trust.keys import OWN_NAME, TRUST, PublicKey


def changed(what: str, name: str, remove: str) -> Iterator[str]:
    """Trust a key or a directory, or remove a key; without any of these show what there is.

    Yields what to say. Raises UserError.
    """
    if remove:
        key, called = trust.remove_key(remove)
        yield f"no longer trusted: {called} {key.fingerprint}"
    if what and Path(what).is_dir():
        yield allow_directory(Path(what))
    elif what:
        yield allow_key(what, name)
    if not (what or remove):
        yield from shown()


def shown() -> Iterator[str]:
    """The user's own key to give to others, and the trusted ones."""
    yield f"your key, for others to trust: {own_key()}"
    others = {key: name for key, name in trust.trusted_keys().items() if name != OWN_NAME}
    for key, name in others.items():
        yield f"trusted: {key.fingerprint} {name}"
    if not others:
        yield "nobody else is trusted: only what you built yourself, or allowed as it is, runs"


def allow_key(text: str, name: str = "") -> str:
    """Trust what a key signs. `name`: without one, the comment behind the key, or its fingerprint."""
    try:
        key = PublicKey.parse(text)
    except ValueError as error:
        raise UserError(f"{error}, and no directory: give one of these") from None
    name = name or " ".join(text.split()[2:]) or key.fingerprint
    trust.add_key(key, name)
    return f"trusted from now on: {name}" + (f" ({key.fingerprint})" if name != key.fingerprint else "")


def allow_directory(directory: Path) -> str:
    """Trust the native code of one artifact directory as it is."""
    manifest = Manifest.open(directory)
    try:
        trust.mark_own(directory, manifest.content)
    except UserError as error:
        digest = hashlib.sha256(manifest.content).hexdigest()
        raise UserError(f"{error}: set {TRUST}=sha256:{digest} instead") from None
    native = {program["file"] for program in manifest.programs.values()}
    return f"trusted as it is: {directory}, with {len(native)} files of native code"
