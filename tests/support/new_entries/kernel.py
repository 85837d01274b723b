"""Weights in tiny8 -> bf16."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from ml_dtypes import bfloat16

from stages import air
from stages.air import limits
from stages.kernels import Arg, Cost, signature
from stages.weights.formats import formats


def reference(weight: np.ndarray, rows: int, cols: int) -> np.ndarray:
    """Plain `weight` i8 `[rows, cols / 32 * 36]` -> bf16 `[rows, cols]`."""
    return formats()["tiny8"].dequantise(weight, cols).astype(bfloat16)


@dataclass(frozen=True)
class Tiling:
    rows: int
    cols: int
    macs: int = 0

    @property
    def costs(self) -> Mapping[str, Cost]:
        return {"unpack": Cost(vectors=4 * self.cols // limits.VECTOR)}


def build(tiling: Tiling) -> air.AirModule:
    rows, cols = tiling.rows, tiling.cols
    stored = formats()["tiny8"].stored_shape((rows, cols))
    b = air.Builder("unpack", {"weight": air.memref_type(stored, "i8"), "out": air.memref_type((rows, cols))})
    variant = air.Variant.of("unpack", BLOCKS=cols // 32)
    share = rows // limits.COLUMNS
    with b.launch(), b.segment(), b.herd(limits.COLUMNS, 1) as (tx, _):
        with b.loop(share) as i, b.alloc(air.L1, ((stored[1],), "i8"), (cols,)) as (packed, values):
            row = tx * share + i
            b.dma(packed, b.args["weight"].at((row, 1, stored[1]), (0, stored[1], 1)))
            b.call(variant, "unpack", packed, values)
            b.dma(b.args["out"].at((row, 1, cols), (0, cols, 1)), values)
    return b.finish()


KERNELS = (
    signature(
        "unpack",
        (Arg("weight", "tiny8", layouts={"cpu": "columns_first"}),),
        "rows cols",
        reference,
        tiling=lambda s: Tiling(s["rows"], s["cols"]),
        program=build,
    ),
)
