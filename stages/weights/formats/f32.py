"""f32: the format of logits and of tables of rotary embeddings."""

from __future__ import annotations

from functools import partial

from stages.engine.lazy import np
from stages.weights.cut import padded_rows
from stages.weights.format import Format, Layout, Shape
from stages.weights.formats.bf16 import pad_rows, padded_shape


def _padded_shape(shape: Shape) -> Shape:
    rows, *rest = shape
    return (padded_rows(rows), *rest)


def _padded_columns(shape: Shape) -> Shape:
    *rows, columns = shape
    return (*rows, padded_rows(columns))


def _first_columns(packed: np.ndarray, shape: Shape) -> np.ndarray:
    return packed[..., : shape[-1]]


FORMAT = Format(
    "f32",
    "f32",
    lambda values: values.astype(np.float32, copy=False),
    lambda stored, n: stored,
    layouts={
        "padded": Layout(padded_shape, pad_rows, serves=("plain",)),
        # For the logits of a group-wise quantised vocabulary.
        "padded_lanes": Layout(_padded_shape, partial(pad_rows, shape=_padded_shape), serves=("plain",)),
        # The same of several tokens.
        "padded_columns": Layout(_padded_columns, partial(pad_rows, shape=_padded_columns), unpack=_first_columns),
    },
)
