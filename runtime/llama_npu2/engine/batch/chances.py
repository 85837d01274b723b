"""Learns how likely tokens that were looked up come true."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class Agreement(IntEnum):
    """How far the places agree where the last tokens of a text stood before."""

    ALONE = 0
    """There is one place."""
    ALL = 1
    """There are several, and the same token follows in all of them."""
    SOME = 2
    """There are several, and different tokens follow."""
    PART = 3
    """It is the part that the text repeats with other words."""


class Evidence(NamedTuple):
    """What speaks for a token that was looked up."""

    match: int
    """How many tokens before it agree."""
    agreement: Agreement


_BEFORE = {
    Agreement.ALONE: (0.1, 0.2, 0.45, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.9, 0.91, 0.92, 0.93, 0.94, 0.95, 0.96, 0.97),
    Agreement.ALL: (0.1, 0.45, 0.85, 0.9, 0.92, 0.94, 0.95, 0.95, 0.95, 0.95, 0.95, 0.96, 0.96, 0.96, 0.97, 0.97, 0.97),
    Agreement.SOME: (0.1, 0.15, 0.2, 0.25, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3),
    Agreement.PART: (0.1, 0.35, 0.65, 0.65, 0.65, 0.75, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8),
}
"""How often a token comes as it was found if none, one, two of the tokens before it agree, and so on: about what it was
in replies of SmolLM2-135M-Instruct to requests of all kinds."""
_LONGEST = len(_BEFORE[Agreement.ALONE]) - 1
_BEFORE_BY_KIND = [chance for agreement in Agreement for chance in _BEFORE[agreement]]
_KINDS = len(_BEFORE_BY_KIND)
_WEIGHT_BEFORE = 20.0
"""How many tokens these count for."""
_WEIGHT_OF_OTHERS = 4.0
"""How many tokens of a text count for as much as all that is known of other texts."""
_KEPT, _KEPT_OF_OTHERS = 0.95, 0.995
"""What an observation counts for once there is another one of the same kind: in its text, and for other texts."""


class Chances:
    """How often tokens came as they were found, by what spoke for them. The last ones count most."""

    def __init__(self, others: Chances | None = None) -> None:
        """Args: `others` knows texts before this one, and is told of this one, too."""
        self._others = others
        self._came, self._counts = [0.0] * _KINDS, [0.0] * _KINDS

    def note(self, evidence: Evidence, came: bool) -> None:
        """Note whether a token came as it was found."""
        self._note(_kind(evidence), came)

    def _note(self, kind: int, came: bool) -> None:
        kept = _KEPT if self._others else _KEPT_OF_OTHERS
        self._came[kind] = self._came[kind] * kept + came
        self._counts[kind] = self._counts[kind] * kept + 1
        if self._others:
            self._others._note(kind, came)

    def of(self, evidence: Evidence) -> float:
        """Return the chance that a token comes as it was found."""
        return self._of(_kind(evidence))

    def _of(self, kind: int) -> float:
        if self._others:
            weight, before = _WEIGHT_OF_OTHERS, self._others._of(kind)
        else:
            weight, before = _WEIGHT_BEFORE, _BEFORE_BY_KIND[kind]
        return (self._came[kind] + weight * before) / (self._counts[kind] + weight)


def _kind(evidence: Evidence) -> int:
    """Return the number of a kind of evidence. Longer matches than the table has say no more than its longest."""
    match, agreement = evidence
    return agreement * (_LONGEST + 1) + (match if match < _LONGEST else _LONGEST)
