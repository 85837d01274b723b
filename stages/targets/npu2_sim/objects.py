"""Tile functions -> objects for the host: the C++ that the NPU runs, compiled against `kernel_src/sim`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from stages.engine.object_cache import CachedObject, cached_object
from stages.engine.objects import compile_object, source_file, wanted
from stages.engine.objects import write_objects as write
from stages.engine.places import KERNELS
from stages.targets.cpu.toolchain import need_host_compiler
from stages.targets.npu2_sim.toolchain import native_fingerprint as fingerprint
from stages.weights.constants import macros

__all__ = ["FENCE_BYTES", "FLAGS", "HEADERS", "VARIANTS", "compile_tile", "fingerprint", "options", "write_objects"]

VARIANTS = True
FENCE_BYTES = 256
"""On each side of a buffer, where nobody may write: the widest vectors twice."""

FLAGS = (
    "-std=c++20",
    "-O3",
    "-march=native",
    "-fPIC",
    "-fno-math-errno",
    "-Wall",
    "-Wextra",
    f"-DSIM_FENCE_BYTES={FENCE_BYTES}",
    *macros(),
)
HEADERS = tuple(KERNELS / name for name in ("sim/device.hpp", "sim/aie_api/aie.hpp"))
"""What the simulator's objects are made from, besides their source and the headers beside it."""


def write_objects(source: str, modules: Sequence[Path], cache: Path, work: Path) -> list[Path]:
    """Step action: the objects of one source that modules ask for. Returns the project's files that were read."""
    return write(source, wanted(source, modules), partial(compile_tile, source, cache), work)


def options(checks: bool = True, more: Sequence[str] = ()) -> tuple[str, ...]:
    """Compiler options that every part of a program shares. `checks`: fences and never-written bytes at run time."""
    return (*FLAGS, f"-DSIM_CHECKS={int(checks)}", *more)


def compile_tile(
    source: str, cache: Path, name: str, flags: Sequence[str], chosen: Sequence[str] = options()
) -> CachedObject:
    """Object `name` of a source with `flags` (`Variant.flags()`) and `chosen` options, from `cache` when its content
    and options are known there. Raises UserError."""
    path = source_file(source)
    made_by = (fingerprint(), tuple(chosen), tuple(flags))
    command = [*need_host_compiler(), *chosen, f"-I{KERNELS / 'sim'}", *flags]
    sources = [path, *sorted(path.parent.glob("*.h")), *HEADERS]
    make = partial(compile_object, command, path, failed=f"{path.name} does not compile as {name}")
    return cached_object(cache, Path(name).stem, made_by, sources, make)
