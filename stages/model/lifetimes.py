"""Gives activations that are not needed at the same time places in one memory, where they overlap.

A device's memory is locked, and a prompt's activations and unpacked weights take most of it besides weights and KV
caches. Lifetimes are known launch by launch, and lengths are fixed. Buffers are placed by size, the largest first, each
at the lowest place that no buffer with an overlapping lifetime has (as "greedy by size" in Pisarchyk and Lee, Efficient
Memory Management for Deep Neural Net Inference, 2020).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby

from llama_npu2.frozen import frozen
from stages.weights.blobs import PAGE


@frozen
class LaunchAccess:
    """The buffers that a launch reads and writes, by name."""

    host: bool
    """Whether the host runs it, else the device."""
    reads: frozenset[str]
    writes: frozenset[str]
    partly: frozenset[str] = frozenset()
    """Those of `writes` of which it writes only a prompt's rows, where the device reads all rows of a bucket."""

    @property
    def touched(self) -> frozenset[str]:
        return self.reads | self.writes


@dataclass
class Life:
    """Return the time from the first launch that writes a content of a buffer to the last that reads it.

    Times are numbers of launches.
    """

    name: str
    begin: int
    """-1 for a content from before the phase."""
    end: int
    read: bool = False
    """Whether a launch reads the content."""


def places(
    sizes: Mapping[str, int], formats: Mapping[str, str], phases: Sequence[Sequence[LaunchAccess]]
) -> dict[str, int]:
    """Return where each buffer begins in the memory that they share, in bytes.

    Buffers that some phase reads before it writes them, or leaves to what comes after it, are not placed. Buffers with
    rows that no launch writes share memory only with buffers of their format, so that stale padding is never NaN.

    Args:
        sizes: bytes of each buffer.
        formats: format of each buffer.
    """
    lives = [list(_lives(phase)) for phase in phases]
    placed = sizes.keys() - {life.name for phase in lives for life in phase if not life.read or life.begin < 0}
    conflicts: dict[str, set[str]] = {name: set() for name in placed}
    for name, other in chain(_mixed_formats(formats, phases), *map(_overlapping, lives)):
        if name in placed and other in placed:
            conflicts[name].add(other)
            conflicts[other].add(name)
    offsets: dict[str, int] = {}
    for name in sorted(placed, key=lambda name: (-sizes[name], name)):
        taken = sorted((offsets[other], offsets[other] + sizes[other]) for other in conflicts[name] & offsets.keys())
        offsets[name] = _lowest_offset(sizes[name], taken)
    return offsets


def _mixed_formats(formats: Mapping[str, str], phases: Sequence[Sequence[LaunchAccess]]) -> Iterator[tuple[str, str]]:
    """Yield each buffer with rows that no launch writes, with each buffer of another format."""
    for name in {name for phase in phases for access in phase for name in access.partly & formats.keys()}:
        yield from ((name, other) for other in formats if formats[other] != formats[name])


def _lowest_offset(size: int, taken: Iterable[tuple[int, int]]) -> int:
    offset = 0
    for first, end in taken:
        if offset + size <= first:
            break
        offset = max(offset, -(-end // PAGE) * PAGE)
    return offset


def _lives(phase: Sequence[LaunchAccess]) -> Iterator[Life]:
    """Yield the lives of all contents. Launches that write a buffer one after the other make one content together."""
    alive: dict[str, Life] = {}
    for number, (access, begin) in enumerate(zip(phase, _begins(phase), strict=True)):
        for name in access.reads:
            life = alive.setdefault(name, Life(name, -1, number))
            life.end, life.read = number, True
        for name in access.writes - access.reads:
            if name in alive and alive[name].read:
                yield alive.pop(name)
            life = alive.setdefault(name, Life(name, begin, number))
            life.end = number
    yield from alive.values()


def _begins(phase: Sequence[LaunchAccess]) -> Iterator[int]:
    """Yield the number of the launch with which each launch may begin.

    Launches of the host run next to those of the device before them, unless they touch a buffer that these use.
    """
    number, device_begin, busy = 0, 0, frozenset[str]()
    for host, stretch in groupby(phase, lambda access: access.host):
        accesses = list(stretch)
        touched = frozenset[str]().union(*(access.touched for access in accesses))
        if not host:
            device_begin, busy = number, touched
        concurrent = host and not touched & busy
        yield from (device_begin if concurrent else number + place for place in range(len(accesses)))
        number += len(accesses)


def _overlapping(lives: Iterable[Life]) -> Iterator[tuple[str, str]]:
    """Yield the names of every two buffers that live at the same time."""
    alive: list[Life] = []
    for life in sorted(lives, key=lambda life: life.begin):
        alive = [other for other in alive if other.end >= life.begin]
        yield from ((life.name, other.name) for other in alive if other.name != life.name)
        alive.append(life)
