"""int6: 6.25 bits per weight, `w = d s q`.

32 weights with numbers q from -32 to 31 share a scale s, a whole number of 8 bits. A row has a factor d, f32.
"""

from __future__ import annotations

from stages.engine.lazy import np
from stages.weights.grouped import SIX_BITS, Grouped
from stages.weights.lanes import for_array
from stages.weights.scales import Grid, quantise_scales, symmetric

ZERO = 32
"""Added to a number to store it without a sign."""

GROUPED = Grouped(factors=1, scale_values=1, numbers=SIX_BITS)


def grid(groups: np.ndarray, importance: np.ndarray | None = None) -> Grid:
    """Choose the scales of f32 `[rows, groups, GROUP]`: `Format.grid`."""
    factor, scales = quantise_scales(symmetric(groups, -ZERO, ZERO - 1, importance))

    def store(numbers: np.ndarray) -> np.ndarray:
        return GROUPED.stored(factor, scales.astype(np.uint8)[..., None], (numbers + ZERO).astype(np.uint8))

    return Grid(scales * factor, np.zeros_like(scales), -ZERO, ZERO - 1, store)


def dequantise(stored: np.ndarray) -> np.ndarray:
    """Return the values of stored rows, f32 `[..., groups, GROUP]`."""
    factors, scales, numbers = GROUPED.parts(stored)
    scale = scales[..., 0].astype(np.float32) * factors
    return scale[..., None] * (numbers.astype(np.float32) - ZERO)


FORMAT = for_array(GROUPED, GROUPED.grid_format("int6", grid, dequantise))
