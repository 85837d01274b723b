"""Matrix times matrix for prefill: `out = x @ weight.T`, f32 accumulation, one rounding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from ml_dtypes import bfloat16

from stages import air
from stages.air import limits
from stages.kernels import BF16, F32, Cost, Sizes, add, matrix, signature, silu_and_mul

if TYPE_CHECKING:
    from stages.air import AirModule, Builder, Channel, Index, MemRef, Number, Variant

    Dims = tuple[tuple[Number, int, int], ...]
    Fetch = Callable[[MemRef, Number, tuple[Index, Index]], None]


def reference(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """`x` bf16 `[rows, cols]`, `weight` bf16 `[out_cols, cols]` -> bf16 `[rows, out_cols]`."""
    return (x.astype(np.float32) @ weight.astype(np.float32, copy=False).T).astype(bfloat16)


def reference_add(x: np.ndarray, weight: np.ndarray, residual: np.ndarray) -> np.ndarray:
    """The product, rounded, and a residual bf16 `[rows, out_cols]` added to it."""
    return add.reference(residual, reference(x, weight))


def reference_silu(x: np.ndarray, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """SwiGLU of two products, each rounded."""
    return silu_and_mul.reference(reference(x, gate), reference(x, up))


TILE = 64
"""Edge of the largest tiles: accumulators of `TILE` x `2 * TILE` take half of L1."""

CHUNK = 256
"""Columns of `x` that pass through L2 at a time."""


@dataclass(frozen=True)
class Tiling:
    """Columns of the array split rows of `x`, its rows split columns of `out`; a core accumulates `tile_m` x `tile_n`.

    `x` passes through L2, `x_chunk` columns at a time, once per block of output columns. It cannot stay there while all
    weights pass by: a memory tile sends once what it was given once, because the compiler counts who takes a buffer,
    and not how often.
    `head_dim`: the output is the V halves of `[K | V]` heads, from `first_row` on; None: plain rows.
    `bfp16`: the core multiplies in block floating point, eight values to an exponent: faster, less exact.
    """

    rows: int
    cols: int
    out_cols: int
    herd_rows: int
    tile_m: int
    tile_n: int
    tile_k: int
    x_chunk: int
    head_dim: int | None = None
    first_row: int = 0
    bfp16: bool = False

    @property
    def block_m(self) -> int:
        return limits.COLUMNS * self.tile_m

    @property
    def block_n(self) -> int:
        return self.herd_rows * self.tile_n

    @property
    def core_steps(self) -> int:
        return self.cols // self.tile_k

    @property
    def steps(self) -> tuple[int, int]:
        """Of the launch: blocks of rows, and for each of them blocks of output columns."""
        return self.rows // self.block_m, self.out_cols // self.block_n

    @property
    def variant(self) -> Variant:
        block_float = {"BFP": 1} if self.bfp16 else {}
        return air.Variant.of("gemm", TK=self.tile_k, TM=self.tile_m, TN=self.tile_n, **block_float)

    @property
    def macs(self) -> int:
        return self.rows * self.cols * self.out_cols

    @property
    def costs(self) -> Mapping[str, Cost]:
        vectors = self.tile_m * self.tile_n // limits.VECTOR
        return {
            "gemm_zero": Cost(vectors=2 * vectors),
            "gemm_step": Cost(self.tile_m * self.tile_n * self.tile_k, "bf16_bfp16" if self.bfp16 else "bf16"),
            "gemm_out": Cost(vectors=9 * vectors // 2),
        }

    def __str__(self) -> str:
        return (
            f"gemm {self.rows}x{self.cols}x{self.out_cols}: herd {limits.COLUMNS}x{self.herd_rows}, tile "
            f"{self.tile_m}x{self.tile_k}x{self.tile_n}, {self.x_chunk} columns of x at a time"
            f"{', out V halves of KV' if self.head_dim else ''}"
        )


def tile(
    rows: int, cols: int, out_cols: int, head_dim: int | None = None, first_row: int = 0, bfp16: bool = False
) -> Tiling:
    """Least DDR traffic first: large output tiles. Steps of a core are even in number (`limits.steady`) wherever a
    shape allows it."""
    what = f"gemm {rows}x{cols}x{out_cols}"
    limits.require_multiple(what, "rows", rows, limits.COLUMNS * limits.BLOCK)
    limits.require_multiple(what, "cols", cols, 2 * limits.BLOCK)
    limits.require_multiple(what, "out_cols", out_cols, 2 * limits.BLOCK)
    herd_rows = max(r for r in (1, 2, 4) if out_cols % (r * 2 * limits.BLOCK) == 0)
    candidates = [
        Tiling(rows, cols, out_cols, herd_rows, m, n, k, chunk, head_dim, first_row, bfp16)
        for m in limits.divisors(rows // limits.COLUMNS, limits.BLOCK, TILE)
        for n in limits.divisors(out_cols // herd_rows, 2 * limits.BLOCK, 2 * TILE)
        for chunk in limits.divisors(cols, 2 * limits.BLOCK, max(2 * limits.BLOCK, min(CHUNK, cols // 2)))[:1]
        for k in limits.divisors(chunk, limits.BLOCK, TILE)
        if herd_rows * n % (head_dim or 1) == 0
    ]
    limits.first(what, f"whole heads of {head_dim} into {herd_rows * 2 * TILE} columns", range(len(candidates)))
    candidates = [c for c in candidates if limits.fits_l1(*_l1(c))]
    limits.first(what, f"L1 ({limits.L1_BYTES} bytes)", range(len(candidates)))
    candidates = [c for c in candidates if sum(_l2(c)) <= limits.L2_BYTES]
    limits.first(what, f"L2 ({limits.L2_BYTES} bytes)", range(len(candidates)))
    candidates = [c for c in candidates if limits.cuttable(c.out_cols // c.block_n)]
    limits.first(what, f"descriptors of at most {limits.ITERATIONS} steps", range(len(candidates)))
    candidates = limits.steady_first(what, candidates, lambda c: c.core_steps)
    return min(
        candidates,
        key=lambda c: (not limits.steady(c.core_steps), ddr_bytes(c), c.tile_k < 32, -c.tile_m * c.tile_n, -c.tile_k),
    )


def _l1(p: Tiling) -> tuple[int, int, int]:
    """Bytes of accumulators, `x` tiles and weight tiles on one core."""
    copies = limits.copies(p.core_steps)
    tiles = (p.tile_m * p.tile_k, p.tile_k * p.tile_n)
    return F32 * p.tile_m * p.tile_n, copies * BF16 * tiles[0], copies * BF16 * tiles[1]


def _l2(p: Tiling) -> tuple[int, int]:
    """Bytes of `x` and of finished output in one memory tile; what changes while it is read is there twice."""
    return 2 * BF16 * p.tile_m * p.x_chunk, 2 * BF16 * p.herd_rows * p.tile_m * p.tile_n


def ddr_bytes(p: Tiling) -> int:
    """DDR bytes of the whole product."""
    down, across = p.steps
    return BF16 * (p.rows * p.cols * across + p.cols * p.out_cols * down + p.rows * p.out_cols)


def build(tiling: Tiling) -> AirModule:
    """Arguments `x`: bf16 `[rows][cols]`, `weight`: bf16 8x8 blocks of `[out_cols][cols]` (layout `blocks`),
    `out`: bf16 `[rows][out_cols]`, or `[first_row + rows][2 * out_cols]` for the V halves."""
    p = tiling
    width = p.out_cols * (2 if p.head_dim else 1)
    shapes = {"x": (p.rows, p.cols), "weight": (p.out_cols, p.cols), "out": (p.first_row + p.rows, width)}
    b = air.Builder("gemm", {name: air.memref_type(shape) for name, shape in shapes.items()})
    with b.launch(*p.steps) as (i, j), b.segment():
        _stream(b, p, i * p.block_m, j)
    return b.finish()


def _stream(b: Builder, p: Tiling, row: Index, j: Index) -> None:
    """Rows `row` to `row + block_m` of block `j` of output columns: their `x` passes through L2 chunk by chunk."""
    channel = b.channel((limits.COLUMNS, 1), (limits.COLUMNS, p.herd_rows))
    with b.loop(p.cols // p.x_chunk) as chunk:
        for column in range(limits.COLUMNS):
            _pass_chunk(b, p, channel, column, row + column * p.tile_m, chunk * p.x_chunk)
    _block(b, p, row, j, lambda a, step, tile: b.get(channel, tile, a))


def _pass_chunk(b: Builder, p: Tiling, channel: Channel, column: int, row: Index, first: Number) -> None:
    """One column's rows of a chunk: to L2 in 8x8 blocks, then down the column tile by tile."""
    m, k, e, n = p.tile_m, p.tile_k, limits.BLOCK, p.x_chunk
    with b.alloc(air.L2, (m // e, n // e, e, e)) as (x,):
        blocks = ((0, m // e, e * n), (0, e, e), (0, n // e, e * e), (0, e, 1))
        b.dma(x.at(*blocks), b.args["x"].at((row, m, p.cols), (first, n, 1)))
        with b.loop(n // k) as step:
            b.put(channel, (column, 0), x.at((0, m // e, e * n), (step * (k * e), k * e, 1)))


def _block(b: Builder, p: Tiling, row: Index, j: Number, fetch: Fetch) -> None:
    """Output rows from `row`, column block `j`: one herd over all of `cols`, then L2 to DDR."""
    m, n, r = p.tile_m, p.tile_n, p.herd_rows
    with b.alloc(air.L2, (limits.COLUMNS, r, m, n)) as (staged,):
        with b.herd(limits.COLUMNS, r) as tile, b.alloc(air.L1, (2, m, n)) as (acc,):
            b.call(p.variant, "gemm_zero", acc)
            _accumulate(b, p, acc, j * r + tile[1], tile, fetch)
            b.call(p.variant, "gemm_out", acc)
            b.dma(staged.at(*_by_rows(p, tile)), acc.at((0, 1, m * n), (0, m, n), (0, n, 1)))
        source = ((0, limits.COLUMNS, r * m * n), (0, m, n), (0, r, m * n), (0, n, 1))
        b.dma(b.args["out"].at(*_drain(p, row, j)), staged.at(*source))


def _accumulate(b: Builder, p: Tiling, acc: MemRef, col: Index, tile: tuple[Index, Index], fetch: Fetch) -> None:
    """`acc += x @ weight[:, col]`, in steps of `tile_k`."""
    m, n, k, e = p.tile_m, p.tile_n, p.tile_k, limits.BLOCK
    with b.loop(p.core_steps) as step, b.alloc(air.L1, (m // e, k // e, e, e), (n // e, k // e, e, e)) as (a, w):
        fetch(a, step, tile)
        b.dma(w, b.args["weight"].at((col * (n // e), n // e, p.cols * e), (step * (k * e), k * e, 1)))
        b.call(p.variant, "gemm_step", a, w, acc)


def _by_rows(p: Tiling, tile: tuple[Index, Index]) -> Dims:
    """Where the 8x8 blocks of a finished tile go in L2 so that its rows come out whole."""
    m, n, e = p.tile_m, p.tile_n, limits.BLOCK
    place = ((tile[0], 1, p.herd_rows * m * n), (tile[1], 1, m * n))
    return (*place, (0, m // e, e * n), (0, n // e, e), (0, e, n), (0, e, 1))


def _drain(p: Tiling, row: Index, j: Number) -> Dims:
    """The block in DDR. The offset of the column dimension stays 0, as in `_keep`."""
    m, n, r, hd = p.tile_m, p.tile_n, p.herd_rows, p.head_dim
    if hd is None:
        return ((0, limits.COLUMNS, m * p.out_cols), (row, m, p.out_cols), (j * r, r, n), (0, n, 1))
    heads, wide = r * n // hd, 2 * p.out_cols
    return ((0, limits.COLUMNS, m * wide), (row + p.first_row, m, wide), (j * heads, heads, 2 * hd), (hd, hd, 1))


_WEIGHT = matrix("weight")
_PARAMS = "rows cols out_cols"


def _cut(sizes: Sizes) -> Tiling:
    """`pos` and `head_dim`: of a product that goes into the V halves of an interleaved cache."""
    kv = {"head_dim": sizes["head_dim"], "first_row": sizes["pos"]} if "head_dim" in sizes else {}
    return tile(sizes["rows"], sizes["cols"], sizes["out_cols"], **kv, bfp16=sizes.get("bfp16", False))


KERNELS = (
    signature("gemm", ("x", _WEIGHT), _PARAMS, reference, tiling=_cut, program=build),
    signature("gemm_add", ("x", _WEIGHT, "residual"), _PARAMS, reference_add, source="gemm"),
    signature("gemm_silu", ("x", matrix("gate"), matrix("up")), _PARAMS, reference_silu, source="gemm"),
    signature(
        "gemm_kv",
        ("x", _WEIGHT),
        f"{_PARAMS} pos head_dim",
        reference,
        source="gemm",
        host=False,
        tiling=_cut,
        program=build,
    ),
)
