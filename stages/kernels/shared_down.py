"""The last product of the feed-forward networks of several tokens on the array, of weights that a token's cores share.

A token's whole network is one launch (`feed_forward`), whose cores have room for one token or two. More tokens take two
launches: gate, up and activation (`grouped_gemv`), then this one, with the sums in the order of a token's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from llama_npu2.errors import UserError
from llama_npu2.frozen import frozen
from stages import air
from stages.air import limits
from stages.engine.lazy import np
from stages.kernels import BF16, F32, Arg, Cost, feed_forward, gemv, grouped_gemv, rms_norm, signature
from stages.kernels.tokens import Tokens, batched, in_rows
from stages.weights.constants import GROUP
from stages.weights.cut import PARTS, SHARES, FeedForward

if TYPE_CHECKING:
    from stages.air import AirModule, Builder, Channel, Index, Variant
    from stages.weights.format import Format


def reference(weight: np.ndarray, x: np.ndarray, residual: np.ndarray) -> np.ndarray:
    """Return `residual` plus the product, bf16 `[out_cols]`, rounded only after the sum.

    `weight`: `[out_cols, cols]`; `x`: bf16 `[cols]`; `residual`: bf16 `[out_cols]`.
    """
    return (residual.astype(np.float32) + gemv.reference_f32(weight, x)).astype(residual.dtype)


@frozen
class Tiling:
    """How the product is divided: a core of a row of cores has a share of the columns, as in `feed_forward.Tiling`.

    Rows of cores have tokens of their own. A step of the launch computes a piece of the outputs, since a core has no
    room for the sums of all. All of `x` comes to all cores, and each keeps its share.
    """

    network: FeedForward
    """How the network's matrices are cut into panels and chunks."""
    together: int
    """Chunks that come to L2 at a time, per column."""
    pieces: int
    """Pieces of the outputs."""
    tokens: Tokens
    """The rows of `x`."""

    @property
    def outputs(self) -> int:
        """Outputs of a piece."""
        return self.network.shares.panels // self.pieces * self.network.shares.lanes

    @property
    def cols(self) -> int:
        """All outputs."""
        return self.pieces * self.outputs

    @property
    def chunks(self) -> int:
        """Chunks that a core takes for a piece."""
        return self.network.chunks[1] // self.pieces

    @property
    def staging(self) -> feed_forward.Staging:
        """How a piece's chunks pass through L2, which also holds the piece's results."""
        steps, chunk_bytes = (self.chunks // self.together,), self.network.shares.chunk_bytes
        return feed_forward.Staging(steps, self.together, chunk_bytes, BF16 * self.tokens.together * self.outputs)

    @property
    def inner(self) -> int:
        """Elements of a core's share of `x`, including those that pad its last chunk."""
        return self.network.shares.inputs

    @property
    def unit(self) -> int:
        """Elements of a token that arrive at a time, of `x` or of the residual.

        All come in one buffer. The DMA of a core runs ahead by as many transfers as a stream has buffers or sizes, so
        that it would overwrite one that is filled again and again.
        """
        return math.gcd(self.network.inner, self.outputs)

    @property
    def units(self) -> tuple[int, int]:
        """Units of `x`, and of a piece of the residual."""
        return SHARES * self.network.inner // self.unit, self.outputs // self.unit

    @property
    def acc(self) -> int:
        """Return how many f32 values a core keeps of a token, as `feed_forward.Tiling.acc`."""
        return limits.aligned(2 * self.network.shares.lanes + 2 * self.inner // GROUP + 1, F32)

    @property
    def fits_l1(self) -> bool:
        """Return whether a core has room.

        In order: for two chunks; of each of its tokens for what arrives, its share of `x`, the residual in whose place
        the result comes, what sums need, sums, and a part of those of others.
        """
        rows = BF16 * (self.unit + self.inner + self.outputs)
        sums = F32 * (self.acc + self.outputs + self.outputs // PARTS)
        return limits.fits_l1(2 * self.network.pairs.chunk_bytes, self.tokens.each * (rows + sums))

    @property
    def variant(self) -> Variant:
        shares = self.network.shares
        sizes = {"COLS": self.outputs, "OUTS": self.outputs, "PARTS": PARTS, "INNER": self.network.inner}
        sizes |= {"DOWN_STEPS": shares.chunks, "TOKENS": self.tokens.each}
        sizes |= {"UNIT": self.unit, "COLUMNS": SHARES}
        return air.Variant.of("shared_down", **sizes, **grouped_gemv.macros(shares))

    @property
    def macs(self) -> int:
        cut = self.network.shares
        chunks = self.pieces * self.chunks
        return self.tokens.count * SHARES * chunks * cut.lanes * cut.chunk_groups * GROUP

    @property
    def costs(self) -> Mapping[str, Cost]:
        each, vectors = self.tokens.each, self.outputs // PARTS // (limits.VECTOR // 2)
        fixed = -(-each * grouped_gemv.FIXED * self.inner // GROUP // self.chunks)
        return {
            "shared_down_take": Cost(vectors=each * 2 * self.unit // limits.VECTOR, share=1 / SHARES),
            f"shared_down{air.KEEP}": Cost(),
            "shared_down_step": Cost(vectors=fixed, scheduled=grouped_gemv.chunk_vectors(self.network.shares, each)),
            **feed_forward.join_costs(each * vectors),
        }

    def __str__(self) -> str:
        cut = self.network.shares
        return (
            f"down {self.cols}, {SHARES} shares of {self.network.inner}, in groups{self.tokens.text}: "
            f"herd {SHARES}x{self.tokens.herd_rows}, {self.pieces} pieces of {self.outputs}, "
            f"chunks of {cut.lanes}x{cut.chunk_groups * GROUP} in {cut.chunk_bytes} bytes, steps of {self.together}"
        )


def tile(form: Format, cols: int, inner: int, tokens: Tokens) -> Tiling:
    """Divide the product: the fewest launches, then the fewest pieces, then steps by `feed_forward.Staging.order`.

    Args:
        form: the format of the network's weights.
        cols: outputs.
        inner: elements of `x`.
        tokens: the rows of `x`, which are divided here.

    Raises UserError where shares or outputs would be padded, or a core's memory or L2 is too small.
    """
    what = f"a product {cols}x{inner} in shares"
    assert form.feed_forward is not None
    network: FeedForward = form.feed_forward(cols, inner)
    if not network.divides(cols, inner):
        raise UserError(f"{what}: its shares or its outputs would be padded")
    tilings = (
        Tiling(network, together, pieces, way)
        for way in in_rows(tokens.count)
        for pieces in limits.divisors(network.shares.panels)[::-1]
        for together in limits.divisors(network.chunks[1] // pieces)
    )
    whole = (p for p in tilings if p.outputs % (PARTS * _LANES) == 0 and all(map(limits.cuttable, p.staging.steps)))
    fitting = limits.require_any(what, limits.IN_L1, (p for p in whole if p.fits_l1))
    fitting = limits.require_any(what, limits.IN_L2, (p for p in fitting if p.staging.fits))
    alike = (p for p in fitting if (p.tokens, p.pieces) == (fitting[0].tokens, fitting[0].pieces))
    return min(alike, key=lambda p: p.staging.order)


_LANES = 16
"""Sums that a core adds at a time (`joined_sums.h`)."""


def build(tiling: Tiling) -> AirModule:
    """Build the AIR program with the arguments `weight`, `x`, `residual` and `out`.

    `weight`: i8 `[SHARES * panels][panel bytes]` (layout `shared_lanes`); `x`: bf16 `[tokens][SHARES * inner]`; the
    others: bf16 `[tokens][cols]`.
    """
    p, cut = tiling, tiling.network.shares
    rows = air.memref_type((p.tokens.count, p.cols))
    types = {"weight": air.memref_type((SHARES * cut.panels, cut.panel_bytes), "i8")}
    types |= {"x": air.memref_type((p.tokens.count, SHARES * p.network.inner)), "residual": rows, "out": rows}
    b = air.Builder("shared_down", types)
    for first in range(0, p.tokens.count, p.tokens.together):
        with b.launch(p.pieces) as (piece, _), b.segment():
            _launch(b, p, first, piece)
    return b.finish()


def _launch(b: Builder, p: Tiling, first: int, piece: Index) -> None:
    """Compute a piece of the results of a launch's tokens, from token `first` on."""
    each, height = p.tokens.each, p.tokens.herd_rows
    fed = b.channel((SHARES, 1), (SHARES, height))
    _feed(b, p, fed, piece)
    rows, end = b.channel((1, height), (SHARES, height)), b.channel((1, height), (1, height))
    wide = SHARES * p.network.inner
    for row in range(height):
        token = first + row * each
        of_x, of_residual = p.units
        with b.loop(of_x) as i:
            b.put(rows, (0, row), b.args["x"].at((token, each, wide), (i * p.unit, p.unit, 1)))
        with b.loop(of_residual) as i:
            of_piece = b.args["residual"].at((piece, 1, p.outputs), (token, each, p.cols), (i * p.unit, p.unit, 1))
            b.put(rows, (0, row), of_piece)
    with b.herd(SHARES, height) as tile:
        _core(b, p, feed_forward.Streams(fed, rows, b.cascade((SHARES - 1, height)), end), tile)
    width = each * p.outputs
    with feed_forward.collected(b, end, height, width) as out:
        elements = first * p.cols + piece * p.outputs, p.outputs, 1
        b.dma(b.args["out"].at((0, height, each * p.cols), (0, each, p.cols), elements), out)


def _feed(b: Builder, p: Tiling, fed: Channel, piece: Index) -> None:
    """Move a piece's chunks to L2, step by step, then one by one to their column's cores."""
    stream, cut = b.channel((SHARES, 1), (SHARES, 1)), p.network.shares
    (steps,), size = p.staging.steps, p.staging.step_bytes
    with b.loop(steps) as step:
        for column in range(SHARES):
            at = (column, 1, cut.panels * cut.panel_bytes), (piece * (steps * size), 1, 1), (step * size, size, 1)
            b.put(stream, (column, 0), b.args["weight"].at(*at))
    feed_forward.pass_on(b, stream, fed, p.staging)


def _core(b: Builder, p: Tiling, streams: feed_forward.Streams, tile: tuple[Index, Index]) -> None:
    """Keep the core's share of `x`, compute its sums, then add those of the cores before it, part by part."""
    each, cut = p.tokens.each, p.network.shares
    rows = [(each * elements,) for elements in (p.unit, p.inner, p.outputs)]
    sums = [((each * elements,), "f32") for elements in (p.acc, p.outputs, p.outputs // PARTS)]
    with b.alloc(air.L1, *rows, *sums) as (arriving, own, residual, acc, sums_of_core, others):
        # Buffers that only loops use would be moved into them, and doubled.
        b.call(p.variant, f"shared_down{air.KEEP}", arriving, acc)
        with b.loop(sum(p.units)) as i:
            b.get(streams.rows, tile, arriving)
            b.call(p.variant, "shared_down_take", arriving, i, tile[0], own, residual)
        with b.loop(p.chunks) as j, b.alloc(air.L1, ((cut.chunk_bytes,), "i8")) as (chunk,):
            b.get(streams.fed, tile, chunk)
            b.call(p.variant, "shared_down_step", chunk, j, acc, own, sums_of_core)
        for i in range(PARTS):
            feed_forward.join(b, p.variant, streams.chain, tile, i, (residual, residual, sums_of_core, others))
        with b.where(tile[0], "eq", feed_forward.LAST):
            b.put(streams.end, (0, tile[1]), residual)


SOURCE = "shared_down"

OF_A_TOKEN = (
    # Templates for `stages.kernels.grouped`: gate and up, then this product.
    signature(
        "norm_shared_swiglu",
        (Arg("weight", matrix=True), "x", "norm"),
        f"out_cols cols {rms_norm.PARAMS} activation",
        gemv.reference_norm_swiglu,
        source="grouped_gemv",
        host=False,
    ),
    signature(
        "shared_gemv_add",
        (Arg("weight", matrix=True), "x", "residual"),
        "out_cols cols",
        reference,
        source=SOURCE,
        host=False,
    ),
)

KERNELS = tuple(map(batched, OF_A_TOKEN))
