"""The activation of a gated feed-forward network (Shazeer 2020).

It is SwiGLU's `silu(gate) * up`, or with the tanh approximation of GELU in place of SiLU (Hendrycks & Gimpel 2016); f32
inside, one rounding. The arguments may have any layout, if all have the same.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from stages.engine.lazy import ml_dtypes, np
from stages.kernels import Sizes, elementwise, lanes, signature
from stages.weights.scalars import ACTIVATIONS


def reference(gate: np.ndarray, up: np.ndarray, activation: int = 0) -> np.ndarray:
    """Return `activation(gate) * up`. All are bf16 of one shape."""
    wide, other = gate.astype(np.float32), up.astype(np.float32)
    if ACTIVATIONS[activation] == "swiglu_oai":
        wide, other = np.minimum(wide, np.float32(7)), np.clip(other, -7, 7) + np.float32(1)
    with np.errstate(over="ignore"):
        return (wide / (1.0 + np.exp(-exponent(wide, activation))) * other).astype(ml_dtypes.bfloat16)


def exponent(gate: np.ndarray, activation: int) -> np.ndarray:
    """Return what the sigmoid is taken of that a gate, f32, is multiplied with.

    The tanh approximation of GELU is x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)). gpt-oss has x sigmoid(1.702 x) (up +
    1), with x and up cut off at 7, up at -7, too.
    """
    if ACTIVATIONS[activation] == "swiglu_oai":
        return np.float32(1.702) * gate
    if ACTIVATIONS[activation] != "gelu_tanh":
        return gate
    wide: np.ndarray = np.float32(2 * np.sqrt(2 / np.pi)) * (gate + np.float32(0.044715) * gate * gate * gate)
    return wide


_VECTORS: Mapping[int, int] = {64: 63, 32: 58, 16: 58}
"""Lanes of a vector -> vector operations that SwiGLU's activation takes."""

_GELU = 13
"""Vector operations that the other one takes besides."""


def vectors(values: int, activation: int = 0) -> int:
    """Return the vector operations that the activation of `values` values takes."""
    width = lanes(values, 64)
    return values // width * (_VECTORS[width] + (_GELU if macros(activation) else 0))


def macros(activation: int) -> dict[str, int]:
    """Return the macros with which `kernel_src/aie2p/silu.h` is compiled."""
    return {"GELU": 1} if ACTIVATIONS[activation] == "gelu_tanh" else {}


def _scalars(sizes: Sizes) -> dict[str, Any]:
    activation = sizes.get("activation", 0)
    return {"macros": macros(activation), "vectors": functools.partial(vectors, activation=activation)}


LEAST = 2.0**-110
"""Accuracy around zero: exponentials below 2^-126 do not exist, so the activation of a gate below -87 is zero up to
this."""

KERNELS = (
    signature(
        "silu_and_mul",
        ("gate", "up"),
        "rows cols activation",
        reference,
        **elementwise.device("silu_and_mul", ("gate", "up", "out"), _scalars),
    ),
)
