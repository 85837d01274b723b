"""Estimates the time of a plan's phases: device programs, submissions, host programs between them, copies.

The times go into the manifest, so that the runtime can choose between phases.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from llama_npu2.artifact.plan import Phase, PlannedCall, Plans, Spec, furthest, slot_bytes
from llama_npu2.devices.xrt.limits import CHAIN, COMMAND
from stages.estimate.constants import Machine
from stages.estimate.work import HOST_CALL, HOST_COPY, HOST_READ, SUBMISSION, Amount, Serial, Work, spend


def phase_milliseconds(content: Spec, plans: Plans) -> dict[str, float]:
    """Return the milliseconds of each phase of a manifest; nothing if no program has an estimate, as on the CPU.

    A prefill phase is priced with a full bucket at the last position where it may begin, a decode phase with a token at
    the last position of its context bucket.

    `content`: with `model`, `programs` (those of the NPU with `milliseconds`) and `buffers`. `plans`: of the manifest.
    """
    if not any("milliseconds" in program for program in content["programs"].values()):
        return {}
    return {str(phase): _milliseconds(content, phase, calls, Machine()) for phase, calls in plans.items()}


def commands(seconds: Sequence[float]) -> int:
    """Return the number of commands for successive calls: a run list is cut by number and by time."""
    count, runs, spent = 0, CHAIN, 0.0
    for duration in seconds:
        if runs == CHAIN or spent + duration > COMMAND:
            count, runs, spent = count + 1, 0, 0.0
        runs, spent = runs + 1, spent + duration
    return count


def host_work(moved: int, copied: int = 0) -> Work:
    """Return the work of one native call that moves `moved` bytes, `copied` of them into buffers of the device."""
    return Serial(Amount(HOST_CALL, 1), Amount(HOST_READ, moved), Amount(HOST_COPY, copied))


def _milliseconds(content: Spec, phase: Phase, calls: Sequence[PlannedCall], machine: Machine) -> float:
    programs = content["programs"]
    rows, positions = content["buffers"]["tokens"]["shape"][0], content["model"]["max_seq"]
    last = furthest(phase, rows, positions)[0]
    shared = {name for call in calls if not programs[call.program]["host"] for name in call.names}
    total = busy = 0.0
    touched: set[str] = set()
    for host, stretch in groupby(calls, lambda call: bool(programs[call.program]["host"])):
        group = list(stretch)
        names = {name for call in group for name in call.names}
        if host:
            moved = [buffer for call in group for buffer in _touched(programs, call, last)]
            crossing = sum(size for name, size in moved if name in shared)
            spent = spend(host_work(sum(size for _, size in moved), crossing), machine).milliseconds
            # Host calls that share no buffer with the device calls before them run in parallel with these.
            total += spent if names & touched else max(0.0, spent - busy)
        else:
            durations = [programs[call.program]["milliseconds"] for call in group]
            busy, touched = sum(durations), names
            submissions = Amount(SUBMISSION, commands([milliseconds / 1e3 for milliseconds in durations]))
            total += busy + spend(submissions, machine).milliseconds
    return total


def _touched(programs: Spec, call: PlannedCall, sizes_at: tuple[int, int]) -> Iterator[tuple[str, int]]:
    """Yield (buffer, bytes) of a host program's call with a number of rows at a position.

    An embedding counts only the rows that are looked up.
    """
    slots = programs[call.program]["slots"]
    sizes = [slot_bytes(slot, *sizes_at) for slot in slots]
    if "tokens" in call.names:
        output = next(size for slot, size in zip(slots, sizes, strict=True) if slot["role"] == "output")
        sizes = [output if slot["role"] == "weight" else size for slot, size in zip(slots, sizes, strict=True)]
    yield from zip(call.names, sizes, strict=True)
