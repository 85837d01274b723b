"""Measures how long steps take, by their number of rows."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

_WEIGHT = 0.2
"""Weight of the last step in an average."""
_SPEED_WEIGHT, _LEAST_WEIGHT = 0.1, 0.03
"""Weights of the last step in what is known of the machine's speed, and the least of it in that of a number of rows."""
_LARGEST = 2.0
"""How many times as long as expected a step counts as at most: something else may have had the CPUs."""
_FEW = 16
"""Up to so many rows, a step takes its time for reading weights, whatever their number."""
_MORE_ROWS = 0.5
"""What rows beyond those that were measured are thought to add, as a share of what the measured ones take each."""
_DOUBT, _DOUBTED_AFTER = 0.1, 1000
"""What share of a number of rows' time may be an error after one step of it; and after how many other steps its own
ones count for half as many."""

_KNOWN = 0.5
"""A number of rows is known as long as what is certain of it is at least so many steps."""

_IN_ORDER = 8
"""After how many steps ratios are brought in order again, since they change little with each."""


@dataclass
class _Measured:
    ratio: float
    steps: float
    """How many steps the ratio was averaged over, less the longer ago they are."""
    last: int
    """The number of the last one among all steps."""


class Pace:
    """Averages of the seconds that steps took, in which later steps weigh more.

    Machines change speed from one second to the next. So the times of numbers of rows are kept as ratios to each other,
    which a step of any number of rows corrects together.
    """

    def __init__(self) -> None:
        self._measured: dict[int, _Measured] = {}
        self._speed = self._row = 0.0
        self._steps = 0
        self._known: list[tuple[int, float]] = []
        """Rows and ratios in order, none of which is larger than one of more rows."""

    def note(self, rows: int, wanted: int, seconds: float) -> None:
        """Note how long a step of so many rows took, `wanted` of them with logits."""
        if rows == wanted:
            self._note(rows, seconds)
        if rows > _FEW:
            self._row += (seconds / rows - self._row) * (_WEIGHT if self._row else 1)

    def _note(self, rows: int, seconds: float) -> None:
        self._speed = self._speed or seconds
        self._steps += 1
        measured = self._measured.get(rows)
        new = measured is None
        if measured is None:
            expected = self.seconds(rows) or seconds
            measured = self._measured[rows] = _Measured(expected / self._speed, 1.0, self._steps)
        error = min(max(seconds / (self._speed * measured.ratio), 1 / _LARGEST), _LARGEST)
        measured.steps, measured.last = self._certain(measured) + 1, self._steps
        measured.ratio *= error ** max(1 / measured.steps, _LEAST_WEIGHT)
        self._speed *= error**_SPEED_WEIGHT
        if new or not self._steps % _IN_ORDER:
            self._known = []

    def _certain(self, measured: _Measured) -> float:
        return measured.steps * 0.5 ** ((self._steps - measured.last) / _DOUBTED_AFTER)

    def measured(self, rows: int) -> bool:
        """Return whether there was a step of so many rows."""
        return rows in self._measured

    def known(self, rows: int) -> bool:
        """Return whether steps of so many rows were measured lately, or so often that it need not be lately."""
        return rows in self._measured and self._certain(self._measured[rows]) >= _KNOWN

    def seconds(self, rows: int) -> float | None:
        """Return how long a step of `rows` rows takes, all with logits; None if there was none of any number yet."""
        if not self._measured:
            return None
        known = self._ordered()
        at = bisect_left(known, (rows, 0.0))
        if at < len(known) and known[at][0] == rows:
            return self._speed * known[at][1]
        if 0 < at < len(known):
            (fewer, less), (more, greater) = known[at - 1], known[at]
            return self._speed * (less + (greater - less) * (rows - fewer) / (more - fewer))
        measured, ratio = known[-1] if at else known[0]
        return self._speed * ratio * (1 + _MORE_ROWS * (rows / measured - 1))

    def hoped(self, rows: int) -> float | None:
        """Return how little time such a step may take, so that numbers of rows are tried that are not well known."""
        seconds, measured = self.seconds(rows), self._measured.get(rows)
        steps = max(self._certain(measured), 1.0) if measured else 1.0
        return seconds and seconds * (1 - _DOUBT / steps**0.5)

    def _ordered(self) -> list[tuple[int, float]]:
        if not self._known:
            least = float("inf")
            for rows in sorted(self._measured, reverse=True):
                least = min(least, self._measured[rows].ratio)
                self._known.append((rows, least))
            self._known.reverse()
        return self._known

    def seconds_of(self, rows: int) -> float:
        """Return about how long so many rows of a prompt take; 0 if that is not known yet."""
        return rows * self._row

    def rows_within(self, seconds: float) -> int:
        """Return about how many rows of prompts are processed in that time; 0 if that is not known yet."""
        return int(seconds / self._row) if self._row else 0
