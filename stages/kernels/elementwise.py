"""Tiling and program of a kernel that maps two arrays to one, element by element.

One row of the array is enough: eight tiles keep eight pairs of DDR streams busy, and nothing is reused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stages import air
from stages.air import limits
from stages.kernels import Sizes

if TYPE_CHECKING:
    from stages.air import AirModule, MemRef, Number


CHUNK = 4096


@dataclass(frozen=True)
class Tiling:
    """Each of `columns` tiles walks its share in chunks of `tile_rows` x `tile_cols`."""

    kernel: str
    rows: int
    cols: int
    columns: int
    tile_rows: int
    tile_cols: int

    @property
    def chunk(self) -> int:
        return self.tile_rows * self.tile_cols

    @property
    def macs(self) -> int:
        return 0

    def __str__(self) -> str:
        return (
            f"{self.kernel} {self.rows}x{self.cols}: herd {self.columns}x1, chunks of {self.tile_rows}x{self.tile_cols}"
        )


def tile(kernel: str, rows: int, cols: int) -> Tiling:
    """Cut `rows` x `cols` so that a chunk of each array, double-buffered, fits L1."""
    what = f"{kernel} {rows}x{cols}"
    limits.require_multiple(what, "cols", cols, limits.VECTOR // 2)
    step = limits.VECTOR if cols % limits.VECTOR == 0 else limits.VECTOR // 2
    if rows == 1:
        columns = limits.first(what, "the columns", (c for c in divisors_of_herd(cols) if cols // c % step == 0))
        return Tiling(kernel, rows, cols, columns, 1, limits.divisors(cols // columns, step, CHUNK)[0])
    columns = divisors_of_herd(rows)[0]
    tile_cols = limits.divisors(cols, step, CHUNK)[0]
    tile_rows = limits.divisors(rows // columns, 1, CHUNK // tile_cols)[0] if tile_cols == cols else 1
    return Tiling(kernel, rows, cols, columns, tile_rows, tile_cols)


def divisors_of_herd(size: int) -> list[int]:
    """Column counts that split `size` evenly, widest first."""
    return limits.divisors(size, 1, limits.COLUMNS) if size > limits.COLUMNS else limits.divisors(size)


def build(tiling: Tiling, args: tuple[str, str, str]) -> AirModule:
    """`args` names the two inputs and the output: bf16 `[rows][cols]`, or `[cols]` for one row."""
    shape = (tiling.cols,) if tiling.rows == 1 else (tiling.rows, tiling.cols)
    b = air.Builder(tiling.kernel, {name: air.memref_type(shape) for name in args})
    left, right, out = (b.args[name] for name in args)
    variant = air.Variant.of(tiling.kernel, COUNT=tiling.chunk)
    share = (tiling.cols if tiling.rows == 1 else tiling.rows) // tiling.columns
    outer, inner = share // tiling.tile_rows, tiling.cols // tiling.tile_cols
    if tiling.rows == 1:
        outer, inner = 1, share // tiling.tile_cols
    chunks = [(tiling.chunk,)] * 3
    with b.launch(), b.segment(), b.herd(tiling.columns, 1) as (tx, _):
        with b.loop(outer) as i, b.loop(inner) as j, b.alloc(air.L1, *chunks) as (x, y, z):
            if tiling.rows == 1:
                piece = _Piece(tx * share + j * tiling.tile_cols)
            else:
                piece = _Piece(j * tiling.tile_cols, tx * share + i * tiling.tile_rows)
            b.dma(x, piece.of(left, tiling))
            b.dma(y, piece.of(right, tiling))
            b.call(variant, tiling.kernel, x, y, z)
            b.dma(piece.of(out, tiling), z)
    return b.finish()


@dataclass(frozen=True)
class _Piece:
    """Where a chunk sits in the arrays."""

    col: Number
    row: Number | None = None

    def of(self, array: MemRef, tiling: Tiling) -> MemRef:
        columns = (self.col, tiling.tile_cols, 1)
        return array.at(columns) if self.row is None else array.at((self.row, tiling.tile_rows, tiling.cols), columns)


def device(kernel: str, args: tuple[str, str, str]) -> dict[str, Any]:
    """What a kernel says of the array, for `signature`; `args` as in `build`."""

    def cut(sizes: Sizes) -> Tiling:
        return tile(kernel, sizes["rows"], sizes["cols"])

    return {"tiling": cut, "program": lambda tiling: build(tiling, args)}
