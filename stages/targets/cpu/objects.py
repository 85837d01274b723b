"""A kernel's C++ source -> its object for one instruction set.

A process that compiles kernels reads the system's headers once: a compiler takes 0.3 s for intrinsics.
"""

from __future__ import annotations

import functools
import os
import shlex
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from stages.engine.object_cache import CachedObject, cached_object
from stages.engine.objects import compiled, source_file
from stages.engine.objects import write_objects as write
from stages.targets.cpu import instruction_sets
from stages.targets.cpu.instruction_sets import SOURCES, options
from stages.targets.cpu.toolchain import FLAGS, INCLUDE, need_host_compiler
from stages.targets.cpu.toolchain import host_compiler_fingerprint as fingerprint

__all__ = ["VARIANTS", "compile_host", "fingerprint", "host_object", "write_objects"]

VARIANTS = False
HEADER = SOURCES / "system.h"

_lock = threading.Lock()
_owner = os.getpid()
_of_forks: Path | None = None
"""The directory of the precompiled headers that `precompile_for_forks` began to make."""


def write_objects(source: str, modules: Sequence[Path], cache: Path, work: Path, declared: str) -> list[Path]:
    """Compile a source for one instruction set, or take its object from the cache that all models share (step action).

    `declared`: as in `compile_host`. Returns the project's files that were read. Raises UserError.
    """
    path, name = source_file(source), Path(source).name
    isa = name.partition(".")[2]
    return write(source, {f"{name}.o": []}, lambda name, flags: host_object(path, cache, declared, isa), work)


def host_object(source: Path, cache: Path, declared: str, isa: str = "") -> CachedObject:
    """Return the object of one source, compiled unless it is in the cache. Arguments: as in `compile_host`."""
    made_by = (fingerprint(), flags_of(isa), declared, isa)
    sources = [source, *sorted(source.parent.glob("*.h"))]
    name = f"{source.stem}.{isa}" if isa else source.stem
    return cached_object(cache, name, made_by, sources, lambda output: compile_host(source, output, declared, isa))


def flags_of(isa: str) -> tuple[str, ...]:
    """Return the compiler's options for objects of an instruction set, or of none."""
    return (*FLAGS, *instruction_sets.FLAGS.get(isa, ()))


def compile_host(source: Path, output: Path, declared: str, isa: str = "") -> list[Path]:
    """Compile `source` to the object `output`; return the project's files that were read. Raises UserError.

    Args:
        declared: C++ declarations (`prototypes_of`). A kernel whose parameters are others does not compile.
        isa: The instruction set, one of `sets_of`; empty for a source that has one object.
    """
    header = output.with_suffix(".prototypes.h")
    header.write_text(declared)
    included = [*(system_headers() if isa else []), INCLUDE, "-include", str(header)]
    command = [*need_host_compiler(), *flags_of(isa), *included, "-c", *options(source, isa)]
    try:
        return compiled(command, output, f"{source.name} does not compile")
    finally:
        header.unlink(missing_ok=True)


def system_headers() -> list[str]:
    """Return the options by which a kernel's source begins with the system's headers, precompiled where possible.

    Only a process whose files are removed when it ends makes some. Forks share those of `precompile_for_forks`.
    """
    found = _of_forks
    if found is None and os.getpid() == _owner:
        with _lock:
            own = _precompiled()
            found = Path(own.name) if own else None
    return [*([f"-I{found}"] if found else []), "-include", HEADER.name]


def precompile_for_forks(directory: Path) -> None:
    """Begin to precompile the system's headers for forks of this process; whoever made `directory` removes it.

    Until that is done, and where it fails, they compile without.
    """
    global _of_forks
    if command := _precompiling(directory / "part"):
        script = f"{shlex.join(command)} && mv part {HEADER.name}.gch"
        nobody = subprocess.DEVNULL
        subprocess.Popen(script, shell=True, cwd=directory, stdin=nobody, stdout=nobody, stderr=nobody)
        _of_forks = directory


@functools.cache
def _precompiled() -> tempfile.TemporaryDirectory[str] | None:
    """Return a directory that holds them for this process alone; None where the compiler is no GCC, or fails."""
    try:
        directory = tempfile.TemporaryDirectory(prefix="llama-npu2-headers-")
    except OSError:
        return None
    output = Path(directory.name) / f"{HEADER.name}.gch"
    command = _precompiling(output)
    if not command or subprocess.run(command, capture_output=True, check=False).returncode:
        output.unlink(missing_ok=True)
        return None
    return directory


def _precompiling(output: Path) -> list[str]:
    """Return the command that precompiles the system's headers; none where the compiler is no GCC."""
    version = fingerprint()
    if version is None or "clang" in version or "zig" in version:
        return []
    return [*need_host_compiler(), *FLAGS, "-x", "c++-header", str(HEADER), "-o", str(output)]
