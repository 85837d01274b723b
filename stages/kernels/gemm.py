"""Matrix times matrix for prefill: `out = x @ weight.T`, f32 accumulation, one rounding."""

from dataclasses import dataclass

import numpy as np
from ml_dtypes import bfloat16

from stages.air import limits
from stages.air.builder import L1, L2, Buffer, Builder, Index, Number, Program, memref_type
from stages.air.externs import Variant


def reference(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """`x` bf16 `[rows, cols]`, `weight` bf16 `[out_cols, cols]` -> bf16 `[rows, out_cols]`."""
    return (x.astype(np.float32) @ weight.astype(np.float32).T).astype(bfloat16)


TILE = 64
"""Edge of the largest tiles: accumulators of `TILE` x `2 * TILE` take half of L1."""

Dims = tuple[tuple[Number, int, int], ...]


@dataclass(frozen=True)
class Plan:
    """Columns split rows of `x`, herd rows split columns of `out`; every tile accumulates `tile_m` x `tile_n` in L1.

    `x_tile` None: `x` is row-major and a block of `8 * tile_m` rows stays in L2 while all weights pass by, so it is
    read from DDR once. Otherwise `x` (too wide to stay) is stored as tiles of `tile_m` x `x_tile`, as another product
    with `out` = `tiles` left them, and streams beside the weights.
    `out`: `rows` is row-major, `tiles` is one tile after the other as computed, `kv` the V halves of `[K | V]` heads, from `first_row` on.
    """

    rows: int
    cols: int
    out_cols: int
    herd_rows: int
    tile_m: int
    tile_n: int
    tile_k: int
    x_tile: int | None
    out: str
    head_dim: int
    first_row: int = 0

    @property
    def block_m(self) -> int:
        return limits.COLUMNS * self.tile_m

    @property
    def block_n(self) -> int:
        return self.herd_rows * self.tile_n

    @property
    def variant(self) -> Variant:
        return Variant.of("gemm", TK=self.tile_k, TM=self.tile_m, TN=self.tile_n)

    def __str__(self) -> str:
        x = f"{self.block_m} rows of x stay in L2" if self.x_tile is None else f"x streams in tiles {self.x_tile} wide"
        return (
            f"gemm {self.rows}x{self.cols}x{self.out_cols}: herd {limits.COLUMNS}x{self.herd_rows}, tile "
            f"{self.tile_m}x{self.tile_k}x{self.tile_n}, {x}, out {self.out}"
        )


def plan(
    rows: int,
    cols: int,
    out_cols: int,
    x_tile: int | None = None,
    out: str = "rows",
    head_dim: int = 1,
    first_row: int = 0,
) -> Plan:
    """Largest output tile that fits L1 beside double-buffered inputs: DDR traffic falls with its edges."""
    what = f"gemm {rows}x{cols}x{out_cols}"
    limits.require_multiple(what, "rows", rows, limits.COLUMNS * limits.BLOCK)
    limits.require_multiple(what, "cols", cols, 2 * limits.BLOCK)
    limits.require_multiple(what, "out_cols", out_cols, 2 * limits.BLOCK)
    herd_rows = max(r for r in (1, 2, 4) if out_cols % (r * 2 * limits.BLOCK) == 0)
    grain = head_dim if out == "kv" else 1
    candidates = [
        Plan(rows, cols, out_cols, herd_rows, m, n, k, x_tile, out, head_dim, first_row)
        for m in limits.divisors(rows // limits.COLUMNS, limits.BLOCK, TILE)
        for n in limits.divisors(out_cols // herd_rows, 2 * limits.BLOCK, 2 * TILE)
        for k in limits.divisors(x_tile or cols, 2 * limits.BLOCK, TILE)
        if herd_rows * n % grain == 0
    ]
    candidates = [c for c in candidates if limits.fits_l1(*_l1(c))]
    limits.first(what, f"L1 ({limits.L1_BYTES} bytes)", range(len(candidates)))
    candidates = [c for c in candidates if sum(_l2(c)) <= limits.L2_BYTES]
    limits.first(what, f"L2 ({limits.L2_BYTES} bytes)", range(len(candidates)))
    return min(candidates, key=lambda c: (traffic(c), c.tile_k < 32, -c.tile_m * c.tile_n, -c.tile_k))


def stays(rows: int, cols: int) -> bool:
    """Whether a block of rows, as high as accumulators allow, can stay in L2 beside a double-buffered output block."""
    tile_m = limits.divisors(rows // limits.COLUMNS, limits.BLOCK, TILE)[0]
    return 2 * tile_m * cols + 2 * 2 * limits.ROWS * tile_m * 2 * TILE <= limits.L2_BYTES


def _l1(p: Plan) -> tuple[int, int, int]:
    """Bytes of accumulators, `x` tiles and weight tiles on one core."""
    return 4 * p.tile_m * p.tile_n, 2 * 2 * p.tile_m * p.tile_k, 2 * 2 * p.tile_k * p.tile_n


def _l2(p: Plan) -> tuple[int, int]:
    """Bytes of resident `x` and of finished output, double-buffered, in one memory tile."""
    return 2 * p.tile_m * p.cols if p.x_tile is None else 0, 2 * 2 * p.herd_rows * p.tile_m * p.tile_n


def traffic(p: Plan) -> int:
    """DDR bytes of the whole product."""
    x_reads = 1 if p.x_tile is None else p.out_cols // p.block_n
    return 2 * (p.rows * p.cols * x_reads + p.cols * p.out_cols * (p.rows // p.block_m) + p.rows * p.out_cols)


def build(tile_plan: Plan) -> Program:
    """Arguments `x`: bf16 `[rows][cols]`, `weight`: bf16 8x8 blocks `[out_cols][cols]` (`layouts_npu.to_blocks`), `out`:
    bf16 `[rows][out_cols]`, twice as wide for `kv`. Tiled arrays keep their shape, only the order differs."""
    p = tile_plan
    width = 2 * p.out_cols if p.out == "kv" else p.out_cols
    shapes = {"x": (p.rows, p.cols), "weight": (p.out_cols, p.cols), "out": (p.first_row + p.rows, width)}
    b = Builder("gemm", {name: memref_type(shape) for name, shape in shapes.items()})
    steps = p.out_cols // p.block_n
    if p.x_tile is None:
        with b.launch(p.rows // p.block_m) as (i, _), b.segment():
            e, share = limits.BLOCK, p.tile_m * p.cols
            with b.alloc(L2, (limits.COLUMNS, p.tile_m // e, p.cols // e, e, e)) as (x,):
                columns = (i * limits.COLUMNS, limits.COLUMNS, share)
                b.dma(
                    x.at(
                        (0, limits.COLUMNS, share),
                        (0, p.tile_m // e, e * p.cols),
                        (0, e, e),
                        (0, p.cols // e, e * e),
                        (0, e, 1),
                    ),
                    b.args["x"].at(columns, (0, p.tile_m, p.cols), (0, p.cols, 1)),
                )
                with b.loop(steps) as j:
                    _block(b, p, i, j, x)
    else:
        with b.launch(p.rows // p.block_m, steps) as (i, j), b.segment():
            _block(b, p, i, j, b.args["x"])
    return b.finish()


def _block(b: Builder, p: Plan, i: Index, j: Number, x: Buffer) -> None:
    """Block `(i, j)` of the output: one herd over all of `cols`, then L2 to DDR."""
    with b.alloc(L2, (limits.COLUMNS, p.herd_rows, p.tile_m, p.tile_n)) as (staged,):
        with b.herd(limits.COLUMNS, p.herd_rows) as (tx, ty):
            with b.alloc(L1, (2, p.tile_m, p.tile_n)) as (acc,):
                b.call(p.variant, "gemm_zero", acc)
                _accumulate(b, p, x, acc, i * limits.COLUMNS + tx if p.x_tile else tx, j * p.herd_rows + ty)
                b.call(p.variant, "gemm_out", acc)
                size = p.tile_m * p.tile_n
                b.dma(staged.at(*_staged(p, tx, ty)), acc.at((0, 1, size), (0, p.tile_m, p.tile_n), (0, p.tile_n, 1)))
        target, source = _drain(p, i, j)
        b.dma(b.args["out"].at(*target), staged.at(*source) if source else staged)


def _accumulate(b: Builder, p: Plan, x: Buffer, acc: Buffer, row: Index, col: Index) -> None:
    """`acc += x[row, :] @ weight[:, col]`, in tiles of `tile_k`."""
    m, n, k, e = p.tile_m, p.tile_n, p.tile_k, limits.BLOCK
    outer = p.cols // (p.x_tile or p.cols)
    inner = p.cols // outer // k
    with b.loop(outer) as o, b.loop(inner) as s:
        with b.alloc(L1, (m // e, k // e, e, e), (n // e, k // e, e, e)) as (a, w):
            b.dma(a, x.at(*_x_tile(p, row, o, s)))
            block = o * (inner * k * e) + s * (k * e)
            b.dma(w, b.args["weight"].at((col * (n // e), n // e, p.cols * e), (block, k * e, 1)))
            b.call(p.variant, "gemm_step", a, w, acc)


def _x_tile(p: Plan, row: Index, outer: Number, step: Number) -> Dims:
    """Where a `tile_m` x `tile_k` tile of `x` lies: in both homes `x` is in 8x8 blocks."""
    m, k, e = p.tile_m, p.tile_k, limits.BLOCK
    if p.x_tile is None:
        return ((row, 1, m * p.cols), (0, m // e, e * p.cols), (step * (k * e), k * e, 1))
    return (
        (row, 1, m * p.cols),
        (outer, 1, m * p.x_tile),
        (0, m // e, e * p.x_tile),
        (step * (k * e), k * e, 1),
    )


def _staged(p: Plan, tx: Index, ty: Index) -> Dims:
    """Where a finished tile (in 8x8 blocks) goes in L2: unrolled into rows, or as it is."""
    m, n, e = p.tile_m, p.tile_n, limits.BLOCK
    tile = ((tx, 1, p.herd_rows * m * n), (ty, 1, m * n))
    if p.out == "tiles":
        return (*tile, (0, m, n), (0, n, 1))
    return (*tile, (0, m // e, e * n), (0, n // e, e), (0, e, n), (0, e, 1))


def _drain(p: Plan, i: Number, j: Number) -> tuple[Dims, Dims]:
    """The block in DDR, and the order in which L2 gives it."""
    m, n, r = p.tile_m, p.tile_n, p.herd_rows
    if p.out == "tiles":
        return ((i * limits.COLUMNS, limits.COLUMNS, m * p.out_cols), (j * r, r, m * n), (0, m * n, 1)), ()
    by_row = ((0, limits.COLUMNS, r * m * n), (0, m, n), (0, r, m * n), (0, n, 1))
    if p.out == "rows":
        cols = ((j * r, r, n), (0, n, 1))
        return ((i * limits.COLUMNS, limits.COLUMNS, m * p.out_cols), (0, m, p.out_cols), *cols), by_row
    heads, wide, hd = r * n // p.head_dim, 2 * p.out_cols, p.head_dim
    cols = ((j * heads, heads, 2 * hd), (hd, hd, 1))
    return ((i * limits.COLUMNS, limits.COLUMNS, m * wide), (p.first_row, m, wide), *cols), by_row
