"""Several sequences on a device where they take turns: their steps as replies to many have them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from llama_npu2.artifact.plan import BLOCK_POSITIONS
from llama_npu2.engine.batch.scheduler import Scheduler
from llama_npu2.engine.batch.sequence import Counts
from llama_npu2.engine.llama import Llama


class _Given:
    """A reply whose tokens are given, the first one as its prompt."""

    replies, hidden = True, False

    def __init__(self, tokens: Sequence[int]) -> None:
        self.ids, self._rest = [tokens[0]], list(tokens[1:])
        self.finished = False

    @property
    def wanted_from(self) -> int:
        return len(self.ids) - 1

    def take(self, row: np.ndarray) -> None:
        self.finished = not self._rest
        if self._rest:
            self.ids.append(self._rest.pop(0))

    def start(self, processed: int) -> None:
        pass

    def end(self, error: Exception | None) -> None:
        if error:
            raise error


def steps_of(llm: Llama, streams: Sequence[Sequence[int]]) -> Iterator[Counts]:
    """Process tokens of several sequences, without drafts; after each step yield the counts so far.

    All begin with an empty context. That of `llm` is lost.
    """
    llm.reset()
    turns = llm.turns
    work = Scheduler(turns, BLOCK_POSITIONS, turns.rows, llm.context_length, speculate=False, turns=turns)
    for tokens in streams:
        work.add(_Given(tokens))
    while work.busy:
        work.step()
        yield replace(work.cache.counts)
