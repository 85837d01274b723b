"""Chooses the phases that process a text where programs have fixed shapes.

They are those that take the least time by the manifest's estimate.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np

from llama_npu2.artifact.plan import DECODE, PREFILL, SEQUENCES, TOKENS, Phase
from llama_npu2.frozen import frozen


@frozen
class Chunk:
    """A call of a phase, for the tokens at the positions `start` to `end` - 1."""

    phase: Phase
    start: int
    end: int


def decode_phase(windows: Sequence[int], position: int) -> Phase:
    """Return the phase of a token at `position`: that of the smallest context bucket of `windows` that holds it."""
    return DECODE._replace(context=next(size for size in windows if size > position)) if windows else DECODE


@frozen
class Chunks:
    """The phases of a manifest with buckets, and what they take."""

    milliseconds: Mapping[Phase, float]
    """Time of a call of each phase."""
    windows: Sequence[int]
    """Context buckets of decode, ascending; empty where there are none."""

    @cached_property
    def _prefills(self) -> list[tuple[int, list[Phase]]]:
        """Each bucket with its phases, both ascending."""
        buckets: dict[int, list[Phase]] = {}
        for phase in sorted(self.milliseconds):
            if phase.kind == PREFILL.kind:
                buckets.setdefault(phase.rows, []).append(phase)
        return list(buckets.items())

    @cached_property
    def _several(self) -> list[Phase]:
        """The phases of several tokens, the fastest first."""
        return self._fastest_first(TOKENS)

    @cached_property
    def _together(self) -> list[Phase]:
        """The phases of several sequences, the fastest first."""
        return self._fastest_first(SEQUENCES)

    def _fastest_first(self, kind: str) -> list[Phase]:
        return sorted((phase for phase in self.milliseconds if phase.kind == kind), key=self.milliseconds.__getitem__)

    @property
    def most_tokens(self) -> int:
        """The most tokens of a text that a step takes, each with the bits that it has alone."""
        return max((phase.rows for phase in self._several), default=1)

    def tokens_phase(self, position: int, count: int) -> Phase | None:
        """Return the phase that takes `count` tokens from `position` on in the least time, if there is one.

        It may take more tokens than that, whose K and V need room, too.
        """
        reach = (phase for phase in self._several if phase.rows >= count and position + phase.rows <= phase.context)
        return next(reach, None)

    @property
    def most_sequences(self) -> int:
        """The most sequences of which a step takes a token each."""
        return max((phase.rows for phase in self._together), default=1)

    def sequences_phase(self, positions: Sequence[int]) -> Phase | None:
        """Return the phase that takes a token of each of several sequences in the least time.

        None where there is none, or their tokens one by one take less.

        Args:
            positions: those of the tokens.
        """
        fits = (p for p in self._together if p.rows >= len(positions) and p.context > max(positions))
        alone = sum(self.milliseconds[decode_phase(self.windows, position)] for position in positions)
        return next((phase for phase in fits if self.milliseconds[phase] < alone), None)

    def cheapest(self, start: int, end: int) -> list[Chunk]:
        """Return chunks for the tokens at the positions `start` to `end` - 1: prefills, then tokens one by one."""
        chunks: list[Chunk] = []
        best = self._best(start, end)
        while start < end and (chunk := best[start][1]):
            chunks.append(chunk)
            start = chunk.end
        return [*chunks, *(Chunk(decode_phase(self.windows, at), at, at + 1) for at in range(start, end))]

    def cost(self, start: int, end: int) -> float:
        """Return the milliseconds that `cheapest` takes."""
        return self._best(start, end)[start][0]

    def _best(self, start: int, end: int) -> dict[int, tuple[float, Chunk | None]]:
        """Return the best way from each position that chunks lead to.

        It is the time up to `end` and the next chunk, None where the rest is processed token by token.
        """
        offers = {position: list(self._offers(position, end)) for position in self._reached(start, end)}
        best: dict[int, tuple[float, Chunk | None]] = {end: (0.0, None)}
        for position in sorted(offers, reverse=True):
            singly: tuple[float, Chunk | None] = (self._singly(position, end), None)
            chunked = [(self.milliseconds[chunk.phase] + best[chunk.end][0], chunk) for chunk in offers[position]]
            best[position] = min([singly, *chunked], key=lambda choice: choice[0])
        return best

    def _reached(self, start: int, end: int) -> set[int]:
        reached, fresh = {start} if start < end else set(), [start]
        while fresh:
            ends = {chunk.end for chunk in self._offers(fresh.pop(), end) if chunk.end < end}
            fresh += ends - reached
            reached |= ends
        return reached

    def _offers(self, position: int, end: int) -> Iterator[Chunk]:
        """Yield a chunk of each bucket, in the smallest context bucket that holds its rows.

        Where the largest context bucket ends before the rows do, the chunk begins earlier and computes K and V that are
        there already once more; they are equal.
        """
        for rows, phases in self._prefills:
            start = min(position, phases[-1].positions - rows)
            if start + rows > position:
                phase = next(phase for phase in phases if phase.positions >= start + rows)
                yield Chunk(phase, start, min(start + rows, end))

    def _singly(self, start: int, end: int) -> float:
        ends = [*(size for size in self.windows if start < size < end), end]
        starts = [start, *ends[:-1]]
        return sum(
            (until - first) * self.milliseconds[decode_phase(self.windows, first)]
            for first, until in zip(starts, ends, strict=True)
        )


_START_BITS, _PHASE_BITS = 24, 48
"""Where a key has the position of its chunk, and its phase: a token's id takes fewer than 24 bits."""


@frozen
class Cut:
    """The chunks of one sequence: those of its prompt, and its replies' tokens one by one."""

    prompt: int
    """Number of tokens of the prompt."""
    chunks: Sequence[Chunk]
    """Those of the prompt. Their starts ascend; a chunk may begin before the last one's end and compute it anew."""
    recipe: Recipe

    def next(self, done: int) -> Chunk:
        """Return the chunk that follows once `done` tokens are processed. It may begin before them."""
        if done >= self.prompt:
            return Chunk(decode_phase(self.recipe.chunks.windows, done), done, done + 1)
        return self.chunks[bisect_right(self.chunks, done, key=lambda chunk: chunk.start) - 1]

    def settled(self, done: int) -> int:
        """Return how many of the `done` tokens that are processed no later chunk computes anew."""
        return min(self.next(done).start, done)

    def resumed(self, matched: int) -> int:
        """Return where the next chunk begins if K and V of the first `matched` tokens are another sequence's."""
        return self.next(matched).start

    def keys(self, ids: Sequence[int]) -> list[int]:
        """Return a number for each of the first tokens of the sequence, which says how its K and V come about, too.

        Sequences whose keys begin alike have the same bits in their caches. Tokens alone would not do, because programs
        of other shapes add in other orders.
        """
        keys = np.array(ids, np.int64)
        number = self.recipe.numbers
        for chunk in self.chunks:
            keys[chunk.start : chunk.end] = ids[chunk.start : chunk.end]
            keys[chunk.start : chunk.end] |= chunk.start << _START_BITS | number[chunk.phase] << _PHASE_BITS
        start = self.prompt
        for window in self.recipe.chunks.windows or [len(ids)]:
            if start < window:
                phase = decode_phase(self.recipe.chunks.windows, start)
                keys[start:window] |= number[phase] << _PHASE_BITS
                start = window
        found: list[int] = keys.tolist()
        return found


class Recipe:
    """Which phases process a sequence, whatever else there is: those that process it alone."""

    def __init__(self, chunks: Chunks) -> None:
        self.chunks = chunks
        self.numbers = {phase: number for number, phase in enumerate(sorted(chunks.milliseconds))}
        """A number for each phase, which `Cut.keys` puts into keys."""

    def cut(self, prompt: int) -> Cut:
        """Return the chunks of a sequence whose prompt has so many tokens."""
        return Cut(prompt, self.chunks.cheapest(0, prompt), self)
