"""Embedding lookup. Reads the LM head's layout, so that tied embeddings are stored once."""

import numpy as np

from stages.kernels import Arg, Kernel

KERNELS = (
    Kernel(
        "embed",
        (Arg("tokens", "i32"), Arg("weight", layouts=(("cpu", "panels"),)), Arg("out", written=True)),
        ("rows", "cols", "vocab"),
    ),
)


def reference(tokens: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """`tokens` int32 `[rows]`, `weight` bf16 `[vocab, cols]` -> bf16 `[rows, cols]`."""
    return weight[tokens]
