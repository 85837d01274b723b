"""Drafts tokens by looking up what followed the last ones earlier in a text."""

from __future__ import annotations

from llama_npu2.engine.batch.gain import LONGEST

_SIZES = (3, 2)
"""Numbers of tokens that are looked up, the surest first."""


_ASTRAY = 6
"""For how many tokens that are not found a text is thought to go on where it was found last, with other words."""


class Lookup:
    """What followed which tokens in one text."""

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}
        self._known = 0
        self._source: int | None = None
        """Where in the text the last call found what might follow."""
        self._astray = 0
        """Tokens since the last ones that were found."""

    def find(self, ids: list[int]) -> list[int]:
        """Return what followed the last tokens when they stood in the text before.

        A text that repeats an earlier part may replace tokens in it. So where the last tokens did not stand before, and
        those shortly before them did, this is what follows the same number of tokens later there.

        Args:
            ids: the text so far, which grows from call to call.
        """
        grown = len(ids) - self._known
        for end in range(max(self._known, 1), len(ids)):
            for size in _SIZES:
                if end >= size:
                    self._after[tuple(ids[end - size : end])] = end
        self._known = len(ids)
        there = None if self._source is None else self._source + grown
        self._source, self._astray = self._at(ids, there), self._astray + grown
        if self._source is not None:
            self._astray = 0
        elif self._astray <= _ASTRAY:
            self._source = there
        return [] if self._source is None else ids[self._source : self._source + LONGEST]

    def _at(self, ids: list[int], there: int | None) -> int | None:
        """Return what follows the last tokens where they stood before: in the part that is repeated, or latest."""
        for size in _SIZES:
            last = ids[-size:]
            if there is not None and ids[max(there - size, 0) : there] == last and there < len(ids):
                return there
            if (found := self._after.get(tuple(last))) is not None:
                return found
        return None
