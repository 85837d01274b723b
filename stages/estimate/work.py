"""What is to be done, and how long it takes: amounts, one after another, at the same time, again and again.

An amount is of something that the machine has a rate for, its *limit*. What runs at the same time takes as long as its
longest part, and is limited by what limits that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from stages.estimate.constants import Machine

# What amounts are of. The first word is the limit that people are told.
MULTIPLY = "multiply"
"""Multiply-accumulates of a core's matrix unit; a mode follows."""
ELEMENTWISE, SCHEDULED, CALL, CYCLES = "elementwise", "elementwise scheduled", "call", "cycles"
"""Of a core: vector operations, those that overlap, calls of tile functions, cycles."""
STREAM, DDR = "stream", "DDR"
"""Bytes."""
CONFIGURATION, STEP, SUBMISSION = "configuration", "step", "submission"
"""Cores loaded for a launch; launch steps awaited; commands."""
HOST, HOST_COPY, HOST_READ, HOST_CALL = "host", "host copy", "host read", "host call"
"""Seconds; bytes into buffer objects; bytes that host programs stream; their calls."""

_SECONDS: Mapping[str, Callable[[float, Machine], float]] = {
    ELEMENTWISE: lambda n, machine: n * machine.vector_cycles / machine.hertz,
    SCHEDULED: lambda n, machine: n * machine.scheduled_cycles / machine.hertz,
    CALL: lambda n, machine: n * machine.call_cycles / machine.hertz,
    CYCLES: lambda n, machine: n / machine.hertz,
    STREAM: lambda n, machine: n / machine.stream_gbps / 1e9,
    DDR: lambda n, machine: n / machine.ddr_gbps / 1e9,
    CONFIGURATION: lambda n, machine: (machine.configuration_us + n * machine.configuration_core_us) / 1e6,
    STEP: lambda n, machine: n * machine.step_us / 1e6,
    SUBMISSION: lambda n, machine: n * machine.submission_us / 1e6,
    HOST: lambda n, machine: n,
    HOST_COPY: lambda n, machine: n / machine.host_copy_gbps / 1e9,
    HOST_READ: lambda n, machine: n / machine.host_read_gbps / 1e9,
    HOST_CALL: lambda n, machine: n * machine.host_call_us / 1e6,
}


@dataclass(frozen=True)
class Amount:
    """So much of what the machine has a rate for."""

    kind: str
    amount: float

    @property
    def limit(self) -> str:
        return self.kind.partition(" ")[0]

    def seconds(self, machine: Machine) -> float:
        if self.limit == MULTIPLY:
            return self.amount / machine.macs_per_second(self.kind.removeprefix(f"{MULTIPLY} "))
        return _SECONDS[self.kind](self.amount, machine)


def multiply(macs: float, mode: str) -> Amount:
    """`mode`: as in `stages.kernels.Cost`."""
    return Amount(f"{MULTIPLY} {mode}", macs)


class Group:
    """Parts of work."""

    def __init__(self, *parts: Work) -> None:
        self.parts = parts


class Serial(Group):
    """One part after another."""


class Overlap(Group):
    """All parts at the same time."""


@dataclass(frozen=True)
class Repeat:
    """The same again, `times` times (a share of a time too)."""

    times: float
    work: Work


Work = Amount | Serial | Overlap | Repeat

NOTHING = Serial()


@dataclass(frozen=True)
class Time:
    """Seconds by the limit that sets them."""

    by: Mapping[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return sum(self.by.values())

    @property
    def milliseconds(self) -> float:
        return 1e3 * self.seconds

    @property
    def limit(self) -> str:
        """What sets most of it; nothing where there is no work."""
        return max(self.by, key=lambda limit: self.by[limit], default="")

    def __add__(self, other: Time) -> Time:
        return Time(Counter(self.by) + Counter(other.by))

    def __mul__(self, times: float) -> Time:
        return Time({limit: seconds * times for limit, seconds in self.by.items()})


def spend(work: Work, machine: Machine) -> Time:
    """How long work takes."""
    match work:
        case Amount():
            return Time({work.limit: work.seconds(machine)})
        case Repeat():
            return spend(work.work, machine) * work.times
        case Overlap():
            return max((spend(part, machine) for part in work.parts), key=lambda time: time.seconds, default=Time())
        case Serial():
            return sum((spend(part, machine) for part in work.parts), Time())
