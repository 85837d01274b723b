"""The files of a user's trust, in a directory that only this user reads."""

from __future__ import annotations

import contextlib
import hmac
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from llama_npu2.errors import UserError

DIRECTORY = "LLAMA_NPU2_CONFIG"
"""Environment variable: the directory of the files, instead of `$XDG_CONFIG_HOME/llama-npu2`."""

_SECRET = "secret"
_SECRET_BYTES = 32


def directory() -> Path:
    """Return the directory of the files, which may not exist yet. Raises UserError."""
    if chosen := os.environ.get(DIRECTORY):
        return Path(chosen)
    config = os.environ.get("XDG_CONFIG_HOME", "")
    # The XDG Base Directory Specification says to ignore a relative path.
    try:
        return (Path(config) if config.startswith("/") else Path.home() / ".config") / "llama-npu2"
    except RuntimeError:
        raise UserError(f"this user has no home directory: set {DIRECTORY} to a directory of theirs") from None


def own_mac(content: bytes, purpose: str) -> str:
    """Return an HMAC-SHA256, hex, that only this user can make. The secret is made when there is none.

    Args:
        content: the authenticated bytes.
        purpose: the claim about the content. The code for another purpose is a different one.

    Raises:
        UserError: if the secret cannot be read or made.
    """
    secret = private(_SECRET, lambda: os.urandom(_SECRET_BYTES))
    return hmac.digest(secret, framed(purpose, content), "sha256").hex()


def is_own_mac(mac: bytes, content: bytes, purpose: str) -> bool:
    """Return whether `mac` is `own_mac(content, purpose)`. Raises UserError."""
    if not mac:
        return False
    path = directory() / _SECRET
    with _explained(path):
        exists = path.exists()
    return exists and hmac.compare_digest(mac, own_mac(content, purpose).encode())


def framed(kind: str, content: bytes) -> bytes:
    """Return the kind of a content and the content as one unambiguous string of bytes.

    It is the pre-authentication encoding of DSSE v1, https://github.com/secure-systems-lab/dsse/blob/v1.0.0/protocol.md.
    """
    encoded = kind.encode()
    return b"DSSEv1 %d %s %d %s" % (len(encoded), encoded, len(content), content)


def private(name: str, make: Callable[[], bytes]) -> bytes:
    """Return the content of a file that only the user may read.

    If there is none, it is made with `make()`. Raises UserError.
    """
    path = directory() / name
    with _explained(path):
        if not path.exists():
            _create(path, make())
        with path.open("rb") as file:
            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
                raise UserError(f"{path} can be read by others: chmod 600 it if it was always yours, else remove it")
            return file.read()


def read(name: str) -> str:
    """Return the text of a file, empty if it is missing. Raises UserError."""
    path = directory() / name
    with _explained(path):
        try:
            return path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""


def write(name: str, text: str) -> None:
    """Replace one of the files. Raises UserError."""
    replace(directory() / name, text.encode(), 0o600)


def replace(path: Path, content: bytes, mode: int) -> None:
    """Write a file atomically. A link of that name is replaced, not followed. Raises UserError."""
    with _explained(path):
        temporary = _temporary(path, content)
        temporary.chmod(mode)
        temporary.replace(path)


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        remedy = f": set {DIRECTORY} to a directory of yours" if path.parent == directory() else ""
        raise UserError(f"{path}: {error.strerror}{remedy}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not text: remove it and trust the keys again") from None


def _create(path: Path, content: bytes) -> None:
    """Make a file. If several processes do, the first one's stays."""
    temporary = _temporary(path, content)
    try:
        with contextlib.suppress(FileExistsError):
            path.hardlink_to(temporary)
    finally:
        temporary.unlink()


def _temporary(path: Path, content: bytes) -> Path:
    """Write a temporary file in the directory of `path`, which only the user may read."""
    import tempfile  # here because it takes time, and running a model does not need it

    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(descriptor)
    return Path(temporary)
