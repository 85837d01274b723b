"""Links a probe again with its tile functions at another level of optimisation, to tell whether the level breaks it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stages.engine.places import LOGS
from stages.proof.selftest.probes import probes
from stages.targets.npu2 import KERNEL_SET
from stages.targets.npu2.levels import VARIABLE, level_of
from stages.targets.npu2.modules import build_module
from stages.targets.npu2.objects import compile_tile
from stages.targets.npu2.programs import ELF, Job, make

Relink = Callable[[str, str, Path], Mapping[str, Any]]
"""(name of a probe, level, new directory) -> what differs in the manifest's entry of the probe, its file included."""


def relink(cache: Path, name: str, level: str, work: Path) -> dict[str, Any]:
    """Link a probe in the new directory `work` (see `Relink`). The tools exist. Raises UserError."""
    module = build_module(probes()[name].program, {})
    sources = {variant.object: (f"{KERNEL_SET}/{variant.stem}", variant.flags()) for variant in module.variants}
    objects = {made: compile_tile(source, cache, made, flags, level).path for made, (source, flags) in sources.items()}
    job = Job(f"{name}_O{level}", module.text(), module.name, module.options, objects)
    _, facts = make(job, work / "aircc", work / LOGS / f"{name}.log")
    return facts | {"file": f"aircc/{ELF}"}


def other_level(name: str) -> tuple[str, str]:
    """Return a level at which a probe's functions are not compiled, and the setting that compiles them so."""
    launches = [launch for part in probes()[name].program.parts for launch in part.launches]
    (source,) = {source for launch in launches for source in launch.kernel.on_array}
    level = "2" if level_of(f"{KERNEL_SET}/{source}") == "1" else "1"
    return level, f"{VARIABLE}={source}={level}"
