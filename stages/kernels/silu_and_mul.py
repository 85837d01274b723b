"""SwiGLU's activation (Shazeer 2020): `silu(gate) * up`, f32 inside, one rounding.

The arguments may have any layout, if all have the same.
"""

from __future__ import annotations

from collections.abc import Mapping

from stages.engine.lazy import ml_dtypes, np
from stages.kernels import elementwise, lanes, signature


def reference(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """Return `silu(gate) * up`. All are bf16 of one shape."""
    wide = gate.astype(np.float32)
    return (wide / (1.0 + np.exp(-wide)) * up.astype(np.float32)).astype(ml_dtypes.bfloat16)


_VECTORS: Mapping[int, int] = {64: 63, 32: 56, 16: 56}
"""Lanes of a vector -> vector operations that its activation takes."""


def vectors(values: int) -> int:
    """Return the vector operations that the activation of `values` values takes."""
    width = lanes(values, 64)
    return values // width * _VECTORS[width]


LEAST = 2.0**-110
"""Accuracy around zero: exponentials below 2^-126 do not exist, so the activation of a gate below -87 is zero up to
this."""

KERNELS = (
    signature(
        "silu_and_mul",
        ("gate", "up"),
        "rows cols",
        reference,
        **elementwise.device("silu_and_mul", ("gate", "up", "out"), vectors=vectors),
    ),
)
