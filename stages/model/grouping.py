"""Which parts a target runs in which order, and which of them share a program: data, from which programs are derived.

Each target has its groupings (`stages.targets`). A phase is a chain of parts; groups cover it greedily, the longest
first, and what no group covers runs on the host, each part as a program of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from stages.model.parts import UNPACK, Part, Slot, joins, layer_part, part, unpacked
from stages.model.policy import BF16, Policy


@dataclass(frozen=True)
class Chain:
    """Names of parts: before the layers, of every layer, behind them. `unpacks`: products of the layers take
    `Policy.matmul`, which the host makes of weights in other formats; says whether they are joined."""

    start: tuple[str, ...]
    layer: tuple[str, ...]
    end: tuple[str, ...]
    unpacks: str = ""


@dataclass(frozen=True)
class Group:
    """Parts that follow one another and share a device program. `prompt`: its shapes depend on the bucket; `windowed`:
    on the window of the cache that it attends over."""

    name: str
    parts: tuple[str, ...]
    prompt: bool = False
    windowed: bool = False


@dataclass(frozen=True)
class Grouping:
    """`joined`: what takes its place where weights are stored so that one product can multiply with several."""

    prompt: Chain
    token: Chain
    groups: tuple[Group, ...]
    joined: Grouping | None = None

    @property
    def attends(self) -> bool:
        """Whether the device attends for a token."""
        return any(group.windowed and not group.prompt for group in self.groups)

    def of(self, family: str, policy: Policy) -> Grouping:
        """The one for a policy."""
        return self.joined if self.joined and joins(family, policy) else self


@dataclass(frozen=True)
class Placed:
    """A part at its place in a phase; `layer` counts on behind the last one, `inside`: one of the layers' parts."""

    part: Part
    layer: int
    inside: bool

    @property
    def unpacks(self) -> bool:
        """Whether it makes the weights of a part behind it."""
        return self.part.name.startswith(UNPACK)

    def reference(self, slot: Slot, head: str = "") -> str:
        """The buffer bound to a slot, with its view: `name`, `name@pos` or `name@last`."""
        turns = {"turn": self.layer % 2, "next": (self.layer + 1) % 2}
        return slot.buffer.format(layer=self.layer, head=head, **turns)

    def seen(self, slot: Slot) -> str:
        """The same to parts that share a program: to a token, its last row is all that there is."""
        return self.reference(slot).removesuffix("@last")

    def buffer(self, slot: Slot, head: str = "") -> str:
        return self.reference(slot, head).partition("@")[0]


@dataclass(frozen=True)
class Program:
    """What a device runs: parts joined. Parts that bind one buffer share the slot of the first.

    `name` is unique in an artifact directory, `entry` is the function's. `wiring`: for each part, its slots -> the
    program's. `bucket`: rows that its shapes are fixed to, None where rows are known at run time only; `window`:
    positions of the cache that they are fixed to, None where it attends over none.
    """

    name: str
    entry: str
    parts: tuple[Part, ...]
    slots: tuple[Slot, ...]
    wiring: tuple[Mapping[str, str], ...]
    host: bool
    bucket: int | None = None
    window: int | None = None


WINDOW = 128
"""Positions of the smallest window of a cache; each has twice as many as the one before."""


PROMPT_WINDOW, PROMPT_STEP = 2048, 3
"""Of the windows that a token has, a prompt's programs have each so manieth, none shorter than that but the last.

By the estimate a shorter one would save less than a tenth of a call: of 1B in 512 rows at the beginning of 4096
positions attention takes 1.9 ms a layer, and 1.1 ms over just its rows, because keys that are masked only stream by.
"""


def windows(positions: int) -> list[int]:
    """That a cache of so many positions is attended over through: the smallest that holds them serves. The last has
    all, up to whole smallest ones."""
    doubled = list(itertools.takewhile(lambda size: size < positions, (WINDOW << i for i in itertools.count())))
    return [*doubled, -(-positions // WINDOW) * WINDOW]


def prompt_windows(bucket: int, positions: int) -> list[int]:
    """The same of a prompt's programs of so many rows. The first has just these, from position 0 on; each of the others
    serves every start from which its rows end in it. They are few, because a program of a whole layer takes long to
    compile."""
    first = bucket if bucket < WINDOW else -(-bucket // WINDOW) * WINDOW
    if positions <= first:
        return [first]
    last, *others = windows(positions)[::-PROMPT_STEP]
    return [first, *sorted(size for size in others if size >= PROMPT_WINDOW and size > first), last]


def chained(family: str, chain: Chain, layers: int, policy: Policy = BF16) -> list[Placed]:
    """A phase of a model of so many layers, part by part."""
    start = [Placed(part(family, name, policy), 0, False) for name in chain.start]
    body = [Placed(made, i, True) for i in range(layers) for made in _layer(family, chain, i, policy)]
    return [*start, *body, *(Placed(part(family, name, policy), layers, False) for name in chain.end)]


def _layer(family: str, chain: Chain, layer: int, policy: Policy) -> Iterator[Part]:
    if not chain.unpacks:
        yield from (layer_part(family, name, layer, policy) for name in chain.layer)
        return
    for name in chain.layer:
        yield from filter(None, unpacked(family, name, policy, chain.unpacks))


def cover(phase: Sequence[Placed], groups: Iterable[Group]) -> Iterator[tuple[Group | None, list[Placed]]]:
    """The phase cut into programs: each group with the parts it covers, None with a part for the host. What unpacks
    weights comes in front of the program that takes them."""
    longest_first = sorted(groups, key=lambda group: -len(group.parts))
    places = [place for place, placed in enumerate(phase) if not placed.unpacks]
    names = tuple(phase[place].part.name for place in places)
    at = begin = 0
    while at < len(places):
        group = next((g for g in longest_first if names[at : at + len(g.parts)] == g.parts), None)
        at += len(group.parts) if group else 1
        end = places[at - 1] + 1
        yield from ((None, [placed]) for placed in phase[begin:end] if placed.unpacks)
        yield group, [placed for placed in phase[begin:end] if not placed.unpacks]
        begin = end


_LAYERS = 3
"""Of the model that programs are derived from at least: the first, one in the middle and the last."""


def programs(
    family: str, grouping: Grouping, buckets: Sequence[int] = (), policy: Policy = BF16, positions: int = WINDOW
) -> list[Program]:
    """Every program, those of groups first; a prompt's groups once per bucket, those that attend over a cache of so
    many positions once per window, of a prompt once per bucket and window. They do not depend on a model's other
    sizes, only on the layers that a policy names.

    TypeError where a group cannot be one program: it would need other slots at another place.
    """
    grouping = grouping.of(family, policy)
    joined: dict[str, Program] = {}
    # One behind those that it names, which is like all others.
    layers = max(_LAYERS, policy.layers + 1)
    for chain in (grouping.prompt, grouping.token):
        calls = list(cover(chained(family, chain, layers, policy), grouping.groups))
        for position, (group, placed) in enumerate(calls):
            made = _join(group, placed, [later for _, part in calls[position + 1 :] for later in part])
            known = joined.setdefault(made.entry, made)
            if known.wiring != made.wiring:
                raise TypeError(f"program {made.entry} binds its slots in two ways")
            joined[made.entry] = _with_results_of_both(known, made)
    order = [g.name for g in grouping.groups] + [name for name in joined if joined[name].host]
    groups = {g.name: g for g in grouping.groups}

    def sized(name: str) -> Iterator[Program]:
        group, known = groups.get(name), joined[name]
        of_prompt = bool(group and group.prompt and buckets)
        for bucket in buckets if of_prompt else (None,):
            sizes: Sequence[int | None] = (None,)
            if group and group.windowed:
                sizes = prompt_windows(bucket, positions) if bucket else windows(positions)
            for at, size in enumerate(sizes):
                # A prompt's first window goes without saying.
                said = [bucket, size if at or not bucket else None]
                name = ".".join([known.name, *(str(each) for each in said if each)])
                yield replace(known, name=name, bucket=bucket, window=size)

    return [program for name in order for program in sized(name)]


def _join(group: Group | None, placed: Sequence[Placed], later: Sequence[Placed]) -> Program:
    """One program of parts that follow one another; slots that they bind to one buffer, seen alike, are one. `later`:
    the parts behind them in the phase."""
    slots: dict[str, Slot] = {}
    shared: dict[str, str] = {}
    wiring = []
    for at in placed:
        wired = {slot.name: shared.get(at.seen(slot), slot.name) for slot in at.part.slots}
        for slot in at.part.slots:
            if at.seen(slot) not in shared and slots.setdefault(slot.name, slot) is not slot:
                raise TypeError(f"{at.part.name}: slot {slot.name} is another part's in the same program")
            if slots[wired[slot.name]].role == "input" and slot.role != "input":
                raise TypeError(f"{at.part.name}: writes {slot.name}, which the program has as input")
        shared |= {at.seen(slot): wired[slot.name] for slot in at.part.slots}
        wiring.append(wired)
    ends = () if later else placed[-1].part.slots
    results = {wiring[-1][slot.name] for slot in ends if slot.role == "output"}
    for seen, name in shared.items():
        slot, buffer = slots[name], seen.partition("@")[0]
        if slot.role == "output" and not (slot.keeps or name in results or _read_next(later, buffer)):
            slots[name] = replace(slot, role="scratch")
    name = group.name if group else placed[0].part.name
    parts = tuple(at.part for at in placed)
    return Program(name, name, parts, tuple(slots.values()), tuple(wiring), host=group is None)


def _read_next(later: Sequence[Placed], buffer: str) -> bool:
    """Whether the next part that touches a buffer reads it."""
    for at in later:
        roles = {slot.role for slot in at.part.slots if at.buffer(slot) == buffer}
        if roles:
            return "input" in roles
    return False


def _with_results_of_both(one: Program, other: Program) -> Program:
    """A slot that is read behind any of a program's calls is an output."""
    pairs = zip(one.slots, other.slots, strict=True)
    return replace(one, slots=tuple(b if b.role == "output" else a for a, b in pairs))
