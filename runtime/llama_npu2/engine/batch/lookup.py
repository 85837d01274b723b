"""Drafts tokens by looking up what followed the last ones earlier in a text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from llama_npu2.engine.batch.chances import Agreement, Chances, Evidence

_SIZES = (4, 2, 1)
"""Numbers of tokens that are looked up, the surest first."""
_PLACES = 8
"""How many places where they stand are compared, the latest ones."""
_LONGEST_MATCH = 32
"""How many tokens before a place are compared."""
_PART = 3
"""How many tokens must agree for a text to repeat a part of it."""
_NEAR = 8
"""How far from where a part should go on it is looked for: words may be left out or put in."""
_ASTRAY = 6
"""For how many tokens that differ a text is thought to go on with the part that it repeated, with other words."""


class Place(NamedTuple):
    """Where a text may have been as it is now."""

    next: int
    """Which of its tokens followed there."""
    match: int
    """How many tokens before that one are the last ones of the text, too."""


class Choice(NamedTuple):
    """A token that may come next."""

    token: int
    why: Evidence
    """What speaks for it."""


class Lookup:
    """What followed which tokens in one text.

    A text goes on as it did where most of its last tokens stood before, or with the part of it that it repeats with
    other words. Each token that comes says which of them was right, so what drafts would bring is known before one is
    made.
    """

    def __init__(self, chances: Chances) -> None:
        """Args: `chances` is told of tokens whether they came as they were found."""
        self._chances = chances
        self._known = 0
        """How much of the text was read."""
        self._latest: list[dict[tuple[int, ...], int]] = [{} for _ in _SIZES]
        """Where tokens end last, for each size."""
        self._earlier = [[0] * (size - 1) for size in _SIZES]
        """Where the tokens that end with each one end before it, for each size; 0 if nowhere."""
        self._places: list[Place] = []
        """Those with the longest match, the latest first."""
        self._part: Place | None = None
        """Where the part that the text repeats should go on."""
        self._astray = 0
        """How many tokens differed from it since the last one that did not."""
        self._next: list[Choice] = []
        """What may come next."""

    def read(self, ids: list[int]) -> None:
        """Note how a text has grown; it only grows."""
        self._index(ids)
        # What a prompt repeats in itself says little of the reply.
        for at in range(self._known or len(ids) - 1, len(ids)):
            self._follow(ids, at)
        self._known = len(ids)

    def find(self, ids: list[int]) -> Iterator[tuple[int, float]]:
        """Yield tokens that may follow the text that was read, each with the chance that it does if those before it do.

        A part that reaches up to the end of the text is repeated on and on.
        """
        text, places, part, choices = _Extended(ids), self._places, self._part, self._next
        while choices:
            chance, token = max((self._chances.of(why), token) for token, why in choices)
            yield token, chance
            text.drafted.append(token)
            places = [Place(next + 1, match + 1) for next, match in places if text[next] == token]
            part = Place(part.next + 1, part.match + 1) if part and text[part.next] == token else None
            choices = _choices(text, places, part)

    def _index(self, ids: list[int]) -> None:
        """Note where the tokens that were not read end."""
        for size, latest, earlier in zip(_SIZES, self._latest, self._earlier, strict=True):
            for end in range(max(self._known + 1, size), len(ids) + 1):
                tokens = tuple(ids[end - size : end])
                earlier.append(latest.get(tokens, 0))
                latest[tokens] = end

    def _follow(self, ids: list[int], at: int) -> None:
        """Note a token that has come; decide what may follow it."""
        came = ids[at]
        for token, why in self._next:
            self._chances.note(why, token == came)
        self._places = [Place(next + 1, match + 1) for next, match in self._places if ids[next] == came]
        if not self._places:
            self._search(ids, at)
        if self._part:
            self._go_on(ids, at, self._part)
        best = self._places[0] if self._places else None
        if best and best.match >= _PART and best.match > (self._part.match if self._part else 0):
            self._part, self._astray = best, 0
        self._next = _choices(ids, self._places, self._part)

    def _search(self, ids: list[int], at: int) -> None:
        """Find the places where most of the last tokens stood before."""
        places: list[Place] = []
        for size, earlier in zip(_SIZES, self._earlier, strict=True):
            end = earlier[at]
            while end and len(places) < _PLACES:
                match = size
                while match < min(_LONGEST_MATCH, end) and ids[end - 1 - match] == ids[at - match]:
                    match += 1
                places.append(Place(end, match))
                end = earlier[end - 1]
            if places:
                break
        longest = max((place.match for place in places), default=0)
        self._places = [place for place in places if place.match == longest]

    def _go_on(self, ids: list[int], at: int, part: Place) -> None:
        """Note a token of a text that repeats a part: the next one of it, another one near it, or one in its place."""
        if ids[part.next] == ids[at]:
            self._part, self._astray = Place(part.next + 1, part.match + 1), 0
            return
        self._astray += 1
        near = range(max(part.next + 1 - _NEAR, 1), min(part.next + 1 + _NEAR, at) + 1)
        ends = [end for end in near if ids[end - 1] == ids[at]]
        if self._astray > _ASTRAY:
            self._part = None
        elif ends:
            self._part = Place(min(ends, key=lambda end: abs(end - part.next - 1)), 1)
        else:
            self._part = Place(part.next + 1, 0)


def _choices(text: list[int] | _Extended, places: list[Place], part: Place | None) -> list[Choice]:
    """Return which tokens may come next, and what speaks for them."""
    found = []
    if len(places) == 1:
        found.append(Choice(text[places[0].next], Evidence(places[0].match, Agreement.ALONE)))
    elif places:
        votes = Counter([text[place.next] for place in places])
        token = max(votes, key=votes.__getitem__)
        agreement = Agreement.SOME if len(votes) > 1 else Agreement.ALL
        found.append(Choice(token, Evidence(places[0].match, agreement)))
    if part and (len(places) != 1 or part.next != places[0].next):
        found.append(Choice(text[part.next], Evidence(part.match, Agreement.PART)))
    return found


class _Extended:
    """A text, and what is drafted behind it."""

    def __init__(self, ids: list[int]) -> None:
        self._ids = ids
        self.drafted: list[int] = []

    def __getitem__(self, at: int) -> int:
        return self._ids[at] if at < len(self._ids) else self.drafted[at - len(self._ids)]
