"""Other projects' plans for the same array, priced like ours, to compare the estimate with their measurements.

The plans are read from the sources: tile sizes, herds, double buffers, and the multiply mode from the build flags.
Plans and measurements are in `systems.toml`, the kinds of launches here. The constants are fitted to `FITTED` within
their published ranges; everything else is predicted.

mlir-air (https://github.com/Xilinx/mlir-air, MIT licence): its Llama-3.2-1B example as of 4216fa496 (May 2026;
docs/profile.md for the times), later builds by commit, single kernels from programming_examples/kernel_registry of
e972f2942 (June 2026, turbo). Its GEMM multiplies bf16 through bfp16, whether its loops are generated from linalg
(`direct_codegen`: matrix unit operations of aievec) or written (`mm_aie2p.cc`, compiled with
AIE_API_EMULATE_BFLOAT16_MMUL_WITH_BFP16); so does its attention. Fused decode: programming_examples/fused_decode.
FastFlowLM's figures are of its version 0.9.30 on Krackan.

Not predicted, because their plans are not known: IRON's prompt (2.74 s) and token (370 ms), prompts of FastFlowLM and
of the 4-bit builds.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from llama_npu2.frozen import frozen
from stages.air.limits import COLUMNS, ROWS
from stages.estimate.constants import Machine
from stages.estimate.flow import call_work
from stages.estimate.work import (
    CONFIGURATION,
    CYCLES,
    DDR,
    HOST,
    HOST_COPY,
    STEP,
    STREAM,
    SUBMISSION,
    Amount,
    Overlap,
    Repeat,
    Serial,
    Work,
    spend,
)
from stages.kernels import BF16, F32, Cost

Launch = tuple[int, float, Work]
"""(cores that it loads, bytes to and from DDR, work)."""

GENERATED, WRITTEN = "bf16_generated", "bf16_bfp16"
"""Multiply modes of mlir-air's GEMM."""


@frozen
class Row:
    """A measurement and the plan that was measured."""

    what: str
    measured: float
    """Milliseconds."""
    work: Work
    note: str = ""
    """Why model and measurement differ."""

    def model(self, machine: Machine) -> float:
        """Return the estimated milliseconds."""
        return spend(self.work, machine).milliseconds

    def error(self, machine: Machine) -> float:
        """Return the error of the model relative to the measurement."""
        return self.model(machine) / self.measured - 1


# Launches. Each is configured on its own if a program has several, and not if it is the only one.


def _launch(cores: int, moved: float, body: Work) -> Work:
    return Serial(Amount(CONFIGURATION, cores), _alone(moved, body))


def _alone(moved: float, body: Work) -> Work:
    return Overlap(Amount(DDR, moved), body)


def _gemm(m: int, k: int, n: int, tile: tuple[int, int, int, int], mode: str, out: int = BF16) -> Launch:
    """Return a product on a herd of 8x4; finished tiles leave before the next ones begin.

    `tile`: rows, columns of x in L2, columns of x in L1, output columns.
    """
    tm, k2, k1, tn = tile
    grid = m // (tm * COLUMNS) * (n // (tn * ROWS))
    multiply = Overlap(call_work(Cost(tm * tn * k1, mode)), Amount(STREAM, BF16 * max(tm, tn) * k1))
    fill = Amount(STREAM, BF16 * max(tm, tn) * k2)
    drain = Serial(Amount(STREAM, out * tm * tn), Amount(STREAM, out * tm * tn * ROWS))
    moved = BF16 * (m * k * (n // (tn * ROWS)) + k * n * (m // (tm * COLUMNS))) + out * m * n
    step = Serial(Repeat(k // k2, Overlap(fill, Repeat(k2 // k1, multiply))), drain)
    return COLUMNS * ROWS, moved, Repeat(grid, step)


def _gemv(m: int, k: int, tile_m: int, rows: int = 0, ping_pong: bool = False) -> Launch:
    """Return a product with a vector, `tile_m` rows on each of 8 cores per launch step.

    L2 fills, then drains `rows` (all of them if it is 0) at a time, next to all of x.

    For 64 products a core loads four times and multiplies once; 14 operations add up a row.
    """
    rows = rows or tile_m
    call = call_work(Cost(vectors=rows * (k // 64 * 5 + 14)))
    fetch = Amount(STREAM, BF16 * rows * k)
    drain = Repeat(tile_m // rows, Overlap(fetch, call) if ping_pong else Serial(fetch, call))
    steps = m // (tile_m * COLUMNS)
    return COLUMNS, BF16 * m * k + BF16 * k * steps, Repeat(steps, Serial(Amount(STREAM, BF16 * tile_m * k), drain))


def _elementwise(calls: int, cost: Cost, reads: int, writes: int, values: int, cores: int = COLUMNS) -> Launch:
    """Return `calls` of `values` on each core, with `reads` and `writes` streams."""
    call = Overlap(call_work(cost), Amount(STREAM, BF16 * values))
    return cores, BF16 * (reads + writes) * cores * calls * values, Repeat(calls, call)


# Vector operations of its sources, per vector of 16 lanes: see `stages.kernels.Cost`.
_ADD, _SILU, _NORM = 7, 18, 18


def _add(n: int, chunk: int = 2048) -> Launch:
    return _elementwise(n // COLUMNS // chunk, Cost(vectors=chunk // 16 * _ADD), 2, 1, chunk)


def _silu(n: int, chunk: int = 4096) -> Launch:
    return _elementwise(n // COLUMNS // chunk, Cost(vectors=chunk // 16 * _SILU), 2, 1, chunk)


def _norm(rows: int, cols: int, cores: int = COLUMNS) -> Launch:
    return _elementwise(rows // cores, Cost(vectors=cols // 16 * _NORM + 14), 1, 1, cols, cores)


def _rope(rows: int, head_dim: int, cores: int = COLUMNS) -> Launch:
    """Return rotary embedding, a row of a head at a time with its row of the table."""
    return _elementwise(rows // cores, Cost(vectors=head_dim // 32 * 14), 2, 1, head_dim, cores)


def _cast(n: int) -> Launch:
    """Return the conversion f32 -> bf16 that the written GEMM's result needs: loads, conversion, store."""
    cores, _, body = _elementwise(n // COLUMNS // 2048, Cost(vectors=2048 // 16 * 4), 2, 1, 2048)
    return cores, (F32 + BF16) * n, body


_TILE = 64
"""Queries, keys and head size of a core's step of attention."""


def _attention(rows: int, heads: int) -> Launch:
    """Return attention: four cores of a column share a query tile, and then they merge.

    Each has a quarter of the keys, masked ones included.

    Launch steps are awaited one by one (`runtime_loop_tiling_sizes=[1, 1]`). Vector operations on 32 lanes: masking
    half 1, clearing 1, maxima 2, exponentials 12, sums 2, rescaling 4; 22 per query for what runs across lanes.
    """
    tile, blocks, group = BF16 * _TILE * _TILE, _TILE * _TILE // 32, 4 * _TILE
    softmax = Cost(2 * _TILE**3, WRITTEN, blocks * 22 + _TILE * 22)
    merge = Cost(vectors=blocks * 15 + _TILE * 6)
    relayed = Serial(Amount(STREAM, tile), Amount(STREAM, tile))
    chunk = Overlap(call_work(softmax), relayed)
    chunks = rows // (ROWS * _TILE)
    out = Serial(Amount(STREAM, tile), Amount(STREAM, group * _TILE * BF16))
    capture = Serial(Repeat(4, relayed), call_work(Cost(vectors=2 * blocks)))
    step = Serial(capture, Repeat(chunks, chunk), Repeat(ROWS - 1, call_work(merge)), out, Amount(STEP, 1))
    steps = rows // group * (heads // 2)
    moved = steps * 2 * (ROWS * group + 2 * chunks * ROWS * _TILE + group) * _TILE * BF16
    return COLUMNS * ROWS, moved, Repeat(steps, step)


def _direct(weights: float) -> Launch:
    """Return a product on two cores of each column, with one double-buffered stream per column straight to a core."""
    return 2 * COLUMNS, weights, Amount(STREAM, weights / COLUMNS)


def _decode(values: float, layers: int, width: int, depth: int, streams: int = COLUMNS) -> Work:
    """Return a token in one submission: a wave per layer and for each of 7 chunks of the vocabulary.

    Weights have 5 bits; 16 cores unpack 3.7 weights per cycle each.

    `values`: weights that a token reads, all but an embedding that is not tied. `width`: values of K (or V) per
    position and layer.
    """
    moved = values * 5 / 8 + 2 * BF16 * layers * width * depth
    body = Overlap(Amount(STREAM, moved / streams), Amount(CYCLES, values / 16 / 3.7))
    return Serial(Amount(SUBMISSION, 1), Amount(STEP, layers + 7), _alone(moved, body))


_LAUNCHES: Mapping[str, Callable[..., Launch]] = {
    **{"gemm generated": partial(_gemm, mode=GENERATED), "gemm written": partial(_gemm, mode=WRITTEN, out=F32)},
    **{"gemv": _gemv, "direct gemv": _direct, "add": _add, "silu_and_mul": _silu, "cast": _cast},
    **{"rms_norm": _norm, "rope": _rope, "attention": _attention},
}
"""The launches by the names that `systems.toml` uses."""


def _work(row: Mapping[str, Any]) -> Work:
    """Return the work of a row of `systems.toml`."""
    arguments = row.get("arguments", ())
    match _DATA["plans"].get(row["plan"], row):
        case {"launches": launches} as plan:
            parts = (_launch(*_LAUNCHES[name](*numbers)) for name, *numbers in launches)
            return Serial(Amount(SUBMISSION, 1), Amount(HOST_COPY, plan.get("copied", 0)), *parts)
        case {"layers": layers, "programs": programs, "after": after, "host": milliseconds}:
            layer, last = (Serial(*(_work({"plan": name}) for name in names)) for names in (programs, after))
            return Serial(Repeat(layers, layer), last, Amount(HOST, milliseconds / 1e3))
        case {"values": values, "layers": layers, "width": width}:
            return _decode(values, layers, width, *arguments)
        case {"moved": moved}:
            return _alone(moved, Amount(STREAM, moved / COLUMNS))
    _, moved, body = _LAUNCHES[row["plan"]](*arguments)
    return Serial(Amount(SUBMISSION, 1), _alone(moved, body))


def _milliseconds(row: Mapping[str, Any]) -> float:
    """Return the time that a row of `systems.toml` states: as a time, or as a rate of its plan's arguments."""
    match row:
        case {"ms": ms}:
            return float(ms)
        case {"us": us}:
            return float(us / 1e3)
        case {"per_second": rate}:
            return float(1e3 / rate)
        case {"gflops": rate, "arguments": [m, k, n, _]}:
            return float(2e-6 * m * k * n / rate)
        case {"gbps": rate, "moved": moved}:
            return float(moved / (rate * 1e6))
    raise ValueError(f"{row['what']}: states no measurement")


_DATA = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())

FITTED, KERNELS, PREDICTED = (
    tuple(Row(row["what"], _milliseconds(row), _work(row), row.get("note", "")) for row in _DATA[table])
    for table in ("fitted", "kernels", "predicted")
)
"""The measurements that the constants are fitted to; those of single kernels; other programs, prompts and tokens."""
