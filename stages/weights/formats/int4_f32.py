"""int4_f32: 6 bits per weight, `w = s q - m`, each operation rounded to f32.

32 weights with numbers q from 0 to 15 share a scale s and a minimum m, f32. The format is for checkpoints: it holds the
values of GGUF's Q4_0, Q4_1 and Q4_K, of AWQ and of 4-bit GPTQ exactly.
"""

from __future__ import annotations

from stages.engine.lazy import np
from stages.weights.grouped import NIBBLES, Grouped
from stages.weights.scales import asymmetric, inverse

MOST = 15

GROUPED = Grouped(factors=0, scale_values=2, scale_type="float32", numbers=NIBBLES)


def quantise(groups: np.ndarray) -> np.ndarray:
    """Round f32 `[rows, groups, GROUP]`. Return stored rows."""
    scale, minimum = asymmetric(groups, MOST)
    numbers = np.clip(np.rint((groups + minimum[..., None]) * inverse(scale)[..., None]), 0, MOST)
    return GROUPED.scaled(np.stack([scale, minimum], axis=-1), numbers.astype(np.uint8))


def dequantise(stored: np.ndarray) -> np.ndarray:
    """Return the values of stored rows, f32 `[..., groups, GROUP]`."""
    scales, numbers = GROUPED.scaled_parts(stored)
    return scales[..., :1] * numbers - scales[..., 1:]


FORMAT = GROUPED.format("int4_f32", quantise, dequantise)
