"""Drafts for many texts: looked up in the text itself, or made by a small model, as long as that saves time."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from llama_npu2.engine.batch.gain import LONGEST, Gain
from llama_npu2.engine.batch.lookup import Lookup
from llama_npu2.engine.batch.pace import Pace
from llama_npu2.engine.batch.small_model import Asked, SmallModel


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
class _Text:
    begun: int
    """Tokens that it had at first."""
    looked_up: Gain
    modelled: Gain
    lookup: Lookup = field(default_factory=Lookup)
    last: Gain | None = None
    """The gain of the drafter that made the last draft."""


class Drafts:
    """Drafts for texts. They never change which tokens are chosen, only how many rows a step has."""

    def __init__(self, pace: Pace, model: SmallModel | None = None) -> None:
        """Initialise drafts of no text.

        Args:
            pace: knows how long the steps take that check drafts.
            model: drafts where nothing is found; None for none.
        """
        self._pace, self._model = pace, model
        self._texts: dict[Hashable, _Text] = {}

    def draft(self, wanted: Sequence[Wanted], room: int) -> list[list[int]]:
        """Return tokens that may follow each text, none where they are unknown or would not pay.

        Args:
            wanted: the texts of a step, a row each.
            room: rows that the step may have besides.
        """
        rows, end = len(wanted), len(wanted) + room
        drafts: list[list[int]] = []
        for each in wanted:
            text = self._text(each)
            found = [] if text.looked_up.rests(len(each.ids)) else text.lookup.find(each.ids)
            found = found[: min(text.looked_up.length, each.most, end - rows)]
            if found and not text.looked_up.allows(len(each.ids), rows, len(found)):
                found = []
            if found:
                text.last = text.looked_up
            drafts.append(found)
            rows += len(found)
        if self._model:
            self._ask(self._model, wanted, drafts, end - rows)
        return drafts

    def note(self, key: Hashable, drafted: int, accepted: int) -> None:
        """Note how many tokens of the last draft for a text were chosen."""
        if (text := self._texts.get(key)) and text.last:
            text.last.note(drafted, accepted)

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
            self._texts[wanted.key] = _Text(len(wanted.ids), Gain(self._pace), Gain(self._pace))
        return self._texts[wanted.key]

    def _ask(self, model: SmallModel, wanted: Sequence[Wanted], drafts: list[list[int]], room: int) -> None:
        """Fill in drafts of the small model, which makes those of all texts together."""
        left = [
            number
            for number, each in enumerate(wanted)
            if not drafts[number] and not self._text(each).modelled.rests(len(each.ids)) and self._begins(model, each)
        ]
        rows = len(wanted) + sum(map(len, drafts))
        asked: dict[int, Asked] = {}
        for number in left:
            each, text = wanted[number], self._text(wanted[number])
            length = min(text.modelled.length, each.most, room, LONGEST)
            seconds = length * model.seconds(len(left)) / len(left)
            if length > 0 and text.modelled.allows(len(each.ids), rows, length, seconds):
                asked[number] = Asked(each.key, each.ids, length, each.namespace)
                text.last = text.modelled
                rows, room = rows + length, room - length
        for number, made in zip(asked, model.draft([*asked.values()]) if asked else (), strict=True):
            drafts[number] = made

    def _begins(self, model: SmallModel, wanted: Wanted) -> bool:
        """Return whether the small model should process what it does not know of a text.

        A reply may end with the next token. So that is put off until the reply has taken as long as it will take.
        """
        token = self._pace.seconds(1) or 0.0
        made = len(wanted.ids) - self._text(wanted).begun
        return model.behind(wanted.key, wanted.ids) <= made * token or not token
