"""int8_f32_16: 10 bits per weight, `w = s q`. 16 weights share a scale s, f32.

The format is for checkpoints: it holds the values of GGUF's Q6_K exactly.
"""

from __future__ import annotations

from stages.engine.lazy import np
from stages.weights.constants import SHORT_GROUP
from stages.weights.grouped import BYTES, Grouped
from stages.weights.scales import inverse, symmetric

MOST = 127

GROUPED = Grouped(factors=0, scale_values=1, scale_type="float32", numbers=BYTES, group=SHORT_GROUP)


def quantise(groups: np.ndarray) -> np.ndarray:
    """Round f32 `[rows, groups, 16]`. Return stored rows."""
    scale = symmetric(groups, -MOST, MOST)[..., None]
    numbers = np.clip(np.rint(groups * inverse(scale)), -MOST, MOST)
    return GROUPED.scaled(scale, numbers.astype(np.int8))


def dequantise(stored: np.ndarray) -> np.ndarray:
    """Return the values of stored rows, f32 `[..., groups, 16]`."""
    scale, numbers = GROUPED.scaled_parts(stored)
    return scale * numbers.view(np.int8)


FORMAT = GROUPED.format("int8_f32_16", quantise, dequantise)
