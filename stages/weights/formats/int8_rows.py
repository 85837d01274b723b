"""int8_rows: 8 bits per value, `x = s q`. A row has one scale s, f32.

With `kv=int8`, the KV cache holds the row of each head and position in this format, quantised when it is appended. In
the NPU's rows, K's scale comes behind its numbers (`stages.kernels.kv_rows`).
"""

from __future__ import annotations

from stages.engine.lazy import np
from stages.weights.format import Format
from stages.weights.formats.w8a8 import parts, quantise_rows

_SCALE = 4


def quantise(values: np.ndarray) -> np.ndarray:
    """Round `[..., n]`. Return i8 `[..., 4 + n]`: each row's scale, then its numbers."""
    numbers, scales = quantise_rows(values)
    return np.concatenate([np.ascontiguousarray(scales).view(np.int8), numbers], axis=-1)


def dequantise(stored: np.ndarray, n: int) -> np.ndarray:
    """Return the values of stored rows, f32 `[..., n]`."""
    numbers, scales = parts(stored)
    return scales * numbers


FORMAT = Format("int8_rows", "i8", quantise, dequantise, row_elements=_SCALE)
