"""Buffers of the CPU device between pages that nobody may touch: native code that leaves one is stopped there, and
under AddressSanitizer at its very first and last byte."""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from llama_npu2.devices import HostBuffer, StoredWeight
from llama_npu2.devices.cpu import CpuDevice

_PAGE = mmap.PAGESIZE
_NO_ACCESS = 0
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
SANITIZED = hasattr(_libc, "__asan_poison_memory_region")
"""Whether AddressSanitizer is in this process."""


class GuardedDevice(CpuDevice):
    """`at_end`: a buffer ends where the page behind it begins, as far as its alignment lets it; else it begins where
    the page before it ends. Weights may not be written."""

    at_end = True
    _weights: ClassVar[dict[tuple[Path, int, int, bool], HostBuffer]] = {}

    def alloc(self, nbytes: int, host: bool = False) -> HostBuffer:
        return HostBuffer(_guarded(super().alloc(_around(nbytes)).bytes, nbytes, self.at_end))

    def load_weights(self, weights: Sequence[StoredWeight]) -> list[HostBuffer]:
        """Copies, made once."""
        return list(map(self._copy, weights))

    def _copy(self, weight: StoredWeight) -> HostBuffer:
        file, offset, nbytes, *_ = weight
        key = (file.path, offset, nbytes, self.at_end)
        if key not in self._weights:
            content = np.memmap(file.container, np.uint8, "r", file.start + offset, (nbytes,))
            whole = super().alloc(_around(nbytes)).bytes
            self._weights[key] = HostBuffer(_guarded(whole, nbytes, self.at_end, content))
        return self._weights[key]


def _around(nbytes: int) -> int:
    """Bytes of whole pages with so many in them, and a page before and behind."""
    return (-(-nbytes // _PAGE) + 2) * _PAGE


def _guarded(whole: np.ndarray, nbytes: int, at_end: bool, content: np.ndarray | None = None) -> np.ndarray:
    """uint8 `[nbytes]` in pages of which the first and the last are for nobody; with a content, which may be read."""
    inner = len(whole) - 2 * _PAGE
    alignment = nbytes & -nbytes if nbytes % 64 else 64
    start = _PAGE + (inner - nbytes if at_end else 0) // alignment * alignment
    buffer = whole[start : start + nbytes]
    if content is not None:
        buffer[:] = content
        _protect(whole, _PAGE, inner, mmap.PROT_READ)
    for guard in (0, _PAGE + inner):
        _protect(whole, guard, _PAGE, _NO_ACCESS)
    if SANITIZED:
        _mark("poison", whole.ctypes.data, whole.nbytes)
        _mark("unpoison", buffer.ctypes.data, buffer.nbytes)
        # Something else may be mapped there then.
        weakref.finalize(whole, _mark, "unpoison", whole.ctypes.data, whole.nbytes)
    return buffer


def _mark(how: str, address: int, nbytes: int) -> None:
    """For what is compiled with AddressSanitizer."""
    getattr(_libc, f"__asan_{how}_memory_region")(ctypes.c_void_p(address), ctypes.c_size_t(nbytes))


def _protect(whole: np.ndarray, start: int, nbytes: int, access: int) -> None:
    if _libc.mprotect(whole.ctypes.data + start, nbytes, access):
        raise OSError(ctypes.get_errno(), "mprotect")
