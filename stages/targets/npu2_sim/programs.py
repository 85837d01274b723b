"""Lowers modules to host C++ and links them with their tile functions, for this machine."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from stages import air
from stages.engine.object_cache import CachedObject, cached_object, copy_cached
from stages.engine.objects import linked, run_compiler
from stages.engine.places import KERNELS
from stages.targets.cpu.toolchain import host_system, need_host_compiler
from stages.targets.npu2_sim.objects import FENCE_BYTES, HEADERS, options
from stages.targets.npu2_sim.toolchain import native_fingerprint as fingerprint

if TYPE_CHECKING:
    from xdsl.dialects.builtin import ModuleOp

__all__ = ["DESCRIBES", "SUFFIX", "cached_program", "fingerprint", "link", "write_program"]

SUFFIX = ".so"
DESCRIBES = False


def write_program(module: Path, library: str, cache: Path, work: Path) -> list[Path]:
    """Lower a module to host C++ and link it with its objects (step action). Return the objects and the headers."""
    objects = list(linked(module).values())

    def made() -> CachedObject:
        with tempfile.TemporaryDirectory() as scratch:
            source = Path(scratch) / f"{library}.cc"
            copy_cached(partial(_cached_source, module, library, cache), source)
            return _linked(source, objects, cache, options())

    return [*objects, *copy_cached(made, work / "elf" / f"{library}{SUFFIX}")]


def cached_program(
    module: ModuleOp, objects: Sequence[Path], library: str, cache: Path, chosen: Sequence[str] | None = None
) -> CachedObject:
    """Return the shared object of a module and the objects that it calls, linked unless it is in the cache.

    `chosen`: as in `compile_tile`. Raises UserError.
    """
    with tempfile.TemporaryDirectory() as scratch:
        source = _lowered(module, Path(scratch) / f"{library}.cc")
        return _linked(source, objects, cache, options() if chosen is None else chosen)


def _cached_source(module: Path, library: str, cache: Path) -> CachedObject:
    """Return the C++ of a module, from the cache if the module and the code that lowers it are the same."""

    def make(output: Path) -> Sequence[Path]:
        _lowered(air.parse_mlir(module.read_text()), output)
        return ()

    code = [Path(__file__).with_name("lower.py"), *sorted(Path(air.__file__).parent.glob("*.py"))]
    return cached_object(cache, f"{library}.lowered", (version("xdsl"), FENCE_BYTES), [module, *code], make)


def _linked(source: Path, objects: Sequence[Path], cache: Path, chosen: Sequence[str]) -> CachedObject:
    """Return the shared object of a module's C++, linked unless it is in the cache."""

    def make(output: Path) -> Sequence[Path]:
        _link_lowered(source, objects, output, chosen)
        return HEADERS

    made_by = (fingerprint(), tuple(chosen), host_system())
    return cached_object(cache, source.stem, made_by, [source, *objects, *HEADERS], make)


def link(
    module: ModuleOp, objects: Sequence[Path], target: Path, work: Path, chosen: Sequence[str] | None = None
) -> Path:
    """Link the shared object `target` of a module and the objects it calls; `work` keeps the C++. Raises UserError."""
    work.mkdir(parents=True, exist_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    _link_lowered(
        _lowered(module, work / f"{target.stem}.cc"), objects, target, options() if chosen is None else chosen
    )
    return target


def _lowered(module: ModuleOp, source: Path) -> Path:
    """Write the C++ of a module to the file `source`, which is returned. Raises UserError."""
    # Loads MLIR's framework, which an up-to-date build does not need.
    from stages.targets.npu2_sim.lower import lower

    source.write_text(lower(module))
    return source


def _link_lowered(source: Path, objects: Sequence[Path], target: Path, chosen: Sequence[str]) -> None:
    program, compiler = source.with_suffix(".o"), need_host_compiler()
    command = [*compiler, *chosen, f"-I{KERNELS / 'sim'}", "-c", str(source), "-o", str(program)]
    run_compiler(command, f"{source.name} does not compile")
    shared = [*compiler, "-shared", "-Wl,-Bsymbolic", "-o", str(target), str(program), *map(str, objects)]
    run_compiler(shared, f"{source.stem} cannot be linked")
