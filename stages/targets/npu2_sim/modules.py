"""The NPU's own modules. Every simulated program also links the simulated device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stages.model.grouping import Program
from stages.targets.npu2 import modules as npu2
from stages.targets.npu2.modules import COSTS, SUFFIX, arguments, fingerprint, launches

__all__ = ["COSTS", "SUFFIX", "arguments", "expected", "fingerprint", "launches", "sources", "write_module"]

DEVICE = "sim/device"


def sources(programs: Sequence[Program], sets: Sequence[str] = ()) -> list[str]:
    """Return the C++ sources that a library of these programs links."""
    return [*npu2.sources(programs), DEVICE]


def expected(source: str) -> dict[str, Any]:
    """Return nothing: an object is asked for by its name and its flags."""
    return {}


def write_module(directory: Path, library: str, work: Path, **arguments: Any) -> None:
    """Write the module of one program, as `stages.targets.npu2.modules.write_module` (step action)."""
    npu2.write_module(directory, library, work, **arguments, support=[DEVICE])
