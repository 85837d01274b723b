"""What a user's trust rests on: files in a directory that only this user reads."""

from __future__ import annotations

import contextlib
import hmac
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from llama_npu2.errors import UserError

DIRECTORY = "LLAMA_NPU2_CONFIG"
"""Environment variable: where the files lie, instead of `$XDG_CONFIG_HOME/llama-npu2`."""

_SECRET = "secret"
_SECRET_BYTES = 32


def directory() -> Path:
    """Where the files lie. It may not exist yet. Raises UserError."""
    if given := os.environ.get(DIRECTORY):
        return Path(given)
    config = os.environ.get("XDG_CONFIG_HOME", "")
    # A relative one is to be ignored: XDG Base Directory Specification.
    try:
        return (Path(config) if config.startswith("/") else Path.home() / ".config") / "llama-npu2"
    except RuntimeError:
        raise UserError(f"this user has no home directory: set {DIRECTORY} to a directory of theirs") from None


def own_mac(content: bytes, purpose: str) -> str:
    """HMAC-SHA256, hex, that only this user can make. `purpose`: what it says of the content; one made for another
    purpose is another. The secret is made when there is none. Raises UserError."""
    secret = private(_SECRET, lambda: os.urandom(_SECRET_BYTES))
    return hmac.digest(secret, framed(purpose, content), "sha256").hex()


def is_own_mac(found: bytes, content: bytes, purpose: str) -> bool:
    """Whether `own_mac` made it. Raises UserError."""
    if not found:
        return False
    path = directory() / _SECRET
    with _explained(path):
        known = path.exists()
    return known and hmac.compare_digest(found, own_mac(content, purpose).encode())


def framed(kind: str, content: bytes) -> bytes:
    """Content and what it is, as one unambiguous string of bytes: the pre-authentication encoding of DSSE v1,
    https://github.com/secure-systems-lab/dsse/blob/v1.0.0/protocol.md."""
    encoded = kind.encode()
    return b"DSSEv1 %d %s %d %s" % (len(encoded), encoded, len(content), content)


def private(name: str, make: Callable[[], bytes]) -> bytes:
    """The content of a file that only the user may read, made once. Raises UserError."""
    path = directory() / name
    with _explained(path):
        if not path.exists():
            _create(path, make())
        with path.open("rb") as file:
            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
                raise UserError(f"{path} can be read by others: chmod 600 it if it was always yours, else remove it")
            return file.read()


def read(name: str) -> str:
    """The text of a file that may be missing. Raises UserError."""
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
    """Write a file at once, whatever was there: a link is replaced, not followed. Raises UserError."""
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
    """Of several processes that make it, the first one's stays."""
    temporary = _temporary(path, content)
    try:
        with contextlib.suppress(FileExistsError):
            path.hardlink_to(temporary)
    finally:
        temporary.unlink()


def _temporary(path: Path, content: bytes) -> Path:
    """A file beside `path` with that content, which only the user may read."""
    import tempfile  # for this alone, which a run does not do

    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(descriptor)
    return Path(temporary)
