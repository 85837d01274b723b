"""Plan and program of a kernel that maps two arrays to one, element by element.

One row of the array is enough: eight tiles keep eight pairs of DDR streams busy, and nothing is reused.
"""

from __future__ import annotations

from dataclasses import dataclass

from stages.air import limits
from stages.air.builder import L1, Buffer, Builder, Number, Program, memref_type
from stages.air.externs import Variant

CHUNK = 4096


@dataclass(frozen=True)
class Plan:
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

    def __str__(self) -> str:
        return (
            f"{self.kernel} {self.rows}x{self.cols}: herd {self.columns}x1, chunks of {self.tile_rows}x{self.tile_cols}"
        )


def plan(kernel: str, rows: int, cols: int) -> Plan:
    """Cut `rows` x `cols` so that a chunk of each array, double-buffered, fits L1."""
    what = f"{kernel} {rows}x{cols}"
    limits.require_multiple(what, "cols", cols, limits.VECTOR // 2)
    step = limits.VECTOR if cols % limits.VECTOR == 0 else limits.VECTOR // 2
    if rows == 1:
        columns = limits.first(what, "the columns", (c for c in divisors_of_herd(cols) if cols // c % step == 0))
        return Plan(kernel, rows, cols, columns, 1, limits.divisors(cols // columns, step, CHUNK)[0])
    columns = divisors_of_herd(rows)[0]
    tile_cols = limits.divisors(cols, step, CHUNK)[0]
    tile_rows = limits.divisors(rows // columns, 1, CHUNK // tile_cols)[0] if tile_cols == cols else 1
    return Plan(kernel, rows, cols, columns, tile_rows, tile_cols)


def divisors_of_herd(size: int) -> list[int]:
    """Column counts that split `size` evenly, widest first."""
    return limits.divisors(size, 1, limits.COLUMNS) if size > limits.COLUMNS else limits.divisors(size)


def build(plan: Plan, args: tuple[str, str, str]) -> Program:
    """`args` names the two inputs and the output: bf16 `[rows][cols]`, or `[cols]` for one row."""
    shape = (plan.cols,) if plan.rows == 1 else (plan.rows, plan.cols)
    b = Builder(plan.kernel, {name: memref_type(shape) for name in args})
    left, right, out = (b.args[name] for name in args)
    variant = Variant.of(plan.kernel, COUNT=plan.chunk)
    share = (plan.cols if plan.rows == 1 else plan.rows) // plan.columns
    outer, inner = share // plan.tile_rows, plan.cols // plan.tile_cols
    if plan.rows == 1:
        outer, inner = 1, share // plan.tile_cols
    chunks = [(plan.chunk,)] * 3
    with b.launch(), b.segment(), b.herd(plan.columns, 1) as (tx, _):
        with b.loop(outer) as i, b.loop(inner) as j, b.alloc(L1, *chunks) as (x, y, z):
            if plan.rows == 1:
                piece = _Piece(tx * share + j * plan.tile_cols)
            else:
                piece = _Piece(j * plan.tile_cols, tx * share + i * plan.tile_rows)
            b.dma(x, piece.of(left, plan))
            b.dma(y, piece.of(right, plan))
            b.call(variant, plan.kernel, x, y, z)
            b.dma(piece.of(out, plan), z)
    return b.finish()


@dataclass(frozen=True)
class _Piece:
    """Where a chunk sits in the arrays."""

    col: Number
    row: Number | None = None

    def of(self, array: Buffer, plan: Plan) -> Buffer:
        columns = (self.col, plan.tile_cols, 1)
        return array.at(columns) if self.row is None else array.at((self.row, plan.tile_rows, plan.cols), columns)
