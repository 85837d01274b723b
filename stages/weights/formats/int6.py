"""int6: 6.25 bits a weight. 32 weights share a scale, a whole number of 8 bits times a factor of the row: `w = d s q`."""

from __future__ import annotations

import numpy as np

from stages.weights.grouped import Grouped, nibbles, two_bits
from stages.weights.scales import level, symmetric

ZERO = 32
"""What is added to a number to store it without a sign."""

GROUPED = Grouped(
    factors=1, scale_values=1, bits=6, pack=lambda numbers: np.concatenate([nibbles(numbers), two_bits(numbers)], axis=-1)
)


def quantise(groups: np.ndarray) -> np.ndarray:
    """f32 `[rows, groups, GROUP]` -> stored."""
    factor, scales = level(symmetric(groups, -ZERO, ZERO - 1))
    scale = (scales * factor)[..., None]
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)
    numbers = np.clip(np.rint(groups * inverse), -ZERO, ZERO - 1) + ZERO
    return GROUPED.stored(factor, scales.astype(np.uint8)[..., None], numbers.astype(np.uint8))


def dequantise(stored: np.ndarray) -> np.ndarray:
    """Stored -> f32 `[..., groups, GROUP]`."""
    factors, scales, numbers = GROUPED.parts(stored)
    scale = scales[..., 0].astype(np.float32) * factors
    return scale[..., None] * (numbers.astype(np.float32) - ZERO)


FORMAT = GROUPED.format("int6", quantise, dequantise)
