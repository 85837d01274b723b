"""Derives buffers and plans from a grouping and a model's dimensions, for every target.

A plan is a list of calls, each a program and the buffer bound to each of its arguments (slots). Naming is the
mechanism: two calls that name one buffer share it, so results stay where the next call reads them.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

from llama_npu2.artifact.plan import (
    BLOCK_POSITIONS,
    DECODE,
    FROM_POSITION,
    LOGITS,
    PREFILL,
    PREFILL_CHUNK,
    SEQUENCES,
    TOKENS,
    WHOLE,
    WINDOW,
    BufferRef,
    Phase,
    PlannedCall,
    View,
    plans_json,
)
from stages.engine.files import write_json
from stages.engine.places import CONFIG, PACKING, PLAN
from stages.kernels import HOST_SET
from stages.model.buffers import Buffer
from stages.model.config import Config
from stages.model.families import read_config
from stages.model.grouping import (
    Chain,
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
from stages.model.lifetimes import LaunchAccess, places
from stages.model.part import HISTORY, KV, Dim, Launch, Slot, resolved
from stages.model.policy import BF16, Policy, parse_policy
from stages.weights.formats import formats

PREFILL_ROWS = 512
"""Rows of a prefill call where rows are known at run time only; longer prompts run in such chunks against the cache.

Large enough that reading the weights once per chunk is a few percent of the arithmetic, small enough that activations
stay a few percent of the weights.
"""

LOGITS_ROWS = 64
"""Rows whose logits are computed at once, where they are of several rows: few enough that these take some MB."""

_ROW_POSITIONS = {KV: BLOCK_POSITIONS, HISTORY: 1}
"""Positions of a row of the host's caches."""


@dataclass
class Plan:
    """The buffers of a model, and the calls of each phase."""

    buffers: dict[str, Buffer] = field(default_factory=dict)
    phases: dict[Phase, list[PlannedCall]] = field(default_factory=dict)

    def nbytes(self, names: Iterable[str]) -> int:
        """Return the memory of these buffers; memory that they share counts up to where the last of them ends."""
        buffers = [self.buffers[name] for name in names]
        own = sum(buffer.nbytes for buffer in buffers if buffer.at is None)
        return own + max((buffer.at + buffer.nbytes for buffer in buffers if buffer.at is not None), default=0)


def write_plan(
    directory: Path,
    grouping: Grouping,
    kernel_set: str,
    work: Path,
    buckets: Sequence[int],
    context: int,
    policy: Mapping[str, str],
) -> None:
    """Step action: write the plan for the configuration in the artifact `directory`, as JSON.

    `policy` is `Policy.recorded`, `context` is that of `Config.within`.
    """
    known = read_config(directory / CONFIG)
    config, short = known.within(context), known.decoder.short_context
    if short and known.max_seq > short:
        chosen = f"short texts, up to {short} positions: context= takes up to {known.max_seq}"
        long = f"long texts, for {config.max_seq} positions: leave context= out for texts up to {short}"
        print(
            f"{known.family}: rotations have the factors for {chosen if config.max_seq <= short else long}",
            file=sys.stderr,
            flush=True,
        )
    plan = make_plan(config, grouping, kernel_set, buckets, parse_policy(**policy))
    buffers = {name: asdict(buffer) for name, buffer in plan.buffers.items()}
    write_json(
        work / PLAN, {"buffers": buffers, "phases": plans_json(plan.phases), **policy, "context": config.max_seq}
    )
    write_json(work / PACKING, {name: spec for name, spec in buffers.items() if plan.buffers[name].packed})


def make_plan(
    config: Config, grouping: Grouping, kernel_set: str, buckets: Sequence[int] = (), policy: Policy = BF16
) -> Plan:
    """Return the plan of a model.

    Phases are `prefill_chunk` (without logits), `prefill` and `decode`. With buckets they are `prefill@<bucket>`, from
    position 0 on, `prefill@<bucket>@<context>`, from where the bucket ends in that context bucket, and `decode`, or
    `decode@<context>` where device programs attend for a token. `logits@<rows>` computes the logits of rows that a
    prompt's layers have processed, where the grouping says so; `tokens@<rows>@<context>` takes several tokens, and
    `sequences@<rows>@<context>` one of each of several sequences.
    TypeError where programs want one buffer in ways that exclude each other, UserError where the policy names what the
    model does not have.

    Args:
        kernel_set: the kernels whose layouts device programs read.
        buckets: row counts of static programs; none: any number of rows.
    """
    policy.check(config)
    return _Planner(config, grouping, kernel_set, buckets, policy).plan()


class _Planner:
    """Derives a plan. With buckets, buffers are as long as the longest: rows past the model's context are padding."""

    def __init__(
        self, config: Config, grouping: Grouping, kernel_set: str, buckets: Sequence[int], policy: Policy
    ) -> None:
        self.config, self.kernel_set, self.policy = config, kernel_set, policy
        self.buckets = sorted(buckets)
        self.grouping = grouping.of(config, policy)
        all_programs = programs(config, grouping, self.buckets, policy, config.max_seq)
        self.programs = {(p.entry, p.bucket, p.context): p for p in all_programs}
        self.context_buckets = _context_buckets(all_programs, config.max_seq)
        longest = self.buckets[-1] if buckets else 0
        positions = max(config.max_seq, longest, *(p.context for p in all_programs if p.context))
        self.dimensions: Mapping[str, float] = config.dimensions(positions) | {
            "window": positions,
            "seq": longest or min(PREFILL_ROWS, config.max_seq),
        }
        self.result = Plan()
        self.accesses: dict[Phase, list[LaunchAccess]] = {}

    def plan(self) -> Plan:
        prompt, token = self.grouping.prompt, self.grouping.token
        for bucket in self.buckets:
            phase = PREFILL._replace(rows=bucket)
            first, *more = prompt_context_buckets(bucket, self.config.max_seq)
            self._add_phase(phase, prompt, bucket, first)
            for context in more:
                self._add_phase(phase._replace(context=context), prompt, bucket, context)
        if not self.buckets:
            self._add_phase(PREFILL_CHUNK, replace(prompt, end=()))
            self._add_phase(PREFILL, prompt)
        if self.grouping.row_logits:
            rows = min(LOGITS_ROWS, int(self.dimensions["seq"]))
            self._add_phase(LOGITS._replace(rows=rows), self.grouping.row_logits, rows)
        for context in self.context_buckets:
            self._add_phase(DECODE._replace(context=context), token, context=context)
        if not self.context_buckets:
            self._add_phase(DECODE, token)
        if self.grouping.tokens:
            for count, context in itertools.product(self.grouping.counts, context_buckets(self.config.max_seq)):
                self._add_phase(Phase(TOKENS, count, context), self.grouping.tokens[count], count, context)
        for count, context in itertools.product(self.grouping.together, context_buckets(self.config.max_seq)):
            self._add_phase(Phase(SEQUENCES, count, context), self.grouping.sequences[count], count, context)
        self._place_sequences(max(self.grouping.together, default=1))
        if self.buckets:
            self._share_memory()
        return self.result

    def _place_sequences(self, count: int) -> None:
        """Make room for so many sequences in each cache, one after the other, and say in views how far apart they are.

        How many rows a sequence has there is known when all phases are.
        """
        rows = {name: b.shape[0] for name, b in self.result.buffers.items() if b.kind == "cache"}
        for name, each in rows.items() if count > 1 else ():
            cache = self.result.buffers[name]
            cache.shape, cache.sequences = (count * each, *cache.shape[1:]), count

        def placed(reference: BufferRef) -> BufferRef:
            at = rows.get(reference.name, 0)
            return reference._replace(view=reference.view._replace(rows=at)) if reference.view.sequence else reference

        for phase, calls in self.result.phases.items():
            if phase.kind == SEQUENCES:
                calls[:] = [call._replace(buffers=tuple(map(placed, call.buffers))) for call in calls]

    def _share_memory(self) -> None:
        """Give activations that device programs use places in one memory."""
        phases = list(self.accesses.values())
        touched = {name for phase in phases for access in phase if not access.host for name in access.touched}
        buffers = {name: self.result.buffers[name] for name in sorted(touched)}
        sizes = {name: buffer.nbytes for name, buffer in buffers.items() if buffer.kind == "activation"}
        formats = {name: buffers[name].format for name in sizes}
        for name, place in places(sizes, formats, phases).items():
            buffers[name].at = place

    def _add_phase(self, phase: Phase, chain: Chain, bucket: int | None = None, context: int | None = None) -> None:
        self.accesses[phase] = []
        self.result.phases[phase] = list(self._calls(self.accesses[phase], chain, bucket, context))

    def _calls(
        self, accesses: list[LaunchAccess], chain: Chain, bucket: int | None, context: int | None
    ) -> Iterator[PlannedCall]:
        phase = chained(self.config, chain, self.policy)
        for group, placed in cover(phase, self.grouping.groups):
            entry = entry_of(group, placed)
            sizes = itertools.product((bucket, None), (context, None))
            program = next(self.programs[key] for size in sizes if (key := (entry, *size)) in self.programs)
            layer = placed[0].layer if placed[0].inside else None
            accesses += (self._access(program.host, at, launch) for at in placed for launch in at.part.launches)
            yield PlannedCall(program.name, self._bind(program, placed, bucket), layer)

    def _access(self, host: bool, at: Placed, launch: Launch) -> LaunchAccess:
        rows = {slot.name for slot in at.part.slots if slot.shape[0] == "seq"} if host else set()
        reads, writes, partly = (
            frozenset(at.buffer(at.part.slot(slot)) for slot in slots)
            for slots in (launch.reads(), launch.writes(), launch.writes() & rows)
        )
        return LaunchAccess(host, reads, writes, partly)

    def _bind(self, program: Program, placed: Sequence[Placed], bucket: int | None) -> tuple[BufferRef, ...]:
        references: dict[str, BufferRef] = {}
        for at, wired in zip(placed, program.wiring, strict=True):
            for slot in at.part.slots:
                reference = self._reference(program, at.reference(slot), slot)
                self._require(program, at, slot, reference, bucket)
                references.setdefault(wired[slot.name], reference)
        return tuple(references[slot.name] for slot in program.slots)

    def _reference(self, program: Program, reference: BufferRef, slot: Slot) -> BufferRef:
        """Static programs get tables and histories from the row of their first position on.

        So no position is compiled in. Those that slide get keys and values from where their window begins.
        """
        of_sequence = reference.view.sequence
        if program.sliding and slot.shape[0] == "window":
            return reference._replace(view=program.sliding.view._replace(sequence=of_sequence))
        moves = bool(self.buckets) and not program.host and (slot.role == "table" or slot.keeps == HISTORY)
        return reference._replace(view=FROM_POSITION._replace(sequence=of_sequence)) if moves else reference

    def _require(self, program: Program, at: Placed, slot: Slot, reference: BufferRef, bucket: int | None) -> None:
        """Add a buffer, or compare it with what other calls require of it."""
        name = reference.name
        layout = at.part.layout_of(slot.name, HOST_SET if program.host else self.kernel_set)
        new = self._described(at, slot, layout, reference.view, bucket)
        if program.sliding and reference.view.kind == WINDOW:
            first = reference.view.row(1, int(self.dimensions["window"]) - 1)
            new.shape = (first + program.sliding.window, *new.shape[1:])
        old = self.result.buffers.setdefault(name, new)
        if (old.kind, old.format) != (new.kind, new.format):
            raise TypeError(f"buffer {name}: {at.part.name}.{slot.name} needs {new}, it is {old}")
        if new.packed:
            try:
                old.layout = formats()[old.format].common_layout(old.layout, new.layout)
            except ValueError as error:
                raise TypeError(f"buffer {name}: {at.part.name}.{slot.name}: {error}") from None
        elif math.prod(new.shape) > math.prod(old.shape):
            old.shape = new.shape

    def _described(self, at: Placed, slot: Slot, layout: str, view: View, bucket: int | None) -> Buffer:
        stored = partial(formats()[slot.format].packed_shape, layout=layout)
        if slot.keeps:
            positions = 0 if self.buckets else _ROW_POSITIONS[slot.keeps]
            return Buffer("cache", slot.format, stored(self._sizes(slot.shape, None)), row_positions=positions)
        if slot.role in ("weight", "table"):
            blob = "tables" if slot.role == "table" else _blob(at)
            return Buffer(slot.role, slot.format, self._sizes(slot.shape, None), layout, blob)
        shape: tuple[Dim, ...] = slot.shape if view == WHOLE else ("seq", *slot.shape[-1:])
        return Buffer("activation", slot.format, stored(self._sizes(shape, bucket)))

    def _sizes(self, shape: Sequence[Dim], bucket: int | None) -> tuple[int, ...]:
        return resolved(shape, {**self.dimensions, **({"seq": bucket} if bucket else {})})


def _context_buckets(all_programs: Iterable[Program], positions: int) -> list[int]:
    """Return the context buckets for which a token has programs, and the last one where some of them slide."""
    of_tokens = [program for program in all_programs if not program.bucket]
    last = context_buckets(positions)[-1:] if any(program.sliding for program in of_tokens) else []
    return sorted({*last, *(program.context for program in of_tokens if program.context)})


def _blob(at: Placed) -> str:
    """Return the blob that a part's weights go to: one per layer, one for what is before and one for what is after."""
    if at.inside:
        return f"layer_{at.layer:03d}"
    return "head" if at.layer else "embedding"
