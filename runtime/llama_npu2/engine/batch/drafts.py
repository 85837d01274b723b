"""Drafts for many texts: looked up in the text itself, or made by a small model, as long as that saves time."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, repeat
from operator import mul
from typing import NamedTuple

from llama_npu2.engine.batch.chances import Chances
from llama_npu2.engine.batch.gain import LONGEST, Gain, Step
from llama_npu2.engine.batch.lookup import Lookup
from llama_npu2.engine.batch.pace import Pace
from llama_npu2.engine.batch.small_model import Asked, SmallModel

_LEAST_CHANCE = 0.2
"""How likely a draft must be to come true as a whole."""
_HOPED = 0.7
"""How likely a small model's token is thought to come true before any was checked."""
_WEIGHT = 0.15
"""Weight of the last token in the average of what comes true."""
_FIRST_PAUSE, _LONGEST_PAUSE = 16, 1024
"""For how many tokens the small model does not draft after it did not pay, twice as many each time."""


class Wanted(NamedTuple):
    """A text whose next token comes in the step that is planned."""

    key: Hashable
    """Which text it is."""
    ids: list[int]
    """Its tokens so far. The list grows from step to step."""
    most: int
    """Tokens of a draft."""
    namespace: str = ""
    """As for `PrefixTree`."""


@dataclass
class _Modelled:
    """How far a small model agrees with the tokens of a text."""

    chance: float = _HOPED
    """How likely its next token comes true."""
    until: int = 0
    """At how many tokens it drafts again."""
    pause: int = _FIRST_PAUSE

    def note(self, drafted: int, accepted: int) -> None:
        for came in [True] * accepted + [False] * (accepted < drafted):
            self.chance += _WEIGHT * (came - self.chance)
        if accepted == drafted:
            self.pause = _FIRST_PAUSE

    def rest(self, tokens: int) -> None:
        """Pause; then hope again, because texts and machines change."""
        self.until, self.pause, self.chance = tokens + self.pause, min(2 * self.pause, _LONGEST_PAUSE), _HOPED


@dataclass
class _Drafted:
    """The last draft for a text."""

    rows: int
    """Rows of the step without it."""
    seconds: float = 0.0
    """How long it took to make it."""
    by_model: bool = False


class _Text:
    def __init__(self, begun: int, chances: Chances) -> None:
        self.begun = begun
        """Tokens that it had at first."""
        self.lookup, self.modelled, self.gain = Lookup(Chances(chances)), _Modelled(), Gain()
        self.last = _Drafted(1)

    def allowed(self, tokens: int) -> float:
        return self.gain.allowed(tokens - self.begun)


class Drafts:
    """Drafts for texts. They never change which tokens are chosen, only how many rows a step has."""

    def __init__(self, pace: Pace, model: SmallModel | None = None, chances: Chances | None = None) -> None:
        """Initialise drafts of no text.

        Args:
            pace: knows how long the steps take that check drafts.
            model: drafts where looking up promises nothing; None for none.
            chances: what is known of other texts; by default nothing.
        """
        self._pace, self._model, self._chances = pace, model, chances or Chances()
        self._texts: dict[Hashable, _Text] = {}

    def draft(self, wanted: Sequence[Wanted], room: int) -> list[list[int]]:
        """Return tokens that may follow each text, none where they are unknown or would not pay.

        Args:
            wanted: the texts of a step, a row each.
            room: rows that the step may have besides.
        """
        step, end = Step(self._pace, len(wanted)), len(wanted) + room
        drafts = [self._looked_up(each, step, end) for each in wanted]
        if self._model:
            self._ask(self._model, wanted, drafts, step, end)
        return drafts

    def note(self, key: Hashable, drafted: int, accepted: int) -> None:
        """Note how many tokens of the last draft for a text were chosen."""
        if text := self._texts.get(key):
            text.gain.note(Step(self._pace, text.last.rows).cost(drafted, text.last.seconds), accepted)
            if text.last.by_model:
                text.modelled.note(drafted, accepted)

    def release(self, key: Hashable) -> None:
        """Give up what the small model keeps of a text that takes a pause."""
        if self._model:
            self._model.release(key)

    def forget(self, key: Hashable) -> None:
        """Forget a text that has ended."""
        self._texts.pop(key, None)
        self.release(key)

    def _text(self, wanted: Wanted) -> _Text:
        if wanted.key not in self._texts:
            self._texts[wanted.key] = _Text(len(wanted.ids), self._chances)
        return self._texts[wanted.key]

    def _looked_up(self, wanted: Wanted, step: Step, end: int) -> list[int]:
        """Add a draft to a step of `end` rows at most; return its tokens."""
        text = self._text(wanted)
        text.lookup.read(wanted.ids)
        found, expected, chance, rows = list[int](), [0.0], 1.0, step.rows
        for token, each in islice(text.lookup.find(wanted.ids), min(LONGEST, wanted.most, end - step.rows)):
            chance *= each
            if chance < _LEAST_CHANCE:
                break
            found.append(token)
            expected.append(expected[-1] + chance)
        if not found or not (length := step.add(expected[1:], text.allowed(len(wanted.ids)))):
            return []
        text.last = _Drafted(rows)
        return found[:length]

    def _ask(self, model: SmallModel, wanted: Sequence[Wanted], drafts: list[list[int]], step: Step, end: int) -> None:
        """Fill in drafts of the small model, which makes those of all texts together."""
        left = [
            number
            for number, each in enumerate(wanted)
            if not drafts[number] and self._text(each).modelled.until <= len(each.ids) and self._begins(model, each)
        ]
        asked: dict[int, Asked] = {}
        for number in left:
            each, text = wanted[number], self._text(wanted[number])
            if (most := min(LONGEST, each.most, end - step.rows)) < 1:
                continue
            rows, seconds = step.rows, model.seconds(len(left)) / len(left)
            expected = accumulate(accumulate(repeat(text.modelled.chance, most), mul))
            if length := step.add(expected, text.allowed(len(each.ids)), seconds):
                asked[number] = Asked(each.key, each.ids, length, each.namespace)
                text.last = _Drafted(rows, length * seconds, by_model=True)
            else:
                text.modelled.rest(len(each.ids))
        for number, made in zip(asked, model.draft([*asked.values()]) if asked else (), strict=True):
            drafts[number] = made

    def _begins(self, model: SmallModel, wanted: Wanted) -> bool:
        """Return whether the small model should process what it does not know of a text.

        A reply may end with the next token. So that is put off until the reply has taken as long as it will take.
        """
        token = self._pace.seconds(1) or 0.0
        made = len(wanted.ids) - self._text(wanted).begun
        return model.behind(wanted.key, wanted.ids) <= made * token or not token
