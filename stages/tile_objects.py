"""The objects of a kernel's tile functions, for every program of an artifact directory: which there are, and where."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from stages.object_cache import CachedObject

TILE_SOURCES = Path("kernel_src/aie2p")
DIRECTORY = Path("build/objects/aie2p")
FEATURES = Path("build/objects/sim/features.json")
"""Instruction sets that the simulator's objects may use, which the manifest asks of a machine that runs them."""


def object_path(build: Path, stem: str, name: str) -> Path:
    """The object `name` of `TILE_SOURCES/<stem>.cc`, below the `build` of an artifact directory."""
    return build.parent / DIRECTORY / stem / name


def write_tile_objects(
    stem: str, descriptions: Iterable[Path], compile_variant: Callable[[str, Sequence[str]], CachedObject], work: Path
) -> list[Path]:
    """Every variant of a source that modules ask for in the JSON beside them, compiled by `compile_variant(name,
    flags)`, some at a time. Returns the project's files that the compiler read."""
    wanted = {
        name: flags
        for path in descriptions
        for name, (source, *flags) in json.loads(path.read_text())["objects"].items()
        if source == stem
    }
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        made = dict(zip(wanted, pool.map(compile_variant, wanted, wanted.values()), strict=True))
    for name, compiled in made.items():
        output = object_path(work / "build", stem, name)
        output.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(compiled.path, output)
    return sorted({path for compiled in made.values() for path in compiled.read})
