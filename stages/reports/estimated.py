"""The estimate of a model on the NPU: its programs, its phases, and what each side does in them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby

from llama_npu2.artifact.dtypes import nbytes
from llama_npu2.engine.turns import tokens_of_turn
from llama_npu2.frozen import frozen
from stages.estimate.constants import Machine
from stages.estimate.phases import commands, host_work
from stages.estimate.price import Priced, price
from stages.estimate.ranges import Range, ranges
from stages.estimate.work import HOST_COPY, SUBMISSION, Amount, Time, Work, spend, summed
from stages.kernels import kv_rows
from stages.model.config import Config
from stages.model.grouping import (
    CONTEXT_BUCKET,
    Group,
    Grouping,
    Placed,
    Program,
    chained,
    context_buckets,
    cover,
    entry_of,
    programs,
    prompt_context_buckets,
)
from stages.model.policy import BF16, Policy
from stages.model.unpacking import UNPACKED
from stages.targets.npu2.groupings import GROUPINGS
from stages.targets.npu2.modules import Module, build_module

TOKEN = "token"
"""The phase of a token."""
DEPTH = 1023
"""Positions before the token that is priced, as other projects quote theirs."""


@frozen(eq=False)
class Stretch:
    """Parts that follow one another on one side. A stretch equals itself alone."""

    parts: tuple[Placed, ...]
    device: tuple[str, ...] = ()
    """The programs that the array runs them as; none: the host runs them."""

    def touched(self) -> set[str]:
        """Return the buffers that it reads or writes, except weights and tables."""
        slots = ((placed, slot) for placed in self.parts for slot in placed.part.slots)
        return {placed.buffer(slot) for placed, slot in slots if slot.role not in ("weight", "table")}


ARRAY_SIDE, HOST_SIDE = "array", "host"


@frozen
class Moment:
    """Work of one side while the other waits: a launch of a program, a host call, submissions, copies."""

    side: str
    program: str
    what: str
    time: Time


@frozen
class Sizes:
    """The sizes that the programs of a phase are compiled for."""

    rows: int | None = None
    """How many rows the programs take; None for those of one token."""
    window: int = 0
    """The context bucket that a prompt fills with these as its last rows; 0: the first one that holds the rows."""
    several: bool = False
    """Whether the rows are tokens that are computed as one token is."""
    of_sequences: bool = False
    """Whether each of these tokens is of a sequence of its own."""
    after: int | None = None
    """Positions before a single token; None: `Estimate.depth`."""

    @property
    def count(self) -> int:
        return self.rows or 1

    @property
    def of_prompt(self) -> bool:
        return bool(self.rows) and not self.several


ONE_TOKEN = Sizes()

TAKE_TURNS = "Sequences take turns in the KV caches, which are filled for each turn"


@frozen
class Turns:
    """Sequences that take turns on the NPU, and the mean milliseconds from one token of a sequence to its next."""

    sequences: int
    together: int
    """How many of them have a turn at once."""
    tokens: int
    """How many tokens a sequence makes in a turn."""
    low: float
    middle: float
    high: float
    host_bytes: int
    """How many bytes of KV cache the host keeps if each sequence fills its own."""


@dataclass
class Estimate:
    """A model in a grouping, with programs for prompts in buckets and for a token."""

    config: Config
    name: str
    """The grouping's."""
    buckets: Sequence[int]
    """Rows that prefill programs are compiled for."""
    machine: Machine
    policy: Policy = BF16
    depth: int = DEPTH
    """Positions before the token."""
    positions: int = CONTEXT_BUCKET
    """Positions that the KV cache has room for."""
    second_copy: bool = False
    """Whether the host has unpacked weights for prompts before, and does not unpack them for each."""
    counts: Sequence[int] = ()
    """How many tokens of a text programs take, besides one, in groupings that have such programs."""
    code_bytes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """The bytes of code that each launch loads, by the name of a program that is compiled."""
    together: Sequence[int] = ()
    """The numbers of sequences of which programs take a token each, in groupings that have such programs."""
    _stretches: dict[Sizes, list[Stretch]] = field(default_factory=dict, repr=False, compare=False)
    """What was computed, by the sizes of a phase: it does not depend on rates."""
    _host_works: dict[tuple[Stretch, int, int], Work] = field(default_factory=dict, repr=False, compare=False)
    """The work of the host's stretches, by rows and positions before them."""
    _on_array: dict[tuple[str, ...], list[Moment]] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Moments of stretches on the array, by the names of their programs."""

    @cached_property
    def grouping(self) -> Grouping:
        """Which parts the programs have."""
        grouping = GROUPINGS[self.name].of(self.config, self.policy)
        chosen = replace(grouping, counts=tuple(self.counts), together=tuple(self.together))
        return chosen if grouping.tokens else grouping

    def window(self, after: int | None = None) -> int:
        """Return the context bucket of a token after so many others, `depth` by default, where the device attends."""
        return context_buckets((self.depth if after is None else after) + 1)[-1]

    @property
    def last(self) -> int:
        """Positions before the last token that the context has room for."""
        return self.positions - 1

    @cached_property
    def programs(self) -> list[Program]:
        """Device programs."""
        of = self.config, self.grouping, self.buckets, self.policy
        prompts = [p for p in programs(*of, self.positions) if p.bucket and not p.several]
        windows = {self.window(), self.window(max(self.last, self.depth))}
        tokens = [p for p in programs(*of, max(windows)) if not p.bucket and p.context in (None, *windows)]
        grouping = self.grouping
        several = [
            *(p for c in grouping.counts for p in self._of_several(replace(grouping, counts=(c,), together=()), c)),
            *(p for c in grouping.together for p in self._of_several(replace(grouping, counts=(), together=(c,)), 1)),
        ]
        return [p for p in (*prompts, *tokens, *several) if not p.host]

    def _of_several(self, grouping: Grouping, tokens: int) -> Iterator[Program]:
        """Yield a grouping's programs of several tokens at once, so many of each sequence after `depth` others."""
        last = self.depth + tokens
        made = programs(self.config, grouping, self.buckets, self.policy, max(self.positions, last))
        several = [program for program in made if program.several]
        windows: dict[str, int] = {}
        for program in several:
            if program.context and program.context >= last:
                windows[program.entry] = min(program.context, windows.get(program.entry, program.context))
        yield from (program for program in several if program.context in (None, windows.get(program.entry)))

    @cached_property
    def modules(self) -> dict[str, Module]:
        """Modules of all device programs, by name."""
        dims = self.config.dimensions()
        return {
            p.name: replace(build_module(p, dims), code_bytes=self.code_bytes.get(p.name, ())) for p in self.programs
        }

    @cached_property
    def rows(self) -> dict[str, list[Priced]]:
        """Launches of all device programs, by name."""
        return {name: price(module, self.machine) for name, module in self.modules.items()}

    def at(self, machine: Machine) -> Estimate:
        """Return the estimate with other rates. What does not depend on them is computed once."""
        other = replace(self, machine=machine)
        other.grouping, other.programs, other.modules = self.grouping, self.programs, self.modules
        other.rows = {name: [row.at(machine) for row in rows] for name, rows in self.rows.items()}
        return other

    def times(self) -> dict[str, float]:
        """Return the milliseconds of every phase that has programs, by its name: that of a token comes first."""
        return {name: self.time(sizes).milliseconds for name, sizes in self.phases()}

    def time(self, sizes: Sizes) -> Time:
        """Return the time of a phase, host and submissions included."""
        return summed(moment.time for moment in self.moments(sizes))

    @cached_property
    def ranges(self) -> dict[str, Range]:
        """How far the times may be off, by the phase's name."""
        return ranges(lambda machine: self.at(machine).times(), self.machine)

    def token(self) -> Time:
        """Return the time of a token after `depth` positions, host and submissions included."""
        return self.time(ONE_TOKEN)

    def prompt(self, bucket: int, window: int = 0) -> Time:
        """Return the time of a prompt that fills a bucket; with `window`, of the last rows of a longer prompt."""
        return self.time(Sizes(bucket, window))

    def turns(self, sequences: int) -> Turns:
        """Return what several sequences get that make tokens at a time, all after `depth` others.

        They take turns in the device's KV caches (`llama_npu2.engine.turns`), some at once where programs take a token
        of each and that takes less time: a cache is filled for each turn, and what each token appends is copied back.
        """
        sizes = self.config.dimensions()
        steps = [(1, self.ranges[TOKEN])]
        steps += [(min(count, sequences), self.ranges[_sequences(count)]) for count in self.grouping.together]
        together, step = min(steps, key=lambda step: step[1].middle * -(-sequences // step[0]))
        turns = -(-sequences // together)
        appended = len(self.config.decoder.attentions) * position_bytes(sizes, self.policy.cache)
        filled, copied = (
            spend(Amount(HOST_COPY, size), self.machine).milliseconds for size in (self.depth * appended, appended)
        )
        tokens = tokens_of_turn(together * filled, step.middle)
        copying = together * (filled / tokens * (turns > 1) + copied) if sequences > 1 else 0.0
        low, middle, high = (turns * (time + copying) for time in (step.low, step.middle, step.high))
        return Turns(sequences, together, tokens, low, middle, high, sequences * self.positions * appended)

    def phases(self) -> Iterator[tuple[str, Sizes]]:
        """Yield name and sizes of every phase that has programs: tokens, several tokens, prompts."""
        yield TOKEN, ONE_TOKEN
        if self.last > self.depth:
            yield f"token after {self.last} others", Sizes(after=self.last)
        yield from ((f"{count} tokens at once", Sizes(count, several=True)) for count in self.grouping.counts)
        for count in self.grouping.together:
            yield _sequences(count), Sizes(count, several=True, of_sequences=True)
        for bucket in self.buckets:
            first, *more = prompt_context_buckets(bucket, self.positions)
            yield f"prompt of {bucket}", Sizes(bucket, first)
            yield from ((f"last {bucket} of a prompt of {window}", Sizes(bucket, window)) for window in more)

    def moments(self, sizes: Sizes = ONE_TOKEN) -> Iterator[Moment]:
        """Yield, in order, what happens in a phase; tokens come after `depth` positions, or `Sizes.after`."""
        before = 0 if sizes.of_prompt else self.depth if sizes.after is None else sizes.after
        crossing = host_traffic(self.config, self.name, sizes.count, self.grouping.attends, self.policy.cache)
        running: list[Moment] = []
        touched: set[str] = set()
        for stretch in self.stretches(sizes):
            if stretch.device:
                if stretch.device not in self._on_array:  # layers have the same programs
                    self._on_array[stretch.device] = list(self._device(stretch))
                running, touched = self._on_array[stretch.device], stretch.touched()
                yield from running
            elif touched & stretch.touched():
                yield self._host(stretch, sizes.count, before)
            else:
                yield _remaining(self._host(stretch, sizes.count, before), running)
        crossing_bytes = crossing["prompt"] if sizes.of_prompt else sizes.count * crossing["token"]
        yield Moment(
            HOST_SIDE, "copies", "to and from the device", spend(Amount(HOST_COPY, crossing_bytes), self.machine)
        )

    def traffic(self) -> tuple[int, int]:
        """Return bytes of DDR and bytes of weights of one token, over all its calls of device programs."""
        moved = weights = 0
        for name in (name for stretch in self.stretches() for name in stretch.device):
            moved += sum(row.traffic.bytes for row in self.rows[name])
            slots = (slot for slot in self.modules[name].described_slots() if slot["role"] == "weight")
            weights += sum(nbytes(slot["dtype"], slot["shape"]) for slot in slots)
        return moved, weights

    def stretches(self, sizes: Sizes = ONE_TOKEN) -> list[Stretch]:
        """Return the stretches of a phase."""
        if sizes not in self._stretches:
            self._stretches[sizes] = list(self._made_stretches(sizes))
        return self._stretches[sizes]

    def _made_stretches(self, sizes: Sizes) -> Iterator[Stretch]:
        grouping = self.grouping
        tokens = grouping.tokens[sizes.count] if sizes.several and grouping.tokens else grouping.token
        if sizes.of_sequences:
            tokens = grouping.sequences[sizes.count]
        chained_parts = chained(self.config, grouping.prompt if sizes.of_prompt else tokens, self.policy)
        parts = [placed for placed in chained_parts if not (self.second_copy and placed.unpacks)]
        calls = cover(parts, grouping.groups)
        for _, part in groupby(calls, lambda call: call[0] is None):
            pairs = list(part)
            names = tuple(self._program(group, placed, sizes) for group, placed in pairs if group)
            yield Stretch(tuple(placed for _, parts in pairs for placed in parts), names)

    def _program(self, group: Group, placed: Sequence[Placed], sizes: Sizes) -> str:
        """Return the name of a group's program of these parts; of several rows without a window, the bucket's first."""
        entry, rows = entry_of(group, placed), sizes.rows if group.prompt or group.several else None
        candidates = (p for p in self.programs if p.entry == entry and p.bucket == rows)
        window = sizes.window if rows else self.window(sizes.after)
        return next(p.name for p in candidates if not window or p.context in (None, window))

    def host_traffic(self, bucket: int) -> dict[str, int]:
        """Return the module's `host_traffic`, with the weights that the host unpacks for a prompt."""
        crossing = host_traffic(self.config, self.name, bucket, self.grouping.attends)
        return crossing | {"prompt": crossing["prompt"] + self._unpacked(self.stretches(Sizes(bucket)))}

    def _unpacked(self, stretches: Iterable[Stretch]) -> int:
        """Return the bytes that the host unpacks weights to."""
        parts = (placed.part for stretch in stretches if not stretch.device for placed in stretch.parts)
        slots = ((part, slot) for part in parts for slot in part.slots if slot.buffer.startswith(UNPACKED))
        return sum(part.host_bytes(slot, self.config.dimensions()) for part, slot in slots)

    def _device(self, stretch: Stretch) -> Iterator[Moment]:
        calls = [total(self.rows[name]) for name in stretch.device]
        submissions = Amount(SUBMISSION, commands([call.seconds for call in calls]))
        yield Moment(HOST_SIDE, "submissions", str(submissions.amount), spend(submissions, self.machine))
        for name in stretch.device:
            yield from (Moment(ARRAY_SIDE, name, row.title, row.time) for row in self.rows[name])

    def _host(self, stretch: Stretch, rows: int, depth: int) -> Moment:
        """Return one native call, which streams what its parts touch and hands over what it unpacks."""
        if (stretch, rows, depth) not in self._host_works:
            dims = {**self.config.dimensions(), "seq": rows, "max_seq": depth + rows}
            moved = sum(_host_bytes(placed, dims) for placed in stretch.parts)
            self._host_works[stretch, rows, depth] = host_work(moved, self._unpacked([stretch]))
        spent = spend(self._host_works[stretch, rows, depth], self.machine)
        return Moment(HOST_SIDE, "host", ", ".join(placed.part.name for placed in stretch.parts), spent)


def _sequences(count: int) -> str:
    """Return the name of the phase with a token of each of several sequences."""
    return f"a token of {count} sequences each"


def _remaining(host: Moment, running: Iterable[Moment]) -> Moment:
    """Return the rest of the host's work after the array has finished what it does at the same time."""
    busy = sum(moment.time.seconds for moment in running if moment.side == ARRAY_SIDE)
    left = max(0.0, 1 - busy / host.time.seconds)
    return replace(host, what=f"{host.what}, after overlapping with the array", time=host.time * left) if busy else host


def total(rows: Iterable[Priced]) -> Time:
    """Return the time of one call of a program, without its submission."""
    return summed(row.time for row in rows)


def _host_bytes(placed: Placed, dims: dict[str, float]) -> int:
    """Return the bytes that a part's kernels touch; of an embedding, only the rows that are looked up."""
    sizes = {slot.name: placed.part.host_bytes(slot, dims) for slot in placed.part.slots}
    looked_up = {
        launch.args["weight"]: launch.args["out"] for launch in placed.part.launches if "tokens" in launch.args
    }
    return sum(sizes[looked_up.get(name, name)] for name in sizes)


def position_bytes(sizes: Mapping[str, float], stored: str) -> int:
    """Return the bytes of a position in a layer's KV cache on the device."""
    elements = int(sizes["kv_heads"]) * kv_rows.head_elements(int(sizes["head_dim"]), stored)
    return nbytes(kv_rows.element_type(stored), [elements])


def host_traffic(
    config: Config, grouping: str = "fused", bucket: int = 2048, attends: bool = False, stored: str = "bf16"
) -> dict[str, int]:
    """Return the bytes that cross between host and device for a prompt of `bucket` tokens and for a token.

    Buffers that one call writes and another reads stay on the device. The host embeds and takes the logits. Unless the
    device `attends` for a token, the host keeps K and V and attends. It normalises a prompt's last row, which
    `separate` hands to the device. `fused` ends a prompt on the host: its norm and logits are flushed before those of
    the first token are written there.
    """
    sizes = {name: int(size) for name, size in config.dimensions().items()}

    def rows(*shape: int) -> int:
        return nbytes("bf16", shape)

    x, layers, logits = rows(sizes["emb"]), len(config.decoder.attentions), nbytes("f32", [sizes["vocab"]])
    prompt = [bucket * x, layers * bucket * position_bytes(sizes, stored), 2 * x, logits]
    attention = [rows(layers, sizes["q_dim"] + sizes["kv_pair_dim"]), rows(layers, sizes["q_dim"])]
    token = [x, logits, *([] if attends else attention)]
    if grouping == "separate":
        # The host's norm of the last row goes back to the device.
        token.append(2 * x)
    return {"prompt": sum(prompt), "token": sum(token)}
