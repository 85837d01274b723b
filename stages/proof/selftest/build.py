"""Step actions: the module of a probe, and the manifest of the probes' directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stages.engine.files import write_json
from stages.graph.manifest import describe
from stages.proof.selftest.probes import probes
from stages.targets.npu2.modules import build_module, write


def write_module(name: str, work: Path, support: Sequence[str], priced: bool) -> None:
    """Write the MLIR of a probe and its description.

    Args:
        support: Further sources that the target's programs link.
        priced: See `stages.targets.npu2.modules.write_module`.
    """
    probe = probes()[name]
    write(build_module(probe.program, {}), name, work, support, priced)


def write_manifest(
    directory: Path, work: Path, programs: Mapping[str, Mapping[str, Any]], target: Mapping[str, Any]
) -> None:
    """Write a `manifest.json` that has programs only."""
    write_json(work / "manifest.json", describe(directory, programs, target))
