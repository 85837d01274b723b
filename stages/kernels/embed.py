"""Embedding lookup.

`embed` reads the LM head's matrix in panels, `embed_rows` in rows, so that tied embeddings are stored once.
"""

from __future__ import annotations

from stages.engine.lazy import np
from stages.kernels import Arg, signature


def reference(tokens: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return the rows of `weight` for `tokens`, bf16 `[rows, cols]`; zeros for ids outside the vocabulary.

    `tokens`: int32 `[rows]`; `weight`: bf16 `[vocab, cols]`.
    """
    valid = (tokens >= 0) & (tokens < len(weight))
    return np.where(valid[:, None], weight[np.where(valid, tokens, 0)], weight.dtype.type(0))


TOKENS = Arg("tokens", "i32")

KERNELS = (
    signature("embed", (TOKENS, Arg("weight", layouts={"cpu": "panels"}, matrix=True)), "rows cols vocab", reference),
    signature("embed_rows", (TOKENS, Arg("weight", matrix=True)), "rows cols vocab", reference),
)
