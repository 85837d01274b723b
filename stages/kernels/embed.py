"""Embedding lookup. `embed` reads the LM head's panels, `embed_rows` its rows: tied embeddings are stored once."""

from __future__ import annotations

import numpy as np

from stages.kernels import Arg, signature


def reference(tokens: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """`tokens` int32 `[rows]`, `weight` bf16 `[vocab, cols]` -> bf16 `[rows, cols]`; zeros for what is no token."""
    known = (tokens >= 0) & (tokens < len(weight))
    return np.where(known[:, None], weight[np.where(known, tokens, 0)], weight.dtype.type(0))


TOKENS = Arg("tokens", "i32")

KERNELS = (
    signature("embed", (TOKENS, Arg("weight", layouts={"cpu": "panels"}, matrix=True)), "rows cols vocab", reference),
    signature("embed_rows", (TOKENS, Arg("weight", matrix=True)), "rows cols vocab", reference),
)
