"""What this machine has to give."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")


def spare_threads() -> None:
    """Have numpy start no threads for its products, unless the user chose how many: kernels of ours multiply.

    It has to be called before numpy is imported, which takes two thirds more CPU time with the threads of OpenBLAS.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def available_memory() -> int:
    """Return the bytes of memory that this process can get: what is free, and no more than its control group may."""
    free = next(
        int(line.split()[1]) << 10
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemAvailable")
    )
    return min([free, *_limits()])


def _limits() -> Iterator[int]:
    """Yield the limits of memory of the control groups (version 2) that this process is in."""
    with contextlib.suppress(OSError, ValueError):
        own = Path("/proc/self/cgroup").read_text().partition("0::/")[2].partition("\n")[0]
        group = _GROUPS / own
        for each in (group, *group.parents):
            if each.is_relative_to(_GROUPS) and (limit := each / "memory.max").is_file():
                text = limit.read_text().strip()
                if text != "max":
                    yield int(text)
