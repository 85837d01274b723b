"""int4: 4.5 bits per weight, `w = d s q - e m`.

32 weights with numbers q from 0 to 15 share a scale s and a minimum m, whole numbers of 8 bits. A row has a factor of
scales, d, and one of minima, e, f32.
"""

from __future__ import annotations

from stages.engine.lazy import np
from stages.weights.grouped import NIBBLES, Grouped
from stages.weights.lanes import for_array
from stages.weights.scales import Grid, asymmetric, quantise_scales

MOST = 15

GROUPED = Grouped(factors=2, scale_values=2, numbers=NIBBLES)


def grid(groups: np.ndarray, importance: np.ndarray | None = None) -> Grid:
    """Choose the scales of f32 `[rows, groups, GROUP]`: `Format.grid`."""
    scale, minimum = asymmetric(groups, MOST, importance)
    d, scales = quantise_scales(scale)
    e, minima = quantise_scales(minimum)
    scales_and_minima = np.stack([scales, minima], axis=-1).astype(np.uint8)

    def store(numbers: np.ndarray) -> np.ndarray:
        return GROUPED.stored(np.concatenate([d, e], axis=-1), scales_and_minima, numbers.astype(np.uint8))

    return Grid(scales * d, minima * e, 0, MOST, store)


def dequantise(stored: np.ndarray) -> np.ndarray:
    """Return the values of stored rows, f32 `[..., groups, GROUP]`."""
    factors, scales, numbers = GROUPED.parts(stored)
    scale, minimum = np.moveaxis(scales.astype(np.float32) * factors[..., None, :], -1, 0)
    return scale[..., None] * numbers - minimum[..., None]


FORMAT = for_array(GROUPED, GROUPED.grid_format("int4", grid, dequantise))
