"""Tile functions -> object files for the NPU's cores, by Peano; and which headers they read."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from runtime.errors import UserError
from stages.object_cache import CachedObject, cached_object
from stages.objects import read_dependencies
from stages.tile_objects import TILE_SOURCES, write_tile_objects
from stages.toolchain import aie_api, need_npu_tools, peano, peano_fingerprint

FLAGS = (
    "--target=aie2p-none-unknown-elf",
    "-O2",
    "-std=c++20",
    "-DNDEBUG",
    "-Wno-parentheses",
    "-Wno-attributes",
    "-Wno-macro-redefined",
    "-Wno-empty-body",
)


def npu_objects(stem: str, descriptions: Sequence[Path], cache: Path, work: Path) -> list[Path]:
    """Step action: the objects of one kernel that modules ask for. Returns the source and the headers it includes.

    Raises UserError, which names every tool of the target that is missing.
    """
    if peano_fingerprint() is None:
        need_npu_tools()
    return write_tile_objects(stem, descriptions, lambda name, flags: compile_tile(name, stem, flags, cache), work)


def compile_tile(name: str, stem: str, flags: Sequence[str], cache: Path) -> CachedObject:
    """Object `name` of `kernel_src/aie2p/<stem>.cc` with `flags` (`Variant.flags()`), from `cache` if content, flags
    and compiler are known there. Raises UserError."""
    need_npu_tools("Peano", "AIE API headers")
    source = TILE_SOURCES / f"{stem}.cc"
    made_by = (peano_fingerprint(), FLAGS, tuple(flags))
    sources = [source, *sorted(source.parent.glob("*.h"))]
    return cached_object(cache, Path(name).stem, made_by, sources, lambda out: _compile(source, name, flags, out))


def command_line(source: Path, flags: Sequence[str], output: Path, dependencies: Path) -> list[str]:
    """Peano's command for one object. The tools are there."""
    compiler, headers = peano(), aie_api()
    assert compiler and headers
    paths = [f"-I{headers.path}", f"-I{TILE_SOURCES}"]
    outputs = ["-c", str(source), "-o", str(output), "-MMD", "-MF", str(dependencies)]
    return [str(compiler.path / "bin/clang++"), *FLAGS, *paths, *flags, *outputs]


def _compile(source: Path, name: str, flags: Sequence[str], output: Path) -> list[Path]:
    dependencies = output.with_suffix(".d")
    command = command_line(source, flags, output, dependencies)
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        if run.returncode or not output.is_file():
            lines = run.stderr.splitlines()
            first = next((line for line in lines if "error" in line.lower()), lines[-1] if lines else "no message")
            raise UserError(f"{source} does not compile for the NPU as {name}: {first.strip()}")
        return [source, *(read_dependencies(dependencies, source) if dependencies.exists() else [])]
    finally:
        dependencies.unlink(missing_ok=True)
