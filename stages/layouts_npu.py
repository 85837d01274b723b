"""Byte orders of matrices that stream to the NPU: 8x8 blocks, as the matrix unit reads them.

Blocks do not depend on tile plans, so one copy of a weight serves every sequence bucket, prefill and decode.
"""

from __future__ import annotations

import numpy as np

BLOCK = 8


def blocks_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of a weight `[out, in]` in blocks: `[out/8, in/8, 8 inputs, 8 outputs]`."""
    rows, cols = shape
    if rows % BLOCK or cols % BLOCK:
        raise ValueError(f"a {rows}x{cols} weight is not a whole number of {BLOCK}x{BLOCK} blocks")
    return (rows // BLOCK, cols // BLOCK, BLOCK, BLOCK)


def to_blocks(weight: np.ndarray) -> np.ndarray:
    """Weight `[out, in]` -> `[out/8, in/8, 8, 8]`; within a block inputs are the rows, as in `x @ weight.T`."""
    rows, cols, *_ = blocks_shape(weight.shape)
    return np.ascontiguousarray(weight.reshape(rows, BLOCK, cols, BLOCK).transpose(0, 2, 3, 1))


def from_blocks(packed: np.ndarray) -> np.ndarray:
    """Inverse of `to_blocks`: `[out, in]`."""
    rows, cols, *_ = packed.shape
    return np.ascontiguousarray(packed.transpose(0, 3, 1, 2)).reshape(rows * BLOCK, cols * BLOCK)


def padded_shape(shape: tuple[int, ...], step: int = 64) -> tuple[int, ...]:
    """Shape of a vocabulary matrix `[vocab, in]` with its rows rounded up for the array."""
    rows, *rest = shape
    return (-(-rows // step) * step, *rest)


def pad_rows(weight: np.ndarray, step: int = 64) -> np.ndarray:
    """Vocabulary matrix with zero rows at the end. Their logits are computed and never read."""
    padded = np.zeros(padded_shape(weight.shape, step), weight.dtype)
    padded[: len(weight)] = weight
    return padded
