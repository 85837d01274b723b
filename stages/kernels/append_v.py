"""Rows of V into a KV cache in rows, where the product that makes them cannot write them itself.

That is where rows have scales, which it would know only behind a head's last value. The kernel for bf16 is a template.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from llama_npu2.artifact.dtypes import SIZES
from llama_npu2.frozen import frozen
from stages import air
from stages.air import limits
from stages.kernels import BF16, KV_FORMATS, Arg, Cost, elementwise, kv_rows, signature

if TYPE_CHECKING:
    from stages.air import AirModule, Variant
    from stages.engine.lazy import np


def reference(x: np.ndarray, head_dim: int, stored: str = "bf16") -> np.ndarray:
    """Return V as a cache holds it, `[rows, heads, half_elements]`. `x`: bf16 `[rows, heads * head_dim]`."""
    return kv_rows.halves(x.reshape(len(x), -1, head_dim), kv_rows.VALUES, stored)


@frozen
class Tiling:
    """How rows are divided: each core has an equal share of them."""

    rows: int
    heads: int
    head_dim: int
    stored: str
    """The cache's format."""
    columns: int
    """Columns of the herd, which has one row."""
    tile_rows: int
    """Rows that a core processes at a time."""

    @property
    def width(self) -> int:
        """Elements of an input row."""
        return self.heads * self.head_dim

    @property
    def half(self) -> int:
        """Elements of V of a head in a row of the cache."""
        return kv_rows.half_elements(self.head_dim, self.stored)

    @property
    def dtype(self) -> str:
        """The dtype of the cache's elements."""
        return kv_rows.element_type(self.stored)

    @property
    def tile_elements(self) -> int:
        """Elements of a core's output buffer, rounded up to where the next buffer may begin."""
        return limits.aligned(self.tile_rows * self.heads * self.half, SIZES[self.dtype])

    @property
    def variant(self) -> Variant:
        return air.Variant.of("append_v", HEADS=self.heads, HEAD_DIM=self.head_dim, ROWS=self.tile_rows)

    @property
    def macs(self) -> int:
        return 0

    @property
    def costs(self) -> Mapping[str, Cost]:
        return {"append_v": Cost(vectors=self.tile_rows * self.heads * kv_rows.quantising_vectors(self.head_dim))}

    def __str__(self) -> str:
        return (
            f"append_v {self.rows}x{self.heads}x{self.head_dim}: herd {self.columns}x1, {self.tile_rows} rows at a "
            f"time, in {self.stored}"
        )


def tile(rows: int, heads: int, head_dim: int, stored: str) -> Tiling:
    """Divide rows so that a core processes as many at a time as fit L1, in an even number of steps where it can.

    Raises UserError if a head is not a whole number of vectors, or if no tile fits.
    """
    what = f"append_v {rows}x{heads}x{head_dim}"
    limits.require_multiple(what, "head_dim", head_dim, limits.VECTOR)
    columns = elementwise.divisors_of_herd(rows)[0]
    share = rows // columns
    tilings = [Tiling(rows, heads, head_dim, stored, columns, r) for r in limits.divisors(share, 1, 8)]
    fitting = (p for p in tilings if limits.fits_l1(limits.copies(share // p.tile_rows) * _l1(p)))
    tilings = limits.require_any(what, limits.IN_L1, fitting)
    return limits.steady_first(what, tilings, lambda p: share // p.tile_rows)[0]


def _l1(p: Tiling) -> int:
    """Return the bytes of input rows and output rows on a core."""
    return p.tile_rows * BF16 * p.width + SIZES[p.dtype] * p.tile_elements


def build(tiling: Tiling) -> AirModule:
    """Build the AIR program with the arguments `x` and `out`.

    `x`: bf16 `[rows][heads * head_dim]`; `out`: the cache's rows, `[rows][2 * heads * half]`.
    """
    p = tiling
    row = 2 * p.heads * p.half
    types = {"x": air.memref_type((p.rows, p.width)), "out": air.memref_type((p.rows, row), p.dtype)}
    b = air.Builder("append_v", types)
    share = p.rows // p.columns
    with b.launch(), b.segment(), b.herd(p.columns, 1) as (tx, _):
        buffers = (p.tile_rows, p.width), ((p.tile_elements,), p.dtype)
        with b.loop(share // p.tile_rows) as i, b.alloc(air.L1, *buffers) as (x, out):
            first = tx * share + i * p.tile_rows
            b.dma(x, b.args["x"].at((first, p.tile_rows, p.width), (0, p.width, 1)))
            b.call(p.variant, "append_v", x, out)
            # V's halves are behind K's.
            halves = (first, p.tile_rows, row), (0, p.heads, 2 * p.half), (p.half, p.half, 1)
            b.dma(b.args["out"].at(*halves), out.at((0, p.tile_rows * p.heads * p.half, 1)))
    return b.finish()


KERNELS = tuple(
    signature(
        "append_v",
        ("x",),
        "rows pos heads head_dim",
        partial(reference, stored=stored),
        writes=(Arg("out", stored, written=True),),
        source="append_v",
        stored=stored,
        host=False,
        tiling=(lambda s, stored=stored: tile(s["rows"], s["heads"], s["head_dim"], stored))
        if kv_rows.in_numbers(stored)
        else None,
        program=build if kv_rows.in_numbers(stored) else None,
    )
    for stored in KV_FORMATS.values()
)
