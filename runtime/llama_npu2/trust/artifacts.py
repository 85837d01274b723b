"""Whether the native code of an artifact directory may run: by its manifest, which names every file with its SHA-256.

Who vouches for the manifest's bytes vouches for all: a mark that this user made when building (`manifest.local`), a
signature by a key that the user trusts (`manifest.sig`), or the manifest's SHA-256 in the environment.
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
    """Vouch for a manifest that was built here, or that the user allows, in `directory`. Raises UserError."""
    settings.replace(directory / LOCAL, settings.own_mac(manifest, _PURPOSE).encode(), 0o644)


def is_marked(directory: Path, manifest: bytes) -> bool:
    """Whether this user's mark lies beside the manifest in `directory`. Raises UserError."""
    return settings.is_own_mac(beside(directory, LOCAL), manifest, _PURPOSE)


def covered(directory: Path) -> dict[str, str]:
    """SHA-256, hex, of the files that the signature in `directory` covers, by name. Raises UserError if it has none
    that the user trusts."""
    manifest = beside(directory, MANIFEST)
    said, _ = signed_statement(directory, manifest, beside(directory, SIGNATURE))
    try:
        files = {name: entry["sha256"] for name, entry in load_json(manifest)["files"].items()}
        made = said["predicate"]["runDetails"]["byproducts"]
        files |= {entry["name"]: entry["digest"]["sha256"] for entry in made}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{directory / SIGNATURE} does not say what was built: get the directory again") from None
    return {**files, MANIFEST: hashlib.sha256(manifest).hexdigest()}


def beside(directory: Path, name: str) -> bytes:
    """Content of a small file in `directory`, empty if there is none; what is too long is cut."""
    path = directory / name
    if not path.is_file():
        return b""
    with path.open("rb") as file:
        return file.read(MAX_BYTES + 1)


def signature(manifest: bytes, statement: dict[str, Any]) -> bytes:
    """The content of `manifest.sig`. `statement`: in-toto's, whose subject is the manifest. Raises UserError."""
    _check_subject(statement, manifest)
    return seal(json.dumps(statement, sort_keys=True).encode(), _STATEMENT_TYPE)


def allowed(directory: Path, manifest: bytes, mark: bytes, envelope: bytes) -> str:
    """Who vouches for a manifest, in words. `mark`, `envelope`: what lies beside it in `directory`, empty where nothing
    does. Raises UserError, or Untrusted if only the key that signed it is not trusted."""
    if f"sha256:{hashlib.sha256(manifest).hexdigest()}" in from_environment():
        return TRUST
    if settings.is_own_mac(mark, manifest, _PURPOSE):
        return OWN_NAME
    return signed_statement(directory, manifest, envelope)[1]


def check_trusted(directory: Path, manifest: bytes, mark: bytes, envelope: bytes, native: Sequence[str]) -> None:
    """Raises UserError if nobody vouches for the manifest. `native`: files that would be run; the others are those of
    `allowed`."""
    try:
        allowed(directory, manifest, mark, envelope)
    except UserError as error:
        why, _, _ = str(error).partition(": to trust it, ")
        ways = [f"{errors.program} trust {directory} allows just this directory"]
        if not directory.is_dir():  # a file that holds all
            ways = [f"--trust=sha256:{hashlib.sha256(manifest).hexdigest()} allows just this"]
        if isinstance(error, Untrusted):
            ways.insert(0, f"{errors.program} trust '{error.key}' allows all that it signs")
        more = f" and {len(native) - 1} more" if len(native) > 1 else ""
        raise UserError(f"{why}; it would run native code ({native[0]}{more}): {', '.join(ways)}") from None


def signed_statement(directory: Path, manifest: bytes, envelope: bytes) -> tuple[dict[str, Any], str]:
    """The in-toto statement about a manifest, and who signed it, in words; the arguments are those of `allowed`. Raises
    UserError, or Untrusted."""
    if not envelope:
        raise UserError(f"{directory} was not built by you, and it is not signed")
    what = str(directory / SIGNATURE)
    signed = unseal(envelope, _STATEMENT_TYPE, what)
    try:
        said = load_json(signed.payload)
        _check_subject(said, manifest)
    except (ValueError, UserError):
        raise UserError(f"{what} is not about this manifest: get the directory again") from None
    return said, f"{signed.name} ({signed.key.fingerprint})"


def _check_subject(statement: Any, manifest: bytes) -> None:
    digest = hashlib.sha256(manifest).hexdigest()
    match statement:
        case {"_type": str(kind), "subject": [{"name": str(name), "digest": {"sha256": str(found)}}, *_]}:
            if (kind, name, found) == (_STATEMENT, MANIFEST, digest):
                return
    raise UserError(f"{MANIFEST} is not what the statement is about: run doit compile")
