"""The level at which Peano optimises each source.

Which level is right depends on the function: upstream's attention hangs at -O2 and its rotation at -O1 (mlir-air,
`fused_decode/Makefile`), and mlir-aie #3792 has a function that is wrong at -O2 only. Ours have run at none yet.
"""

from __future__ import annotations

import os

from llama_npu2.errors import UserError
from stages.engine.places import KERNELS

VARIABLE = "LLAMA_NPU2_PEANO_O"
"""Environment variable with levels of sources, `flash_attention=1,rope=3`."""

LEVEL = "2"
"""The level of sources that neither `LEVELS` nor the environment names."""

LEVELS: dict[str, str] = {}
"""Source, without directory and suffix -> its level."""

ALL = ("0", "1", "2", "3")


def level_of(source: str) -> str:
    """Return the level of a source `<kernel set>/<stem>`. Raises UserError if the environment names no such levels."""
    kernel_set, _, stem = source.rpartition("/")
    chosen = _chosen(kernel_set)
    return chosen.get(stem) or LEVELS.get(stem, LEVEL)


def _chosen(kernel_set: str) -> dict[str, str]:
    """Return the levels that the environment names, by source. Raises UserError."""
    chosen, stems = {}, {path.stem for path in (KERNELS / kernel_set).glob("*.cc")}
    for entry in filter(None, os.environ.get(VARIABLE, "").replace(" ", "").split(",")):
        stem, _, level = entry.partition("=")
        if level not in ALL or stem not in stems:
            raise UserError(f"{VARIABLE}: {entry} is not SOURCE=LEVEL, a name in kernel_src/{kernel_set} and 0 to 3")
        chosen[stem] = level
    return chosen
