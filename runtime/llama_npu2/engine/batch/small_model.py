"""A small model that drafts: it processes the same texts, in a KV cache of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from llama_npu2.engine.batch.pace import Pace
from llama_npu2.engine.batch.sequence import Cache, Held
from llama_npu2.engine.step import Run, Steps

_GAP, _LEAST_CHUNK = 0.1, 64
"""Seconds that reading texts may take before a draft, and rows of them, however slow."""


class Asked(NamedTuple):
    """A draft that is asked for."""

    key: Hashable
    """Which text it is for."""
    ids: list[int]
    """The text so far."""
    length: int
    """Tokens of the draft, at least one."""
    namespace: str = ""
    """As for `PrefixTree`."""


@dataclass(eq=False)
class _Text(Held):
    """A text. Its `done` counts tokens of it alone, not those of drafts."""

    ahead: list[int] = field(default_factory=list)
    """The drafted tokens that were processed behind it."""

    def catch_up(self) -> None:
        """Count those of `ahead` that were chosen."""
        for token in self.ahead:
            if self.done >= len(self.ids) or self.ids[self.done] != token:
                break
            self.done += 1
        self.ahead = []


class SmallModel:
    """Drafts the most likely tokens. A text that it knows costs it a row for each token of a draft."""

    def __init__(
        self,
        steps: Steps,
        positions: int,
        rows: int,
        context: int,
        vocab: int,
        least_shared: int = 8,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Initialise it without texts.

        Args:
            steps: what processes its rows.
            positions: in a block.
            rows: the most in a step.
            context: the most positions of a text.
            vocab: how many tokens the model knows that the drafts are for. No other is drafted.
            least_shared: as for `PrefixTree`.
            clock: seconds, to measure steps by.
        """
        self._steps, self._rows, self._context, self._vocab = steps, rows, context, vocab
        self._clock, self._pace = clock, Pace()
        self.cache = Cache(steps, positions, least_shared)
        self._texts: dict[Hashable, _Text] = {}

    def seconds(self, texts: int) -> float:
        """Return how long a token of each of so many drafts takes; 0 if that is not known yet."""
        return self._pace.seconds(texts) or 0.0

    def behind(self, key: Hashable, ids: Sequence[int]) -> float:
        """Return how long it takes to process what is not known of a text; 0 if that is not known yet."""
        text = self._texts.get(key)
        return self._pace.seconds_of(len(ids) - (text.done + len(text.ahead) if text else 0))

    def draft(self, asked: Sequence[Asked]) -> list[list[int]]:
        """Return the drafts that are asked for, all of them together step by step.

        One is empty as long as its text is not processed as a whole, or where blocks or positions run out.
        """
        drafts: list[list[int]] = [[] for _ in asked]
        left = min(max(self._pace.rows_within(_GAP), _LEAST_CHUNK), self._rows)
        placed: dict[int, int] = {}
        for number, each in enumerate(asked):
            if rows := self._place(each, left):
                placed[number], left = rows, left - rows
        texts = [self._texts[each.key] for each in asked]
        runs = {}
        for number, rows in placed.items():
            text = texts[number]
            ids = text.ids[text.done : text.done + rows]
            runs[number] = Run(ids, text.done, text.table, int(rows == text.pending))
        while runs:
            chosen = self._step([*runs.values()])
            for number in [number for number, run in runs.items() if run.logits]:
                drafts[number].append(next(chosen))
            for number, rows in placed.items():
                self._processed(texts[number], rows)
            placed = {}  # what comes then are tokens of drafts
            runs = {
                number: Run(made[-1:], texts[number].done + len(made) - 1, texts[number].table)
                for number, made in enumerate(drafts)
                if 0 < len(made) < asked[number].length
            }
        for text, made in zip(texts, drafts, strict=True):
            text.ahead = made[:-1]
        return drafts

    def release(self, key: Hashable) -> None:
        """Give up the blocks of a text."""
        if text := self._texts.pop(key, None):
            text.catch_up()
            self.cache.give_up(text)

    def _place(self, asked: Asked, most: int) -> int:
        """Find blocks for the next rows of a text and for its draft; return how many rows."""
        text = self._texts.setdefault(asked.key, _Text(asked.ids, namespace=asked.namespace))
        text.catch_up()
        if not text.table:
            self.cache.reuse(text)
        if most < 1 or len(text.ids) + asked.length - 1 > self._context:
            return 0
        self.cache.own_last(text)
        ends = text.pending <= most
        rows = text.pending + asked.length - 1 if ends else most
        return min(text.pending, most) if self.cache.reach(text, rows) else 0

    def _processed(self, text: _Text, rows: int) -> None:
        full = text.done // self.cache.positions
        text.done += rows
        if text.done // self.cache.positions > full:
            self.cache.remember(text)

    def _step(self, runs: list[Run]) -> Iterator[int]:
        """Process rows; return the most likely token after each run that wants logits."""
        started = self._clock()
        logits = self._steps.step(runs)
        rows, wanted = sum(len(run.tokens) for run in runs), sum(run.logits for run in runs)
        self._pace.note(rows, wanted, self._clock() - started)
        return iter(np.argmax(logits[:, : self._vocab], axis=1).tolist())
