"""Compiles tile functions into objects for the host: the NPU's C++, compiled against `kernel_src/sim`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from stages.engine.object_cache import CachedObject, cached_object
from stages.engine.objects import compile_object, flags_by_object, source_file
from stages.engine.objects import write_objects as write
from stages.engine.places import KERNELS
from stages.targets.cpu.toolchain import need_host_compiler
from stages.targets.npu2_sim.toolchain import level
from stages.targets.npu2_sim.toolchain import native_fingerprint as fingerprint
from stages.weights.constants import macros

__all__ = ["FENCE_BYTES", "FLAGS", "HEADERS", "VARIANTS", "compile_tile", "fingerprint", "options", "write_objects"]

VARIANTS = True
FENCE_BYTES = 256
"""Bytes on each side of a buffer that nobody may write to: twice the widest vector."""

FLAGS = (
    "-std=c++20",
    "-march=native",
    "-fPIC",
    "-fno-math-errno",
    "-Wall",
    "-Wextra",
    f"-DSIM_FENCE_BYTES={FENCE_BYTES}",
    *macros(),
)
HEADERS = tuple(KERNELS / name for name in ("sim/device.hpp", "sim/aie_api/aie.hpp"))
"""Headers that every object of the simulator includes, besides those next to its source."""


def write_objects(source: str, modules: Sequence[Path], cache: Path, work: Path) -> list[Path]:
    """Write the objects of one source that modules ask for (step action). Return the project's files that were read."""
    return write(source, flags_by_object(source, modules), partial(compile_tile, source, cache), work)


def options(checks: bool = True, more: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the compiler options that all objects of a program share, but for the level of tile functions.

    Args:
        checks: Whether a run looks for writes to fences and for bytes that were never written.

    Raises UserError if the environment has no level (`toolchain.level`).
    """
    return (*FLAGS, f"-O{level()}", f"-DSIM_CHECKS={int(checks)}", *more)


def compile_tile(
    source: str, cache: Path, name: str, flags: Sequence[str], chosen: Sequence[str] | None = None
) -> CachedObject:
    """Compile an object of a source, or take it from `cache`. Raises UserError.

    The cache has it if content, flags (`Variant.flags()`) and the options `chosen` (`options()`) are the same. Tile
    functions do the arithmetic: at level 1 a prompt takes ten times as long as at 2, their least one.
    """
    path = source_file(source)
    chosen = (*(options() if chosen is None else chosen), f"-O{max(level(), '2')}")
    made_by = (fingerprint(), chosen, tuple(flags))
    command = [*need_host_compiler(), *chosen, f"-I{KERNELS / 'sim'}", *flags]
    sources = [path, *sorted(path.parent.glob("*.h")), *HEADERS]
    make = partial(compile_object, command, path, failed=f"{path.name} does not compile as {name}")
    return cached_object(cache, Path(name).stem, made_by, sources, make)
