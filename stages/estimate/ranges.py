"""How far an estimate may be off: what the published ranges of the rates leave open.

A rate that the selftest measured on this machine has no range. Errors of the others are taken as independent of each
other, so that they add up as the root of their squares. That all rates are at their worst at once is far less likely.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from llama_npu2.frozen import frozen
from stages.estimate.constants import Machine, constants


@frozen
class Swing:
    """What one rate does to a time."""

    rate: str
    """A name of `constants.toml`."""
    low: float
    """The shortest time in milliseconds within the rate's range."""
    high: float
    """The longest one."""


@frozen
class Range:
    """An estimated time in milliseconds, and what is likely at least and at most."""

    middle: float
    """With the values of the table."""
    swings: tuple[Swing, ...]
    """The rates that move the time, the one that moves it most first."""

    @property
    def low(self) -> float:
        """The time if all that may be faster is, with independent errors."""
        return max(0.0, self.middle - math.hypot(*(self.middle - swing.low for swing in self.swings)))

    @property
    def high(self) -> float:
        """The time if all that may be slower is, with independent errors."""
        return self.middle + math.hypot(*(swing.high - self.middle for swing in self.swings))


def ranges(times: Callable[[Machine], Mapping[str, float]], machine: Machine) -> dict[str, Range]:
    """Return the range of each of several times.

    Args:
        times: Milliseconds by name, of a machine.
        machine: The rates that the middle is computed with.
    """
    open_rates = [rate for rate in constants(machine) if rate.name not in machine.measured]
    ends = {rate.name: [times(_with(machine, rate.name, end)) for end in (rate.low, rate.high)] for rate in open_rates}
    return {
        name: _range(middle, {rate: [end[name] for end in at] for rate, at in ends.items()})
        for name, middle in times(machine).items()
    }


def _with(machine: Machine, rate: str, value: float) -> Machine:
    changed: dict[str, Any] = {rate: value}
    return replace(machine, **changed)


def _range(middle: float, ends: Mapping[str, list[float]]) -> Range:
    swings = [Swing(rate, min(middle, *at), max(middle, *at)) for rate, at in ends.items()]
    moving = (swing for swing in swings if swing.high > swing.low)
    return Range(middle, tuple(sorted(moving, key=lambda swing: swing.low - swing.high)))


def per_second(low: float, high: float, count: int = 1) -> str:
    """Return as a range how many come a second if each `count` take from `low` to `high` milliseconds."""
    return between(1e3 * count / high, 1e3 * count / low)


def between(low: float, high: float) -> str:
    """Return two numbers as people read a range, in three digits: `17.1-31.7`, `754-1060`."""
    return "-".join(f"{float(f'{end:.3g}'):g}" for end in (low, high))
