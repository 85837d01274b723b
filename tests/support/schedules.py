"""Random schedules of sequences: when they come, what they share, and which are cancelled."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import fields

import numpy as np

from llama_npu2.engine.batch.scheduler import Scheduler
from llama_npu2.engine.batch.sequence import Cache, Counts, Growing


class Noted:
    """A reply that notes its logits and how it ended. What is derived from it chooses tokens, and says when it ends."""

    replies, hidden = True, False

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids
        self.rows: list[np.ndarray] = []
        """The logits before each of its tokens."""
        self.errors: list[Exception | None] = []

    @property
    def wanted_from(self) -> int:
        return len(self.ids) - 1

    def start(self, processed: int) -> None:
        pass

    def take(self, logits: np.ndarray) -> None:
        self.rows.append(logits.copy())

    def end(self, error: Exception | None) -> None:
        self.errors.append(error)


def prompts(draw: random.Random, count: int, vocab: int, longest: int) -> list[list[int]]:
    """Prompts of 1 to `longest` tokens; most begin like others, up to a position that is drawn."""
    own = max(longest // 6, 1)
    bases = [[draw.randrange(vocab) for _ in range(longest - own)] for _ in range(2)]

    def prompt() -> list[int]:
        shared = draw.choice(bases)[: draw.randrange(longest - own)]
        return shared + [draw.randrange(vocab) for _ in range(draw.randint(1, own))]

    return [prompt() for _ in range(count)]


def run(draw: random.Random, work: Scheduler, replies: Sequence[Growing]) -> set[int]:
    """Let sequences come and go at random until all have ended; return the numbers of those that were cancelled."""
    handles, cancelled = [], set()
    for reply in replies:
        handles.append(work.add(reply))
        for _ in range(draw.randrange(6)):
            work.step()
            if draw.random() < 0.04:
                gone = draw.randrange(len(handles))
                if not replies[gone].finished:
                    cancelled.add(gone)
                    work.cancel(handles[gone])
    drain(work)
    return cancelled


def drain(work: Scheduler, most: int = 4000) -> None:
    """Process all sequences to their ends."""
    while work.busy and most:
        work.step()
        most -= 1
    assert not work.busy, "sequences never end"


def all_back(cache: Cache) -> None:
    """Check that every block is free once the tree has forgotten all."""
    while cache.tree.evict():
        pass
    assert cache.pool.free == cache.pool.count


def total(schedule: Callable[[int], Counts], seeds: range) -> Counts:
    """Return the sums of what schedules count."""
    each = [schedule(seed) for seed in seeds]
    return Counts(*(sum(getattr(counts, spec.name) for counts in each) for spec in fields(Counts)))
