"""The modules of the NPU targets: text for the compiler, and beside it what else a program's build needs to know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stages.config import read_config
from stages.files import write_json
from stages.npu_modules import build_module, groups


def write_module(
    directory: Path, program: str, group: str, work: Path, grouping: str, bucket: int, bfp16: bool
) -> None:
    """Step action: MLIR of one program, and beside it what else its compilation needs to know, as JSON."""
    dimensions = read_config(directory / "build/config.json").dimensions()
    wanted = next(g for g in groups(grouping) if g.name == group)
    module = build_module(wanted, dimensions, bucket, bfp16=bfp16)
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
