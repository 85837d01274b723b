"""Groupings: which parts a target runs in which order, and which of them share a program. Programs follow from them.

Each target has its groupings (`stages.targets`). A phase is a chain of parts. Groups cover it greedily, the longest
first; each part that no group covers is a program of its own, which the host runs.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace

from llama_npu2.artifact.plan import LAST_ROW, WHOLE, WINDOW, BufferRef
from llama_npu2.errors import UserError
from llama_npu2.frozen import frozen
from stages.kernels import Sliding
from stages.model.config import Config
from stages.model.decoder import Attention, Decoder, Layer
from stages.model.part import Part, PartKey, Slot
from stages.model.parts import joins, key_of, layer_part
from stages.model.parts.builders import SCALE_LOGITS
from stages.model.policy import BF16, Policy
from stages.model.unpacking import unpacked
from stages.weights.scalars import ALL


@frozen
class Chain:
    """Names of parts in the order of a phase."""

    start: tuple[str, ...]
    """Before the layers."""
    layers: Mapping[str, tuple[str, ...]]
    """The parts of a layer by the kind of its mixer."""
    end: tuple[str, ...]
    """After the layers."""
    unpacks: str = ""
    """Not empty if the layers' products take `Policy.matmul`, into which the host unpacks weights in other formats:
    `UNPACK` or `UNPACK_JOINED`, by how these lie."""
    scale: str = SCALE_LOGITS
    """The part after the last in models whose logits have a factor."""


@frozen
class Group:
    """Parts that follow one another and share a device program."""

    name: str
    parts: tuple[str, ...]
    prompt: bool = False
    """Whether its shapes depend on the bucket."""
    windowed: bool = False
    """Whether its shapes depend on the context bucket of the KV cache that it attends over."""
    several: bool = False
    """Whether its shapes depend on how many tokens it takes."""


@frozen
class Grouping:
    """The chains of prompt and token, and the groups that cover them."""

    prompt: Chain
    token: Chain
    groups: tuple[Group, ...]
    joined: Grouping | None = None
    """The grouping in place of this one where weights are stored so that one product can multiply with several."""
    row_logits: Chain | None = None
    """The parts that compute the logits of several rows at once, after a prompt's layers; None if rows take turns."""
    tokens: Mapping[int, Chain] = field(default_factory=dict)
    """The parts that compute for so many tokens of a text what those of `token` do for one, with the same bits."""
    counts: tuple[int, ...] = ()
    """Which of `tokens` there are programs for."""
    sequences: Mapping[int, Chain] = field(default_factory=dict)
    """The parts that compute for a token of each of so many sequences what those of `token` do, with the same bits."""
    together: tuple[int, ...] = ()
    """Which of `sequences` there are programs for."""

    @property
    def attends(self) -> bool:
        """Whether the device attends for a token."""
        return any(group.windowed and not group.prompt for group in self.groups)

    def chains(self, buckets: Sequence[int]) -> Iterator[tuple[Chain, Sequence[int]]]:
        """Yield the chains of all phases, each with the numbers of rows that its programs are compiled for."""
        yield self.prompt, buckets
        yield self.token, ()
        if self.row_logits:
            yield self.row_logits, buckets
        if self.tokens:
            yield from ((self.tokens[count], (count,)) for count in self.counts)
        yield from ((self.sequences[count], (count,)) for count in self.together)

    def of(self, config: Config, policy: Policy) -> Grouping:
        """Return the grouping for a policy: this one or `joined`."""
        if not self.joined or not joins(config, policy):
            return self
        chosen = self.counts, self.together
        return replace(self.joined, counts=chosen[0], together=chosen[1]) if any(chosen) else self.joined


@frozen
class Placed:
    """A part at its place in a phase."""

    part: Part
    layer: int
    """From 0; the number of layers for parts after the last."""
    inside: bool
    """Whether it is one of the layers' parts."""
    rope: str = ""
    """The end of the name of the layer's tables."""

    @property
    def unpacks(self) -> bool:
        """Whether it makes the weights of a part after it."""
        return bool(self.part.key.unpacks)

    def reference(self, slot: Slot) -> BufferRef:
        """Return the buffer that is bound to a slot, as the part sees it."""
        turns = {"turn": self.layer % 2, "next": (self.layer + 1) % 2}
        return BufferRef(slot.buffer.format(layer=self.layer, rope=self.rope, **turns), slot.view)

    def shared_reference(self, slot: Slot) -> BufferRef:
        """Return what parts of one program share a slot by: `reference`, where in decode the last row is all rows."""
        reference = self.reference(slot)
        return reference._replace(view=WHOLE) if reference.view == LAST_ROW else reference

    def buffer(self, slot: Slot) -> str:
        """Return the name of the buffer that is bound to a slot."""
        return self.reference(slot).name


@frozen
class Program:
    """A sequence of parts that a device launches as one. Parts that bind one buffer share the slot of the first."""

    name: str
    """Unique in an artifact directory."""
    entry: str
    """The name of its function."""
    parts: tuple[Part, ...]
    slots: tuple[Slot, ...]
    wiring: tuple[Mapping[str, str], ...]
    """For each part, the program's slot by the part's."""
    host: bool
    bucket: int | None = None
    """Rows that its shapes are fixed to, of a prompt or several tokens; None for a token, or where rows are known at
    run time only."""
    several: bool = False
    """Whether it takes several tokens, of one or of several sequences, with the arithmetic of one."""
    context: int | None = None
    """Positions of the KV cache that its shapes are fixed to; None where it attends over none, or is `sliding`."""
    sliding: Sliding | None = None
    """How it reads just the positions of the KV cache that a window sees, in all context buckets that are longer."""


CONTEXT_BUCKET = 128
"""Positions of the smallest context bucket; each has twice as many as the one before."""


PROMPT_CONTEXT_BUCKET, PROMPT_STEP = 2048, 3
"""Prefill programs exist for every third context bucket of decode, counted from the longest; those below 2048 positions
are left out, except for the longest.

By the estimate a shorter one would save less than a tenth of a call: of 1B in 512 rows at the beginning of 4096
positions attention takes 1.9 ms a layer, and 1.1 ms over just its rows, because masked keys only stream by.
"""


def context_buckets(positions: int) -> list[int]:
    """Return the context buckets of decode for a KV cache of `positions` positions, ascending.

    A token uses the smallest that holds it. The last has all positions, rounded up to a multiple of `CONTEXT_BUCKET`.
    """
    doubled = list(itertools.takewhile(lambda size: size < positions, (CONTEXT_BUCKET << i for i in itertools.count())))
    return [*doubled, -(-positions // CONTEXT_BUCKET) * CONTEXT_BUCKET]


def prompt_context_buckets(bucket: int, positions: int) -> list[int]:
    """Return the context buckets of prefill programs of `bucket` rows.

    The first has just these rows, from position 0 on; each of the others serves every start from which the rows end in
    it. They are few, because a program of a whole layer takes long to compile.
    """
    first = bucket if bucket < CONTEXT_BUCKET else -(-bucket // CONTEXT_BUCKET) * CONTEXT_BUCKET
    if positions <= first:
        return [first]
    last, *others = context_buckets(positions)[::-PROMPT_STEP]
    return [first, *sorted(size for size in others if size >= PROMPT_CONTEXT_BUCKET and size > first), last]


def chained(config: Config, chain: Chain, policy: Policy = BF16, layers: int = 0) -> list[Placed]:
    """Return the parts of a phase of a model, in order.

    `layers`: how many layers, if not as many as it has; those past the last are like the last.
    """
    described, last = config.decoder.layers, config.layers - 1
    count = layers or config.layers

    def outside(names: Iterable[str], layer: int) -> Iterator[Placed]:
        return (Placed(layer_part(config, name, 0, policy), layer, False) for name in names)

    body = [
        Placed(inner, i, True, rope_suffix(layer))
        for i in range(count)
        for layer in (described[min(i, last)],)
        for inner in _layer(config, chain.layers[layer.mixer.kind], chain.unpacks, i, policy)
    ]
    scaled = (chain.scale,) if chain.end and config.decoder.logits_scale != 1 else ()
    return [*outside(chain.start, 0), *body, *outside((*chain.end, *scaled), count)]


def rope_suffix(layer: Layer) -> str:
    """Return the end of the name of the tables that a layer reads."""
    return layer.mixer.rope.suffix if isinstance(layer.mixer, Attention) else ""


def _layer(config: Config, names: Iterable[str], unpacks: str, layer: int, policy: Policy) -> Iterator[Part]:
    if not unpacks:
        yield from (layer_part(config, name, layer, policy) for name in names)
        return
    for name in names:
        yield from filter(None, unpacked(config, key_of(config, name, layer), policy, unpacks))


def cover(phase: Sequence[Placed], groups: Iterable[Group]) -> Iterator[tuple[Group | None, list[Placed]]]:
    """Cut a phase into programs: yield each group with the parts it covers, and None with each part for the host.

    Parts that unpack weights come before the program that takes these.
    """
    longest_first = sorted(groups, key=lambda group: -len(group.parts))
    places = [place for place, placed in enumerate(phase) if not placed.unpacks]
    names = tuple(str(phase[place].part.key._replace(variant="")) for place in places)
    at = begin = 0
    while at < len(places):
        group = next((g for g in longest_first if names[at : at + len(g.parts)] == g.parts), None)
        at += len(group.parts) if group else 1
        end = places[at - 1] + 1
        yield from ((None, [placed]) for placed in phase[begin:end] if placed.unpacks)
        yield group, [placed for placed in phase[begin:end] if not placed.unpacks]
        begin = end


def entry_of(group: Group | None, placed: Sequence[Placed]) -> str:
    """Return the name of the function of a program.

    It is the group's, and what tells its parts from those of other layers.
    """
    if group is None:
        return placed[0].part.name
    return str(
        PartKey(group.name, "_".join(dict.fromkeys(at.part.key.variant for at in placed if at.part.key.variant)))
    )


_LAYERS = 3
"""The fewest layers that programs of equal layers are derived from: the first, one in the middle and the last."""


def _derived_from(decoder: Decoder, named: int) -> int:
    """Return how many layers programs are derived from.

    They are the first ones: as many as a policy names and one more, which is like all others, and as it takes until
    every kind has come before each kind that follows it anywhere, and the last is of the kind of the model's last.
    """
    layers = decoder.layers
    if len(decoder.kinds) == 1:
        return max(_LAYERS, named + 1)
    neighbours = {*itertools.pairwise(layers)}
    enough = (n for n in range(min(named + 1, len(layers)), len(layers)) if layers[n - 1] == layers[-1])
    return next((n for n in enough if {*itertools.pairwise(layers[:n])} == neighbours), len(layers))


def programs(
    config: Config,
    grouping: Grouping,
    buckets: Sequence[int] = (),
    policy: Policy = BF16,
    positions: int = CONTEXT_BUCKET,
) -> list[Program]:
    """Return every program, those of groups first.

    A prompt's groups have one for each bucket, those of several tokens one for each number of them; groups that attend
    over the KV cache have one for each context bucket, those of a prompt or of several tokens one for each of both. A
    token that sees a window has one program for all context buckets that are longer than the view of what it sees.
    Layers of one kind share theirs. Programs do not depend on how many layers there are, only on their kinds and on
    those that a policy names. TypeError where a group cannot be one program, because it would need other slots at
    another place.

    Args:
        positions: positions of the KV cache.
    """
    grouping = grouping.of(config, policy)
    joined: dict[str, Program] = {}
    group_of: dict[str, Group] = {}
    rows_of: dict[str, set[int]] = {}
    layers = _derived_from(config.decoder, policy.layers)
    for chain, rows in grouping.chains(buckets):
        calls = list(cover(chained(config, chain, policy, layers), grouping.groups))
        for position, (group, placed) in enumerate(calls):
            following = calls[position + 1 : position + 1 + _READERS]
            program = _join(group, placed, [later for _, parts in following for later in parts])
            if group:
                group_of[program.entry] = group
                rows_of.setdefault(program.entry, set()).update(rows)
            before = joined.setdefault(program.entry, program)
            if before.wiring != program.wiring:
                raise TypeError(f"program {program.entry} binds its slots in two ways")
            joined[program.entry] = _with_results_of_both(before, program)
    entries = ((group, entry) for group in grouping.groups for entry, of in group_of.items() if of == group)
    of_groups = [
        sized
        for group, entry in entries
        for sized in _sized(config, joined[entry], group, sorted(rows_of[entry]), positions)
    ]
    return of_groups + [program for program in joined.values() if program.host]


_READERS = 24
"""Calls after one that may read its results: more than two layers have."""


def _sized(config: Config, program: Program, group: Group, buckets: Sequence[int], positions: int) -> Iterator[Program]:
    """Yield a group's program in every size, named after bucket and context bucket; last the one that slides.

    `buckets`: numbers of rows.

    A prompt's first context bucket, which follows from the bucket, is left out of the name.
    """
    for bucket in buckets if (group.prompt and buckets) or group.several else (None,):
        sizes: Sequence[int | None] = (None,)
        if group.windowed:
            sizes = context_buckets(positions)
            if bucket and not group.several:
                sizes = prompt_context_buckets(bucket, positions)
        sliding = None if group.prompt else _sliding(config, program, bucket or 1)
        kept = [size for size in sizes if not size or not sliding or size <= sliding.window]
        for number, context in enumerate(kept):
            named_context = context if number or not group.prompt or not bucket else None
            name = ".".join([program.name, *(str(size) for size in (bucket, named_context) if size)])
            yield replace(program, name=name, bucket=bucket, context=context, several=group.several)
        if sliding and len(kept) < len(sizes):
            name = ".".join([program.name, *(str(size) for size in (bucket, WINDOW) if size)])
            yield replace(program, name=name, bucket=bucket, sliding=sliding, several=group.several)


def _sliding(config: Config, program: Program, rows: int) -> Sliding | None:
    """Return how a program of so many tokens reads just what its window sees.

    It is None if the program has no window, or the array cannot do it.
    """
    sizes = {**config.dimensions(), "seq": rows, "max_seq": rows, "window": 0, "pos": 0}
    for launch in (launch for part in program.parts for launch in part.launches):
        if launch.kernel.sliding and launch.scalars.get("sees", ALL) != ALL:
            with contextlib.suppress(UserError):
                return launch.kernel.sliding(launch.numbers(sizes))
    return None


def _join(group: Group | None, placed: Sequence[Placed], later: Sequence[Placed]) -> Program:
    """Return one program of parts that follow one another; slots that they bind to one buffer in one view are one.

    Args:
        later: the parts after them in the phase.
    """
    slots: dict[str, Slot] = {}
    shared: dict[BufferRef, str] = {}
    wiring = []
    for at in placed:
        wired = {slot.name: shared.get(at.shared_reference(slot), slot.name) for slot in at.part.slots}
        for slot in at.part.slots:
            if at.shared_reference(slot) not in shared and slots.setdefault(slot.name, slot) is not slot:
                raise TypeError(f"{at.part.name}: slot {slot.name} is another part's in the same program")
            if slots[wired[slot.name]].role == "input" and slot.role != "input":
                raise TypeError(f"{at.part.name}: writes {slot.name}, which the program has as input")
        shared |= {at.shared_reference(slot): wired[slot.name] for slot in at.part.slots}
        wiring.append(wired)
    ends = () if later else placed[-1].part.slots
    results = {wiring[-1][slot.name] for slot in ends if slot.role == "output"}
    for reference, name in shared.items():
        slot = slots[name]
        if slot.role == "output" and not (slot.keeps or name in results or _is_read(later, reference.name)):
            slots[name] = replace(slot, role="scratch")
    name = entry_of(group, placed)
    parts = tuple(at.part for at in placed)
    return Program(name, name, parts, tuple(slots.values()), tuple(wiring), host=group is None)


def _is_read(later: Sequence[Placed], buffer: str) -> bool:
    """Whether the next part that touches a buffer reads it."""
    for at in later:
        roles = {slot.role for slot in at.part.slots if at.buffer(slot) == buffer}
        if roles:
            return "input" in roles
    return False


def _with_results_of_both(program: Program, other: Program) -> Program:
    """Return a program with the outputs of both: slots that are read after any of its calls."""
    pairs = zip(program.slots, other.slots, strict=True)
    return replace(program, slots=tuple(b if b.role == "output" else a for a, b in pairs))
