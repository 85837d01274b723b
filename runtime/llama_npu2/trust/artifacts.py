"""Decides whether the native code of an artifact directory may run.

The manifest names every file with its SHA-256, so it is enough that somebody vouches for the manifest's bytes: a mark
that this user made when building (`manifest.local`), a signature by a key that the user trusts (`manifest.sig`), or the
manifest's SHA-256 in the environment.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llama_npu2 import errors
from llama_npu2.errors import UserError
from llama_npu2.schema import load_json
from llama_npu2.trust import settings
from llama_npu2.trust.envelopes import MAX_BYTES, Untrusted, seal, unseal
from llama_npu2.trust.keys import OWN_NAME, TRUST, from_environment

MANIFEST = "manifest.json"
LOCAL = "manifest.local"
SIGNATURE = "manifest.sig"
"""A DSSE envelope with an in-toto statement about the manifest."""

_PURPOSE = "manifest"
_STATEMENT = "https://in-toto.io/Statement/v1"
_STATEMENT_TYPE = "application/vnd.in-toto+json"


def mark_own(directory: Path, manifest: bytes) -> None:
    """Write this user's mark for a manifest that was built here, or that the user allows. Raises UserError."""
    settings.replace(directory / LOCAL, settings.own_mac(manifest, _PURPOSE).encode(), 0o644)


def is_marked(directory: Path, manifest: bytes) -> bool:
    """Return whether `directory` has this user's mark for the manifest. Raises UserError."""
    return settings.is_own_mac(_read_start(directory / LOCAL), manifest, _PURPOSE)


def covered(directory: Path) -> dict[str, str]:
    """Return the SHA-256, hex, of the files that the signature in `directory` covers, by name.

    Raises UserError if there is no signature by a key that the user trusts.
    """
    manifest = _read_start(directory / MANIFEST)
    statement, _ = signed_statement(directory, manifest, _read_start(directory / SIGNATURE))
    try:
        files = {name: entry["sha256"] for name, entry in load_json(manifest)["files"].items()}
        byproducts = statement["predicate"]["runDetails"]["byproducts"]
        files |= {entry["name"]: entry["digest"]["sha256"] for entry in byproducts}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{directory / SIGNATURE} does not say what was built: get the directory again") from None
    return {**files, MANIFEST: hashlib.sha256(manifest).hexdigest()}


def _read_start(path: Path) -> bytes:
    """Return the content of a small file, empty if there is none. A file that is too long is cut."""
    if not path.is_file():
        return b""
    with path.open("rb") as file:
        return file.read(MAX_BYTES + 1)


def signature(manifest: bytes, statement: dict[str, Any]) -> bytes:
    """Return the content of `manifest.sig`: the signed in-toto `statement`, whose subject is the manifest.

    Raises UserError.
    """
    _check_subject(statement, manifest)
    return seal(json.dumps(statement, sort_keys=True).encode(), _STATEMENT_TYPE)


def allowed(directory: Path, manifest: bytes, mark: bytes, envelope: bytes) -> str:
    """Return who vouches for a manifest, in words.

    Args:
        directory: the artifact directory, for messages.
        manifest: the content of `manifest.json`.
        mark: the content of `manifest.local`, empty if there is none.
        envelope: the content of `manifest.sig`, empty if there is none.

    Raises:
        Untrusted: if the signature is right, but its key is not trusted.
        UserError: if nobody vouches for it for another reason.
    """
    if f"sha256:{hashlib.sha256(manifest).hexdigest()}" in from_environment():
        return TRUST
    if settings.is_own_mac(mark, manifest, _PURPOSE):
        return OWN_NAME
    return signed_statement(directory, manifest, envelope)[1]


def vouching(directory: Path) -> str:
    """Return who vouches for the manifest of a directory, as `allowed` does. Raises UserError as that."""
    return allowed(directory, *(_read_start(directory / name) for name in (MANIFEST, LOCAL, SIGNATURE)))


def check_trusted(directory: Path, manifest: bytes, mark: bytes, envelope: bytes, native: Sequence[str]) -> None:
    """Raise UserError if nobody vouches for the manifest.

    The message names `native`, the files that would be run; the other arguments are those of `allowed`.
    """
    try:
        allowed(directory, manifest, mark, envelope)
    except UserError as error:
        why = error.why if isinstance(error, Untrusted) else str(error)
        ways = [f"{errors.program} trust {directory} allows just this directory"]
        if not directory.is_dir():  # a file of doit export
            ways = [f"--trust=sha256:{hashlib.sha256(manifest).hexdigest()} allows just this"]
        if isinstance(error, Untrusted):
            ways.insert(0, f"{errors.program} trust '{error.key}' allows all that it signs")
        more = f" and {len(native) - 1} more" if len(native) > 1 else ""
        raise UserError(f"{why}; it would run native code ({native[0]}{more}): {', '.join(ways)}") from None


def signed_statement(directory: Path, manifest: bytes, envelope: bytes) -> tuple[dict[str, Any], str]:
    """Return the in-toto statement about a manifest, and who signed it, in words.

    Arguments and errors are those of `allowed`.
    """
    if not envelope:
        raise UserError(f"{directory} was not built by you, and it is not signed")
    what = str(directory / SIGNATURE)
    signed = unseal(envelope, _STATEMENT_TYPE, what)
    try:
        statement = load_json(signed.payload)
        _check_subject(statement, manifest)
    except (ValueError, UserError):
        raise UserError(f"{what} is not about this manifest: get the directory again") from None
    return statement, f"{signed.name} ({signed.key.fingerprint})"


def _check_subject(statement: Any, manifest: bytes) -> None:
    digest = hashlib.sha256(manifest).hexdigest()
    match statement:
        case {"_type": str(kind), "subject": [{"name": str(name), "digest": {"sha256": str(sha256)}}, *_]}:
            if (kind, name, sha256) == (_STATEMENT, MANIFEST, digest):
                return
    raise UserError(f"{MANIFEST} is not what the statement is about: run doit compile")
