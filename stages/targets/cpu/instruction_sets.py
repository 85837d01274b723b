"""The instruction sets that kernels are compiled for, one object each.

A source that includes `vec.h` is compiled for each set, by `kernel_src/cpu/one_isa.h`; one that includes `amx.h` also
for processors with tiles. Any other source has one object. The program holds all of them, so it runs on every machine
of its architecture.
"""

from __future__ import annotations

import functools
import platform
import re
from pathlib import Path

from stages.engine.places import KERNELS

SOURCES = KERNELS / "cpu"
"""The folder of the host's kernels. Objects depend on this module, so it imports no description of a kernel."""

LANES = {"amx": 16, "avx512bf16": 16, "avx2": 8, "portable": 4}
"""Instruction set, best first -> f32 lanes of its vector registers."""

_INCLUDE = re.compile(r'^#include "(.*)"', re.MULTILINE)


@functools.cache
def _included(path: Path) -> frozenset[str]:
    """Return the names of the headers of this folder that a file includes, directly or not."""
    names = [name for name in _INCLUDE.findall(path.read_text()) if (path.parent / name).is_file()]
    return frozenset(names).union(*(_included(path.parent / name) for name in names))


def sets_of(stem: str) -> tuple[str, ...]:
    """Return the instruction sets that a source has an object for, best first. None for one that is not divided."""
    source = SOURCES / f"{stem}.cc"
    headers = _included(source) if source.is_file() else ()
    if "vec.h" not in headers:
        return ()
    if platform.machine() != "x86_64":
        return ("portable",)
    return tuple(name for name in LANES if name != "amx" or "amx.h" in headers)


def objects_of(stem: str) -> list[str]:
    """Return the objects of a source: `<kernel set>/<stem>.<instruction set>` each, or `<kernel set>/<stem>`."""
    return [f"{SOURCES.name}/{stem}.{name}" for name in sets_of(stem)] or [f"{SOURCES.name}/{stem}"]


def options(source: Path, isa: str) -> list[str]:
    """Return the compiler's options and input for the object of a source. `isa`: empty if the source is not divided."""
    if not isa:
        return [str(source)]
    defined = {"ISA": isa, "ISA_LANES": LANES[isa], "ISA_AMX": int(isa == "amx"), "KERNEL_FILE": f'"{source}"'}
    macros = [f"-D{name}={value}" for name, value in defined.items()]
    return [*macros, "-x", "c++", str(source.parent / "one_isa.h")]
