"""Ed25519 public keys in the form in which people paste them, and the list of keys that a user trusts."""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re

from llama_npu2.errors import UserError
from llama_npu2.frozen import frozen
from llama_npu2.trust import settings

TRUST = "LLAMA_NPU2_TRUST"
"""Environment variable: fingerprints, keys, and `sha256:` with a manifest's digest, with commas between, that are
trusted besides the list."""
OWN = "signing_key.pub"
"""The user's own public key, in the directory of settings."""
OWN_NAME = "you"

_TYPE = "ssh-ed25519"
_LIST = "trusted_keys"
_REVOKED = "@revoked"
_DIGEST = re.compile(r"SHA256:[A-Za-z0-9+/]{43}|sha256:[0-9a-f]{64}")
"""A key's fingerprint, or a manifest's digest."""
_PREFIX = b"\0\0\0\x0bssh-ed25519\0\0\0\x20"
"""The bytes before the 32 bytes of the key in OpenSSH's encoding (RFC 8709, section 4)."""


@frozen
class PublicKey:
    """An Ed25519 public key. As text it is OpenSSH's `ssh-ed25519 AAAA...`."""

    raw: bytes
    """32 bytes."""

    @classmethod
    def parse(cls, text: str) -> PublicKey:
        """Return the key of `ssh-ed25519 AAAA...` or of the base64 alone; either may be followed by a comment.

        Raises ValueError.
        """
        words = text.split()
        encoded = words[1] if words[:1] == [_TYPE] and len(words) > 1 else words[0] if words else ""
        try:
            blob = base64.b64decode(encoded, validate=True)
        except binascii.Error:
            blob = b""
        if not blob.startswith(_PREFIX) or len(blob) != len(_PREFIX) + 32:
            raise ValueError(f"{text[:80]!r} is no Ed25519 key ({_TYPE} and base64)")
        return cls(blob[len(_PREFIX) :])

    def __str__(self) -> str:
        return f"{_TYPE} {base64.b64encode(_PREFIX + self.raw).decode()}"

    @property
    def fingerprint(self) -> str:
        """The fingerprint that `ssh-keygen -l` shows."""
        digest = hashlib.sha256(_PREFIX + self.raw).digest()
        return f"SHA256:{base64.b64encode(digest).decode().rstrip('=')}"


def trusted_keys() -> dict[PublicKey, str]:
    """Return the user's own key, the listed ones and those of the environment, with their names. Raises UserError."""
    own = settings.read(OWN)
    names = {_parsed(own, OWN): OWN_NAME} if own else {}
    listed, revoked = _listed()
    names |= listed
    for text in from_environment():
        if not _DIGEST.fullmatch(text):
            names.setdefault(PublicKey.parse(text), TRUST)
    return {key: name for key, name in names.items() if key not in revoked}


def from_environment() -> list[str]:
    """Return the fingerprints, keys and digests of manifests that the environment trusts. Raises UserError."""
    texts = [text.strip() for text in os.environ.get(TRUST, "").split(",") if text.strip()]
    for text in texts:
        if not _DIGEST.fullmatch(text):
            try:
                PublicKey.parse(text)
            except ValueError:
                raise UserError(f"{TRUST}: {text} is no fingerprint, key, or sha256: of a manifest") from None
    return texts


def revoked_keys() -> dict[PublicKey, str]:
    """Return the keys that were removed from the list, with their names. Raises UserError."""
    return _listed()[1]


def add_key(key: PublicKey, name: str) -> None:
    """Trust from now on what a key signs. Messages call it `name`. Raises UserError."""
    if not re.fullmatch(r"\S+( \S+)*", name) or not name.isprintable():
        raise UserError(f"name={name!r}: a name is printable text on one line")
    listed, revoked = _listed()
    revoked.pop(key, None)
    _write(listed | {key: name}, revoked)


def remove_key(text: str) -> tuple[PublicKey, str]:
    """Trust a key no more, not even if a directory that it signed is shown.

    Args:
        text: the key, its fingerprint or its name.

    Returns:
        The key and its name.

    Raises:
        UserError: if there is not exactly one such trusted key.
    """
    listed, revoked = _listed()
    matches = [(key, name) for key, name in trusted_keys().items() if text in (str(key), key.fingerprint, name)]
    if len(matches) != 1:
        what = "no trusted key is" if not matches else f"{len(matches)} trusted keys are"
        raise UserError(f"{what} called {text}: give the fingerprint of one of doit trust")
    key, name = matches[0]
    listed.pop(key, None)
    _write(listed, revoked | {key: name})
    return key, name


def _listed() -> tuple[dict[PublicKey, str], dict[PublicKey, str]]:
    """Return the trusted and the revoked keys of the list, with their names."""
    trusted: dict[PublicKey, str] = {}
    revoked: dict[PublicKey, str] = {}
    for line in settings.read(_LIST).splitlines():
        if line.strip() and not line.startswith("#"):
            text = line.removeprefix(_REVOKED)
            key = _parsed(text, str(settings.directory() / _LIST))
            (trusted if text == line else revoked)[key] = " ".join(text.split()[2:]) or key.fingerprint
    return trusted, revoked


def _parsed(text: str, where: str) -> PublicKey:
    try:
        return PublicKey.parse(text)
    except ValueError as error:
        raise UserError(f"{where}: {error}: remove it") from None


def _write(listed: dict[PublicKey, str], revoked: dict[PublicKey, str]) -> None:
    lines = [f"{key} {name}" for key, name in listed.items()]
    lines += [f"{_REVOKED} {key} {name}" for key, name in revoked.items()]
    settings.write(_LIST, "".join(f"{line}\n" for line in lines))
