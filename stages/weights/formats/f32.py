"""f32: logits and rotation tables."""

from __future__ import annotations

from functools import partial

import numpy as np

from stages.weights.format import Format, Layout, Shape
from stages.weights.formats.bf16 import pad_rows, padded_shape
from stages.weights.lanes import padded


def _filled(shape: Shape) -> Shape:
    rows, *rest = shape
    return (padded(rows), *rest)


FORMAT = Format(
    "f32",
    "f32",
    lambda values: values.astype(np.float32, copy=False),
    lambda stored, n: stored,
    layouts={
        "padded": Layout(padded_shape, pad_rows, serves=("plain",)),
        # Logits of a vocabulary in groups.
        "padded_lanes": Layout(_filled, partial(pad_rows, shape=_filled), serves=("plain",)),
    },
)
