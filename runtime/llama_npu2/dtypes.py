"""What the elements of a buffer are and occupy. A manifest's buffers and slots name their dtype; block formats of
weights are stored as bytes (`i8`), their shape says how many."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np
from ml_dtypes import bfloat16

DTYPES: Mapping[str, np.dtype] = {
    "bf16": np.dtype(bfloat16),
    "f32": np.dtype(np.float32),
    "i32": np.dtype(np.int32),
    "i8": np.dtype(np.int8),
}

SAFETENSORS: Mapping[str, str] = {"bf16": "BF16", "f32": "F32", "i32": "I32", "i8": "I8"}
"""What safetensors call them."""


def nbytes(dtype: str, shape: Iterable[int]) -> int:
    """Bytes of a buffer."""
    return DTYPES[dtype].itemsize * math.prod(shape)
