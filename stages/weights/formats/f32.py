"""f32: logits and rotation tables."""

from __future__ import annotations

import numpy as np

from stages.weights.formats import Format, Layout
from stages.weights.formats.bf16 import pad_rows, padded_shape

FORMAT = Format(
    "f32",
    "f32",
    lambda values: values.astype(np.float32, copy=False),
    lambda stored, n: stored,
    layouts={"padded": Layout(padded_shape, pad_rows, serves=("plain",))},
)
