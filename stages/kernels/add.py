"""Residual add: `out = a + b`, f32 inside, one rounding."""

from __future__ import annotations

from stages.engine.lazy import ml_dtypes, np
from stages.kernels import elementwise, lanes, signature


def reference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return `a + b`. All are bf16 of one shape."""
    return (a.astype(np.float32) + b.astype(np.float32)).astype(ml_dtypes.bfloat16)


def vectors(values: int) -> int:
    """Return the vector operations that the sum of `values` values takes."""
    return values // lanes(values) * 7


KERNELS = (
    signature(
        "add",
        ("a", "b"),
        "rows cols",
        reference,
        **elementwise.device("add", ("a", "b", "out"), lambda sizes: {"vectors": vectors}),
    ),
)
