"""int6: 6.25 bits a weight. 32 weights share a scale, a whole number of 8 bits times a factor of the row:
`w = d s q`."""

from __future__ import annotations

import numpy as np

from stages.weights.grouped import SIX_BITS, Grouped
from stages.weights.lanes import for_array
from stages.weights.scales import Grid, level, symmetric

ZERO = 32
"""What is added to a number to store it without a sign."""

GROUPED = Grouped(factors=1, scale_values=1, numbers=SIX_BITS)


def grid(groups: np.ndarray, importance: np.ndarray | None = None) -> Grid:
    """Of f32 `[rows, groups, GROUP]`; `importance` weighs the squares of errors."""
    factor, scales = level(symmetric(groups, -ZERO, ZERO - 1, importance))

    def store(numbers: np.ndarray) -> np.ndarray:
        return GROUPED.stored(factor, scales.astype(np.uint8)[..., None], (numbers + ZERO).astype(np.uint8))

    return Grid(scales * factor, np.zeros_like(scales), -ZERO, ZERO - 1, store)


def dequantise(stored: np.ndarray) -> np.ndarray:
    """Stored -> f32 `[..., groups, GROUP]`."""
    factors, scales, numbers = GROUPED.parts(stored)
    scale = scales[..., 0].astype(np.float32) * factors
    return scale[..., None] * (numbers.astype(np.float32) - ZERO)


FORMAT = for_array(GROUPED, GROUPED.grid_format("int6", grid, dequantise))
