"""Other projects' plans for the same array, priced like ours, to compare the estimate with their measurements.

Plans are read from their sources: tile sizes, herds, double buffers, and the multiply mode from the build flags. The
measurements are in `systems.toml`. The constants are fitted to `FITTED` within their published ranges; everything else
is predicted.

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
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

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


@dataclass(frozen=True)
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
    return (
        COLUMNS * ROWS,
        moved,
        Repeat(grid, Serial(Repeat(k // k2, Overlap(fill, Repeat(k2 // k1, multiply))), drain)),
    )


def _gemv(m: int, k: int, tile_m: int, rows: int, ping_pong: bool) -> Launch:
    """Return a product with a vector, `tile_m` rows on each of 8 cores per launch step: L2 fills, then drains `rows`
    at a time, next to all of x.

    For 64 products a core loads four times and multiplies once; 14 operations add up a row.
    """
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
    """Return attention: four cores of a column share a query tile, with a quarter of the keys each, masked ones
    included; then they merge.

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


def _program(*launches: Launch, copied: float = 0) -> Work:
    """Return one submission of launches after the host has written `copied` bytes."""
    parts = (_launch(*launch) for launch in launches)
    return Serial(Amount(SUBMISSION, 1), Amount(HOST_COPY, copied), *parts)


def _kernel(launch: Launch) -> Work:
    """Return a launch that is the only one: submitted, not configured again."""
    _, moved, body = launch
    return Serial(Amount(SUBMISSION, 1), _alone(moved, body))


def _host(milliseconds: float) -> Work:
    return Amount(HOST, milliseconds / 1e3)


# Llama-3.2-1B at 2048 rows, as built in May 2026.

_ROWS, _EMB, _FFN, _KV, _HEADS, _LAYERS = 2048, 2048, 8192, 512, 32, 16
_X = BF16 * _ROWS * _EMB
_QKV, _WIDE, _DEEP = (64, 64, 32, 128), (64, 64, 32, 128), (64, 256, 32, 64)
_gemm_may = partial(_gemm, mode=GENERATED)


def _projections(product: Callable[[int], list[Launch]], kv: int = _KV, copied: float = _X) -> Work:
    """Return norm, Q, K, V, and the rotation of Q and K."""
    heads = _HEADS * _ROWS
    ropes = _rope(heads, 64), _rope(heads * kv // _EMB, 64)
    return _program(_norm(_ROWS, _EMB), *product(_EMB), *product(kv), *product(kv), *ropes, copied=copied)


def _feed_forward(wo: list[Launch], wide: list[Launch], down: list[Launch]) -> Work:
    n, norm = _ROWS * _EMB, _norm(_ROWS, _EMB)
    launches = [*wo, _add(n), norm, *wide, *wide, _silu(_ROWS * _FFN), *down, _add(n)]
    return _program(*launches, copied=2 * _X)


_rms_gemms_rope = _projections(lambda n: [_gemm_may(_ROWS, _EMB, n, _QKV)])
_o_ffn = _feed_forward(
    [_gemm_may(_ROWS, _EMB, _EMB, _DEEP)], [_gemm_may(_ROWS, _EMB, _FFN, _WIDE)], [_gemm_may(_ROWS, _FFN, _EMB, _DEEP)]
)
_flash_attn = _program(_attention(_ROWS, _HEADS), copied=_X + 2 * BF16 * _ROWS * _KV + _X)

_row = partial(_norm, 1, _EMB, 1)
_rms_gemv_rope = _program(
    _row(), *(_gemv(n, _EMB, 8, 4, True) for n in (_EMB, _KV, _KV)), _rope(_HEADS, 64, 1), _rope(8, 64, 1)
)
_o_gemv_ffn = _program(
    _gemv(_EMB, _EMB, 8, 4, False),
    _add(_EMB, _EMB // COLUMNS),
    _row(),
    _gemv(_FFN, _EMB, 8, 4, False),
    _gemv(_FFN, _EMB, 8, 4, False),
    _silu(_FFN, _FFN // COLUMNS),
    _gemv(_EMB, _FFN, 2, 1, False),
    _add(_EMB, _EMB // COLUMNS),
)
_lm_head_gemv = _program(*[_gemv(16384, _EMB, 8, 4, True)] * 8)

_PROMPT_HOST = _host(5.8 + 3.1 + _LAYERS * (1.1 + 6.9))
"""Embedding, last norm, and per layer the copy into the cache and Python, as its profile states them."""
_TOKEN_HOST = _host(0.07 + _LAYERS * (0.28 + 0.05))
"""Last norm, and per layer attention in numpy and Python."""


def _prompt(qkv: Work, attention: Work, ffn: Work) -> Work:
    return Serial(Repeat(_LAYERS, Serial(qkv, attention, ffn)), _lm_head_gemv, _PROMPT_HOST)


def _token(qkv: Work, ffn: Work) -> Work:
    return Serial(Repeat(_LAYERS, Serial(qkv, ffn)), _lm_head_gemv, _TOKEN_HOST)


# Later builds.


def _written(k: int, n: int) -> list[Launch]:
    """Return the written GEMM with f32 results, and their conversion."""
    return [_gemm(_ROWS, k, n, (64, 256, 32, 128), WRITTEN, F32), _cast(_ROWS * n)]


_written_ffn = _feed_forward(_written(_EMB, _EMB), _written(_EMB, _FFN), _written(_FFN, _EMB))
_written_qkv = _projections(lambda n: _written(_EMB, n))


def _direct_gemv(weights: float) -> Launch:
    """Return a product on two cores of each column, with one double-buffered stream per column straight to a core."""
    return 2 * COLUMNS, weights, Amount(STREAM, weights / COLUMNS)


_ffn_3 = _program(*(_direct_gemv(BF16 * n) for n in (_EMB * _EMB, 2 * _EMB * _FFN, _EMB * _FFN)))


@dataclass(frozen=True)
class _Decoder:
    """A model that decodes in one submission."""

    values: float
    """Weights that a token reads: all but an embedding that is not tied."""
    layers: int
    width: int
    """Values of K (or V) per position and layer."""
    chunks: int = 7
    """Waves for the vocabulary."""

    def token(self, depth: int, streams: int = COLUMNS) -> Work:
        """Return a wave per layer and per chunk of the vocabulary; 5 bits per weight; 16 cores unpack 3.7 weights per
        cycle each."""
        moved = self.values * 5 / 8 + 2 * BF16 * self.layers * self.width * depth
        body = Overlap(Amount(STREAM, moved / streams), Amount(CYCLES, self.values / 16 / 3.7))
        return Serial(Amount(SUBMISSION, 1), Amount(STEP, self.layers + self.chunks), _alone(moved, body))


_B1, _B3, _B8 = _Decoder(1.236e9, 16, 512), _Decoder(3.21e9, 28, 1024), _Decoder(7.5e9, 32, 1024)


_PLANS: dict[str, Callable[..., Work]] = {
    "rms_gemms_rope": lambda: _rms_gemms_rope,
    "flash_attn": lambda: _flash_attn,
    "o_ffn": lambda: _o_ffn,
    "rms_gemv_rope": lambda: _rms_gemv_rope,
    "o_gemv_ffn": lambda: _o_gemv_ffn,
    "lm_head_gemv": lambda: _lm_head_gemv,
    "prompt": lambda: _prompt(_rms_gemms_rope, _flash_attn, _o_ffn),
    "token": lambda: _token(_rms_gemv_rope, _o_gemv_ffn),
    "written rms_gemms_rope": lambda: _written_qkv,
    "written rms_gemms_rope, as many heads of K and V": lambda: _projections(lambda n: _written(_EMB, n), _EMB),
    "written o_ffn": lambda: _written_ffn,
    "written prompt": lambda: _prompt(_written_qkv, _flash_attn, _written_ffn),
    "flash_attn, as many heads of K and V": lambda: _program(_attention(_ROWS, _HEADS), copied=4 * _X),
    "o_gemv_ffn of 3 launches": lambda: _ffn_3,
    "token, o_gemv_ffn of 3 launches": lambda: _token(_rms_gemv_rope, _ffn_3),
    "streams": lambda moved: _alone(moved, Amount(STREAM, moved / COLUMNS)),
    "fused decode 1B": _B1.token,
    "fused decode 3B": _B3.token,
    "fused decode 8B": _B8.token,
    "gemm written": lambda m, k, n, tile: _kernel(_gemm(m, k, n, tile, WRITTEN, F32)),
    "gemm generated": lambda m, k, n, tile: _kernel(_gemm(m, k, n, tile, GENERATED)),
    "gemv": lambda m, k, tile_m: _kernel(_gemv(m, k, tile_m, tile_m, False)),
    "add": lambda n: _kernel(_add(n)),
    "rms_norm": lambda rows, cols: _kernel(_norm(rows, cols)),
    "rope": lambda rows, head_dim: _kernel(_rope(rows, head_dim)),
    "silu_and_mul": lambda n: _kernel(_silu(n)),
    "attention": lambda rows, heads: _program(_attention(rows, heads)),
}
"""The plans by the names that `systems.toml` uses."""


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
        case {"gbps": rate, "arguments": [moved]}:
            return float(moved / (rate * 1e6))
    raise ValueError(f"{row['what']}: states no measurement")


_DATA = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())

FITTED, KERNELS, PREDICTED = (
    tuple(
        Row(row["what"], _milliseconds(row), _PLANS[row["plan"]](*row.get("arguments", ())), row.get("note", ""))
        for row in _DATA[table]
    )
    for table in ("fitted", "kernels", "predicted")
)
"""The measurements that the constants are fitted to; those of single kernels; other programs, prompts and tokens."""
