"""The machine's rates in one table, each with its unit, published range and source.

The rates are those of an NPU2 in its fastest power mode. `doit selftest` measures them; values of its report replace
those of the table.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from llama_npu2.errors import UserError


def _rate(value: float, low: float, high: float, unit: str, source: str) -> Any:
    return field(default=value, metadata={"range": (low, high), "unit": unit, "source": source})


_REGISTRY = "mlir-air e972f2942, programming_examples/kernel_registry"
_EXAMPLE = "mlir-air 4216fa496, programming_examples/llama32_1b"


@dataclass(frozen=True)
class Machine:
    """Rates of an NPU2 and of its host."""

    clock_ghz: float = _rate(
        1.8,
        1.57,
        1.8,
        "GHz",
        "xdna-driver npu4_regs.c: H clock of the highest level; 1.57 as mlir-air's fused_decode ran",
    )
    macs_bf16: float = _rate(
        24,
        18,
        27,
        "MAC/cycle/core",
        "mmul of bf16 by element-wise products and shuffles, at most 32: 2.8 TFLOP/s on 32 cores (arXiv 2512.13282)",
    )
    macs_bf16_generated: float = _rate(
        54,
        49,
        58,
        "MAC/cycle/core",
        "bf16 through bfp16, loops generated from linalg: per K step of the direct path, of bf16 and of f32 results "
        f"({_REGISTRY}/details/GEMM_bf16_in_*.md); 58: {_EXAMPLE}, o_ffn without its element-wise launches",
    )
    macs_bf16_bfp16: float = _rate(
        86,
        75,
        128,
        "MAC/cycle/core",
        f"bf16 through bfp16, written with mmul, 2x2 blocks in registers: {_REGISTRY}, external path, 2048x8192x2048 "
        "against 2048x2048x2048; 128: 14.7 TFLOP/s (arXiv 2512.13282)",
    )
    macs_bf16_x_bfp16: float = _rate(
        221, 208, 234, "MAC/cycle/core", "weights in bfp16, activations converted: 24-27 TFLOP/s (mlir-aie, bfp16 GEMM)"
    )
    macs_bfp16: float = _rate(300, 274, 330, "MAC/cycle/core", "31.6-38 TFLOP/s (mlir-aie; arXiv 2511.16041)")
    macs_int8: float = _rate(410, 330, 495, "MAC/cycle/core", "38-57 TOPS (mlir-aie; arXiv 2512.13282)")
    vector_cycles: float = _rate(
        2.5,
        2.0,
        3.2,
        "cycle",
        "of a vector operation in a loop that is not software-pipelined (`stages.kernels.Cost` says what one is): add, "
        f"rms_norm, rope, silu_and_mul of {_REGISTRY}, time less its 80 us over operations of their sources",
    )
    scheduled_cycles: float = _rate(
        1.4,
        1.0,
        2.5,
        "cycle",
        "of one in a product with weights in groups: 140 bundles for 512 weights of 4 bits (mlir-air, fused_decode), "
        "whose source has 100 of them",
    )
    call_cycles: float = _rate(
        45, 30, 100, "cycle", f"of a tile function's call and its locks: {_REGISTRY}, rope, rows of 64 against 128"
    )
    stream_gbps: float = _rate(
        9.5,
        7.0,
        10.3,
        "GB/s",
        "of a stream between DDR, a memory tile and a core: 7.2 = 4 bytes at 1.8 GHz; 8.9 = 35.7 GB/s over four "
        f"columns (mlir-air, fused_decode); 10.3: {_EXAMPLE}, lm_head_gemv, if it fills L2 and then drains it",
    )
    ddr_gbps: float = _rate(
        60, 55, 70, "GB/s", f"58 read (mlir-air, fused_decode), 55 (IRON, GEMV), 70 (eltwise_add of {_REGISTRY})"
    )
    configuration_us: float = _rate(
        35,
        30,
        160,
        "us",
        "of configuring the array for a launch, without its cores: 39 in all (IRON), 80-190 (iree-amd-aie), 160 "
        "(mlir-air #1631, five launches fewer)",
    )
    configuration_core_us: float = _rate(
        6,
        0,
        10,
        "us",
        "of loading one core: 350 us in all with 32 cores (mlir-air #1334), 280 without programs (#1694)",
    )
    step_us: float = _rate(
        20,
        15,
        25,
        "us",
        "of a launch step that is awaited before the next is issued: a wave of mlir-air's fused_decode",
    )
    submission_us: float = _rate(
        80, 44, 100, "us", f"44-50 (IRON), 80 = least time of any kernel of {_REGISTRY}, 100 ({_EXAMPLE})"
    )
    host_copy_gbps: float = _rate(
        15, 15, 20, "GB/s", f"into a buffer object, by one thread: {_EXAMPLE}, docs/profile.md: 44 MB a layer in 2.9 ms"
    )
    host_read_gbps: float = _rate(40, 40, 80, "GB/s", "of the host's programs: two Zen 5 cores, 42-79")
    host_call_us: float = _rate(50, 20, 60, "us", f"of a host program's call: {_EXAMPLE}, 0.05 ms a layer and token")
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
        names = [constant.name for constant in constants(Machine())]
        measured = {name: _number(path, name, values[name]) for name in names if name in values}
        if not measured:
            raise UserError(f"measured={path}: measured has none of {', '.join(names)}: give a report of doit selftest")
        return replace(Machine(), **measured, measured=frozenset(measured))


@dataclass(frozen=True)
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
    rated = [(field.name, field.metadata) for field in fields(Machine) if field.metadata]
    return [
        Constant(name, getattr(machine, name), low, high, about["unit"], about["source"])
        for name, about in rated
        for low, high in [about["range"]]
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
