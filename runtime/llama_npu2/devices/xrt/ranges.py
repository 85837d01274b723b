"""Sets of byte ranges, which say which side has the newer copy of which part of a buffer."""

from __future__ import annotations

Range = tuple[int, int]
"""First byte, and the byte after the last."""


class Ranges:
    """Disjoint byte ranges. There are few at a time, so a list will do."""

    def __init__(self) -> None:
        self._parts: list[Range] = []

    def __bool__(self) -> bool:
        return bool(self._parts)

    def add(self, low: int, high: int) -> None:
        """Add `low..high`, joined with the ranges that it touches."""
        if low >= high:
            return
        separate = []
        for first, end in self._parts:
            if end < low or high < first:
                separate.append((first, end))
            else:
                low, high = min(first, low), max(end, high)
        self._parts = [*separate, (low, high)]

    def take(self, low: int, high: int) -> list[Range]:
        """Remove `low..high`; return the parts of it that were in the set, ascending."""
        taken, kept = [], []
        for first, end in self._parts:
            start, stop = max(first, low), min(end, high)
            if start >= stop:
                kept.append((first, end))
                continue
            taken.append((start, stop))
            kept += [part for part in ((first, start), (stop, end)) if part[0] < part[1]]
        self._parts = kept
        return sorted(taken)
