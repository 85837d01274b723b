"""int4: 4.5 bits a weight. 32 weights share a scale and a minimum, whole numbers of 8 bits times a factor of the row
each: `w = d s q - e m`."""

from __future__ import annotations

import numpy as np

from stages.weights.grouped import NIBBLES, Grouped
from stages.weights.lanes import for_array
from stages.weights.scales import Grid, affine, level

MOST = 15

GROUPED = Grouped(factors=2, scale_values=2, numbers=NIBBLES)


def grid(groups: np.ndarray, importance: np.ndarray | None = None) -> Grid:
    """Of f32 `[rows, groups, GROUP]`; `importance` weighs the squares of errors."""
    scale, minimum = affine(groups, MOST, importance)
    d, scales = level(scale)
    e, minima = level(minimum)
    both = np.stack([scales, minima], axis=-1).astype(np.uint8)

    def store(numbers: np.ndarray) -> np.ndarray:
        return GROUPED.stored(np.concatenate([d, e], axis=-1), both, numbers.astype(np.uint8))

    return Grid(scales * d, minima * e, 0, MOST, store)


def dequantise(stored: np.ndarray) -> np.ndarray:
    """Stored -> f32 `[..., groups, GROUP]`."""
    factors, scales, numbers = GROUPED.parts(stored)
    scale, minimum = np.moveaxis(scales.astype(np.float32) * factors[..., None, :], -1, 0)
    return scale[..., None] * numbers - minimum[..., None]


FORMAT = for_array(GROUPED, GROUPED.grid_format("int4", grid, dequantise))
