"""Drafts tokens by looking up what followed the last ones earlier in a text."""

from __future__ import annotations

from llama_npu2.engine.batch.gain import LONGEST

_SIZES = (3, 2)
"""Numbers of tokens that are looked up, the surest first."""


class Lookup:
    """What followed which tokens in one text."""

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}
        self._known = 0

    def find(self, ids: list[int]) -> list[int]:
        """Return what followed the last tokens when they stood in the text before; nothing if they did not.

        Args:
            ids: the text so far, which grows from call to call.
        """
        for end in range(max(self._known, 1), len(ids)):
            for size in _SIZES:
                if end >= size:
                    self._after[tuple(ids[end - size : end])] = end
        self._known = len(ids)
        ends = (self._after.get(tuple(ids[-size:])) for size in _SIZES)
        at = next((end for end in ends if end is not None), len(ids))
        return ids[at : at + LONGEST]
