"""int4_f32: 6 bits a weight. 32 weights share a scale and a minimum, f32: `w = s q - m`, each operation rounded to f32.
For checkpoints: it holds what GGUF's Q4_0, Q4_1 and Q4_K, AWQ and 4-bit GPTQ hold, exactly."""

from __future__ import annotations

import numpy as np

from stages.weights.grouped import NIBBLES, Grouped
from stages.weights.scales import affine, inverse

MOST = 15

GROUPED = Grouped(factors=0, scale_values=2, scale_type=np.float32, numbers=NIBBLES)


def quantise(groups: np.ndarray) -> np.ndarray:
    """f32 `[rows, groups, GROUP]` -> stored."""
    scale, minimum = affine(groups, MOST)
    numbers = np.clip(np.rint((groups + minimum[..., None]) * inverse(scale)[..., None]), 0, MOST)
    return GROUPED.scaled(np.stack([scale, minimum], axis=-1), numbers.astype(np.uint8))


def dequantise(stored: np.ndarray) -> np.ndarray:
    """Stored -> f32 `[..., groups, GROUP]`."""
    scales, numbers = GROUPED.scaled_parts(stored)
    return scales[..., :1] * numbers - scales[..., 1:]


FORMAT = GROUPED.format("int4_f32", quantise, dequantise)
