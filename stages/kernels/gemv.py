"""Matrix times vector for decode and for the LM head: `out = weight @ x`, f32 accumulation, one rounding."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from ml_dtypes import bfloat16

from stages import air
from stages.air import limits
from stages.kernels import BF16, F32, Arg, Cost, add, lanes, matrix, rms_norm, signature, silu_and_mul
from stages.weights.formats.bf16 import padded_shape

if TYPE_CHECKING:
    from stages.air import AirModule, Builder, Index, MemRef, Number, Variant

    Dim = tuple[Number, int, int]


def reference(weight: np.ndarray, x: np.ndarray) -> np.ndarray:
    """`weight` bf16 `[out_cols, cols]`, `x` bf16 `[cols]` -> bf16 `[out_cols]`."""
    return reference_f32(weight, x).astype(bfloat16)


def reference_f32(weight: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The same without rounding: f32 `[out_cols]`."""
    return weight.astype(np.float32) @ x.astype(np.float32)


def reference_add(weight: np.ndarray, x: np.ndarray, residual: np.ndarray) -> np.ndarray:
    """The product, rounded, and a residual bf16 `[out_cols]` added to it."""
    return add.reference(residual, reference(weight, x))


def reference_silu(gate: np.ndarray, up: np.ndarray, x: np.ndarray) -> np.ndarray:
    """SwiGLU of two products, each rounded."""
    return silu_and_mul.reference(reference(gate, x), reference(up, x))


def reference_norm(weight: np.ndarray, x: np.ndarray, norm: np.ndarray, eps: float) -> np.ndarray:
    """The product of `x`'s RMS norm, whose weight is `norm` bf16 `[cols]`."""
    return reference(weight, rms_norm.reference(x, norm, eps))


def reference_norm_f32(weight: np.ndarray, x: np.ndarray, norm: np.ndarray, eps: float) -> np.ndarray:
    """The same without rounding."""
    return reference_f32(weight, rms_norm.reference(x, norm, eps))


def reference_norm_swiglu(weight: np.ndarray, x: np.ndarray, norm: np.ndarray, eps: float) -> np.ndarray:
    """SwiGLU of such products, of a gate's and an up's rows that lie one behind the other: `weight` `[2 * out_cols,
    cols]`."""
    gate, up = np.split(weight, 2)
    return reference_silu(gate, up, rms_norm.reference(x, norm, eps))


TILE_BYTES = 16384
ROWS_PER_LAUNCH = 16384
"""Most output rows of one launch; longer outputs (a vocabulary) are cut into partitions."""


@dataclass(frozen=True)
class Tiling:
    """The array streams `weight` once, one stream per column through L2; `x` is broadcast from one channel.

    A launch step covers `8 * herd_rows * tile_m` outputs, each tile's in chunks of `chunk` inputs. `steps` counts the
    launch steps of every partition. `blocked`: the weight is in 8x8 blocks (the bytes that `gemm` reads), else it has
    `padded` plain rows.
    """

    out_cols: int
    cols: int
    dtype: str
    blocked: bool
    herd_rows: int
    tile_m: int
    chunk: int
    steps: tuple[int, ...]

    @property
    def per_step(self) -> int:
        return limits.COLUMNS * self.herd_rows * self.tile_m

    @property
    def padded(self) -> int:
        """Rows of the weight and of the output in DDR: `out_cols` and the rows nobody reads."""
        return sum(self.steps) * self.per_step

    @property
    def variant(self) -> Variant:
        return air.Variant.of("gemv", BLOCKED=int(self.blocked), COLS=self.cols, KC=self.chunk, ROWS=self.tile_m)

    @property
    def macs(self) -> int:
        return self.padded * self.cols

    @property
    def costs(self) -> Mapping[str, Cost]:
        """Its products are the vector unit's: those of a block beside what spreads `x` over it, those of plain rows
        beside loads of `x` that rows share."""
        if self.blocked:
            step = self.tile_m // limits.BLOCK * (self.chunk // limits.BLOCK * 13 + 9)
        else:
            sharing = next(n for n in (4, 2, 1) if self.tile_m % n == 0)
            step = self.tile_m // sharing * (self.chunk // lanes(self.chunk, 64) * (2 + 3 * sharing) + 14 * sharing)
        out = 4 * math.ceil(self.tile_m / 16)
        return {"gemv_zero": Cost(), "gemv_step": Cost(vectors=step), "gemv_out": Cost(vectors=out)}

    def __str__(self) -> str:
        return (
            f"gemv {self.out_cols}x{self.cols} {self.dtype}: herd {limits.COLUMNS}x{self.herd_rows}, tile "
            f"{self.tile_m}x{self.chunk}, steps {'+'.join(map(str, self.steps))}, {self.padded} rows in DDR"
        )


def tile(out_cols: int, cols: int, dtype: str = "bf16", blocked: bool = True) -> Tiling:
    """Tiles of at most 16 KiB in L1 (twice, beside `x`), at most half of L2 per step. A blocked tile is one row of
    blocks, which is one run of memory; plain rows are a dimension of the transfer."""
    what = f"gemv {out_cols}x{cols}"
    grain = limits.BLOCK if blocked else 2
    limits.require_multiple(what, "cols", cols, 2 * limits.BLOCK)
    if blocked:
        limits.require_multiple(what, "out_cols", out_cols, limits.COLUMNS * grain)
    column = padded_shape((out_cols,))[0] // limits.COLUMNS
    half = limits.L2_BYTES // 2
    shapes = [
        (r, m, k)
        for r in range(limits.ROWS, 0, -1)
        for m in limits.divisors(column, grain, grain if blocked else 16)
        for k in limits.divisors(cols, limits.BLOCK, min(cols // 2, TILE_BYTES // BF16 // m))
        # Blocks of a chunk lie together, its plain rows do not.
        if blocked or k <= limits.WRAP
        if column % (r * m) == 0 and (k % limits.VECTOR == 0 or cols % limits.VECTOR)
    ]
    limits.first(what, f"cols = {cols} into two chunks of whole vectors ({limits.VECTOR})", range(len(shapes)))
    shapes = [
        (r, m, k)
        for r, m, k in shapes
        if limits.fits_l1(limits.copies(cols // k) * m * k * BF16, cols * BF16, m * F32, m * BF16)
    ]
    limits.first(what, f"L1 ({limits.L1_BYTES} bytes)", range(len(shapes)))
    shapes = [(r, m, k) for r, m, k in shapes if r * m * cols * BF16 <= half]
    limits.first(what, f"L2 ({limits.L2_BYTES} bytes)", range(len(shapes)))
    shapes = limits.steady_first(what, shapes, lambda s: cols // s[2])
    herd_rows, tile_m, chunk = max(shapes, key=lambda s: (limits.steady(cols // s[2]), s[0] * s[1], s[0], s[1] * s[2]))
    tiles = column // (herd_rows * tile_m)
    most = max(1, ROWS_PER_LAUNCH // (limits.COLUMNS * herd_rows * tile_m))
    steps = tuple(min(most, tiles - start) for start in range(0, tiles, most))
    return Tiling(out_cols, cols, dtype, blocked, herd_rows, tile_m, chunk, steps)


def build(tiling: Tiling) -> AirModule:
    """Arguments `weight`: bf16 `[padded][cols]`, `x`: bf16 `[cols]`, `out`: `[padded]`."""
    p = tiling
    shapes = {"weight": air.memref_type((p.padded, p.cols)), "x": air.memref_type((p.cols,))}
    b = air.Builder("gemv", shapes | {"out": air.memref_type((p.padded,), p.dtype)})
    start = 0
    for steps in p.steps:
        with b.launch(steps) as (step, _), b.segment():
            _step(b, p, step * p.per_step + start)
        start += steps * p.per_step
    return b.finish()


def _step(b: Builder, p: Tiling, first: Index) -> None:
    """Outputs `first` to `first + per_step`, `tile_m` of them on every tile."""
    n, k, r = p.tile_m, p.cols, p.herd_rows
    with b.alloc(air.L2, (limits.COLUMNS, r * n, k), ((limits.COLUMNS, r * n), p.dtype)) as (weight, out):
        b.dma(weight, b.args["weight"].at((0, limits.COLUMNS, r * n * k), (first, r * n, k), (0, k, 1)))
        with b.herd(limits.COLUMNS, r) as (tx, ty), b.alloc(air.L1, (k,), ((n,), "f32")) as (x, acc):
            b.dma(x, b.args["x"].at((0, k, 1)))
            _accumulate(b, p, x, weight, ((tx, 1, r * n * k), (ty, 1, n * k)), acc)
            mine = out.at((tx, 1, r * n), (ty, 1, n), (0, n, 1))
            _hand_out(b, p.variant, "gemv_out", p.dtype, acc, mine, n)
        b.dma(b.args["out"].at((0, limits.COLUMNS, r * n), (first, r * n, 1)), out)


def _hand_out(b: Builder, variant: Variant, function: str, dtype: str, acc: MemRef, to: MemRef, rows: int) -> None:
    """So many sums of a core, f32, as they are, or as bf16 that a tile function rounds them to."""
    if dtype == "f32":
        b.dma(to, acc)
        return
    with b.alloc(air.L1, (rows,)) as (rounded,):
        b.call(variant, function, acc, rounded)
        b.dma(to, rounded)


def _accumulate(b: Builder, p: Tiling, x: MemRef, weight: MemRef, tile: tuple[Dim, Dim], acc: MemRef) -> None:
    """`tile_m` dot products in f32, over chunks of the inputs."""
    m, e = p.tile_m, limits.BLOCK
    b.call(p.variant, "gemv_zero", acc)
    with (
        b.loop(p.cols // p.chunk) as j,
        b.alloc(air.L1, (m // e, p.chunk // e, e, e) if p.blocked else (m, p.chunk)) as (a,),
    ):
        if p.blocked:
            chunk = ((0, m // e, e * p.cols), (j * (p.chunk * e), p.chunk * e, 1))
        else:
            chunk = ((0, m, p.cols), (j * p.chunk, p.chunk, 1))
        b.dma(a, weight.at(*tile, *chunk))
        b.call(p.variant, "gemv_step", a, x, j * p.chunk, acc)


_WEIGHT = matrix("weight")
_PARAMS = "out_cols cols"

KERNELS = (
    signature(
        "gemv", (_WEIGHT, "x"), _PARAMS, reference, tiling=lambda s: tile(s["out_cols"], s["cols"]), program=build
    ),
    signature("gemv_add", (_WEIGHT, "x", "residual"), _PARAMS, reference_add, source="gemv"),
    signature("gemv_silu", (matrix("gate"), matrix("up"), "x"), _PARAMS, reference_silu, source="gemv"),
    # Of weights in formats that the array takes as they are stored.
    *(
        signature(
            name,
            (Arg("weight", matrix=True), "x", "norm"),
            f"{_PARAMS} eps:float",
            made,
            writes=(Arg("out", out, written=True),),
            source="gemv",
            host=False,
        )
        for name, made, out in (
            ("norm_gemv", reference_norm, "bf16"),
            ("norm_gemv_swiglu", reference_norm_swiglu, "bf16"),
            ("norm_gemv_f32", reference_norm_f32, "f32"),
        )
    ),
    signature(
        "gemv_f32",
        (Arg("weight", layouts={"cpu": "panels", "aie2p": "padded"}, matrix=True), "x"),
        _PARAMS,
        reference_f32,
        writes=(Arg("out", "f32", written=True, layouts={"aie2p": "padded"}),),
        source="gemv",
        tiling=lambda s: tile(s["out_cols"], s["cols"], "f32", blocked=False),
        program=build,
    ),
    # For a weight whose rows are whole, as the NPU's vocabulary matrix.
    signature(
        "gemv_rows_f32",
        (Arg("weight", matrix=True), "x"),
        _PARAMS,
        reference_f32,
        writes=(Arg("out", "f32", written=True),),
        source="gemv_rows",
    ),
)
