"""Product of f32 values and a number: `out = x scale`."""

from __future__ import annotations

from stages.engine.lazy import np
from stages.kernels import Arg, signature


def reference(x: np.ndarray, scale: float) -> np.ndarray:
    """Return `x * scale`, f32 `[rows, cols]`."""
    scaled: np.ndarray = x * np.float32(scale)
    return scaled


KERNELS = (
    signature(
        "scale", (Arg("x", "f32"),), "rows cols scale:float", reference, writes=(Arg("out", "f32", written=True),)
    ),
)
