"""int8_f32: 10 bits per weight, `w = s q - m`, each operation rounded to f32.

32 weights with numbers q from -128 to 127 share a scale s and a minimum m, f32. The format is for checkpoints: it holds
the values of GGUF's Q5_K and of 8-bit GPTQ exactly.
"""

from __future__ import annotations

from stages.engine.lazy import np
from stages.weights.grouped import BYTES, Grouped
from stages.weights.scales import asymmetric, inverse

LEAST, MOST = -128, 127

GROUPED = Grouped(factors=0, scale_values=2, scale_type="float32", numbers=BYTES)


def quantise(groups: np.ndarray) -> np.ndarray:
    """Round f32 `[rows, groups, GROUP]`. Return stored rows."""
    scale, minimum = asymmetric(groups, MOST - LEAST)
    minimum += scale * LEAST
    numbers = np.clip(np.rint((groups + minimum[..., None]) * inverse(scale)[..., None]), LEAST, MOST)
    return GROUPED.scaled(np.stack([scale, minimum], axis=-1), numbers.astype(np.int8))


def dequantise(stored: np.ndarray) -> np.ndarray:
    """Return the values of stored rows, f32 `[..., groups, GROUP]`."""
    scales, numbers = GROUPED.scaled_parts(stored)
    return scales[..., :1] * numbers.view(np.int8) - scales[..., 1:]


FORMAT = GROUPED.format("int8_f32", quantise, dequantise)
