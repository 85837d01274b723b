"""The figures of `doit estimate` for JSON (`estimate.json`), from which its page is made.

Times are in milliseconds, memory and traffic in bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama_npu2 import load
from llama_npu2.devices.sim import Counters
from stages import air
from stages.estimate.constants import Machine, constants
from stages.estimate.price import Priced
from stages.estimate.ranges import Range
from stages.estimate.work import Time, summed
from stages.proof.selftest.measure import RATES_OF_TABLE
from stages.reports.estimated import Estimate, Moment, Sizes, Turns, total
from stages.targets.npu2.modules import Module

if TYPE_CHECKING:
    from stages.air.occupancy import Segment, Use


def figures(
    model: str, estimates: Mapping[str, Estimate], grouping: str, turns: Sequence[Turns] = ()
) -> dict[str, Any]:
    """Return the times of all groupings, and the details of one: its phases, and the launches of its programs.

    Phases are a token after `depth` positions, several tokens at once, prompts that fill a bucket, and last chunks of
    longer prompts.
    `turns`: what several sequences get at a time.
    """
    estimate = estimates[grouping]
    moved, weights = estimate.traffic()
    return {
        "model": model,
        "weights": estimate.policy.text,
        "grouping": grouping,
        "depth": estimate.depth,
        "token_bytes": {"moved": moved, "weights": weights},
        "groupings": {name: one.times() for name, one in estimates.items()},
        "phases": {phase: _phase(sizes, list(estimate.moments(sizes))) for phase, sizes in estimate.phases()},
        "ranges": {phase: _range(found) for phase, found in estimate.ranges.items()},
        "streams": [asdict(each) for each in turns],
        "programs": {name: _program(rows) for name, rows in estimate.rows.items()},
        "rates": list(_rates(estimate.machine)),
    }


def _phase(sizes: Sizes, moments: list[Moment]) -> dict[str, Any]:
    """Describe a phase by its moments, which follow one another."""
    described = [{"side": m.side, "program": m.program, "what": m.what, **_time(m.time)} for m in moments]
    time = _time(summed(moment.time for moment in moments))
    return {**time, "of_prompt": sizes.of_prompt, "moments": described}


def _range(found: Range) -> dict[str, Any]:
    """Describe how far a time may be off, with the rates that leave most of it open first."""
    rates = [asdict(swing) | {"measured_by_selftest": swing.rate in RATES_OF_TABLE} for swing in found.swings]
    return {"low": found.low, "middle": found.middle, "high": found.high, "rates": rates}


def _time(time: Time) -> dict[str, Any]:
    return {"milliseconds": time.milliseconds, "limits": {limit: 1e3 * spent for limit, spent in time.by.items()}}


def _program(rows: list[Priced]) -> dict[str, Any]:
    return {**_time(total(rows)), "launches": [_launch(row) for row in rows]}


def _launch(row: Priced) -> dict[str, Any]:
    """Describe a launch. One that occupies the array several times describes its first segment."""
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
        "slots": {slot: ways for slot, ways in moved.items() if any(ways)},
        "herds": [herd.shape() for herd in segment.herds],
        "limits_taken": _fullest(segment),
        "buffers": [asdict(buffer) for buffer in segment.buffers()],
        "tiles": [list(asdict(tile).values()) for tile in tiles(segment)],
    }


def _fullest(segment: Segment) -> list[dict[str, Any]]:
    """Return, for each limit, the place that uses the most of it."""
    fullest: dict[str, Use] = {}
    for use in segment.uses():
        most = fullest.setdefault(use.limit, use)
        if use.used * most.available > most.used * use.available:
            fullest[use.limit] = use
    return [asdict(use) for use in fullest.values()]


def _rates(machine: Machine) -> Iterator[dict[str, Any]]:
    for rate in constants(machine):
        source = "measured by the selftest" if rate.name in machine.measured else rate.source
        yield {**asdict(rate), "source": source}


def counted(directory: Path, estimate: Estimate) -> dict[str, Any]:
    """Run a prompt that fills the smallest bucket and a token on `npu2-sim`, and return what it counted.

    Counts are for one call of each program, by launch, next to what the estimate reads from the same operations.
    `estimate` is that of the artifacts' model, grouping and policy. Raises UserError if the artifacts do not load.
    """
    llm = load(directory)
    rows = min(llm.buckets[0], llm.context_length - 1)
    llm.prefill([0] * rows)
    llm.decode(0)
    run = {name: counters for name, counters in llm.device.counters().items() if counters.submissions}
    llm.close()
    modules = replace(estimate, depth=rows, buckets=llm.buckets[:1]).modules
    return {
        "prompt": rows,
        "programs": {name: list(_compared(modules[name], counters)) for name, counters in run.items()},
    }


def _compared(module: Module, counters: Counters) -> Iterator[dict[str, Any]]:
    """Yield counts of each launch, with [read, written] of each slot (argument)."""
    runs = counters.submissions
    counts = zip(counters.calls, counters.macs, counters.slots, strict=True)
    for traffic, (calls, macs, slots) in zip(air.count(module.air), counts, strict=True):
        moved = {slot: [traffic.read[slot], traffic.written[slot]] for slot in traffic.slots}
        yield {
            "launch": traffic.name,
            "macs": macs // runs,
            "calls": {"estimated": traffic.calls, "counted": calls // runs},
            "slots": {
                slot: {"estimated": ways, "counted": [n // runs for n in slots.get(slot, (0, 0))]}
                for slot, ways in moved.items()
                if any(ways) or slot in slots
            },
        }
