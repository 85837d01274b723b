"""i32: the format of token ids."""

from __future__ import annotations

from stages.engine.lazy import np
from stages.weights.format import Format

FORMAT = Format(
    "i32",
    "i32",
    lambda values: values.astype(np.int32, copy=False),
    lambda stored, n: stored.astype(np.float32),
)
