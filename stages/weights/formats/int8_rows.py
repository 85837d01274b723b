"""int8_rows: 8 bits a value, one scale per row, f32: `x = s q`. A KV cache of `kv=int8` so holds each position's row of
a head, quantised when it is appended."""

from __future__ import annotations

import numpy as np

from stages.weights.format import Format
from stages.weights.formats.w8a8 import parts, quantise_rows

_SCALE = np.dtype(np.float32).itemsize


def quantise(values: np.ndarray) -> np.ndarray:
    """`[..., n]` -> i8 `[..., 4 + n]`: a row's scale, its numbers."""
    numbers, scales = quantise_rows(values)
    return np.concatenate([np.ascontiguousarray(scales).view(np.int8), numbers], axis=-1)


def dequantise(stored: np.ndarray, n: int) -> np.ndarray:
    """Stored -> f32 `[..., n]`."""
    numbers, scales = parts(stored)
    return scales * numbers


FORMAT = Format("int8_rows", "i8", quantise, dequantise, row_elements=_SCALE)
