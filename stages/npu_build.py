"""The NPU targets' programs: module text for the compiler, and for `npu2-sim` the same text as a host shared object."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stages.air_text import parse_mlir
from stages.air_to_host import HEADERS, SOURCES, build, tile_objects
from stages.config import read_config
from stages.files import write_json
from stages.npu_modules import build_module, groups


def write_module(directory: Path, program: str, group: str, work: Path, grouping: str, bucket: int) -> None:
    """Step action: MLIR of one program, and beside it what else its compilation needs to know, as JSON."""
    dimensions = read_config(directory / "build/config.json").dimensions()
    wanted = next(g for g in groups(grouping) if g.name == group)
    module = build_module(wanted, dimensions, bucket)
    path = work / "build/modules" / f"{program}.mlir"
    path.parent.mkdir(parents=True)
    path.write_text(module.text())
    write_json(path.with_suffix(".json"), _description(module))


def _description(module: Any) -> Mapping[str, Any]:
    return {
        "function": module.name,
        "slots": [asdict(slot) for slot in module.slots],
        "plans": [str(plan) for plan in module.plans],
        "objects": {variant.object: [variant.stem, *variant.flags()] for variant in module.variants},
        "options": module.options,
    }


def sim_elf(module: Path, program: str, cache: Path, work: Path) -> list[Path]:
    """Step action: lower a module to host C++ and link it with its tile functions; returns the sources it read."""
    text = module.read_text()
    with tempfile.TemporaryDirectory() as scratch:
        build(text, work / "elf" / f"{program}.so", Path(scratch), cache)
    read = [*HEADERS, *(tile.source for tile in tile_objects(parse_mlir(text)))]
    return sorted({path.relative_to(SOURCES.parent) for path in read})
