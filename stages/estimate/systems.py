"""Other projects' plans for the same array, by the estimate's own arithmetic, beside what they measured.

Plans are read from their sources: tile sizes, herds, what is double-buffered, the multiply mode from the build flags.
The constants are fitted to `FITTED` within their published ranges; everything else is predicted.

mlir-air (https://github.com/Xilinx/mlir-air, MIT licence): its Llama-3.2-1B example as of 4216fa496 (May 2026;
docs/profile.md for the times), later builds by commit, single kernels from programming_examples/kernel_registry of
e972f2942 (June 2026, turbo). Its GEMM multiplies bf16 through bfp16, whether its loops are generated from linalg
(`direct_codegen`: matrix unit operations of aievec) or written (`mm_aie2p.cc`, compiled with
AIE_API_EMULATE_BFLOAT16_MMUL_WITH_BFP16); so does its attention. Fused decode: programming_examples/fused_decode.
FastFlowLM's figures are of its version 0.9.30 on Krackan.

Not predicted, for want of a plan: IRON's prompt (2.74 s) and token (370 ms), prompts of FastFlowLM and of the 4-bit
builds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

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
"""Cores that it loads, bytes that it moves to and from DDR, what it does."""

GENERATED, WRITTEN = "bf16_generated", "bf16_bfp16"
"""Multiply modes of mlir-air's GEMM."""


@dataclass(frozen=True)
class Row:
    """A measurement: what, milliseconds, and the work of the plan behind it. `note`: why the two are apart."""

    what: str
    measured: float
    work: Work
    note: str = ""

    def model(self, machine: Machine) -> float:
        """Milliseconds."""
        return spend(self.work, machine).milliseconds

    def error(self, machine: Machine) -> float:
        """Of the model, relative to the measurement."""
        return self.model(machine) / self.measured - 1


# Launches. Each is loaded on its own where a program has several, and is not where it is all that runs.


def _launch(cores: int, moved: float, body: Work) -> Work:
    return Serial(Amount(CONFIGURATION, cores), _alone(moved, body))


def _alone(moved: float, body: Work) -> Work:
    return Overlap(Amount(DDR, moved), body)


def _gemm(m: int, k: int, n: int, tile: tuple[int, int, int, int], mode: str, out: int = BF16) -> Launch:
    """`tile`: rows, columns of x in L2, in L1, output columns; herd 8x4. Finished tiles leave before the next begin."""
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
    """`tile_m` rows on each of 8 cores per launch step: L2 fills, then drains `rows` at a time, beside all of x.

    Per 64 products a core loads twice two times, and multiplies; 14 operations add up a row.
    """
    call = call_work(Cost(vectors=rows * (k // 64 * 5 + 14)))
    fetch = Amount(STREAM, BF16 * rows * k)
    drain = Repeat(tile_m // rows, Overlap(fetch, call) if ping_pong else Serial(fetch, call))
    steps = m // (tile_m * COLUMNS)
    return COLUMNS, BF16 * m * k + BF16 * k * steps, Repeat(steps, Serial(Amount(STREAM, BF16 * tile_m * k), drain))


def _elementwise(calls: int, cost: Cost, reads: int, writes: int, values: int, cores: int = COLUMNS) -> Launch:
    """`calls` of `values` on each core; `reads`, `writes`: streams."""
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
    """A row of a head at a time, its table row beside it."""
    return _elementwise(rows // cores, Cost(vectors=head_dim // 32 * 14), 2, 1, head_dim, cores)


def _cast(n: int) -> Launch:
    """f32 -> bf16, which the written GEMM's result takes: loads, conversion, store."""
    cores, _, body = _elementwise(n // COLUMNS // 2048, Cost(vectors=2048 // 16 * 4), 2, 1, 2048)
    return cores, (F32 + BF16) * n, body


_TILE = 64
"""Queries, keys and head size of a core's step of attention."""


def _attention(rows: int, heads: int, keys: int | None = None) -> Launch:
    """Four cores of a column share a query tile, a quarter of the keys each, masked ones too; then they merge.

    Launch steps are awaited one by one (`runtime_loop_tiling_sizes=[1, 1]`). Vector operations on 32 lanes: masking
    half 1, clearing 1, maxima 2, exponentials 12, sums 2, rescaling 4; 22 per query for what runs across lanes.
    """
    tile, blocks, group = BF16 * _TILE * _TILE, _TILE * _TILE // 32, 4 * _TILE
    softmax = Cost(2 * _TILE**3, WRITTEN, blocks * 22 + _TILE * 22)
    merge = Cost(vectors=blocks * 15 + _TILE * 6)
    relayed = Serial(Amount(STREAM, tile), Amount(STREAM, tile))
    chunk = Overlap(call_work(softmax), relayed)
    chunks = (keys or rows) // (ROWS * _TILE)
    out = Serial(Amount(STREAM, tile), Amount(STREAM, group * _TILE * BF16))
    capture = Serial(Repeat(4, relayed), call_work(Cost(vectors=2 * blocks)))
    step = Serial(capture, Repeat(chunks, chunk), Repeat(ROWS - 1, call_work(merge)), out, Amount(STEP, 1))
    steps = rows // group * (heads // 2)
    moved = steps * 2 * (ROWS * group + 2 * chunks * ROWS * _TILE + group) * _TILE * BF16
    return COLUMNS * ROWS, moved, Repeat(steps, step)


def _program(*launches: Launch, copied: float = 0) -> Work:
    """One submission, and `copied` bytes that the host writes before it."""
    parts = (_launch(*launch) for launch in launches)
    return Serial(Amount(SUBMISSION, 1), Amount(HOST_COPY, copied), *parts)


def _kernel(launch: Launch) -> Work:
    """All that is loaded: submitted, not configured again."""
    _, moved, body = launch
    return Serial(Amount(SUBMISSION, 1), _alone(moved, body))


def _host(milliseconds: float) -> Work:
    """As stated."""
    return Amount(HOST, milliseconds / 1e3)


# Llama-3.2-1B at 2048 rows, as built in May 2026.

_ROWS, _EMB, _FFN, _KV, _HEADS, _LAYERS = 2048, 2048, 8192, 512, 32, 16
_X = BF16 * _ROWS * _EMB
_QKV, _WIDE, _DEEP = (64, 64, 32, 128), (64, 64, 32, 128), (64, 256, 32, 64)
_gemm_may = partial(_gemm, mode=GENERATED)


def _projections(product: Callable[[int], list[Launch]], kv: int = _KV, copied: float = _X) -> Work:
    """Norm, Q, K, V, and the rotation of Q and K."""
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
"""Embedding, last norm, per layer the copy into the cache and Python, all as its profile states them."""
_TOKEN_HOST = _host(0.07 + _LAYERS * (0.28 + 0.05))
"""Last norm, per layer attention in numpy and Python."""


def _prompt(qkv: Work, attention: Work, ffn: Work) -> Work:
    return Serial(Repeat(_LAYERS, Serial(qkv, attention, ffn)), _lm_head_gemv, _PROMPT_HOST)


def _token(qkv: Work, ffn: Work) -> Work:
    return Serial(Repeat(_LAYERS, Serial(qkv, ffn)), _lm_head_gemv, _TOKEN_HOST)


FITTED = (
    Row("rms_gemms_rope", 7.3, _rms_gemms_rope),
    Row("flash_attn", 21.6, _flash_attn, "the same kernel took 15.4-16.1 ms in June, copies aside"),
    Row("o_ffn", 41.0, _o_ffn, "47.7 ms a month later, before #1687"),
    Row("rms_gemv_rope", 0.9, _rms_gemv_rope),
    Row("o_gemv_ffn", 3.6, _o_gemv_ffn),
    Row("lm_head_gemv", 13.6, _lm_head_gemv),
    Row("prompt of 2048", 1270, _prompt(_rms_gemms_rope, _flash_attn, _o_ffn)),
    Row("token", 92, _token(_rms_gemv_rope, _o_gemv_ffn)),
)
"""mlir-air's Llama-3.2-1B in bf16, May 2026: milliseconds per call, per prompt, per token."""


# Later builds.


def _written(k: int, n: int) -> list[Launch]:
    """The written GEMM with f32 results, and their conversion."""
    return [_gemm(_ROWS, k, n, (64, 256, 32, 128), WRITTEN, F32), _cast(_ROWS * n)]


_written_ffn = _feed_forward(_written(_EMB, _EMB), _written(_EMB, _FFN), _written(_FFN, _EMB))
_written_qkv = _projections(lambda n: _written(_EMB, n))


def _direct_gemv(weights: float) -> Launch:
    """Two cores of each column; a stream per column straight to a core, double-buffered."""
    return 2 * COLUMNS, weights, Amount(STREAM, weights / COLUMNS)


_ffn_3 = _program(*(_direct_gemv(BF16 * n) for n in (_EMB * _EMB, 2 * _EMB * _FFN, _EMB * _FFN)))


@dataclass(frozen=True)
class _Decoder:
    """A model that decodes in one submission: weights that a token reads (all but an embedding that is not the
    vocabulary's), values of K or V per position and layer, waves for the vocabulary."""

    values: float
    layers: int
    width: int
    chunks: int = 7

    def token(self, depth: int, streams: int = COLUMNS) -> Work:
        """A wave per layer and per chunk of the vocabulary; 5 bits per weight, of which 16 cores unpack 3.7 a cycle."""
        moved = self.values * 5 / 8 + 2 * BF16 * self.layers * self.width * depth
        body = Overlap(Amount(STREAM, moved / streams), Amount(CYCLES, self.values / 16 / 3.7))
        return Serial(Amount(SUBMISSION, 1), Amount(STEP, self.layers + self.chunks), _alone(moved, body))


_M64 = 64 << 20
_B1, _B3, _B8 = _Decoder(1.236e9, 16, 512), _Decoder(3.21e9, 28, 1024), _Decoder(7.5e9, 32, 1024)


_GemmRow = tuple[int, int, int, tuple[int, int, int, int], float, str]


def _gemm_rows(name: str, mode: str, out: int, rows: Sequence[_GemmRow]) -> list[Row]:
    """Shape, tile, GFLOP/s as published."""
    return [
        Row(f"GEMM {name} {m}x{k}x{n}", 2e-6 * m * k * n / rate, _kernel(_gemm(m, k, n, tile, mode, out)), note)
        for m, k, n, tile, rate, note in rows
    ]


_KernelRow = tuple[tuple[int, ...], float, str]


def _kernel_rows(name: str, launch: Callable[..., Launch], rows: Sequence[_KernelRow]) -> list[Row]:
    """Arguments of the plan, microseconds as published."""
    return [
        Row(f"{name} {'x'.join(map(str, arguments[:2]))}", us / 1e3, _kernel(launch(*arguments)), note)
        for arguments, us, note in rows
    ]


_GEMM_WRITTEN = (
    (2048, 2048, 2048, (64, 512, 32, 128), 8508, ""),
    (2048, 2048, 512, (64, 256, 32, 128), 7342, ""),
    (2048, 2048, 8192, (64, 256, 32, 128), 8278, ""),
    (2048, 8192, 2048, (64, 256, 32, 128), 9797, ""),
    (4096, 4096, 4096, (64, 512, 32, 128), 9329, ""),
    (1024, 1024, 1024, (64, 256, 32, 128), 6256, ""),
    (512, 512, 512, (32, 256, 32, 128), 1791, ""),
)
_GEMM_GENERATED = (
    (2048, 2048, 2048, (64, 512, 32, 128), 5230, ""),
    (2048, 2048, 512, (64, 256, 32, 128), 4765, ""),
    (2048, 8192, 2048, (64, 256, 32, 128), 5592, ""),
    (2048, 2048, 11008, (64, 128, 32, 64), 4276, "a tile half as wide: a K step's fixed part weighs twice"),
)
_GEMV = (
    ((512, 2048, 8), 136, ""),
    ((2048, 2048, 8), 330, ""),
    ((8192, 2048, 8), 1067, ""),
    ((2048, 8192, 2), 1082, ""),
    ((16384, 2048, 8), 2193, ""),
    ((16384, 1024, 16), 1069, ""),
    ((49152, 2048, 8), 6187, ""),
)
_ATTENTION = (
    (2048, 32, 15750, ""),
    (2048, 14, 7270, ""),
    (1024, 12, 2490, ""),
    (512, 64, 3790, ""),
    (512, 2, 730, "two steps: what is left is loading 32 full program memories, 350 us (#1334)"),
    (16384, 2, 39850, ""),
)

KERNELS = (
    *_gemm_rows("written, f32 out,", WRITTEN, F32, _GEMM_WRITTEN),
    *_gemm_rows("generated, bf16 out,", GENERATED, BF16, _GEMM_GENERATED),
    *_kernel_rows("GEMV", lambda m, k, tile_m: _gemv(m, k, tile_m, tile_m, False), _GEMV),
    *_kernel_rows("add", _add, [((1 << 20,), 175, ""), ((1 << 22,), 437, ""), ((1 << 23,), 798, "")]),
    *_kernel_rows(
        "rms_norm",
        _norm,
        [
            ((2048, 1024), 407, ""),
            ((2048, 2048), 911, ""),
            ((2048, 3072), 1012, "2.1 cycles a value measured, 2.9 at 2048 columns: banks, inferred"),
        ],
    ),
    *_kernel_rows("rope", _rope, [((16384, 64), 210, ""), ((65536, 64), 579, ""), ((49152, 128), 667, "")]),
    *_kernel_rows("silu_and_mul", _silu, [((1 << 21,), 569, ""), ((1 << 24,), 4016, "")]),
    *(
        Row(f"attention {rows} rows, {heads} heads", us / 1e3, _program(_attention(rows, heads)), note)
        for rows, heads, us, note in _ATTENTION
    ),
)
"""Single kernels of mlir-air's registry. Its GEMM and element-wise kernels gave their rates, one for all shapes."""

_CACHE = "its cache costs 0.6 of what bf16 would at 60 GB/s: fewer bytes, inferred"

PREDICTED = (
    Row("rms_gemms_rope, written GEMM (#1687)", 7.6, _written_qkv),
    Row("o_ffn, written GEMM (#1687)", 37.4, _written_ffn),
    Row("o_ffn, generated GEMM, before #1687", 47.7, _o_ffn),
    Row("prompt of 2048, written GEMM (#1687)", 1217, _prompt(_written_qkv, _flash_attn, _written_ffn)),
    Row("o_gemv_ffn, 3 launches (#1637)", 2.599, _ffn_3),
    Row("token, o_gemv_ffn of 3 launches (#1631)", 78, _token(_rms_gemv_rope, _ffn_3)),
    Row("rms_gemv_rope, C++ harness (#1633)", 0.7246, _rms_gemv_rope),
    Row("SmolLM2-1.7B rms_gemms_rope", 11.5, _projections(lambda n: _written(_EMB, n), _EMB)),
    Row("SmolLM2-1.7B flash_attn", 22.0, _program(_attention(_ROWS, _HEADS), copied=4 * _X)),
    Row("SmolLM2-1.7B o_ffn", 37.2, _written_ffn),
    Row("IRON GEMV, 64 MiB on 8 columns", _M64 / 55e6, _alone(_M64, Amount(STREAM, _M64 / COLUMNS))),
    Row("fused decode 1B, window 2048, 1 channel", 1e3 / 46.2, _B1.token(2048, COLUMNS // 2)),
    Row("fused decode 1B, window 2048, 2 channels", 1e3 / 52.3, _B1.token(2048), "later 63.2/s, its kernels tuned"),
    Row("fused decode 1B at 1k", 1e3 / 68.5, _B1.token(1024)),
    Row("fused decode 1B at 2k", 1e3 / 63.2, _B1.token(2048)),
    Row("fused decode 3B at 1k", 1e3 / 28.1, _B3.token(1024)),
    Row("fused decode 3B at 8k", 1e3 / 17.0, _B3.token(8192)),
    Row("fused decode 8B at 2k", 1e3 / 10.7, _B8.token(2048)),
    Row("FastFlowLM 1B at 1k", 1e3 / 64.5, _B1.token(1024)),
    Row("FastFlowLM 1B at 8k", 1e3 / 53.9, _B1.token(8192)),
    Row("FastFlowLM 1B at 32k", 1e3 / 35.0, _B1.token(32768)),
    Row("FastFlowLM 3B at 1k", 1e3 / 26.3, _B3.token(1024)),
    Row("FastFlowLM 3B at 8k", 1e3 / 21.7, _B3.token(8192)),
    Row("FastFlowLM 3B at 32k", 1e3 / 13.6, _B3.token(32768), _CACHE),
    Row("FastFlowLM 8B at 1k", 1e3 / 12.8, _B8.token(1024)),
    Row("FastFlowLM 8B at 32k", 1e3 / 8.5, _B8.token(32768), _CACHE),
)
"""Programs, prompts and tokens of other plans by the same constants."""
