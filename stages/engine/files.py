"""Writing files so that nobody ever sees half of one."""

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
"""Bytes. What is written or mapped at once lies in the page cache in pages that large, where kernel and file system
can, and then a runtime maps them as such."""

_PIECE = 32 * HUGE_PAGE
_MADV_POPULATE_READ = 22  # of Linux 5.14; Python does not name it


def content_digest(path: Path) -> str:
    """xxh3-128 of a file's content, hex. Raises OSError, also for what is no regular file."""
    return _hexdigest(xxhash.xxh3_128(), path)


def content_sha256(path: Path) -> str:
    """SHA-256 of a file's content, hex: for what is shared between machines. Raises OSError as `content_digest`."""
    return _hexdigest(hashlib.sha256(), path)


def _hexdigest(state: Any, path: Path) -> str:
    for block in _blocks(path):
        state.update(block)
    digest: str = state.hexdigest()
    return digest


def _blocks(path: Path) -> Iterator[bytes]:
    """The content, in order, as long as the file is when it is opened: some files of the system have no end.

    What the page cache has not got comes into it in huge pages, where kernel and file system can: weights that are
    mapped from there read faster than from the small pages that reading alone leaves behind.
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
    """No more than a wish: whatever is wrong with a file or its system is left to who reads it."""
    if count >= HUGE_PAGE:
        with contextlib.suppress(AttributeError, OSError, ValueError):
            with mmap.mmap(file.fileno(), count, prot=mmap.PROT_READ, offset=start) as mapping:
                mapping.madvise(mmap.MADV_HUGEPAGE)
                mapping.madvise(_MADV_POPULATE_READ)


def file_digests(path: Path) -> dict[str, str | int]:
    """Size, xxh3-128 (change detection) and sha256 (for what is shared) of a file."""
    return {"size": path.stat().st_size, "xxh3": content_digest(path), "sha256": content_sha256(path)}


def read_json(path: Path, remedy: str = REMEDY) -> dict[str, Any]:
    """A JSON file that holds an object. `remedy`: what to do if it does not. Raises UserError."""
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
    """The same, if it is what a table of `llama_npu2.schema` says. Raises UserError."""
    value = read_json(path)
    try:
        check(value)
    except ValueError as error:
        raise UserError(f"{path}: {error}: {REMEDY}") from None
    return value


def write_json(path: Path, value: Any) -> None:
    """A JSON file with sorted keys, so that equal values are equal bytes. Not atomic: for files in a work directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def fsync_path(path: Path) -> None:
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
    """Replace a file's content: write beside it, flush, rename. The temporary is removed on any failure."""
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
    there = next(path for path in (directory, *directory.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(there).free
    if needed > free:
        raise UserError(f"{what} needs {needed / 1e9:.1f} GB in {there}, {free / 1e9:.1f} GB are free: make room")


@contextlib.contextmanager
def atomic_directory(directory: Path, ours: str) -> Iterator[Path]:
    """A temporary directory that becomes `directory` when the block succeeds.

    An old one is replaced if it holds the file `ours`: a directory of that name may be somebody's own where a link
    leads to it. Leftovers of killed predecessors are removed first, so the caller holds a lock. Raises UserError.
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
