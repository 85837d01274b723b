"""Drafts tokens by looking up what followed the last ones earlier in a text, as long as that saves time."""

from __future__ import annotations

from llama_npu2.engine.batch.pace import Pace

_SIZES = (3, 2)
"""Numbers of tokens that are looked up, the surest first."""
_LONGEST = 8
"""Most tokens of a draft."""
_FIRST_PAUSE, _LONGEST_PAUSE = 16, 1024
"""For how many tokens nothing is drafted after drafts did not pay, twice as many each time."""
_WEIGHT = 0.3
"""Weight of the last draft in the average of what comes true."""
_HOPED = 0.5
"""Share of a draft that is thought to come true before any was tried."""
_LEAST_GAIN = 0.1
"""Tokens that a draft must bring more than it costs."""


class Lookup:
    """Drafts for one text. What it drafts never changes which tokens are chosen, only how many rows a step has."""

    def __init__(self, pace: Pace) -> None:
        """Args: `pace` knows how long steps take."""
        self._pace = pace
        self._after: dict[tuple[int, ...], int] = {}
        self._known = 0
        self._length = 2
        self._share = _HOPED
        """Average of the share of drafts that comes true."""
        self._until, self._pause = 0, _FIRST_PAUSE
        self._tries = True
        """Whether the next draft is made whatever it costs: texts and machines change."""

    def draft(self, ids: list[int], rows: int, most: int) -> list[int]:
        """Return tokens that may follow `ids`, none if they are unknown or would not pay.

        Args:
            ids: the text so far, which grows from call to call.
            rows: that the step has without them.
            most: of them.
        """
        if len(ids) < self._until:
            return []
        found = self._find(ids)[: min(self._length, most)]
        if not found:
            return []
        pays = self._pays(rows, len(found))
        if not pays and not self._tries:
            self._stop(len(ids))
            return []
        self._pause, self._tries = _FIRST_PAUSE if pays else self._pause, False
        return found

    def note(self, drafted: int, accepted: int) -> None:
        """Note how many tokens of a draft were chosen."""
        self._share += _WEIGHT * (accepted / drafted - self._share)
        self._length = min(self._length * 2, _LONGEST) if accepted == drafted else max(accepted, 1)

    def _pays(self, rows: int, drafted: int) -> bool:
        """Return whether a draft brings more tokens than all sequences of a step lose by its longer time."""
        alone, longer = self._pace.seconds(rows), self._pace.seconds(rows + drafted)
        lost = rows * (longer / alone - 1) if alone and longer else 0.0
        return self._share * drafted >= lost + _LEAST_GAIN

    def _stop(self, length: int) -> None:
        self._until, self._pause = length + self._pause, min(2 * self._pause, _LONGEST_PAUSE)
        self._tries, self._length = True, 2

    def _find(self, ids: list[int]) -> list[int]:
        """Return what followed the last tokens when they stood in the text before."""
        for end in range(max(self._known, 1), len(ids)):
            for size in _SIZES:
                if end >= size:
                    self._after[tuple(ids[end - size : end])] = end
        self._known = len(ids)
        ends = (self._after.get(tuple(ids[-size:])) for size in _SIZES)
        at = next((end for end in ends if end is not None), len(ids))
        return ids[at : at + _LONGEST]
