"""Work and its time: amounts that follow one another, overlap or repeat.

An amount is in units that the machine has a rate for, its *limit*. Overlapping parts take as long as the longest of
them and have its limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import field

from llama_npu2.frozen import frozen
from stages.estimate.constants import Machine

# Kinds of amounts. The first word is the limit that people are told.
MULTIPLY = "multiply"
"""Multiply-accumulates of a core's matrix unit; the mode follows (`multiply bf16`)."""
ELEMENTWISE, SCHEDULED, CALL, CYCLES = "elementwise", "elementwise scheduled", "call", "cycles"
"""On a core: vector operations, those that are software-pipelined, calls of tile functions, cycles."""
STREAM, DDR = "stream", "DDR"
"""Bytes."""
CONFIGURATION, CODE, STEP, SUBMISSION = "configuration", "configuration code", "step", "submission"
"""Cores loaded for a launch, or the KiB of their code; awaited launch steps; commands."""
HOST, HOST_COPY, HOST_READ, HOST_CALL = "host", "host copy", "host read", "host call"
"""On the host: seconds; bytes copied into buffer objects; bytes that host programs read; their calls."""

_SECONDS: Mapping[str, Callable[[float, Machine], float]] = {
    ELEMENTWISE: lambda n, machine: n * machine.vector_cycles / machine.hertz,
    SCHEDULED: lambda n, machine: n * machine.scheduled_cycles / machine.hertz,
    CALL: lambda n, machine: n * machine.call_cycles / machine.hertz,
    CYCLES: lambda n, machine: n / machine.hertz,
    STREAM: lambda n, machine: n / machine.stream_gbps / 1e9,
    DDR: lambda n, machine: n / machine.ddr_gbps / 1e9,
    CONFIGURATION: lambda n, machine: (machine.configuration_us + n * machine.configuration_core_us) / 1e6,
    CODE: lambda n, machine: (machine.configuration_us + n * machine.configuration_kib_us) / 1e6,
    STEP: lambda n, machine: n * machine.step_us / 1e6,
    SUBMISSION: lambda n, machine: n * machine.submission_us / 1e6,
    HOST: lambda n, machine: n,
    HOST_COPY: lambda n, machine: n / machine.host_copy_gbps / 1e9,
    HOST_READ: lambda n, machine: n / machine.host_read_gbps / 1e9,
    HOST_CALL: lambda n, machine: n * machine.host_call_us / 1e6,
}


@frozen
class Amount:
    """An amount in units that the machine has a rate for."""

    kind: str
    """One of the constants above."""
    amount: float

    @property
    def limit(self) -> str:
        return self.kind.partition(" ")[0]

    def seconds(self, machine: Machine) -> float:
        if self.limit == MULTIPLY:
            return self.amount / machine.macs_per_second(self.kind.removeprefix(f"{MULTIPLY} "))
        return _SECONDS[self.kind](self.amount, machine)


def multiply(macs: float, mode: str) -> Amount:
    """Return multiply-accumulates in a mode of `stages.kernels.Cost`."""
    return Amount(f"{MULTIPLY} {mode}", macs)


class Group:
    """Several parts of work."""

    def __init__(self, *parts: Work) -> None:
        self.parts = parts


class Serial(Group):
    """Parts that run one after another."""


class Overlap(Group):
    """Parts that run at the same time."""


@frozen
class Repeat:
    """Work that is repeated."""

    times: float
    """May be a fraction."""
    work: Work


Work = Amount | Serial | Overlap | Repeat

NOTHING = Serial()


@frozen
class Time:
    """A time, split by what limits it."""

    by: Mapping[str, float] = field(default_factory=dict)
    """Seconds by limit."""

    @property
    def seconds(self) -> float:
        return sum(self.by.values())

    @property
    def milliseconds(self) -> float:
        return 1e3 * self.seconds

    @property
    def limit(self) -> str:
        """The limit with the largest share; empty without work."""
        return max(self.by, key=lambda limit: self.by[limit], default="")

    def __add__(self, other: Time) -> Time:
        return summed((self, other))

    def __mul__(self, times: float) -> Time:
        return Time({limit: seconds * times for limit, seconds in self.by.items()})


def summed(times: Iterable[Time]) -> Time:
    """Return the time of what follows one another."""
    by: dict[str, float] = {}
    for time in times:
        for limit, seconds in time.by.items():
            if seconds > 0:
                by[limit] = by.get(limit, 0.0) + seconds
    return Time(by)


def spend(work: Work, machine: Machine) -> Time:
    """Return how long work takes."""
    match work:
        case Amount():
            return Time({work.limit: work.seconds(machine)})
        case Repeat():
            return spend(work.work, machine) * work.times
        case Overlap():
            return max((spend(part, machine) for part in work.parts), key=lambda time: time.seconds, default=Time())
        case Serial():
            return summed(spend(part, machine) for part in work.parts)
