"""Tiling and program of a kernel that maps two arrays to one, element by element.

One row of the array is enough: eight tiles keep eight pairs of DDR streams busy, and nothing is reused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from stages import air
from stages.air import limits
from stages.kernels import BF16, Cost, Sizes

if TYPE_CHECKING:
    from stages.air import AirModule, MemRef, Number


CHUNK = 4096


def _none(values: int) -> int:
    return 0


@dataclass(frozen=True)
class Tiling:
    """Each of `columns` tiles walks its share in chunks of `tile_rows` x `tile_cols`.

    `vectors`: vector operations that so many values take.
    """

    kernel: str
    rows: int
    cols: int
    columns: int
    tile_rows: int
    tile_cols: int
    vectors: Callable[[int], int] = _none

    @property
    def chunk(self) -> int:
        return self.tile_rows * self.tile_cols

    @property
    def steps(self) -> tuple[int, int]:
        """Of one core: over its rows, and over the columns of each."""
        if self.rows == 1:
            return 1, self.cols // self.columns // self.tile_cols
        return self.rows // self.columns // self.tile_rows, self.cols // self.tile_cols

    @property
    def inner_steps(self) -> int:
        """Of the innermost loop that there is."""
        outer, inner = self.steps
        return inner if inner > 1 else outer

    @property
    def macs(self) -> int:
        return 0

    @property
    def costs(self) -> Mapping[str, Cost]:
        return {self.kernel: Cost(vectors=self.vectors(self.chunk))}

    def __str__(self) -> str:
        return (
            f"{self.kernel} {self.rows}x{self.cols}: herd {self.columns}x1, chunks of {self.tile_rows}x{self.tile_cols}"
        )


def tile(kernel: str, rows: int, cols: int) -> Tiling:
    """Cut `rows` x `cols` into the largest chunks of which each array's, as often as the compiler copies them, fit L1;
    a core makes an even number of steps where a shape allows it (`limits.steady`)."""
    what = f"{kernel} {rows}x{cols}"
    limits.require_multiple(what, "cols", cols, limits.VECTOR // 2)
    step = limits.VECTOR if cols % limits.VECTOR == 0 else limits.VECTOR // 2
    if rows == 1:
        columns = limits.first(what, "the columns", (c for c in divisors_of_herd(cols) if cols // c % step == 0))
        shapes = [(1, width) for width in limits.divisors(cols // columns, step, CHUNK)]
    else:
        columns = divisors_of_herd(rows)[0]
        shapes = [(height, cols) for height in limits.divisors(rows // columns, 1, CHUNK // cols)]
        shapes += [(1, width) for width in limits.divisors(cols, step, CHUNK)]
    cut = (Tiling(kernel, rows, cols, columns, *shape) for shape in shapes)
    fitting = [t for t in cut if limits.fits_l1(3 * limits.copies(t.inner_steps) * BF16 * t.chunk)]
    limits.first(what, f"L1 ({limits.L1_BYTES} bytes)", range(len(fitting)))
    return limits.steady_first(what, fitting, lambda t: t.inner_steps)[0]


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
    outer, inner = tiling.steps
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


def device(kernel: str, args: tuple[str, str, str], vectors: Callable[[int], int]) -> dict[str, Any]:
    """What a kernel says of the array, for `signature`; `args` as in `build`, `vectors` as in `Tiling`."""

    def cut(sizes: Sizes) -> Tiling:
        return replace(tile(kernel, sizes["rows"], sizes["cols"]), vectors=vectors)

    return {"tiling": cut, "program": lambda tiling: build(tiling, args)}
