"""A kernel's C++ source -> its one object, which dispatches between instruction sets itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stages.engine.object_cache import CachedObject, cached_object
from stages.engine.objects import compile_object, source_file
from stages.engine.objects import write_objects as write
from stages.targets.cpu.toolchain import FLAGS, INCLUDE, need_host_compiler
from stages.targets.cpu.toolchain import host_compiler_fingerprint as fingerprint

__all__ = ["VARIANTS", "compile_host", "fingerprint", "host_object", "write_objects"]

VARIANTS = False


def write_objects(source: str, modules: Sequence[Path], cache: Path, work: Path, declared: str) -> list[Path]:
    """Step action: compile one source for the host, or take its object from the cache that all models share.

    `declared`: as in `compile_host`. Returns the project's files that were read. Raises UserError.
    """
    path = source_file(source)
    return write(source, {f"{path.stem}.o": []}, lambda name, flags: host_object(path, cache, declared), work)


def host_object(source: Path, cache: Path, declared: str) -> CachedObject:
    """The object of one source, compiled unless it is in the cache. `declared`: as in `compile_host`."""
    made_by = (fingerprint(), FLAGS, declared)
    sources = [source, *sorted(source.parent.glob("*.h"))]
    return cached_object(cache, source.stem, made_by, sources, lambda output: compile_host(source, output, declared))


def compile_host(source: Path, output: Path, declared: str) -> list[Path]:
    """Compile `source` to the object `output`; returns the project's files that were read. Raises UserError.

    `declared`: C++ declarations (`prototypes_of`); a kernel whose parameters are others does not compile.
    """
    header = output.with_suffix(".prototypes.h")
    header.write_text(declared)
    command = [*need_host_compiler(), *FLAGS, INCLUDE, "-include", str(header)]
    try:
        return compile_object(command, source, output, f"{source.name} does not compile")
    finally:
        header.unlink(missing_ok=True)
