"""Embedding lookup. Reads the LM head's layout, so that tied embeddings are stored once."""

import numpy as np


def reference(tokens: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """`tokens` int32 `[rows]`, `weight` bf16 `[vocab, cols]` -> bf16 `[rows, cols]`."""
    return weight[tokens]
