"""int8_f32: 10 bits a weight. 32 weights share a scale and a minimum, f32: `w = s q - m` with q from -128 to 127, each
operation rounded to f32. For checkpoints: it holds what GGUF's Q5_K and 8-bit GPTQ hold, exactly."""

from __future__ import annotations

import numpy as np

from stages.weights.grouped import BYTES, Grouped
from stages.weights.scales import affine, inverse

LEAST, MOST = -128, 127

GROUPED = Grouped(factors=0, scale_values=2, scale_type=np.float32, numbers=BYTES)


def quantise(groups: np.ndarray) -> np.ndarray:
    """f32 `[rows, groups, GROUP]` -> stored."""
    scale, minimum = affine(groups, MOST - LEAST)
    minimum += scale * LEAST
    numbers = np.clip(np.rint((groups + minimum[..., None]) * inverse(scale)[..., None]), LEAST, MOST)
    return GROUPED.scaled(np.stack([scale, minimum], axis=-1), numbers.astype(np.int8))


def dequantise(stored: np.ndarray) -> np.ndarray:
    """Stored -> f32 `[..., groups, GROUP]`."""
    scales, numbers = GROUPED.scaled_parts(stored)
    return scales[..., :1] * numbers.view(np.int8) - scales[..., 1:]


FORMAT = GROUPED.format("int8_f32", quantise, dequantise)
