"""How a weight matrix's bytes are arranged for the kernels that read it. Kernel signatures name the layouts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from ml_dtypes import bfloat16

from stages.layouts_npu import blocks_shape, pad_rows, padded_shape, to_blocks

PANEL_ROWS = 16
"""Output rows per panel: one 64-byte line holds a pair of inputs for each, the operand of one `vdpbf16ps`."""

KV_BLOCK_POSITIONS = 128
"""Positions per block of a KV cache in panels: a block of one head stays in the first-level cache."""


def panels_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    rows, cols = shape
    return (-(-rows // PANEL_ROWS), -(-cols // 2), PANEL_ROWS, 2)


def to_panels(weight: np.ndarray) -> np.ndarray:
    """bf16 `[out, in]` -> bf16 `[ceil(out/16), ceil(in/2), 16, 2]`, padded with zeros.

    One layout for matrix-matrix and matrix-vector kernels and for the embedding lookup, so that every weight is
    stored once.
    """
    panels, pairs, rows, _ = shape = panels_shape(weight.shape)
    if weight.shape != (panels * rows, pairs * 2):
        padded = np.zeros((panels * rows, pairs * 2), bfloat16)
        padded[: weight.shape[0], : weight.shape[1]] = weight
        weight = padded
    words = np.ascontiguousarray(weight).view(np.uint32).reshape(panels, rows, pairs)
    return np.ascontiguousarray(words.transpose(0, 2, 1)).view(bfloat16).reshape(shape)


def from_panels(packed: np.ndarray, rows: int, cols: int) -> np.ndarray:
    """Inverse of `to_panels`: bf16 `[rows, cols]`."""
    panels, pairs, _, _ = packed.shape
    weight = packed.transpose(0, 2, 1, 3).reshape(panels * PANEL_ROWS, pairs * 2)
    return np.ascontiguousarray(weight[:rows, :cols])


def _plain(weight: np.ndarray) -> np.ndarray:
    return weight


LAYOUTS: dict[str, tuple[Callable[[tuple[int, ...]], tuple[int, ...]], Callable[[np.ndarray], np.ndarray]]] = {
    "plain": (tuple, _plain),
    "panels": (panels_shape, to_panels),
    "blocks": (blocks_shape, to_blocks),
    "padded": (padded_shape, pad_rows),
}
"""Layout name -> (shape after packing, packing)."""
