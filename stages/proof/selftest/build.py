"""Step actions: the module of a probe, and the manifest of the directory that holds them all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stages.engine.files import write_json
from stages.graph.manifest import describe
from stages.proof.selftest.probes import probes
from stages.targets.npu2.modules import build_module, write


def write_module(name: str, work: Path, support: Sequence[str], priced: bool) -> None:
    """MLIR of a probe and its description; `support`: sources that the target's programs link besides; `priced`: see
    `stages.targets.npu2.modules.write_module`."""
    probe = probes()[name]
    write(build_module(probe.program, {}), name, work, support, priced)


def write_manifest(
    directory: Path, work: Path, programs: Mapping[str, Mapping[str, Any]], target: Mapping[str, Any]
) -> None:
    """`manifest.json` of programs alone."""
    write_json(work / "manifest.json", describe(directory, programs, target))
