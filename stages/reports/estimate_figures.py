"""What `doit estimate` finds, as JSON: `estimate.json`, of which its page is made. Times are in milliseconds, memory
and traffic in bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama_npu2 import load
from llama_npu2.devices.sim import Counters
from stages import air
from stages.estimate.constants import Machine, constants
from stages.estimate.price import Priced
from stages.estimate.work import Time
from stages.reports.estimated import Estimate, Moment, total
from stages.targets.npu2.modules import Module

if TYPE_CHECKING:
    from stages.air.occupancy import Segment, Use

TOKEN = "token"


def figures(model: str, estimates: Mapping[str, Estimate], grouping: str) -> dict[str, Any]:
    """Of all groupings the times, of one what happens in each phase (a token behind `depth` positions, prompts that
    fill a bucket, and what fills one behind others) and what each program's launches take."""
    estimate = estimates[grouping]
    moved, weights = estimate.traffic()
    return {
        "model": model,
        "weights": estimate.policy.text,
        "grouping": grouping,
        "depth": estimate.depth,
        "token_bytes": {"moved": moved, "weights": weights},
        "groupings": {
            name: {phase: sum(moment.time.milliseconds for moment in moments) for phase, moments in _phases(each)}
            for name, each in estimates.items()
        },
        "phases": {phase: _phase(moments) for phase, moments in _phases(estimate)},
        "programs": {name: _program(rows) for name, rows in estimate.rows.items()},
        "rates": list(_rates(estimate.machine)),
    }


def _phases(estimate: Estimate) -> Iterator[tuple[str, list[Moment]]]:
    yield TOKEN, list(estimate.moments())
    yield from ((what, list(estimate.moments(bucket, window=window))) for what, bucket, window in estimate.prompts())


def _phase(moments: list[Moment]) -> dict[str, Any]:
    """`moments`: one after another."""
    said = [{"side": m.side, "program": m.program, "what": m.what, **_time(m.time)} for m in moments]
    return {**_time(sum((moment.time for moment in moments), Time())), "moments": said}


def _time(time: Time) -> dict[str, Any]:
    return {"milliseconds": time.milliseconds, "limits": {limit: 1e3 * spent for limit, spent in time.by.items()}}


def _program(rows: list[Priced]) -> dict[str, Any]:
    return {**_time(total(rows)), "launches": [_launch(row) for row in rows]}


def _launch(row: Priced) -> dict[str, Any]:
    """A launch that takes several of the array says of the first what that takes of it."""
    from stages.air.analysis import segment_of
    from stages.air.occupancy import Segment
    from stages.air.placement import tiles

    traffic = row.traffic
    segment = Segment(segment_of(row.launch), row.name)
    moved = {slot: [traffic.read[slot], traffic.written[slot]] for slot in traffic.slots}
    return {
        "kernel": row.name,
        "tiling": row.tiling,
        "launches": row.launches,
        **_time(row.time),
        "macs": row.macs,
        "slots": {slot: each for slot, each in moved.items() if any(each)},
        "herds": [herd.shape() for herd in segment.herds],
        "limits_taken": _fullest(segment),
        "buffers": [asdict(buffer) for buffer in segment.buffers()],
        "tiles": [list(asdict(tile).values()) for tile in tiles(segment)],
    }


def _fullest(segment: Segment) -> list[dict[str, Any]]:
    """Of each limit the place where the most is taken of it."""
    fullest: dict[str, Use] = {}
    for use in segment.uses():
        known = fullest.setdefault(use.limit, use)
        if use.used * known.available > known.used * use.available:
            fullest[use.limit] = use
    return [asdict(use) for use in fullest.values()]


def _rates(machine: Machine) -> Iterator[dict[str, Any]]:
    for each in constants(machine):
        source = "measured by the selftest" if each.name in machine.measured else each.source
        yield {**asdict(each), "source": source}


def counted(directory: Path, estimate: Estimate) -> dict[str, Any]:
    """What `npu2-sim` counted of a prompt that fills the smallest bucket and of the token behind it, per call of each
    program and by launch, beside what the estimate reads from the same operations.

    `estimate`: of the artifacts' model, grouping and policy. Raises UserError where they do not load.
    """
    llm = load(directory)
    rows = min(llm.buckets[0], llm.context_length - 1)
    llm.prefill([0] * rows)
    llm.decode(0)
    run = {name: counters for name, counters in llm.device.counters().items() if counters.submissions}
    llm.close()
    modules = estimate.at(rows, llm.buckets[:1]).modules
    return {
        "prompt": rows,
        "programs": {name: list(_compared(modules[name], counters)) for name, counters in run.items()},
    }


def _compared(module: Module, counters: Counters) -> Iterator[dict[str, Any]]:
    """By launch of the array; [read, written] of each slot."""
    runs = counters.submissions
    counts = zip(counters.calls, counters.macs, counters.slots, strict=True)
    for traffic, (calls, macs, slots) in zip(air.count(module.air), counts, strict=True):
        moved = {slot: [traffic.read[slot], traffic.written[slot]] for slot in traffic.slots}
        yield {
            "launch": traffic.name,
            "macs": macs // runs,
            "calls": {"estimated": traffic.calls, "counted": calls // runs},
            "slots": {
                slot: {"estimated": each, "counted": [n // runs for n in slots.get(slot, (0, 0))]}
                for slot, each in moved.items()
                if any(each) or slot in slots
            },
        }
