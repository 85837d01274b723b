"""Measures how long steps take, by their number of rows."""

from __future__ import annotations

from collections import Counter

_WEIGHT = 0.2
"""Weight of the last step in an average."""
_SPEED_WEIGHT, _LEAST_WEIGHT = 0.3, 0.1
"""Weights of the last step in what is known of the machine's speed, and the least of it in that of a number of rows."""
_FEW = 16
"""Up to so many rows, a step takes its time for reading weights, whatever their number."""


class Pace:
    """Averages of the seconds that steps took, in which later steps weigh more.

    Machines change speed from one second to the next. So the times of numbers of rows are kept as ratios to each other,
    which a step of any number of rows corrects together.
    """

    def __init__(self) -> None:
        self._ratios: dict[int, float] = {}
        self._noted: Counter[int] = Counter()
        self._speed = self._row = 0.0

    def note(self, rows: int, wanted: int, seconds: float) -> None:
        """Note how long a step of so many rows took, `wanted` of them with logits."""
        if rows == wanted:
            self._speed = self._speed or seconds
            ratio = self._ratios.setdefault(rows, seconds / self._speed)
            self._noted[rows] += 1
            error = seconds / (self._speed * ratio)
            self._ratios[rows] *= error ** max(1 / self._noted[rows], _LEAST_WEIGHT)
            self._speed *= error**_SPEED_WEIGHT
        if rows > _FEW:
            self._row += (seconds / rows - self._row) * (_WEIGHT if self._row else 1)

    def seconds(self, rows: int) -> float | None:
        """Return how long a step of `rows` rows takes, all with logits; None if there was none yet."""
        return self._speed * self._ratios[rows] if rows in self._ratios else None

    def seconds_of(self, rows: int) -> float:
        """Return about how long so many rows of a prompt take; 0 if that is not known yet."""
        return rows * self._row

    def rows_within(self, seconds: float) -> int:
        """Return about how many rows of prompts are processed in that time; 0 if that is not known yet."""
        return int(seconds / self._row) if self._row else 0
