"""SwiGLU's activation (Shazeer 2020): `silu(gate) * up`, f32 inside, one rounding."""

import numpy as np
from ml_dtypes import bfloat16

from stages.air import elementwise
from stages.air.builder import Program


def reference(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """`gate`, `up` bf16 of one shape -> bf16 of that shape."""
    wide = gate.astype(np.float32)
    return (wide / (1.0 + np.exp(-wide)) * up.astype(np.float32)).astype(bfloat16)


def plan(rows: int, cols: int) -> elementwise.Plan:
    return elementwise.plan("silu_and_mul", rows, cols)


def build(tile_plan: elementwise.Plan) -> Program:
    """Arguments `gate`, `up`, `out`: bf16 `[rows][cols]`, or `[cols]` for one row; any layout the three share."""
    return elementwise.build(tile_plan, ("gate", "up", "out"))
