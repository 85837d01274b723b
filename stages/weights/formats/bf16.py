"""bf16: the format of checkpoints, which all kernels take. Its layouts permute and pad, and never round."""

from __future__ import annotations

from collections.abc import Callable

from stages.engine.lazy import ml_dtypes, np
from stages.weights.constants import BLOCK, PANEL_ROWS
from stages.weights.format import Format, Layout, Shape

ROWS_STEP = 8 * BLOCK
"""For the array, the rows of a vocabulary matrix are a multiple of this: a block for each of eight columns."""


def panels_shape(shape: Shape) -> Shape:
    """Return the shape of a weight `[out, in]` in panels: `[ceil(out/16), ceil(in/2), 16, 2]`."""
    rows, cols = shape
    return (-(-rows // PANEL_ROWS), -(-cols // 2), PANEL_ROWS, 2)


def to_panels(weight: np.ndarray) -> np.ndarray:
    """Pack a weight bf16 `[out, in]` into panels, padded with zeros.

    Matrix-matrix and matrix-vector kernels and the embedding lookup read this one layout, so every weight is stored
    once.
    """
    panels, pairs, rows, _ = shape = panels_shape(weight.shape)
    if weight.shape != (panels * rows, pairs * 2):
        padded = np.zeros((panels * rows, pairs * 2), ml_dtypes.bfloat16)
        padded[: weight.shape[0], : weight.shape[1]] = weight
        weight = padded
    words = np.ascontiguousarray(weight).view(np.uint32).reshape(panels, rows, pairs)
    return np.ascontiguousarray(words.transpose(0, 2, 1)).view(ml_dtypes.bfloat16).reshape(shape)


def from_panels(packed: np.ndarray, shape: Shape) -> np.ndarray:
    """Return the weight `[out, in]` of its panels."""
    rows, cols = shape
    panels, pairs, height, _ = panels_shape(shape)
    wide = packed.reshape(panels, pairs, height, 2).transpose(0, 2, 1, 3).reshape(panels * height, pairs * 2)
    return wide[:rows, :cols]


def blocks_shape(shape: Shape) -> Shape:
    """Return the shape of a weight `[out, in]` in blocks: `[out/8, in/8, 8 inputs, 8 outputs]`."""
    rows, cols = shape
    if rows % BLOCK or cols % BLOCK:
        raise ValueError(f"a {rows}x{cols} weight is not a whole number of {BLOCK}x{BLOCK} blocks")
    return (rows // BLOCK, cols // BLOCK, BLOCK, BLOCK)


def to_blocks(weight: np.ndarray) -> np.ndarray:
    """Order a weight `[out, in]` as `[out/8, in/8, 8, 8]`. The rows of a block are inputs, as in `x @ weight.T`.

    Blocks do not depend on tilings, so one copy of a weight serves prefill in every bucket, and decode.
    """
    rows, cols, *_ = blocks_shape(weight.shape)
    return np.ascontiguousarray(weight.reshape(rows, BLOCK, cols, BLOCK).transpose(0, 2, 3, 1))


def from_blocks(packed: np.ndarray, shape: Shape) -> np.ndarray:
    """Return the weight `[out, in]` of its blocks."""
    return packed.reshape(blocks_shape(shape)).transpose(0, 3, 1, 2).reshape(shape)


def padded_shape(shape: Shape) -> Shape:
    """Return the shape of a vocabulary matrix `[vocab, in]`, or of its logits, with rows rounded up for the array."""
    rows, *rest = shape
    return (-(-rows // ROWS_STEP) * ROWS_STEP, *rest)


def pad_rows(weight: np.ndarray, shape: Callable[[Shape], Shape] = padded_shape) -> np.ndarray:
    """Pad a vocabulary matrix with rows of zeros. Their logits are computed and never read."""
    padded = np.zeros(shape(weight.shape), weight.dtype)
    padded[tuple(map(slice, weight.shape))] = weight
    return padded


def to_taps(weight: np.ndarray) -> np.ndarray:
    """Order the taps `[channels, 1, taps]` of a convolution as `[taps, channels]`: vectors are of channels."""
    return np.ascontiguousarray(weight.reshape(len(weight), -1).T)


def from_taps(packed: np.ndarray, shape: Shape) -> np.ndarray:
    """Return the taps `[channels, 1, taps]`."""
    return packed.reshape(shape[-1], shape[0]).T.reshape(shape)


def quantise(values: np.ndarray) -> np.ndarray:
    """Round to bf16, to nearest even."""
    return values.astype(ml_dtypes.bfloat16, copy=False)


FORMAT = Format(
    "bf16",
    "bf16",
    quantise,
    lambda stored, n: stored.astype(np.float32),
    layouts={
        "panels": Layout.of_panels(PANEL_ROWS, panels_shape, to_panels, from_panels),
        "blocks": Layout(blocks_shape, to_blocks, from_blocks),
        "taps": Layout(lambda shape: (shape[-1], shape[0]), to_taps, from_taps, of_matrices=False),
        "padded": Layout(padded_shape, pad_rows, serves=("plain",)),
    },
)
