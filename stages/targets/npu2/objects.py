"""Compiles tile functions into object files for the NPU's cores with Peano."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from llama_npu2.errors import UserError
from stages.engine.object_cache import CachedObject, cached_object
from stages.engine.objects import compile_object, flags_by_object, source_file
from stages.engine.objects import write_objects as write
from stages.engine.places import KERNELS
from stages.targets.npu2 import KERNEL_SET, fifos, stack, static
from stages.targets.npu2.levels import level_of
from stages.targets.npu2.toolchain import aie_api, need_npu_tools, peano
from stages.targets.npu2.toolchain import peano_fingerprint as fingerprint
from stages.weights.constants import macros

__all__ = ["FLAGS", "VARIANTS", "command_line", "compile_tile", "fingerprint", "write_objects"]

VARIANTS = True
FLAGS = (
    "--target=aie2p-none-unknown-elf",
    "-std=c++20",
    "-DNDEBUG",
    # Without this, the AIE API of wheels since July 2026 includes <adf.h>, which Peano lacks.
    "-D__AIE_API_AIE_ADF_HPP__",
    "-Wno-parentheses",
    "-Wno-attributes",
    "-Wno-macro-redefined",
    "-Wno-empty-body",
    *stack.FLAGS,
    *macros(),
)


def write_objects(source: str, modules: Sequence[Path], cache: Path, work: Path, level: str = "") -> list[Path]:
    """Write the objects of one source that modules ask for (step action). Return the project's files that were read.

    Args:
        level: See `compile_tile`.

    Raises:
        UserError: With all tools of the target that are missing.
    """
    if fingerprint() is None:
        need_npu_tools()
    return write(source, flags_by_object(source, modules), partial(compile_tile, source, cache, level=level), work)


def compile_tile(source: str, cache: Path, name: str, flags: Sequence[str], level: str = "") -> CachedObject:
    """Compile an object of a source, or take it from `cache`.

    The cache has it if content, flags (`Variant.flags()`) and compiler are the same.

    Args:
        level: The optimisation level, the digit of `-O`; the source's own if it is empty.

    Raises:
        UserError: Also if it needs more stack than a core has, or memory that nothing clears.
    """
    need_npu_tools("Peano", "AIE API headers")
    path = source_file(source)
    flags = [f"-O{level or level_of(source)}", *flags]
    made_by = (fingerprint(), FLAGS, tuple(flags), stack.LIMIT)
    sources = [path, *sorted(path.parent.glob("*.h"))]
    failed = f"{path.name} does not compile for the NPU as {name}"

    def compiled(output: Path, *more: str) -> list[Path]:
        read = compile_object(command_line([*flags, *more]), path, output, failed)
        fifos.check_fifos(output, name, objdump())
        return read

    def make(output: Path) -> list[Path]:
        try:
            read = compiled(output)
        except UserError as error:
            if not fifos.is_spill(error):
                raise
            read = compiled(output, fifos.FEWER)
        stack.check_stack(output, name)
        static.check_static(output, name)
        return read

    return cached_object(cache, Path(name).stem, made_by, sources, make)


def objdump() -> Path:
    """Return the path of Peano's disassembler, which some builds lack. The compiler exists."""
    compiler = peano()
    assert compiler
    return compiler.path / "bin/llvm-objdump"


def command_line(flags: Sequence[str]) -> list[str]:
    """Return Peano's command for one object with its flags, without source and output. The tools exist."""
    compiler, headers = peano(), aie_api()
    assert compiler and headers
    return [str(compiler.path / "bin/clang++"), *FLAGS, f"-I{headers.path}", f"-I{KERNELS / KERNEL_SET}", *flags]
