"""int8: 8.5 bits per weight, `w = s q`. 32 weights share a scale s, f16.

Geometry and rounding are those of GGUF's Q8_0, whose values it holds exactly (ggml `quantize_row_q8_0_ref`).
"""

from __future__ import annotations

from stages.engine.lazy import np
from stages.weights.grouped import BYTES, Grouped
from stages.weights.lanes import for_array

GROUPED = Grouped(factors=0, scale_values=1, scale_type="float16", numbers=BYTES)


def quantise(groups: np.ndarray) -> np.ndarray:
    """Round f32 `[rows, groups, GROUP]`. Return stored rows."""
    scale = np.abs(groups).max(axis=-1, keepdims=True) / np.float32(127)
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)
    scaled = groups * inverse
    # Halves are rounded away from zero, as by C's roundf.
    numbers = np.trunc(scaled + np.copysign(np.float32(0.5), scaled)).astype(np.int8)
    return GROUPED.scaled(scale, numbers)


def dequantise(stored: np.ndarray) -> np.ndarray:
    """Return the values of stored rows, f32 `[..., groups, GROUP]`."""
    scale, numbers = GROUPED.scaled_parts(stored)
    return scale * numbers.view(np.int8)


FORMAT = for_array(GROUPED, GROUPED.format("int8", quantise, dequantise))
