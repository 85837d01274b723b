"""The estimate of a model on the NPU: its programs, phases, and what each side does in them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

from llama_npu2.artifact.dtypes import nbytes
from stages.estimate.constants import Machine
from stages.estimate.phases import commands, host_work
from stages.estimate.price import Priced, price
from stages.estimate.work import HOST_COPY, SUBMISSION, Amount, Time, spend
from stages.model.config import Config
from stages.model.grouping import WINDOW, Group, Placed, Program, chained, cover, programs, prompt_windows, windows
from stages.model.policy import BF16, Policy
from stages.model.unpacking import UNPACKED
from stages.targets.npu2.groupings import GROUPINGS
from stages.targets.npu2.modules import Module, build_module

DEPTH = 1023
"""Positions before the token that is priced, as others quote theirs."""


@dataclass(frozen=True)
class Stretch:
    """Parts that follow one another on one side; `device`: the programs that the array runs them as, none: the host
    does."""

    parts: tuple[Placed, ...]
    device: tuple[str, ...] = ()

    def touched(self) -> set[str]:
        """Buffers that both sides know, weights and tables aside."""
        slots = ((at, slot) for at in self.parts for slot in at.part.slots)
        return {at.buffer(slot) for at, slot in slots if slot.role not in ("weight", "table")}


ARRAY_SIDE, HOST_SIDE = "array", "host"


@dataclass(frozen=True)
class Moment:
    """What one side does while the other waits: a launch of a program, a host call, submissions, copies."""

    side: str
    program: str
    what: str
    time: Time


class Estimate:
    """A model in a grouping, with programs for prompts in buckets, over a cache of so many positions, and for a token
    behind `depth` others. `second_copy`: the host does not unpack weights for a prompt, it has done so."""

    def __init__(
        self,
        config: Config,
        grouping: str,
        buckets: Sequence[int],
        machine: Machine,
        policy: Policy = BF16,
        depth: int = DEPTH,
        positions: int = WINDOW,
        second_copy: bool = False,
    ) -> None:
        self.config, self.name, self.grouping = config, grouping, GROUPINGS[grouping].of(config.family, policy)
        self.buckets, self.machine, self.policy = buckets, machine, policy
        self.depth, self.positions, self.second_copy = depth, positions, second_copy

    def at(self, depth: int, buckets: Sequence[int]) -> Estimate:
        """The same behind other positions, with other buckets."""
        given = self.config, self.name, buckets, self.machine, self.policy, depth, self.positions
        return Estimate(*given, self.second_copy)

    @property
    def window(self) -> int:
        """Positions that a token behind `depth` others attends over, where the device does."""
        return windows(self.depth + 1)[-1]

    @cached_property
    def programs(self) -> list[Program]:
        """Of the device."""
        of = self.config.family, self.grouping, self.buckets, self.policy
        prompts = [p for p in programs(*of, self.positions) if p.bucket]
        tokens = [p for p in programs(*of, self.window) if not p.bucket and p.window in (None, self.window)]
        return [p for p in (*prompts, *tokens) if not p.host]

    @cached_property
    def modules(self) -> dict[str, Module]:
        """Of every device program, by its name."""
        dims = self.config.dimensions()
        return {p.name: build_module(p, dims) for p in self.programs}

    @cached_property
    def rows(self) -> dict[str, list[Priced]]:
        """Of every device program, its launches."""
        return {name: price(module, self.machine) for name, module in self.modules.items()}

    def token(self, depth: int | None = None) -> Time:
        """One token behind `depth` positions, host and submissions included."""
        return sum((moment.time for moment in self.moments(depth=depth)), Time())

    def prompt(self, bucket: int, window: int = 0) -> Time:
        """A prompt that fills a bucket, or what fills it at the end of a longer window, up to its logits."""
        return sum((moment.time for moment in self.moments(bucket, window=window)), Time())

    def prompts(self) -> Iterator[tuple[str, int, int]]:
        """What people call it, bucket and window of everything that has programs."""
        for bucket in self.buckets:
            first, *more = prompt_windows(bucket, self.positions)
            yield f"prompt of {bucket}", bucket, first
            yield from ((f"{bucket} more up to {window}", bucket, window) for window in more)

    def moments(self, bucket: int | None = None, depth: int | None = None, window: int = 0) -> Iterator[Moment]:
        """Of a prompt that fills a bucket (at the end of a window, where one is given), else of a token behind `depth`
        positions: what happens, in order."""
        behind = 0 if bucket else self.depth if depth is None else depth
        crossing = host_traffic(self.config, self.name, bucket or 1, self.grouping.attends)
        running: list[Moment] = []
        touched: set[str] = set()
        for stretch in self.stretches(bucket, window):
            if stretch.device:
                running, touched = list(self._device(stretch)), stretch.touched()
                yield from running
            elif touched & stretch.touched():
                yield self._host(stretch, bucket or 1, behind)
            else:
                yield _longer(self._host(stretch, bucket or 1, behind), running)
        crossing_bytes = crossing["prompt" if bucket else "token"]
        yield Moment(
            HOST_SIDE, "copies", "to and from the device", spend(Amount(HOST_COPY, crossing_bytes), self.machine)
        )

    def traffic(self) -> tuple[int, int]:
        """(DDR bytes, weight bytes) of one token: every device program as often as a token calls it."""
        moved = weights = 0
        for name in (name for stretch in self.stretches() for name in stretch.device):
            moved += sum(row.traffic.bytes for row in self.rows[name])
            slots = (slot for slot in self.modules[name].described_slots() if slot["role"] == "weight")
            weights += sum(nbytes(slot["dtype"], slot["shape"]) for slot in slots)
        return moved, weights

    def stretches(self, bucket: int | None = None, window: int = 0) -> Iterator[Stretch]:
        """Of a prompt in a bucket (and a window that is not its first), else of a token."""
        chain = self.grouping.prompt if bucket else self.grouping.token
        chained_parts = chained(self.config.family, chain, self.config.layers, self.policy)
        parts = [placed for placed in chained_parts if not (self.second_copy and placed.unpacks)]
        calls = cover(parts, self.grouping.groups)
        for _, part in groupby(calls, lambda call: call[0] is None):
            found = list(part)
            names = tuple(self._program(group, bucket, window) for group, _ in found if group)
            yield Stretch(tuple(placed for _, parts in found for placed in parts), names)

    def _program(self, group: Group, bucket: int | None, window: int) -> str:
        """By name; a prompt's is the first of its bucket's where no window is said."""
        known = (p for p in self.programs if p.entry == group.name and p.bucket == (bucket if group.prompt else None))
        return next(p.name for p in known if not (bucket and window) or p.window in (None, window))

    def host_traffic(self, bucket: int) -> dict[str, int]:
        """The same as `host_traffic`, with weights that the host unpacks for a prompt."""
        crossing = host_traffic(self.config, self.name, bucket, self.grouping.attends)
        return crossing | {"prompt": crossing["prompt"] + self._unpacked(self.stretches(bucket))}

    def _unpacked(self, stretches: Iterable[Stretch]) -> int:
        """Bytes that the host makes of weights."""
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
        """One native call, which streams what its parts touch, and hands over what it unpacks."""
        dims = {**self.config.dimensions(), "seq": rows, "max_seq": depth + rows}
        moved = sum(_host_bytes(placed, dims) for placed in stretch.parts)
        spent = spend(host_work(moved, self._unpacked([stretch])), self.machine)
        return Moment(HOST_SIDE, "host", ", ".join(placed.part.name for placed in stretch.parts), spent)


def _longer(host: Moment, running: Iterable[Moment]) -> Moment:
    """What is left of the host's part when the array has done what it does at the same time."""
    busy = sum(moment.time.seconds for moment in running if moment.side == ARRAY_SIDE)
    left = max(0.0, 1 - busy / host.time.seconds)
    return replace(host, what=f"{host.what}, beside the array", time=host.time * left) if busy else host


def total(rows: Iterable[Priced]) -> Time:
    """One call of a program, without its submission."""
    return sum((row.time for row in rows), Time())


def _host_bytes(placed: Placed, dims: dict[str, float]) -> int:
    """Of everything that a part's kernels touch; of an embedding only the rows that are looked up."""
    sizes = {slot.name: placed.part.host_bytes(slot, dims) for slot in placed.part.slots}
    looked_up = {
        launch.args["weight"]: launch.args["out"] for launch in placed.part.launches if "tokens" in launch.args
    }
    return sum(sizes[looked_up.get(name, name)] for name in sizes)


def host_traffic(config: Config, grouping: str = "fused", bucket: int = 2048, attends: bool = False) -> dict[str, int]:
    """Bytes that cross between host and device: per prompt of `bucket` tokens, per token.

    Slots that one call makes and another reads stay on the device. The host embeds and takes the logits; unless the
    device `attends` for a token, it caches K and V and attends. It norms a prompt's last row, which `separate` hands to
    the device. `fused` ends a prompt on the host: norm and logits that it writes are flushed before those of the first
    token land there.
    """
    known = {name: int(size) for name, size in config.dimensions().items()}

    def rows(*shape: int) -> int:
        return nbytes("bf16", shape)

    x, layers, logits = rows(known["emb"]), config.layers, nbytes("f32", [known["vocab"]])
    prompt = [bucket * x, rows(layers, bucket, known["kv_pair_dim"]), 2 * x, logits]
    attention = [rows(layers, known["q_dim"] + known["kv_pair_dim"]), rows(layers, known["q_dim"])]
    token = [x, logits, *([] if attends else attention)]
    if grouping == "separate":
        # The host's norm of the last row goes back to the device.
        token.append(2 * x)
    return {"prompt": sum(prompt), "token": sum(token)}
