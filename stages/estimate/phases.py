"""What the phases of a plan take: calls of device programs, submissions, what the host does between them, copies.

Of a manifest's sections, so that whoever reads them can choose between phases.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from llama_npu2.devices.xrt.limits import CHAIN, COMMAND
from llama_npu2.plan import Phase, PlannedCall, Plans, Spec, furthest, slot_bytes
from stages.estimate.constants import Machine
from stages.estimate.work import HOST_CALL, HOST_COPY, HOST_READ, SUBMISSION, Amount, Serial, Work, spend


def phase_milliseconds(content: Spec, plans: Plans, machine: Machine | None = None) -> dict[str, float]:
    """By phase of a manifest: of a prompt that fills it, from the last position on that it may begin at, or of a token
    behind as many as it attends over. Nothing where no program is estimated, as on the CPU.

    `content`: with `model`, `programs` (those of the NPU with `milliseconds`) and `buffers`. `plans`: of the manifest.
    """
    if not any("milliseconds" in program for program in content["programs"].values()):
        return {}
    return {str(phase): _milliseconds(content, phase, calls, machine or Machine()) for phase, calls in plans.items()}


def commands(seconds: Sequence[float]) -> int:
    """How many commands calls that follow one another take: a run list is cut by number and by time."""
    count, runs, spent = 0, CHAIN, 0.0
    for each in seconds:
        if runs == CHAIN or spent + each > COMMAND:
            count, runs, spent = count + 1, 0, 0.0
        runs, spent = runs + 1, spent + each
    return count


def host_work(moved: int, copied: int = 0) -> Work:
    """One native call, which streams so many bytes, some of them into buffers of the device."""
    return Serial(Amount(HOST_CALL, 1), Amount(HOST_READ, moved), Amount(HOST_COPY, copied))


def _milliseconds(content: Spec, phase: Phase, calls: Sequence[PlannedCall], machine: Machine) -> float:
    programs = content["programs"]
    rows, positions = content["buffers"]["tokens"]["shape"][0], content["model"]["max_seq"]
    at = furthest(phase, rows, positions)[0]
    shared = {name for call in calls if not programs[call.program]["host"] for name in call.names}
    total = busy = 0.0
    touched: set[str] = set()
    for host, stretch in groupby(calls, lambda call: bool(programs[call.program]["host"])):
        part = list(stretch)
        names = {name for call in part for name in call.names}
        if host:
            moved = [each for call in part for each in _touched(programs, call, at)]
            crossing = sum(size for name, size in moved if name in shared)
            spent = spend(host_work(sum(size for _, size in moved), crossing), machine).milliseconds
            # What shares no buffer with calls of the device runs beside them.
            total += spent if names & touched else max(0.0, spent - busy)
        else:
            each = [programs[call.program]["milliseconds"] for call in part]
            busy, touched = sum(each), names
            submissions = Amount(SUBMISSION, commands([milliseconds / 1e3 for milliseconds in each]))
            total += busy + spend(submissions, machine).milliseconds
    return total


def _touched(programs: Spec, call: PlannedCall, at: tuple[int, int]) -> Iterator[tuple[str, int]]:
    """Buffers and bytes of a host program's call of so many rows at a position; of an embedding only the rows that are
    looked up."""
    slots = programs[call.program]["slots"]
    sizes = [slot_bytes(slot, *at) for slot in slots]
    if "tokens" in call.names:
        made = next(size for slot, size in zip(slots, sizes, strict=True) if slot["role"] == "output")
        sizes = [made if slot["role"] == "weight" else size for slot, size in zip(slots, sizes, strict=True)]
    yield from zip(call.names, sizes, strict=True)
