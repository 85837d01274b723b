"""bfp16: block floating point as the array multiplies it, `x = 2^(e - 133) m`. 8 values along a row share e.

A block is 9 bytes: the exponent, biased by 127 like that of f32, then the mantissas, 8 bits with their sign (AMD's
`bfp16ebs8`; mlir-aie's programming_examples/ml/block_datatypes reads it so). No checkpoint is stored like this: for a
prompt, the host converts weights in other formats to it.
"""

from __future__ import annotations

from stages.engine.lazy import ml_dtypes, np
from stages.weights.constants import BLOCK
from stages.weights.format import Format, Layout, Shape

BYTES = 1 + BLOCK
"""Bytes of a block."""

LOWEST = 8
"""Exponent of the smallest blocks. With it, subnormal numbers, which the host takes for zero, are zero, and the factor
that mantissas are made with is a number of f32."""

_SCALE = 133
"""Difference between a block's exponent and that of a mantissa's 1."""

PAIR = 2 * BLOCK
"""Rows whose blocks alternate, so that a core has one stream of the weights for two blocks of its results."""


def quantise(values: np.ndarray) -> np.ndarray:
    """Round `[..., n]` to bf16, then to blocks. Return i8 `[..., 9 * ceil(n / 8)]`, with zeros after the last value.

    Blocks are rounded to nearest, ties to even, as the matrix unit converts bf16 itself: the largest mantissa of a
    block has 7 bits, and the exponent is one more where it would be rounded up to 128.
    """
    rounded = values.astype(ml_dtypes.bfloat16).astype(np.float32)
    padding = [(0, 0)] * (rounded.ndim - 1) + [(0, -rounded.shape[-1] % BLOCK)]
    blocks = np.pad(rounded, padding).reshape(*rounded.shape[:-1], -1, BLOCK)
    largest = np.abs(blocks).max(axis=-1, keepdims=True)
    exponents = np.where(largest > 0, np.maximum(np.frexp(largest)[1] + 126, LOWEST), LOWEST)
    exponents += np.rint(np.ldexp(largest, _SCALE - exponents)) > 127
    mantissas = np.rint(np.ldexp(blocks, _SCALE - exponents)).astype(np.int8)
    stored = np.concatenate([exponents.astype(np.uint8).view(np.int8), mantissas], axis=-1)
    return stored.reshape(*rounded.shape[:-1], -1)


def dequantise(stored: np.ndarray, n: int) -> np.ndarray:
    """Return the values of stored rows, f32 `[..., n]`, exactly."""
    blocks = stored.reshape(*stored.shape[:-1], -1, BYTES)
    exponents = blocks[..., :1].view(np.uint8).astype(np.int32)
    values = np.ldexp(blocks[..., 1:].astype(np.float32), exponents - _SCALE)
    return values.reshape(*stored.shape[:-1], -1)[..., :n]


def pairs_shape(shape: Shape) -> Shape:
    """Return the shape of stored rows in pairs of blocks: `[rows/16, blocks, 2, 72 bytes]`."""
    rows, stored_bytes = shape
    if rows % PAIR:
        raise ValueError(f"{rows} rows are not a whole number of pairs of {BLOCK}")
    return rows // PAIR, stored_bytes // BYTES, 2, BLOCK * BYTES


def to_pairs(stored: np.ndarray) -> np.ndarray:
    """Order stored rows i8 `[rows, bytes]` as blocks of 8 rows along the rows; blocks of two times 8 rows alternate."""
    pairs, blocks, *_ = shape = pairs_shape(stored.shape)
    by_block = stored.reshape(pairs, 2, BLOCK, blocks, BYTES).transpose(0, 3, 1, 2, 4)
    return np.ascontiguousarray(by_block).reshape(shape)


def from_pairs(packed: np.ndarray, shape: Shape) -> np.ndarray:
    """Return the stored rows of their blocks."""
    pairs, blocks, *_ = pairs_shape(shape)
    by_block = packed.reshape(pairs, blocks, 2, BLOCK, BYTES).transpose(0, 2, 3, 1, 4)
    return np.ascontiguousarray(by_block).reshape(shape)


FORMAT = Format(
    "bfp16",
    "i8",
    quantise,
    dequantise,
    values=BLOCK,
    elements=BYTES,
    layouts={"pairs": Layout(pairs_shape, to_pairs, from_pairs)},
)
