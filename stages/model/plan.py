"""Derives buffers and plans from a grouping and a model's dimensions, for every target.

A plan is a list of calls, each a program and the buffer bound to each of its slots. Naming is the mechanism: two calls
that name one buffer share it, so results stay where the next call reads them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

from stages.engine.files import write_json
from stages.engine.places import CONFIG, PACKING, PLAN
from stages.kernels import HOST_SET
from stages.model import families
from stages.model.buffers import Buffer
from stages.model.config import Config
from stages.model.families import read_config
from stages.model.grouping import Chain, Grouping, Placed, Program, chained, cover, programs, prompt_windows
from stages.model.lifetimes import Step, places
from stages.model.parts import Dim, Launch, Slot, resolved
from stages.model.policy import BF16, Policy, parse_policy
from stages.weights.formats import formats

PREFILL_ROWS = 512
"""Rows of a prefill call where rows are known at run time only; longer prompts run in such chunks against the cache.

Large enough that reading the weights once per chunk is a few percent of the arithmetic, small enough that activations
stay a few percent of the weights.
"""


@dataclass(frozen=True)
class Call:
    """`buffers`: a reference per slot: `name`, `name@pos` (from the row of the first position on) or `name@last` (the
    last row). `layer`: from 0, where the call belongs to one."""

    program: str
    buffers: list[str]
    layer: int | None = None


@dataclass
class Plan:
    buffers: dict[str, Buffer] = field(default_factory=dict)
    phases: dict[str, list[Call]] = field(default_factory=dict)

    def nbytes(self, names: Iterable[str]) -> int:
        """Memory of these buffers: of what lies in memory that they share, up to where the last ends."""
        found = [self.buffers[name] for name in names]
        own = sum(buffer.nbytes for buffer in found if buffer.at is None)
        return own + max((buffer.at + buffer.nbytes for buffer in found if buffer.at is not None), default=0)


def write_plan(
    directory: Path,
    grouping: Grouping,
    kernel_set: str,
    work: Path,
    buckets: Sequence[int],
    weights: str,
    kv: str,
    context: int,
    matmul: str,
) -> None:
    """Step action: the plan of the configuration in the artifact `directory`, as JSON. `weights`, `kv`, `matmul`: a
    policy's. `context`: as in `with_context`."""
    config = with_context(read_config(directory / CONFIG), context)
    plan = make_plan(config, grouping, kernel_set, buckets, parse_policy(weights, kv, matmul))
    write_json(work / PLAN, asdict(plan) | {"weights": weights, "kv": kv, "matmul": matmul, "context": config.max_seq})
    write_json(work / PACKING, {name: asdict(buffer) for name, buffer in plan.buffers.items() if buffer.packed})


def with_context(config: Config, context: int) -> Config:
    """With KV caches of at most so many positions; 0: as many as the model knows."""
    return replace(config, max_seq=min(config.max_seq, context)) if context else config


def make_plan(
    config: Config, grouping: Grouping, kernel_set: str, buckets: Sequence[int] = (), policy: Policy = BF16
) -> Plan:
    """`kernel_set`: whose layouts device programs read. `buckets`: row counts of static programs; none: any number.

    Phases are `prefill_chunk` (no logits), `prefill` and `decode`; with buckets `prefill@<bucket>`, from position 0 on,
    `prefill@<bucket>@<window>`, from where the bucket ends in the window, and `decode`, or `decode@<window>` where
    device programs attend for a token.
    TypeError where programs want one buffer in ways that exclude each other, UserError where the policy names what the
    model does not have.
    """
    policy.check(config)
    return _Planner(config, grouping, kernel_set, buckets, policy).plan()


class _Planner:
    """With buckets, buffers are as long as the longest: positions past the model's context are only ever padding."""

    def __init__(
        self, config: Config, grouping: Grouping, kernel_set: str, buckets: Sequence[int], policy: Policy
    ) -> None:
        self.config, self.kernel_set, self.policy = config, kernel_set, policy
        self.buckets = sorted(buckets)
        family = families.of(config)
        self.family, self.head = family.model_type, family.head(config)
        self.grouping = grouping.of(self.family, policy)
        made = programs(self.family, grouping, self.buckets, policy, config.max_seq)
        self.programs = {(p.entry, p.bucket, p.window): p for p in made}
        self.windows = sorted({p.window for p in made if p.window and not p.bucket})
        longest = self.buckets[-1] if buckets else 0
        positions = max(config.max_seq, longest, *(p.window for p in made if p.window))
        self.dimensions: Mapping[str, float] = config.dimensions() | {
            "max_seq": positions,
            "window": positions,
            "seq": longest or min(PREFILL_ROWS, config.max_seq),
        }
        self.made = Plan()
        self.steps: dict[str, list[Step]] = {}

    def plan(self) -> Plan:
        prompt = self.grouping.prompt
        for bucket in self.buckets:
            first, *more = prompt_windows(bucket, self.config.max_seq)
            self._phase(f"prefill@{bucket}", prompt, bucket, first)
            for window in more:
                self._phase(f"prefill@{bucket}@{window}", prompt, bucket, window)
        if not self.buckets:
            self._phase("prefill_chunk", replace(prompt, end=()))
            self._phase("prefill", prompt)
        for window in self.windows:
            self._phase(f"decode@{window}", self.grouping.token, window=window)
        if not self.windows:
            self._phase("decode", self.grouping.token)
        if self.buckets:
            self._share()
        return self.made

    def _share(self) -> None:
        """Give what the device works on, and works on no more, one memory."""
        touched = {name for steps in self.steps.values() for step in steps if not step.host for name in step.touched}
        buffers = {name: self.made.buffers[name] for name in sorted(touched)}
        sizes = {name: buffer.nbytes for name, buffer in buffers.items() if buffer.kind == "activation"}
        formats = {name: buffers[name].format for name in sizes}
        for name, place in places(sizes, formats, list(self.steps.values())).items():
            buffers[name].at = place

    def _phase(self, name: str, chain: Chain, bucket: int | None = None, window: int | None = None) -> None:
        self.steps[name] = []
        self.made.phases[name] = list(self._calls(self.steps[name], chain, bucket, window))

    def _calls(self, steps: list[Step], chain: Chain, bucket: int | None, window: int | None) -> Iterator[Call]:
        phase = chained(self.family, chain, self.config.layers, self.policy)
        for group, placed in cover(phase, self.grouping.groups):
            entry = group.name if group else placed[0].part.name
            sizes = itertools.product((bucket, None), (window, None))
            program = next(self.programs[key] for size in sizes if (key := (entry, *size)) in self.programs)
            layer = placed[0].layer if placed[0].inside else None
            steps += (self._step(program.host, at, launch) for at in placed for launch in at.part.launches)
            yield Call(program.name, self._bind(program, placed, bucket), layer)

    def _step(self, host: bool, at: Placed, launch: Launch) -> Step:
        rows = {slot.name for slot in at.part.slots if slot.shape[0] == "seq"} if host else set()
        reads, writes, partly = (
            frozenset(at.buffer(at.part.slot(slot), self.head) for slot in slots)
            for slots in (launch.reads(), launch.writes(), launch.writes() & rows)
        )
        return Step(host, reads, writes, partly)

    def _bind(self, program: Program, placed: Sequence[Placed], bucket: int | None) -> list[str]:
        references: dict[str, str] = {}
        for at, wired in zip(placed, program.wiring, strict=True):
            for slot in at.part.slots:
                reference = self._reference(program, at.reference(slot, self.head), slot)
                self._need(program, at, slot, reference, bucket)
                references.setdefault(wired[slot.name], reference)
        return [references[slot.name] for slot in program.slots]

    def _reference(self, program: Program, reference: str, slot: Slot) -> str:
        """Static programs get the table's rows of their positions, so that no position is compiled in."""
        static = bool(self.buckets) and not program.host
        return f"{reference}@pos" if static and slot.role == "table" else reference

    def _need(self, program: Program, at: Placed, slot: Slot, reference: str, bucket: int | None) -> None:
        """Add a buffer, or hold it against what other calls need of it."""
        name, _, view = reference.partition("@")
        layout = at.part.layout_of(slot.name, HOST_SET if program.host else self.kernel_set)
        new = self._described(at, slot, layout, view, bucket)
        old = self.made.buffers.setdefault(name, new)
        if (old.kind, old.format) != (new.kind, new.format):
            raise TypeError(f"buffer {name}: {at.part.name}.{slot.name} needs {new}, it is {old}")
        if new.packed:
            try:
                old.layout = formats()[old.format].common_layout(old.layout, new.layout)
            except ValueError as error:
                raise TypeError(f"buffer {name}: {at.part.name}.{slot.name}: {error}") from None
        elif math.prod(new.shape) > math.prod(old.shape):
            old.shape = new.shape

    def _described(self, at: Placed, slot: Slot, layout: str, view: str, bucket: int | None) -> Buffer:
        stored = partial(formats()[slot.format].packed_shape, layout=layout)
        if slot.keeps:
            return Buffer("cache", slot.format, stored(self._sizes(slot.shape, None)))
        if slot.role in ("weight", "table"):
            blob = "tables" if slot.role == "table" else _blob(at)
            return Buffer(slot.role, slot.format, self._sizes(slot.shape, None), layout, blob)
        shape: tuple[Dim, ...] = ("seq", *slot.shape[-1:]) if view else slot.shape
        return Buffer("activation", slot.format, stored(self._sizes(shape, bucket)))

    def _sizes(self, shape: Sequence[Dim], bucket: int | None) -> tuple[int, ...]:
        return resolved(shape, {**self.dimensions, **({"seq": bucket} if bucket else {})})


def _blob(at: Placed) -> str:
    """The file that a part's weights go to: one per layer, one for what is before and one for what is behind them."""
    if at.inside:
        return f"layer_{at.layer:03d}"
    return "head" if at.layer else "embedding"
