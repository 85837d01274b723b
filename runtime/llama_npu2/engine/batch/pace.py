"""Measures how long steps take, by their number of rows."""

from __future__ import annotations

_WEIGHT = 0.2
"""Weight of the last step in an average."""
_FEW = 16
"""Up to so many rows, a step takes its time for reading weights, whatever their number."""


class Pace:
    """Averages of the seconds that steps took, in which later steps weigh more."""

    def __init__(self) -> None:
        self._steps: dict[int, float] = {}
        self._row = 0.0

    def note(self, rows: int, wanted: int, seconds: float) -> None:
        """Note how long a step of so many rows took, `wanted` of them with logits."""
        if rows == wanted:
            self._steps[rows] = _average(self._steps.get(rows), seconds)
        if rows > _FEW:
            self._row = _average(self._row or None, seconds / rows)

    def seconds(self, rows: int) -> float | None:
        """Return how long a step of `rows` rows takes, all with logits; None if there was none yet."""
        return self._steps.get(rows)

    def seconds_of(self, rows: int) -> float:
        """Return about how long so many rows of a prompt take; 0 if that is not known yet."""
        return rows * self._row

    def rows_within(self, seconds: float) -> int:
        """Return about how many rows of prompts are processed in that time; 0 if that is not known yet."""
        return int(seconds / self._row) if self._row else 0


def _average(old: float | None, new: float) -> float:
    return new if old is None else old + _WEIGHT * (new - old)
