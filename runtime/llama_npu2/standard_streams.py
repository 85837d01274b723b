"""The standard streams of a process that was started without some of them."""

from __future__ import annotations

import os
import sys


def open_missing() -> None:
    """Open file descriptors 0 to 2 where they are closed: the input is empty then, and what is printed is lost.

    Files that are opened later would get their numbers, and with them what this process and others print.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(_nowhere(), True)  # it has the lowest number that is free
    sys.stdin = sys.stdin or os.fdopen(_nowhere())
    sys.stdout = sys.stdout or os.fdopen(_nowhere(), "w")
    sys.stderr = sys.stderr or os.fdopen(_nowhere(), "w")


def _nowhere() -> int:
    return os.open(os.devnull, os.O_RDWR)
