"""A bias that launches of their own add on the array, in place, to a product that is rounded already.

Products whose launches have no stream left for it are followed by it: a core has two, for the weight and for `x`. So
such sums are rounded twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from llama_npu2.frozen import frozen
from stages import air
from stages.air import limits
from stages.kernels import BF16, Cost, elementwise, lanes
from stages.kernels import Tiling as AnyTiling

if TYPE_CHECKING:
    from stages.air import AirModule, Number


@frozen
class Tiling:
    """How a bias is added: each core has an equal share of the rows, and adds it to one at a time.

    Of a single row, each core has a share of the columns.
    """

    rows: int
    cols: int
    columns: int
    """Columns of the herd, which has one row."""
    head_dim: int | None = None
    """If given, the rows are the V halves of `[K | V]` heads of this size; if None, plain rows."""
    parts: int = 1
    """Steps of the launch, each of which adds a part of the bias to a part of all rows."""

    @property
    def steps(self) -> int:
        """Steps of a core."""
        return 1 if self.rows == 1 else self.rows // self.columns

    @property
    def share(self) -> int:
        """Elements of a row that a core has at a time."""
        return self.cols // (self.columns if self.rows == 1 else self.parts)

    @property
    def costs(self) -> Mapping[str, Cost]:
        return {"add": Cost(vectors=self.share // lanes(self.share) * 7)}


@frozen
class Biased:
    """A product, and how its bias is added to it."""

    product: AnyTiling
    bias: Tiling

    @property
    def macs(self) -> int:
        return self.product.macs

    @property
    def costs(self) -> Mapping[str, Cost]:
        return {**self.product.costs, **self.bias.costs}

    def __str__(self) -> str:
        kernel, _, rest = str(self.product).partition(" ")
        return f"{kernel}_bias {rest}; then the bias: herd {self.bias.columns}x1"


def tile(rows: int, cols: int, head_dim: int | None = None) -> Tiling:
    """Divide the sum of rows and a bias. Arguments as in `Tiling`. UserError names the limit that is broken."""
    what = f"bias of {rows}x{cols}"
    limits.require_multiple(what, "cols", cols, limits.VECTOR // 2)
    herds = elementwise.divisors_of_herd(cols if rows == 1 else rows)
    parts = limits.divisors(cols // (head_dim or 1))[::-1] if rows > 1 else [1]
    tilings = [Tiling(rows, cols, columns, head_dim, some) for some in parts for columns in herds]
    tilings = [p for p in tilings if p.share % (limits.VECTOR // 2) == 0]
    fitting = (p for p in tilings if limits.fits_l1(BF16 * (2 * limits.copies(p.steps) + 1) * p.share))
    tilings = limits.require_any(what, limits.IN_L1, fitting)
    return limits.steady_first(what, (p for p in tilings if p.parts == tilings[0].parts), lambda p: p.steps)[0]


def biased(product: AnyTiling, rows: int, cols: int, head_dim: int | None = None) -> Biased:
    """Return a product whose bias is added afterwards. Arguments as in `Tiling`. Raises UserError."""
    return Biased(product, tile(rows, cols, head_dim))


def program(build: Callable[..., AirModule]) -> Callable[[Biased], AirModule]:
    """Return the function that builds the program of a product and its bias, given that of the product.

    Its arguments are those of the product, and `bias`: bf16 `[cols]`.
    """

    def built(tiling: Biased) -> AirModule:
        product = build(tiling.product)
        names = [str(arg.name_hint) for arg in product.function.body.block.args]
        own = {"rows": "out", "bias": "bias"}
        parts = [(product, {name: name for name in names}), (_add(tiling.bias), own)]
        return air.stitch(
            f"{product.function.sym_name.data}_bias", [*names[:-1], "bias", names[-1]], parts, settled=False
        )

    return built


def _add(p: Tiling) -> AirModule:
    """Build the AIR program with the arguments `rows`, as `out` of the product has them, and `bias`: bf16 `[cols]`."""
    width = p.cols * (2 if p.head_dim else 1)
    shape = (width,) if p.rows == 1 else (p.rows, width)
    b = air.Builder("bias", {"rows": air.memref_type(shape), "bias": air.memref_type((p.cols,))})
    variant = air.Variant.of("add", COUNT=p.share)
    with (
        b.launch(p.parts, together=False) as (step, _),
        b.segment(),
        b.herd(p.columns, 1) as (tx, _),
        b.alloc(air.L1, (p.share,)) as (bias,),
    ):
        part: Number = step if p.parts > 1 else 0
        first: Number = (tx if p.rows == 1 else part) * p.share
        b.dma(bias, b.args["bias"].at((first, p.share, 1)))
        with b.loop(p.steps) as i, b.alloc(air.L1, *[(p.share,)] * 2) as (row, out):
            place: list[tuple[Number, int, int]] = [(first, p.share, 1)]
            if p.head_dim:
                heads = p.share // p.head_dim
                place = [(part * heads, heads, 2 * p.head_dim), (p.head_dim, p.head_dim, 1)]
            if p.rows > 1:
                place.insert(0, (tx * p.steps + i, 1, width))
            b.dma(row, b.args["rows"].at(*place))
            b.call(variant, "add", row, bias, out)
            b.dma(b.args["rows"].at(*place), out)
    return b.finish()
