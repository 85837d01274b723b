"""Lowers modules to host C++ and links them with their tile functions, for this machine."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stages import air
from stages.engine.objects import linked, run_compiler
from stages.engine.places import KERNELS
from stages.targets.cpu.toolchain import need_host_compiler
from stages.targets.npu2_sim.objects import HEADERS, options
from stages.targets.npu2_sim.toolchain import native_fingerprint as fingerprint

if TYPE_CHECKING:
    from xdsl.dialects.builtin import ModuleOp

__all__ = ["DESCRIBES", "SUFFIX", "fingerprint", "link", "write_program"]

SUFFIX = ".so"
DESCRIBES = False


def write_program(module: Path, library: str, work: Path) -> list[Path]:
    """Lower a module to host C++ and link it with its objects (step action). Return the objects and the headers."""
    objects = list(linked(module).values())
    with tempfile.TemporaryDirectory() as scratch:
        link(air.parse_mlir(module.read_text()), objects, work / "elf" / f"{library}{SUFFIX}", Path(scratch))
    return [*objects, *HEADERS]


def link(
    module: ModuleOp, objects: Sequence[Path], target: Path, work: Path, chosen: Sequence[str] = options()
) -> Path:
    """Link the shared object `target` of a module and the objects it calls; `work` keeps the C++. Raises UserError."""
    # Loads MLIR's framework, which an up-to-date build does not need.
    from stages.targets.npu2_sim.lower import lower

    work.mkdir(parents=True, exist_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    source = work / f"{target.stem}.cc"
    source.write_text(lower(module))
    program, compiler = source.with_suffix(".o"), need_host_compiler()
    command = [*compiler, *chosen, f"-I{KERNELS / 'sim'}", "-c", str(source), "-o", str(program)]
    run_compiler(command, f"{source.name} does not compile")
    shared = [*compiler, "-shared", "-Wl,-Bsymbolic", "-o", str(target), str(program), *map(str, objects)]
    run_compiler(shared, f"{target.name} cannot be linked")
    return target
