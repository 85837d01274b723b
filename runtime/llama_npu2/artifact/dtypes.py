"""The dtypes that a manifest's buffers and arguments (slots) name, and the sizes of their elements.

Weights in block formats are stored as bytes (`i8`), and their shape says how many.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    DTYPES: Mapping[str, np.dtype]
    """The dtype in numpy."""

SIZES: Mapping[str, int] = {"bf16": 2, "f32": 4, "i32": 4, "i8": 1}
"""Bytes of an element."""

SAFETENSORS: Mapping[str, str] = {"bf16": "BF16", "f32": "F32", "i32": "I32", "i8": "I8"}
"""The name of each dtype in a safetensors file."""


def nbytes(dtype: str, shape: Iterable[int]) -> int:
    """Return the bytes of a buffer."""
    return SIZES[dtype] * math.prod(shape)


def __getattr__(name: str) -> Any:
    """Import numpy on first use: a manifest is read, and a chat template's process starts, before it is loaded."""
    if name != "DTYPES":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import numpy as np
    from ml_dtypes import bfloat16

    types = {"bf16": bfloat16, "f32": np.float32, "i32": np.int32, "i8": np.int8}
    globals()[name] = dtypes = {name: np.dtype(kind) for name, kind in types.items()}
    return dtypes
