"""The instruction sets that kernels are compiled for, one object each.

A source that includes `vec.h` is compiled for each set, by `kernel_src/cpu/one_isa.h`; one that includes `amx.h` also
for processors with tiles. Any other source has one object. A program with all sets runs on every machine of its
architecture; one that was built to be run here need not have more than `sets_used_here`.
"""

from __future__ import annotations

import functools
import os
import platform
import re
from collections.abc import Collection
from pathlib import Path

from llama_npu2.artifact.cpu_features import cpu_features
from stages.engine.places import KERNELS

SOURCES = KERNELS / "cpu"
"""The folder of the host's kernels. Objects depend on this module, so it imports no description of a kernel."""

LANES = {"amx": 16, "avx512bf16": 16, "avx2": 8, "portable": 4}
"""Instruction set, best first -> f32 lanes of its vector registers."""

FLAGS = {"avx2": ("-falign-loops=64",)}
"""Instruction set -> options that the compiler gets for its objects besides those for all.

On Zen 3 a product's loop takes up to 6 % longer where it does not begin with a line.
"""

_AVX2 = {"avx2", "fma", "f16c"}
_AVX512 = _AVX2 | {"avx512f", "avx512dq", "avx512bw", "avx512vl", "avx512_bf16", "avx512_vnni"}
_FEATURES = {
    "amx": _AVX512 | {"amx_tile", "amx_int8", "amx_bf16"},
    "avx512bf16": _AVX512,
    "avx2": _AVX2,
    "portable": set[str](),
}
"""Instruction set -> the features of a CPU that has it. The library asks the CPU itself (kernel_src/cpu/isa.h)."""

_INCLUDE = re.compile(r'^#include "(.*)"', re.MULTILINE)


@functools.cache
def _included(path: Path) -> frozenset[str]:
    """Return the names of the headers of this folder that a file includes, directly or not."""
    names = [name for name in _INCLUDE.findall(path.read_text()) if (path.parent / name).is_file()]
    return frozenset(names).union(*(_included(path.parent / name) for name in names))


def all_sets() -> tuple[str, ...]:
    """Return the instruction sets of this machine's architecture, best first."""
    return tuple(LANES) if platform.machine() == "x86_64" else ("portable",)


def sets_of_machine() -> tuple[str, ...]:
    """Return the instruction sets that this machine's CPU has, best first."""
    features = {*cpu_features()}
    return tuple(name for name in all_sets() if _FEATURES[name] <= features)


def sets_used_here() -> tuple[str, ...]:
    """Return the instruction sets that a program uses on this machine: the best one, and what that one calls.

    All sets where the features of the CPU are not known.
    """
    if not cpu_features():
        return all_sets()
    wanted = os.environ.get("LLAMA_NPU2_ISA", "")
    allowed = [*LANES][[*LANES].index(wanted) :] if wanted in LANES else [*LANES]
    best = next(name for name in sets_of_machine() if name in allowed)
    # Kernels without tiles, and products of few rows, are those of avx512bf16.
    return (best, "avx512bf16") if best == "amx" else (best,)


def sets_of(stem: str, among: Collection[str] | None = None) -> tuple[str, ...]:
    """Return the instruction sets that a source has an object for, best first. None for one that is not divided.

    `among`: only of these; None: of all sets.
    """
    source = SOURCES / f"{stem}.cc"
    headers = _included(source) if source.is_file() else ()
    if "vec.h" not in headers:
        return ()
    chosen = [name for name in all_sets() if among is None or name in among]
    return tuple(name for name in chosen if name != "amx" or "amx.h" in headers)


def objects_of(stem: str, among: Collection[str] | None = None) -> list[str]:
    """Return the objects of a source: `<kernel set>/<stem>.<instruction set>` each, or `<kernel set>/<stem>`.

    `among`: as in `sets_of`.
    """
    return [f"{SOURCES.name}/{stem}.{name}" for name in sets_of(stem, among)] or [f"{SOURCES.name}/{stem}"]


def options(source: Path, isa: str) -> list[str]:
    """Return the compiler's options and input for the object of a source. `isa`: empty if the source is not divided."""
    if not isa:
        return [str(source)]
    defined = {"ISA": isa, "ISA_LANES": LANES[isa], "ISA_AMX": int(isa == "amx"), "KERNEL_FILE": f'"{source}"'}
    macros = [f"-D{name}={value}" for name, value in defined.items()]
    return [*macros, "-x", "c++", str(source.parent / "one_isa.h")]
