"""Embedding lookup.

`embed` reads the LM head's matrix in panels, `embed_rows` in rows, so that tied embeddings are stored once.
"""

from __future__ import annotations

from stages.engine.lazy import ml_dtypes, np
from stages.kernels import Arg, signature


def reference(tokens: np.ndarray, weight: np.ndarray, scale: float = 1.0) -> np.ndarray:
    """Return the rows of `weight` for `tokens`, rounded and then multiplied by `scale`, bf16 `[rows, cols]`.

    Ids outside the vocabulary have zeros.

    `tokens`: int32 `[rows]`; `weight`: bf16 `[vocab, cols]`.
    """
    valid = (tokens >= 0) & (tokens < len(weight))
    return scaled(np.where(valid[:, None], weight[np.where(valid, tokens, 0)], weight.dtype.type(0)), scale)


def scaled(rows: np.ndarray, scale: float) -> np.ndarray:
    """Return rows times `scale`, rounded once more."""
    if scale == 1:
        return rows
    return (rows.astype(ml_dtypes.bfloat16).astype(np.float32) * np.float32(scale)).astype(ml_dtypes.bfloat16)


TOKENS = Arg("tokens", "i32")

KERNELS = (
    signature(
        "embed",
        (TOKENS, Arg("weight", layouts={"cpu": "panels"}, matrix=True)),
        "rows cols vocab scale:float",
        reference,
    ),
    signature("embed_rows", (TOKENS, Arg("weight", matrix=True)), "rows cols vocab scale:float", reference),
)
