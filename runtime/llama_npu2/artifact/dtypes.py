"""What the elements of a buffer are and occupy. A manifest's buffers and slots name their dtype; block formats of
weights are stored as bytes (`i8`), their shape says how many."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    DTYPES: Mapping[str, np.dtype]
    """numpy's names of them."""

SIZES: Mapping[str, int] = {"bf16": 2, "f32": 4, "i32": 4, "i8": 1}
"""Bytes of an element."""

SAFETENSORS: Mapping[str, str] = {"bf16": "BF16", "f32": "F32", "i32": "I32", "i8": "I8"}
"""What safetensors call them."""


def nbytes(dtype: str, shape: Iterable[int]) -> int:
    """Bytes of a buffer."""
    return SIZES[dtype] * math.prod(shape)


def __getattr__(name: str) -> Any:
    """Import numpy on first use: a manifest is read, and a chat template's process starts, before it is loaded."""
    if name != "DTYPES":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import numpy as np
    from ml_dtypes import bfloat16

    types = {"bf16": bfloat16, "f32": np.float32, "i32": np.int32, "i8": np.int8}
    globals()[name] = found = {name: np.dtype(kind) for name, kind in types.items()}
    return found
