"""Tiling and AIR program of a kernel that combines two tensors element by element.

It uses one row of the array: eight cores keep eight pairs of DDR streams busy, and no element is used twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any

from llama_npu2.frozen import frozen
from stages import air
from stages.air import limits
from stages.kernels import BF16, Cost, Sizes

if TYPE_CHECKING:
    from stages.air import AirModule, Number


CHUNK = 4096
"""Elements that a core processes at a time, at most."""


@frozen
class Tiling:
    """How an elementwise launch is divided: each core processes an equal share, chunk by chunk."""

    kernel: str
    """Name of the kernel and of its tile function."""
    rows: int
    cols: int
    """Columns of the tensors."""
    columns: int
    """Columns of the herd, which has one row."""
    tile_rows: int
    tile_cols: int
    """A chunk is `tile_rows` x `tile_cols` elements."""
    vectors: Callable[[int], int] = lambda values: 0
    """Number of values -> vector operations that they take."""
    macros: Mapping[str, int] = field(default_factory=dict, hash=False)
    """Macros of its tile function."""

    @property
    def chunk(self) -> int:
        return self.tile_rows * self.tile_cols

    @property
    def steps(self) -> tuple[int, int]:
        """Steps of one core's loops: over its rows, and over the columns of each row."""
        if self.rows == 1:
            return 1, self.cols // self.columns // self.tile_cols
        return self.rows // self.columns // self.tile_rows, self.cols // self.tile_cols

    @property
    def inner_steps(self) -> int:
        """Steps of the innermost loop that takes more than one step."""
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
    """Divide `rows` x `cols` into the largest chunks that fit L1, with one chunk of each tensor.

    The compiler's copies of the buffers count (`limits.copies`). A core makes an even number of steps if the shape
    allows it (`limits.steady`).
    """
    what = f"{kernel} {rows}x{cols}"
    limits.require_multiple(what, "cols", cols, limits.VECTOR // 2)
    step = limits.VECTOR if cols % limits.VECTOR == 0 else limits.VECTOR // 2
    if rows == 1:
        herds = (columns for columns in divisors_of_herd(cols) if cols // columns % step == 0)
        columns = limits.require_any(what, "the columns", herds)[0]
        shapes = [(1, width) for width in limits.divisors(cols // columns, step, CHUNK)]
    else:
        columns = divisors_of_herd(rows)[0]
        shapes = [(height, cols) for height in limits.divisors(rows // columns, 1, CHUNK // cols)]
        shapes += [(1, width) for width in limits.divisors(cols, step, CHUNK)]
    tilings = (Tiling(kernel, rows, cols, columns, *shape) for shape in shapes)
    fitting = (p for p in tilings if limits.fits_l1(3 * limits.copies(p.inner_steps) * BF16 * p.chunk))
    candidates = limits.require_any(what, limits.IN_L1, fitting)
    return limits.steady_first(what, candidates, lambda p: p.inner_steps)[0]


def divisors_of_herd(size: int) -> list[int]:
    """Return the numbers of herd columns among which `size` can be divided evenly, largest first."""
    return limits.divisors(size, 1, limits.COLUMNS) if size > limits.COLUMNS else limits.divisors(size)


def build(tiling: Tiling, args: tuple[str, str, str]) -> AirModule:
    """Build the AIR program.

    `args`: names of the two inputs and the output, bf16 `[rows][cols]`, or `[cols]` for one row.
    """
    shape = (tiling.cols,) if tiling.rows == 1 else (tiling.rows, tiling.cols)
    b = air.Builder(tiling.kernel, {name: air.memref_type(shape) for name in args})
    left, right, out = (b.args[name] for name in args)
    variant = air.Variant.of(tiling.kernel, COUNT=tiling.chunk, **tiling.macros)
    share = (tiling.cols if tiling.rows == 1 else tiling.rows) // tiling.columns
    outer, inner = tiling.steps
    chunks = [(tiling.chunk,)] * 3
    with b.launch(), b.segment(), b.herd(tiling.columns, 1) as (tx, _):
        with b.loop(outer) as i, b.loop(inner) as j, b.alloc(air.L1, *chunks) as (x, y, z):
            if tiling.rows == 1:
                place: list[tuple[Number, int, int]] = [(tx * share + j * tiling.tile_cols, tiling.tile_cols, 1)]
            else:
                column = (j * tiling.tile_cols, tiling.tile_cols, 1)
                place = [(tx * share + i * tiling.tile_rows, tiling.tile_rows, tiling.cols), column]
            b.dma(x, left.at(*place))
            b.dma(y, right.at(*place))
            b.call(variant, tiling.kernel, x, y, z)
            b.dma(out.at(*place), z)
    return b.finish()


def device(kernel: str, args: tuple[str, str, str], fields: Callable[[Sizes], Mapping[str, Any]]) -> dict[str, Any]:
    """Return `tiling` and `program` of an elementwise kernel, as keyword arguments of `signature`.

    Args:
        args: As in `build`.
        fields: Further fields of its tilings, `vectors` and `macros`, by a launch's scalars.
    """

    def cut(sizes: Sizes) -> Tiling:
        return replace(tile(kernel, sizes["rows"], sizes["cols"]), **fields(sizes))

    return {"tiling": cut, "program": lambda tiling: build(tiling, args)}
