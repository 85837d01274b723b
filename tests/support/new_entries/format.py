"""Eight bits and a power of two per 32 values: 36 bytes."""

import numpy as np

from stages.weights.format import Format, Layout

VALUES, BYTES = 32, 36


def quantise(values: np.ndarray) -> np.ndarray:
    blocks = values.astype(np.float32).reshape(*values.shape[:-1], -1, VALUES)
    largest = np.abs(blocks).max(axis=-1, keepdims=True)
    scales = np.exp2(np.ceil(np.log2(np.maximum(largest, 1e-30) / 127))).astype(np.float32)
    stored = np.concatenate([np.rint(blocks / scales).astype(np.int8), scales.view(np.int8)], axis=-1)
    return stored.reshape(*values.shape[:-1], -1)


def dequantise(stored: np.ndarray, n: int) -> np.ndarray:
    blocks = np.ascontiguousarray(stored).reshape(*stored.shape[:-1], -1, BYTES)
    scales = np.ascontiguousarray(blocks[..., VALUES:]).view(np.float32)
    return (blocks[..., :VALUES] * scales).reshape(*stored.shape[:-1], -1)[..., :n]


def columns_first(stored: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(stored.reshape(len(stored), -1, BYTES).swapaxes(0, 1))


FORMAT = Format(
    "tiny8",
    "i8",
    quantise,
    dequantise,
    values=VALUES,
    elements=BYTES,
    layouts={"columns_first": Layout(lambda shape: (shape[1] // BYTES, shape[0], BYTES), columns_first)},
)
