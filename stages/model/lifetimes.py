"""Where activations lie that are not all needed at once: in memory that they share, one where another was.

A device's memory is locked, and a prompt's activations and unpacked weights are what takes most of it besides weights
and caches. Lifetimes are known launch by launch, and lengths are fixed; places are chosen by size, the largest first,
each at the lowest place that nothing has which lives at the same time (as "greedy by size" in Pisarchyk and Lee,
Efficient Memory Management for Deep Neural Net Inference, 2020).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from stages.weights.blobs import PAGE


@dataclass(frozen=True)
class Step:
    """A launch: names of the buffers that it reads and writes. `host`: who runs it. `partly`: of what it writes, that
    of which it writes a prompt's rows alone, where the device reads those of a bucket."""

    host: bool
    reads: frozenset[str]
    writes: frozenset[str]
    partly: frozenset[str] = frozenset()

    @property
    def touched(self) -> frozenset[str]:
        return self.reads | self.writes


@dataclass
class Life:
    """Of what a buffer holds, from the first launch that writes it to the last that reads it. Launches are numbered."""

    name: str
    begin: int
    end: int
    read: bool = False


def places(sizes: Mapping[str, int], formats: Mapping[str, str], phases: Sequence[Sequence[Step]]) -> dict[str, int]:
    """Bytes from the beginning of the memory that buffers of so many bytes, in these formats, share. One has no place
    that some phase reads before it writes it, or leaves to who comes after it. Rows that nobody writes hold numbers:
    what was there had the same format."""
    together: dict[str, set[str]] = {name: set() for name in sizes}
    for name in {name for phase in phases for step in phase for name in step.partly & sizes.keys()}:
        for other in (other for other in sizes if formats[other] != formats[name]):
            together[name].add(other)
            together[other].add(name)
    for phase in phases:
        lives = list(_lives(phase))
        for name in {life.name for life in lives if not life.read or life.begin < 0}:
            together.pop(name, None)
        for one, other in _at_once(lives):
            together.get(one, set()).add(other)
            together.get(other, set()).add(one)
    found: dict[str, int] = {}
    for name in sorted(together, key=lambda name: (-sizes[name], name)):
        taken = sorted((found[other], found[other] + sizes[other]) for other in together[name] & found.keys())
        found[name] = _lowest(sizes[name], taken)
    return found


def _lowest(size: int, taken: Iterable[tuple[int, int]]) -> int:
    place = 0
    for first, end in taken:
        if place + size <= first:
            break
        place = max(place, -(-end // PAGE) * PAGE)
    return place


def _lives(phase: Sequence[Step]) -> Iterator[Life]:
    """Launches that write a buffer one after the other make it together."""
    alive: dict[str, Life] = {}
    for number, (step, begin) in enumerate(zip(phase, _begins(phase), strict=True)):
        for name in step.reads:
            life = alive.setdefault(name, Life(name, -1, number))
            life.end, life.read = number, True
        for name in step.writes - step.reads:
            if name in alive and alive[name].read:
                yield alive.pop(name)
            life = alive.setdefault(name, Life(name, begin, number))
            life.end = number
    yield from alive.values()


def _begins(phase: Sequence[Step]) -> Iterator[int]:
    """When each launch may begin: what the host does beside the device, as nothing of it waits for that, with what the
    device does."""
    number, beside, busy = 0, 0, frozenset[str]()
    for host, stretch in groupby(phase, lambda step: step.host):
        steps = list(stretch)
        touched = frozenset[str]().union(*(step.touched for step in steps))
        if not host:
            beside, busy = number, touched
        apart = host and not touched & busy
        yield from (beside if apart else number + place for place in range(len(steps)))
        number += len(steps)


def _at_once(lives: Iterable[Life]) -> Iterator[tuple[str, str]]:
    alive: list[Life] = []
    for life in sorted(lives, key=lambda life: life.begin):
        alive = [other for other in alive if other.end >= life.begin]
        yield from ((life.name, other.name) for other in alive if other.name != life.name)
        alive.append(life)
