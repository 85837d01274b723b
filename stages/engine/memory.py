"""What steps free goes back to the system: glibc would keep hundreds of MB that packing took, beside the compilers of
the steps behind it. Other C libraries know neither of these calls and give back on their own."""

from __future__ import annotations

import contextlib
import ctypes

_ARENA_MAX = -8
"""`M_ARENA_MAX` of glibc's malloc.h."""

_libc = ctypes.CDLL(None)


def use_one_arena() -> None:
    """For all threads: what is free at the end of another arena is not given back by `malloc_trim`."""
    with contextlib.suppress(AttributeError):
        _libc.mallopt(_ARENA_MAX, 1)


def give_back() -> None:
    """What is free now."""
    with contextlib.suppress(AttributeError):
        _libc.malloc_trim(0)
