"""The activation of a gated feed-forward network (Shazeer 2020).

It is SwiGLU's `silu(gate) * up`, or with the tanh approximation of GELU in place of SiLU (Hendrycks & Gimpel 2016); f32
inside, one rounding. The arguments may have any layout, if all have the same.
"""

from __future__ import annotations

from collections.abc import Mapping

from stages.engine.lazy import ml_dtypes, np
from stages.kernels import elementwise, lanes, signature
from stages.weights.scalars import ACTIVATIONS


def reference(gate: np.ndarray, up: np.ndarray, activation: int = 0) -> np.ndarray:
    """Return `activation(gate) * up`. All are bf16 of one shape.

    The tanh approximation of GELU is x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)).
    """
    wide = gate.astype(np.float32)
    inner = wide
    if ACTIVATIONS[activation] == "gelu_tanh":
        inner = np.float32(2 * np.sqrt(2 / np.pi)) * (wide + np.float32(0.044715) * wide * wide * wide)
    with np.errstate(over="ignore"):
        return (wide / (1.0 + np.exp(-inner)) * up.astype(np.float32)).astype(ml_dtypes.bfloat16)


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
        "rows cols activation",
        reference,
        **elementwise.device("silu_and_mul", ("gate", "up", "out"), vectors=vectors),
    ),
)
