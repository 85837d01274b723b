"""The machine's rates: `constants.toml` has each with its unit, published range and source.

The rates are those of an NPU2 in its fastest power mode. `doit selftest` measures them; values of its report replace
those of the table.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from llama_npu2.errors import UserError
from llama_npu2.frozen import frozen

_TABLE: Mapping[str, Mapping[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


def _rate(name: str) -> Any:
    return _TABLE[name]["value"]


@frozen
class Machine:
    """Rates of an NPU2 and of its host; the units are in `constants.toml`."""

    clock_ghz: float = _rate("clock_ghz")
    macs_bf16: float = _rate("macs_bf16")
    macs_bf16_generated: float = _rate("macs_bf16_generated")
    macs_bf16_bfp16: float = _rate("macs_bf16_bfp16")
    macs_bf16_x_bfp16: float = _rate("macs_bf16_x_bfp16")
    macs_bfp16: float = _rate("macs_bfp16")
    macs_int8: float = _rate("macs_int8")
    vector_cycles: float = _rate("vector_cycles")
    scheduled_cycles: float = _rate("scheduled_cycles")
    call_cycles: float = _rate("call_cycles")
    stream_gbps: float = _rate("stream_gbps")
    ddr_gbps: float = _rate("ddr_gbps")
    configuration_us: float = _rate("configuration_us")
    configuration_core_us: float = _rate("configuration_core_us")
    configuration_kib_us: float = _rate("configuration_kib_us")
    step_us: float = _rate("step_us")
    submission_us: float = _rate("submission_us")
    host_copy_gbps: float = _rate("host_copy_gbps")
    host_read_gbps: float = _rate("host_read_gbps")
    host_call_us: float = _rate("host_call_us")
    measured: frozenset[str] = frozenset()
    """Fields whose values come from a report."""

    @property
    def hertz(self) -> float:
        return self.clock_ghz * 1e9

    def macs_per_second(self, mode: str) -> float:
        """Return the rate of one core in a mode of `stages.kernels.Cost`."""
        rate: float = getattr(self, f"macs_{mode}")
        return rate * self.hertz

    @staticmethod
    def from_report(path: Path) -> Machine:
        """Return the table with the values under `measured` of a selftest report. Raises UserError."""
        values = _measured(path)
        measured = {name: _number(path, name, values[name]) for name in _TABLE if name in values}
        if not measured:
            names = ", ".join(_TABLE)
            raise UserError(f"measured={path}: measured has none of {names}: give a report of doit selftest")
        return replace(Machine(), **measured, measured=frozenset(measured))


@frozen
class Constant:
    """One row of the table."""

    name: str
    value: float
    low: float
    high: float
    unit: str
    source: str


def constants(machine: Machine) -> list[Constant]:
    """Return the rows of the table with the values of a machine."""
    return [
        Constant(name, getattr(machine, name), low, high, row["unit"], row["source"])
        for name, row in _TABLE.items()
        for low, high in [row["range"]]
    ]


def _measured(path: Path) -> Mapping[str, Any]:
    remedy = "give a report of doit selftest"
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"measured={path}: {error.strerror}: {remedy}") from None
    except (ValueError, RecursionError):
        raise UserError(f"measured={path}: is not JSON: {remedy}") from None
    values = report.get("measured") if isinstance(report, dict) else None
    if not isinstance(values, dict):
        raise UserError(f"measured={path}: has no object called measured: {remedy}")
    return values


def _number(path: Path, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
        raise UserError(f"measured={path}: {name} is {value!r}, not a positive number: remove it or measure again")
    return float(value)
