"""Compare outputs of layers with another program's, and with what rounding to bf16 alone costs that program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MOST = 2.0
"""A layer's error may be this many times that of a run in bf16: one bit."""
WORST = 5
"""Percentage of positions, those with the lowest cosines, that a cosine leaves out."""


@dataclass(frozen=True)
class Distance:
    """How far rows are from others."""

    cosine: float
    """The lowest cosine of all but the worst `WORST` percent of the rows."""
    largest: float
    """The largest difference of two values."""
    error: float
    """Root mean square of the differences, divided by that of the values."""


@dataclass(frozen=True)
class Layer:
    """The output of a layer, for the positions of one part of the text."""

    layer: int
    """From 0."""
    part: str
    """`prompt` or `tokens`."""
    ours: Distance
    """The runtime, against the other program in float32 with the same weights."""
    bf16: Distance
    """The other program in bf16, against itself in float32."""
    checkpoint: Distance | None
    """The runtime, against the checkpoint's weights, where the artifacts' are others."""
    bounded: bool
    """Whether a bound applies: not where activations are rounded to whole numbers too, or share exponents."""

    @property
    def times(self) -> float:
        """The error as a multiple of that in bf16."""
        return self.ours.error / self.bf16.error if self.bf16.error else float("inf" if self.ours.error else 0)

    @property
    def drifts(self) -> bool:
        """Whether the error exceeds the bound."""
        return self.bounded and not self.times <= MOST


def distance(rows: np.ndarray, exact: np.ndarray) -> Distance:
    """Return how far rows `[positions, emb]` are from exact ones."""
    a, b = rows.astype(np.float64), exact.astype(np.float64)
    sizes = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    cosines = np.divide((a * b).sum(axis=-1), sizes, out=np.zeros(len(a)), where=sizes > 0)
    size = np.linalg.norm(b)
    error = np.linalg.norm(a - b) / size if size else float(np.any(a))
    return Distance(float(np.percentile(cosines, WORST)), float(np.abs(a - b).max()), float(error))


def compared(
    layer: int,
    states: Sequence[np.ndarray],
    theirs: Sequence[np.ndarray],
    checkpoint: np.ndarray | None,
    prompt: int,
    bounded: bool,
) -> list[Layer]:
    """Compare one layer, at the positions of the prompt and at those after it.

    Args:
        states: The runtime's rows, by position.
        theirs: The other program's rows, in float32 and in bf16.
        checkpoint: Rows with the checkpoint's weights, where the artifacts' are others.
        prompt: Tokens of the prompt.
        bounded: See `Layer`.
    """
    ours, (exact, rounded) = np.stack(states), theirs
    parts = []
    for part, rows in (("prompt", slice(prompt)), ("tokens", slice(prompt, len(ours)))):
        if len(ours[rows]):
            apart = None if checkpoint is None else distance(ours[rows], checkpoint[rows])
            of_ours, of_bf16 = (distance(side[rows], exact[rows]) for side in (ours, rounded))
            parts.append(Layer(layer, part, of_ours, of_bf16, apart, bounded))
    return parts
