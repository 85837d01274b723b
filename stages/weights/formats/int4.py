"""int4: 4.5 bits a weight. 32 weights share a scale and a minimum, whole numbers of 8 bits times a factor of the row
each: `w = d s q - e m`."""

from __future__ import annotations

import numpy as np

from stages.weights.grouped import Grouped, nibbles
from stages.weights.scales import affine, level

MOST = 15

GROUPED = Grouped(factors=2, scale_values=2, bits=4, pack=nibbles)


def quantise(groups: np.ndarray) -> np.ndarray:
    """f32 `[rows, groups, GROUP]` -> stored."""
    scale, minimum = affine(groups, MOST)
    d, scales = level(scale)
    e, minima = level(minimum)
    scale, minimum = (scales * d)[..., None], (minima * e)[..., None]
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)
    numbers = np.clip(np.rint((groups + minimum) * inverse), 0, MOST)
    both = np.stack([scales, minima], axis=-1).astype(np.uint8)
    return GROUPED.stored(np.concatenate([d, e], axis=-1), both, numbers.astype(np.uint8))


def dequantise(stored: np.ndarray) -> np.ndarray:
    """Stored -> f32 `[..., groups, GROUP]`."""
    factors, scales, numbers = GROUPED.parts(stored)
    scale, minimum = np.moveaxis(scales.astype(np.float32) * factors[..., None, :], -1, 0)
    return scale[..., None] * numbers - minimum[..., None]


FORMAT = GROUPED.format("int4", quantise, dequantise)
