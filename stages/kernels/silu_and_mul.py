"""SwiGLU's activation (Shazeer 2020): `silu(gate) * up`, f32 inside, one rounding. Any layout the arguments share."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from ml_dtypes import bfloat16

from stages.kernels import elementwise, lanes, signature


def reference(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """`gate`, `up` bf16 of one shape -> bf16 of that shape."""
    wide = gate.astype(np.float32)
    return (wide / (1.0 + np.exp(-wide)) * up.astype(np.float32)).astype(bfloat16)


_VECTORS: Mapping[int, int] = {64: 63, 32: 56, 16: 56}
"""Vector operations for a vector of so many values."""


def vectors(values: int) -> int:
    """Vector operations that so many values take."""
    width = lanes(values, 64)
    return values // width * _VECTORS[width]


LEAST = 2.0**-110
"""There is no e^x below 2^-126: the activation of a gate below -87 is zero to within this."""

KERNELS = (
    signature(
        "silu_and_mul",
        ("gate", "up"),
        "rows cols",
        reference,
        **elementwise.device("silu_and_mul", ("gate", "up", "out"), vectors=vectors),
    ),
)
