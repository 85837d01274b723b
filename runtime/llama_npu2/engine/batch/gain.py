"""Decides how long drafts are, so that they save time, and bounds what they may lose."""

from __future__ import annotations

from collections.abc import Iterable

from llama_npu2.engine.batch.pace import Pace

LONGEST = 15
"""Most tokens of a draft: with the token before them, as many rows as products take in one pass over the weights."""
_AT_FIRST, _FOR_A_TOKEN, _TRIAL = 0.7, 0.015, 1.0
"""How many tokens' time the drafts of a text may lose: at first, more for each token of the reply, and besides where a
number of rows was never measured."""
_MARGIN = 1.02
"""How many times as many tokens a second a step with a draft must promise as one without it."""
_SLOWEST = 3.0
"""How many times as long a step may take with all its drafts as without them, so that tokens come evenly. Where rows
take that long, arithmetic binds, and more of them would hardly bring more tokens a second."""


class Step:
    """A step that is planned, to which drafts are added."""

    def __init__(self, pace: Pace, rows: int) -> None:
        """Initialise a step without drafts.

        Args:
            pace: knows how long steps take.
            rows: its rows, each of which makes a token.
        """
        self._pace, self._without = pace, rows
        self.rows = rows
        """Its rows so far."""
        self._tokens, self._seconds = float(rows), 0.0
        """How many tokens it makes on average, and how long it takes to make its drafts."""

    def cost(self, length: int, seconds: float = 0.0) -> float:
        """Return how many tokens the sequences of the step could have made in the time that a draft takes.

        Args:
            length: of the draft.
            seconds: that making it takes.
        """
        alone, longer = self._pace.seconds(self.rows), self._pace.seconds(self.rows + length)
        return self.rows * ((longer + seconds) / alone - 1) if alone and longer else float(self.rows * length)

    def add(self, expected: Iterable[float], allowed: float, seconds: float = 0.0) -> int:
        """Add the draft that makes most tokens a second; return its length, which is 0 if none makes more.

        Args:
            expected: how many tokens come true on average of drafts of 1, 2 and more.
            allowed: how many tokens may be lost if none does.
            seconds: that making each token of the draft takes.
        """
        time = self._pace.seconds(self.rows)
        if not time:
            return 0
        best, chosen, gained = _MARGIN * self._tokens / (time + self._seconds), 0, 0.0
        by_length = [*expected]
        shortest = (self._pace.hoped(self.rows + 1) or 0.0) + self._seconds + seconds
        if not by_length or self._tokens + by_length[-1] <= best * shortest:
            return 0  # what the longest draft makes would not pay in the time of the shortest: so for most free text
        most_seconds = _SLOWEST * (self._pace.seconds(self._without) or 0.0)
        for length, tokens in enumerate(by_length, 1):
            longer = (self._pace.hoped(self.rows + length) or 0.0) + self._seconds + seconds * length
            if longer > most_seconds and self._pace.known(self.rows + length):
                continue
            trial = 0.0 if self._pace.measured(self.rows + length) else _TRIAL
            if (rate := (self._tokens + tokens) / longer) <= best:
                continue
            if self.cost(length, seconds * length) <= allowed + trial:
                best, chosen, gained = rate, length, tokens
        self.rows += chosen
        self._tokens += gained
        self._seconds += seconds * chosen
        return chosen


class Gain:
    """What the drafts of one text have brought, in tokens that could have been made in the same time."""

    def __init__(self) -> None:
        self._balance = _AT_FIRST

    def allowed(self, made: int) -> float:
        """Return how much a draft may lose once the reply has so many tokens: what drafts have won, too."""
        return self._balance + _FOR_A_TOKEN * made

    def note(self, cost: float, accepted: int) -> None:
        """Note what a draft cost, and how many tokens of it were chosen."""
        self._balance += accepted - cost
