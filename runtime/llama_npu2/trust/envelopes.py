"""Signed payloads: DSSE v1 envelopes with one Ed25519 signature, whose `keyid` is the public key itself.

See https://github.com/secure-systems-lab/dsse.
"""

from __future__ import annotations

import base64
import binascii
import functools
import json
from typing import Any

from llama_npu2.errors import UserError
from llama_npu2.frozen import frozen
from llama_npu2.schema import load_json
from llama_npu2.trust import settings
from llama_npu2.trust.keys import OWN, TRUST, PublicKey, from_environment, revoked_keys, trusted_keys

MAX_BYTES = 16 << 20
"""Most bytes of an envelope."""

_SIGNING_KEY = "signing_key"


@frozen
class Signed:
    """A payload that was signed with a key that the user trusts."""

    payload: bytes
    key: PublicKey
    name: str
    """The user's name for the key."""


class Untrusted(UserError):
    """The signature is right, but its key is not trusted."""

    def __init__(self, what: str, key: PublicKey) -> None:
        self.key = key
        removed = revoked_keys().get(key)
        signer = "whom you do not trust" if removed is None else f"the key {removed!r} that you removed"
        self.why = f"{what} is signed by {key.fingerprint}, {signer}"
        super().__init__(f"{self.why}: to trust it, doit trust key='{key}'")


def payload_type(purpose: str) -> str:
    """Return the media type of the project's payloads for a purpose."""
    return f"application/vnd.llama-npu2.{purpose}"


def sign(payload: bytes, purpose: str) -> bytes:
    """Return an envelope with the payload, signed with the user's key, which is made when there is none.

    The purpose is signed as well, so that the envelope is not valid for another one. Raises UserError.
    """
    return seal(payload, payload_type(purpose))


def verify(envelope: bytes, purpose: str, what: str = "this") -> Signed:
    """Open an envelope, which messages call `what`.

    Raises:
        Untrusted: if the signature is right, but its key is not trusted.
        UserError: if the envelope is damaged, altered or for another purpose.
    """
    return unseal(envelope, payload_type(purpose), what)


def seal(payload: bytes, kind: str) -> bytes:
    """Sign a payload as `sign` does, with its full media type."""
    key = _signing_key()
    public = own_key()
    signature = {"keyid": str(public), "sig": _base64(key.sign(settings.framed(kind, payload)))}
    envelope = {"payload": _base64(payload), "payloadType": kind, "signatures": [signature]}
    return (json.dumps(envelope, indent=1) + "\n").encode()


def unseal(envelope: bytes, kind: str, what: str) -> Signed:
    """Open an envelope as `verify` does, with its full media type."""
    try:
        payload, key, signature = _opened(envelope, kind)
    except ValueError as error:
        raise UserError(f"{what} is not signed correctly ({error}): get it again") from None
    if not _valid(key, signature, settings.framed(kind, payload)):
        raise UserError(f"{what} was altered: the signature of {key.fingerprint} is of something else: get it again")
    trusted = trusted_keys()
    if key.fingerprint in from_environment() and key not in revoked_keys():
        trusted.setdefault(key, TRUST)
    if key not in trusted:
        raise Untrusted(what, key)
    return Signed(payload, key, trusted[key])


def own_key() -> PublicKey:
    """Return the user's own key, which is made when there is none. Raises UserError."""
    private = _signing_key()
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    key = PublicKey(private.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw))
    if settings.read(OWN) != f"{key}\n":
        settings.write(OWN, f"{key}\n")
    return key


def _signing_key() -> Any:
    ed25519 = _ed25519()
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    def make() -> bytes:
        key = ed25519.Ed25519PrivateKey.generate()
        return bytes(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))

    content = settings.private(_SIGNING_KEY, make)
    try:
        key = _parsed_key(content)
    except Exception as error:
        raise UserError(f"{settings.directory() / _SIGNING_KEY} cannot be read ({error}): remove it") from None
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise UserError(f"{settings.directory() / _SIGNING_KEY} is no Ed25519 key: remove it")
    return key


@functools.lru_cache(maxsize=1)
def _parsed_key(content: bytes) -> Any:
    """Return the key in a file's content, which is asked for some times for each step of a build."""
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    return load_ssh_private_key(content, None)


def _valid(key: PublicKey, signature: bytes, content: bytes) -> bool:
    ed25519 = _ed25519()
    from cryptography.exceptions import InvalidSignature

    try:
        ed25519.Ed25519PublicKey.from_public_bytes(key.raw).verify(signature, content)
    except (InvalidSignature, ValueError):
        return False
    return True


def _ed25519() -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise UserError("signatures need cryptography: pip install -e '.[share]' or pip install cryptography") from None
    return ed25519


def _opened(envelope: bytes, kind: str) -> tuple[bytes, PublicKey, bytes]:
    """Return payload, key and signature. Raises ValueError if this is no envelope of that kind."""
    if len(envelope) > MAX_BYTES:
        raise ValueError(f"{len(envelope)} bytes")
    try:
        content = load_json(envelope)
    except ValueError:
        raise ValueError("it is not JSON") from None
    match content:
        case {"payload": str(payload), "payloadType": str(stated), "signatures": [{"keyid": str(key), "sig": str(s)}]}:
            if stated != kind:
                raise ValueError(f"it is for {stated[:80]!r}, not {kind!r}")
            return _bytes(payload), PublicKey.parse(key), _bytes(s)
    raise ValueError("it is no DSSE envelope with one signature")


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("it holds what is not base64") from None
