"""Which phases process a text, where programs have fixed shapes: whatever takes least by the manifest's estimate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Chunk:
    """A call of a phase, for the tokens at the positions `start` to `end` - 1."""

    phase: str
    start: int
    end: int


def decode_phase(windows: Sequence[int], position: int) -> str:
    """Of a token at a position: the smallest of the windows that holds it, where there are any."""
    return f"decode@{next(size for size in windows if size > position)}" if windows else "decode"


@dataclass(frozen=True)
class Chunks:
    """`milliseconds`: of a call of each phase, by name. `windows`: those that tokens are decoded through."""

    milliseconds: Mapping[str, float]
    windows: Sequence[int]

    @cached_property
    def _prompts(self) -> list[tuple[int, list[tuple[int, str]]]]:
        """Rows of each bucket, and the windows that its phases attend through, ascending. The first is as long as the
        bucket, and not in the phase's name."""
        found: dict[int, list[tuple[int, str]]] = {}
        for phase in self.milliseconds:
            kind, *numbers = phase.split("@")
            if kind == "prefill":
                found.setdefault(int(numbers[0]), []).append((int(numbers[-1]), phase))
        return [(rows, sorted(windows)) for rows, windows in sorted(found.items())]

    def cheapest(self, start: int, end: int) -> list[Chunk]:
        """For the tokens at the positions `start` to `end` - 1: chunks of prompts, then tokens one by one."""
        chunks: list[Chunk] = []
        best = self._best(start, end)
        while start < end and (chunk := best[start][1]):
            chunks.append(chunk)
            start = chunk.end
        return [*chunks, *(Chunk(decode_phase(self.windows, at), at, at + 1) for at in range(start, end))]

    def cost(self, start: int, end: int) -> float:
        """Milliseconds of that."""
        return self._best(start, end)[start][0]

    def _best(self, start: int, end: int) -> dict[int, tuple[float, Chunk | None]]:
        """From each position that chunks lead to: the time up to `end`, and the chunk that comes next, None where the
        rest goes one by one."""
        offers = {position: list(self._offers(position, end)) for position in self._reached(start, end)}
        best: dict[int, tuple[float, Chunk | None]] = {end: (0.0, None)}
        for position in sorted(offers, reverse=True):
            singly: tuple[float, Chunk | None] = (self._singly(position, end), None)
            chunked = [(self.milliseconds[each.phase] + best[each.end][0], each) for each in offers[position]]
            best[position] = min([singly, *chunked], key=lambda each: each[0])
        return best

    def _reached(self, start: int, end: int) -> set[int]:
        found, fresh = {start} if start < end else set(), [start]
        while fresh:
            ends = {each.end for each in self._offers(fresh.pop(), end) if each.end < end}
            fresh += ends - found
            found |= ends
        return found

    def _offers(self, position: int, end: int) -> Iterator[Chunk]:
        """A chunk of each bucket, through the smallest window that has its rows. Where the last one ends before them,
        a chunk begins so much earlier, and makes what is there again: the same K and V."""
        for rows, windows in self._prompts:
            start = min(position, windows[-1][0] - rows)
            if start + rows > position:
                phase = next(phase for window, phase in windows if window >= start + rows)
                yield Chunk(phase, start, min(start + rows, end))

    def _singly(self, start: int, end: int) -> float:
        ends = [*(size for size in self.windows if start < size < end), end]
        starts = [start, *ends[:-1]]
        return sum(
            (until - first) * self.milliseconds[decode_phase(self.windows, first)]
            for first, until in zip(starts, ends, strict=True)
        )
