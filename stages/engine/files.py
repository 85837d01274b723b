"""Reads, hashes and writes files; written ones are replaced atomically, so that nobody sees half of one."""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

import xxhash

from llama_npu2.artifact.regular import open_regular, read_regular
from llama_npu2.errors import REMEDY, UserError
from llama_npu2.schema import Check, load_json
from stages.engine.tree import Tree

HUGE_PAGE = 2 << 20
"""Bytes of a huge page. Where kernel and file system can, the page cache holds files that are written or mapped in such
pieces in huge pages, and a runtime maps them as such."""

_PIECE = 32 * HUGE_PAGE
_MADV_POPULATE_READ = 22  # of Linux 5.14; Python does not name it


def content_digest(path: Path) -> str:
    """Return the xxh3-128 of a file's content, hex. Raises OSError, also if it is no regular file."""
    return _hexdigest(xxhash.xxh3_128(), path)


def content_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content, hex, for files that machines share.

    Raises OSError as `content_digest`.
    """
    return _hexdigest(hashlib.sha256(), path)


def _hexdigest(state: Any, path: Path) -> str:
    for block in _blocks(path):
        state.update(block)
    digest: str = state.hexdigest()
    return digest


def _blocks(path: Path) -> Iterator[bytes]:
    """Yield the content that the file has when it is opened, in order: some files of the system have no end.

    Where kernel and file system can, parts that the page cache does not have come into it in huge pages: mapped weights
    read faster from those than from the small pages that reading alone leaves.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        size, read = os.fstat(file.fileno()).st_size, 0
        while read < size:
            if read % _PIECE == 0:
                _cache_in_huge_pages(file, read, min(_PIECE, size - read))
            block = file.read(min(1 << 20, size - read))
            if not block:
                return
            yield block
            read += len(block)


def _cache_in_huge_pages(file: BinaryIO, start: int, count: int) -> None:
    """Ask for huge pages. Errors are ignored: reading the file meets them again."""
    if count >= HUGE_PAGE:
        with contextlib.suppress(AttributeError, OSError, ValueError):
            with mmap.mmap(file.fileno(), count, prot=mmap.PROT_READ, offset=start) as mapping:
                mapping.madvise(mmap.MADV_HUGEPAGE)
                mapping.madvise(_MADV_POPULATE_READ)


def file_digests(path: Path) -> dict[str, str | int]:
    """Return the size of a file, its xxh3-128 (to detect changes) and its SHA-256 (for other machines)."""
    return {"size": path.stat().st_size, "xxh3": content_digest(path), "sha256": content_sha256(path)}


def read_json(path: Path, remedy: str = REMEDY) -> dict[str, Any]:
    """Return the object in a JSON file. Raises UserError, which ends with `remedy`."""
    try:
        value = load_json(read_regular(path))
    except FileNotFoundError:
        raise UserError(f"{path} is missing: {remedy}") from None
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}): {remedy}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}: {remedy}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold a JSON object, it holds a {type(value).__name__}: {remedy}")
    return value


def read_checked(path: Path, check: Check) -> dict[str, Any]:
    """Return the object in a JSON file that passes a check of `llama_npu2.schema`. Raises UserError."""
    value = read_json(path)
    try:
        check(value)
    except ValueError as error:
        raise UserError(f"{path}: {error}: {REMEDY}") from None
    return value


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file with sorted keys, so that equal values are equal bytes.

    It is not atomic, which is enough in a work directory.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def fsync_path(path: Path) -> None:
    """Flush a file or directory to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(directory: Path) -> None:
    """Flush every file below a directory to disk."""
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            fsync_path(path)


def write_atomic(path: Path, data: bytes) -> None:
    """Replace a file's content: write a temporary file next to it, flush, rename. It is removed on any failure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(temporary).unlink()
        raise


def require_space(directory: Path, needed: int, what: str) -> None:
    """Raise UserError if the disk that `directory` is on, or will be, has fewer than `needed` bytes for `what`."""
    existing = next(path for path in (directory, *directory.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise UserError(f"{what} needs {needed / 1e9:.1f} GB in {existing}, {free / 1e9:.1f} GB are free: make room")


@contextlib.contextmanager
def atomic_directory(directory: Path, ours: str) -> Iterator[Path]:
    """Yield a temporary directory that becomes `directory` when the `with` block succeeds.

    An old one is replaced if it has the file `ours`: where a link leads to it, it may be somebody's own directory.
    Leftovers of killed predecessors are removed first, so the caller must hold a lock. Raises UserError.
    """
    tree, name = Tree(directory.parent), directory.name
    if tree.names(name) and ours not in tree.names(name):
        raise UserError(f"{directory} is in the way, and it was not made by llama-npu2: move it elsewhere")
    for leftover in tree.names():
        if leftover.startswith(f".{name}.tmp-"):
            tree.remove(leftover)
    temporary = tree.make_empty(f".{name}.tmp-{uuid4().hex[:8]}")
    try:
        yield temporary
        sync_tree(temporary)
        tree.remove(name)
        tree.take(temporary, name)
    except BaseException:
        with contextlib.suppress(OSError):
            tree.remove(temporary.name)
        raise
