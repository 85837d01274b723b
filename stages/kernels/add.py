"""Residual add."""

import numpy as np
from ml_dtypes import bfloat16

from stages.air import elementwise
from stages.air.builder import Program


def reference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """`a`, `b` bf16 of one shape -> bf16 of that shape."""
    return (a.astype(np.float32) + b.astype(np.float32)).astype(bfloat16)


def plan(rows: int, cols: int) -> elementwise.Plan:
    return elementwise.plan("add", rows, cols)


def build(tile_plan: elementwise.Plan) -> Program:
    """Arguments `a`, `b`, `out`: bf16 `[rows][cols]`, or `[cols]` for one row."""
    return elementwise.build(tile_plan, ("a", "b", "out"))
