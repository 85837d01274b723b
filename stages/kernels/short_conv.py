"""A gated causal convolution over positions, each channel by itself, as LFM2 mixes positions (Liquid AI 2025).

A product makes three rows of a position: B, C and x. B * x, rounded, is appended to a history, whose last rows are
multiplied with the taps, summed up in f32 from the oldest on and rounded; C times that is the result.
"""

from __future__ import annotations

from stages.engine.lazy import ml_dtypes, np
from stages.kernels import Arg, signature


def reference(
    bcx: np.ndarray, weight: np.ndarray, history: np.ndarray, pos: int, taps: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return a copy of `history` with the new rows, and the results bf16 `[rows, cols]`.

    Products of two bf16 are exact in f32.

    Args:
        bcx: bf16 `[rows, 3 * cols]`.
        weight: bf16 `[cols, 1, taps]`; the last tap is for a position's own row.
        history: bf16 `[positions + taps - 1, cols]`. The row of position p is `p + taps - 1`; those before the first
            position are zeros.
        pos: The first row's position.
    """
    gate, after, x = np.split(np.atleast_2d(bcx).astype(np.float32), 3, axis=-1)
    rows, history = len(x), history.copy()
    history[pos + taps - 1 :][:rows] = (gate * x).astype(ml_dtypes.bfloat16)
    seen, factors = history[pos:].astype(np.float32), weight.astype(np.float32)[:, 0].T
    total = seen[:rows] * factors[0]
    for tap in range(1, taps):
        total += seen[tap : tap + rows] * factors[tap]
    mixed = after * total.astype(ml_dtypes.bfloat16).astype(np.float32)
    return history, mixed.astype(ml_dtypes.bfloat16).reshape(*bcx.shape[:-1], -1)


KERNELS = (
    signature(
        "short_conv",
        ("bcx", Arg("weight", layouts={"cpu": "taps", "aie2p": "taps"})),
        "rows pos cols taps",
        reference,
        writes=(Arg("history", written=True), "out"),
    ),
)
