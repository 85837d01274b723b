"""Weights in the memory of the host, in huge pages where that is possible.

A token reads all weights once, which takes longer from small pages: what the machine asks for by itself ends with a
page, and each page has to be looked up. How much of a mapped file is in huge pages depends on file systems and on the
memory that was free when the file was read, so it is not left to chance.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from threading import Thread
from typing import NamedTuple

import numpy as np

from llama_npu2.artifact.storage import File
from llama_npu2.devices import HostBuffer, StoredWeight
from llama_npu2.machine import available_memory

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")

_LEAST = 2 << 20
"""Bytes of a huge page on most machines. Fewer are not worth a copy."""

_PIECE = 8 << 20
"""Bytes that a thread reads at a time."""


class Loaded(NamedTuple):
    """The content of weights."""

    buffers: list[HostBuffer]
    """Read-only, in their order."""
    copies: mmap.mmap | None
    """The memory of those that were copied."""

    def release(self) -> None:
        """Give the memory of copies back. Who still has a buffer reads zeros."""
        if self.copies is not None:
            self.copies.madvise(mmap.MADV_DONTNEED)


def load(weights: Sequence[StoredWeight], threads: int) -> Loaded:
    """Return the content of weights.

    Those that are read in full are copied into huge pages if at most half of the available memory goes into that: so
    the page cache can keep the files too, for the next start. Others, and else all, are mapped.

    Args:
        weights: where they lie.
        threads: how many read files at a time.

    Raises:
        UserError: if a file ends early or cannot be read.
    """
    in_full = [weight for weight in weights if weight.in_full]
    memory = _huge_pages(sum(map(_whole_pages, in_full)))
    copies = iter([] if memory is None else _copied(in_full, memory, threads))
    files: dict[Path, mmap.mmap] = {}
    contents = (_mapped(weight, files) if memory is None or not weight.in_full else next(copies) for weight in weights)
    return Loaded(list(map(HostBuffer, contents)), memory)


def _whole_pages(weight: StoredWeight) -> int:
    """Return the bytes of the pages that a weight takes."""
    return -(-weight.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _huge_pages(nbytes: int) -> mmap.mmap | None:
    """Return so much memory, in huge pages once it is written. None where it is not worth it or not to be had."""
    with contextlib.suppress(OSError, ValueError):
        if nbytes >= _LEAST and "[never]" not in _HUGE_PAGES.read_text() and nbytes <= available_memory() // 2:
            memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            memory.madvise(mmap.MADV_HUGEPAGE)
            return memory
    return None


def _mapped(weight: StoredWeight, files: dict[Path, mmap.mmap]) -> np.ndarray:
    """Return a weight's content in the page cache, whose pages all processes share that map the file."""
    where = weight.file.container
    if where not in files:
        with where.open("rb") as container:
            files[where] = mmap.mmap(container.fileno(), 0, prot=mmap.PROT_READ)
        with contextlib.suppress(AttributeError, OSError):
            # Where kernel and file system can, this caches and maps it in huge pages.
            files[where].madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(files[where], np.uint8, weight.nbytes, weight.file.start + weight.offset)


class _Piece(NamedTuple):
    """A part of a file, and the memory that it is read into."""

    file: File
    offset: int
    memory: memoryview


def _copied(weights: Sequence[StoredWeight], memory: mmap.mmap, threads: int) -> list[np.ndarray]:
    """Read weights into `memory`, each from the begin of a page on, and return their content."""
    view, begins = memoryview(memory), list(accumulate(map(_whole_pages, weights), initial=0))
    _read(
        [
            _Piece(file, offset + at, view[begin + at : begin + min(at + _PIECE, nbytes)])
            for (file, offset, nbytes, *_), begin in zip(weights, begins, strict=False)
            for at in range(0, nbytes, _PIECE)
        ],
        threads,
    )
    own = view.toreadonly()
    return [np.frombuffer(own, np.uint8, weight.nbytes, at) for weight, at in zip(weights, begins, strict=False)]


def _read(pieces: Sequence[_Piece], threads: int) -> None:
    """Read all pieces. Raises what the first one that fails raises."""
    left, failed = iter(pieces), list[BaseException]()

    def read() -> None:
        try:
            for piece in left:
                piece.file.read_into(piece.memory, piece.offset)
        except BaseException as error:
            failed.append(error)

    helpers = [Thread(target=read) for _ in range(threads - 1)]
    for helper in helpers:
        helper.start()
    read()
    for helper in helpers:
        helper.join()
    if failed:
        raise failed[0]
