"""Outputs of layers against those of another program, and what rounding alone costs that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MOST = 2.0
"""Times the error of a run in bf16 that a layer's output may be off by: one bit."""
WORST = 5
"""Percentile of the cosines of positions."""


@dataclass(frozen=True)
class Off:
    """How far rows are from others. `cosine`: of all but the worst `WORST` percent of the rows, the least; `largest`:
    difference of two values; `error`: root mean square of the differences over that of the values."""

    cosine: float
    largest: float
    error: float


@dataclass(frozen=True)
class Layer:
    """The output of a layer, from 0, for the positions of a `part` of the text: prompt or tokens. `ours` and `bf16`:
    how far the runtime, and the other program in bf16, are from that in float32 with the same weights; `checkpoint`:
    how far the runtime is from the checkpoint's weights, where the artifacts' are others. `bounded`: not where
    activations are rounded to whole numbers too, or share exponents."""

    layer: int
    part: str
    ours: Off
    bf16: Off
    checkpoint: Off | None
    bounded: bool

    @property
    def times(self) -> float:
        """Error as a multiple of that in bf16."""
        return self.ours.error / self.bf16.error if self.bf16.error else float("inf" if self.ours.error else 0)

    @property
    def drifts(self) -> bool:
        return self.bounded and not self.times <= MOST


def off(found: np.ndarray, exact: np.ndarray) -> Off:
    """Of rows `[positions, emb]`."""
    a, b = found.astype(np.float64), exact.astype(np.float64)
    sizes = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    cosines = np.divide((a * b).sum(axis=-1), sizes, out=np.zeros(len(a)), where=sizes > 0)
    size = np.linalg.norm(b)
    error = np.linalg.norm(a - b) / size if size else float(np.any(a))
    return Off(float(np.percentile(cosines, WORST)), float(np.abs(a - b).max()), float(error))


def compared(
    layer: int,
    states: Sequence[np.ndarray],
    theirs: Sequence[np.ndarray],
    checkpoint: np.ndarray | None,
    prompt: int,
    bounded: bool,
) -> list[Layer]:
    """One layer, the `prompt`'s positions and those behind it. `states`: our rows by position; `theirs`: in float32 and
    in bf16."""
    ours, (exact, rounded) = np.stack(states), theirs
    found = []
    for part, rows in (("prompt", slice(prompt)), ("tokens", slice(prompt, len(ours)))):
        if len(ours[rows]):
            apart = None if checkpoint is None else off(ours[rows], checkpoint[rows])
            of_ours, of_bf16 = (off(each[rows], exact[rows]) for each in (ours, rounded))
            found.append(Layer(layer, part, of_ours, of_bf16, apart, bounded))
    return found
