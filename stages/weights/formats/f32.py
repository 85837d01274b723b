"""f32: logits and rotation tables."""

from __future__ import annotations

import numpy as np

from stages.weights.formats import Format, Layout
from stages.weights.formats.bf16 import pad_rows, padded_shape
from stages.weights.lanes import padded

FORMAT = Format(
    "f32",
    "f32",
    lambda values: values.astype(np.float32, copy=False),
    lambda stored, n: stored,
    layouts={
        "padded": Layout(padded_shape, pad_rows, serves=("plain",)),
        # Logits of a vocabulary in groups (`stages.weights.lanes`); only their shape is asked for.
        "padded_lanes": Layout(lambda shape: (padded(shape[0]), *shape[1:])),
    },
)
