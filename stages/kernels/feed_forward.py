"""A token's whole feed-forward network on the array in one launch, with group-wise quantised weights.

The launch computes the RMS norm, gate, up, SwiGLU, down and the residual add. The cores divide the inner width among
them, as machines do in tensor parallelism (Shoeybi et al. 2019, section 3).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from llama_npu2.frozen import frozen
from stages import air
from stages.air import limits
from stages.engine.lazy import np
from stages.kernels import BF16, F32, Arg, Cost, add, gemv, grouped_gemv, rms_norm, signature, silu_and_mul
from stages.kernels.tokens import ACTIVATIONS, ONE, Tokens, batched, in_rows
from stages.weights.constants import GROUP
from stages.weights.cut import PARTS, SHARES, FeedForward

if TYPE_CHECKING:
    from stages.air import AirModule, Builder, Channel, Index, MemRef, Variant
    from stages.weights.format import Format


def reference(
    gate_up: np.ndarray,
    down: np.ndarray,
    x: np.ndarray,
    norm: np.ndarray,
    eps: float,
    offset: float = 0.0,
    once: int | bool = False,
    activation: int = 0,
) -> np.ndarray:
    """Return `x` plus the feed-forward network of its RMS norm, bf16 `[cols]`, rounded only after the sum.

    `gate_up`: `[2 * ffn, cols]`, gate's rows, then up's; `down`: `[cols, ffn]`; `x`, `norm`: bf16 `[cols]`.
    """
    inner = gemv.reference_norm_swiglu(gate_up, x, norm, eps, offset, once, activation)
    return (x.astype(np.float32) + gemv.reference_f32(down, inner)).astype(x.dtype)


def reference_sandwich(
    gate_up: np.ndarray,
    down: np.ndarray,
    residual: np.ndarray,
    norms: np.ndarray,
    x: np.ndarray,
    eps: float,
    offset: float = 0.0,
    once: int | bool = False,
    activation: int = 0,
) -> np.ndarray:
    """Return a sum plus the norm of the feed-forward network of the sum's norm, bf16 `[cols]`.

    The sum is `residual` plus the norm of `x`. `norms`: weights of these three norms, bf16 `[NORMS * cols]`, of
    `x`, of the sum and of the network; the others as in `reference`.
    """
    scalars = eps, offset, once
    of_x, of_sum, of_network = np.split(norms, NORMS)
    mixed = rms_norm.reference_add(x, residual, of_x, *scalars)
    inner = gemv.reference_norm_swiglu(gate_up, mixed, of_sum, *scalars, activation)
    return rms_norm.reference_add(gemv.reference(down, inner), mixed, of_network, *scalars)


NORMS = 3
"""Norms of a sandwich: of the mixer's product, of the sum, and of the network's product."""

FIRST, LAST = 0, SHARES - 1
"""Columns of the first and of the last core."""


@frozen
class Staging:
    """How the chunks of a column pass through L2: several of them in a step, in buffers that take turns."""

    steps: tuple[int, ...]
    """Steps of each loop around a transfer from DDR."""
    together: int
    """Chunks of a step."""
    chunk_bytes: int
    result_bytes: int
    """Bytes of L2 that results take."""

    @property
    def step_bytes(self) -> int:
        """Bytes that come to a column's L2 in a step."""
        return self.together * self.chunk_bytes

    @property
    def buffers(self) -> int:
        """Buffers that steps take in turn: one is filled while another is read."""
        return limits.copies(sum(self.steps))

    @property
    def fits(self) -> bool:
        """Return whether L2 has room for the buffers and the results."""
        return self.buffers * self.step_bytes + self.result_bytes <= limits.L2_BYTES

    @property
    def order(self) -> tuple[int, int, int, int]:
        """Return what sorts ways of staging, the best first: in two buffers, of few descriptors, of few bytes.

        A core waits for its first chunk until all of the first step is in L2, and memory idles while the last one is
        read.
        """
        descriptors = sum(map(limits.descriptors, self.steps))
        return abs(self.buffers - 2), descriptors, max(self.step_bytes, SHORT_STEP), -self.step_bytes


SHORT_STEP = 1 << 14
"""Bytes of a step that is too short to gain from being shorter."""


@frozen
class Tiling:
    """How a feed-forward network is divided: one row of cores, each with a share of the inner width (`FeedForward`).

    A core's chunks of gate and up, and then those of down, come to its column's L2 while earlier ones are read. `x` and
    the norm's weight come to all cores at once. The sums of down pass from core to core, and each core adds its own;
    the first also adds the residual. They use the cascade, because both input streams of a core are taken. (When sums
    and `x` passed from core to core by one DMA, the compiler passed on `x` only when the sums were done: mlir-air of
    2026-05-08.)

    Of a layer's matrices only those of the feed-forward network are summed like this. The results of earlier ones would
    have to come back to all cores.

    With several tokens, rows of cores have tokens of their own (`Tokens`), and the cores of a column receive the same
    chunks. Where a core has two tokens, their normed rows lie where sums come later: it has room for no more.
    """

    network: FeedForward
    """How its matrices are cut into panels and chunks."""
    cols: int
    """Elements of `x`: the hidden size."""
    norm: rms_norm.Norm
    together: int
    """Chunks that come to L2 at a time, per column."""
    activation: int = 0
    """The gated activation, by its place in `ACTIVATIONS`."""
    sandwich: bool = False
    """Whether the mixer's product comes, whose norm is added to the residual first, and the norm of the result is added
    at the end."""
    tokens: Tokens = ONE
    """The rows of `x`."""

    @property
    def rows(self) -> Mapping[str, int]:
        """Elements of the arguments that come to every core, of one token, in the order in which they come."""
        if self.sandwich:
            return {"residual": self.cols, "norms": NORMS * self.cols, "x": self.cols}
        return {"x": self.cols, "norm": self.cols}

    @property
    def outputs(self) -> int:
        """Sums, including those of rows that pad the last panels."""
        return self.network.shares.panels * self.network.shares.lanes

    @property
    def inner(self) -> int:
        """Elements of a core's activation, including those that pad its last chunk."""
        return limits.aligned(self.network.shares.inputs, BF16)

    @property
    def acc(self) -> int:
        """Return how many f32 values a core keeps.

        They are sums of two panels, two values per group of inputs, and the value that sums begin with.
        """
        groups = max(self.network.pairs.inputs, self.network.shares.inputs) // GROUP
        return limits.aligned(2 * self.network.pairs.lanes + 2 * groups + 1, F32)

    @property
    def steps(self) -> tuple[int, int]:
        """Steps of `together` chunks: of gate and up, and of down."""
        pairs, down = (chunks // self.together for chunks in self.network.chunks)
        return pairs, down

    @property
    def staging(self) -> Staging:
        """How chunks pass through L2, which also holds the results of a launch's tokens."""
        chunk_bytes = self.network.pairs.chunk_bytes
        return Staging(self.steps, self.together, chunk_bytes, BF16 * self.cols * self.tokens.together)

    @property
    def l1_bytes(self) -> int:
        """Bytes that a core holds where it has several tokens, as `FeedForward.l1_bytes`."""
        element_rows = self.row + self.inner + 2 * self.outputs
        of_token = BF16 * element_rows + F32 * (self.acc + self.outputs // PARTS)
        after = BF16 * limits.aligned(self.cols, BF16) * self.sandwich
        return 2 * self.network.pairs.chunk_bytes + self.tokens.each * of_token + after

    @property
    def fits_l1(self) -> bool:
        """Return whether a core has room for its tokens."""
        if self.tokens.each == 1:
            return self.network.has_room(self.cols if self.sandwich else 0)
        return self.cols % limits.VECTOR == 0 and limits.fits_l1(self.l1_bytes)

    @property
    def row(self) -> int:
        """Elements of `x` on a core, whose memory has the outputs at the end."""
        return max(self.network.pairs.inputs, self.outputs)

    @property
    def variant(self) -> Variant:
        pairs, shares = self.network.pairs, self.network.shares
        chunks = {"STEPS": pairs.chunks, "DOWN_STEPS": shares.chunks, "PAIR_CHUNKS": self.network.chunks[0]}
        more = self.norm.macros | silu_and_mul.macros(self.activation) | ({"SANDWICH": 1} if self.sandwich else {})
        sizes = {"COLS": self.cols, "INNER": self.network.inner, "OUTS": self.outputs, "PARTS": PARTS}
        sizes |= self.tokens.macros
        return air.Variant.of("feed_forward", **sizes, **chunks, **grouped_gemv.macros(pairs), **more)

    @property
    def macs(self) -> int:
        cut = self.network.pairs
        return self.tokens.count * SHARES * sum(self.network.chunks) * cut.lanes * cut.chunk_groups * GROUP

    @property
    def panel_vectors(self) -> int:
        """Vector operations that the activation of a panel takes."""
        return self.network.pairs.lanes // 16 + 2 * 3 + silu_and_mul.vectors(self.network.pairs.lanes, self.activation)

    @property
    def costs(self) -> Mapping[str, Cost]:
        pairs, shares, chunks = self.network.pairs, self.network.shares, sum(self.network.chunks)
        activation = self.network.inner // pairs.lanes * self.panel_vectors
        vectors = activation + grouped_gemv.FIXED * shares.inputs // GROUP
        part_vectors = self.outputs // PARTS // (limits.VECTOR // 2)
        begin = self.norm.vectors(self.cols) + grouped_gemv.FIXED * pairs.inputs // GROUP
        added = self.norm.vectors(self.cols) + add.vectors(self.cols) if self.sandwich else 0
        each = self.tokens.each
        products = grouped_gemv.chunk_vectors(pairs, each)
        return {
            "feed_forward_begin": Cost(vectors=each * (begin + added)),
            "feed_forward_step": Cost(vectors=-(-each * vectors // chunks), scheduled=products),
            **join_costs(each * part_vectors, sandwich=self.sandwich, last=each * added // PARTS),
        }

    def __str__(self) -> str:
        cut = self.network.pairs
        return (
            f"feed-forward {self.cols}, inside {SHARES} shares of {self.network.inner}, in groups{self.tokens.text}: "
            f"herd {SHARES}x{self.tokens.herd_rows}, "
            f"chunks of {cut.lanes}x{cut.chunk_groups * GROUP} in {cut.chunk_bytes} bytes, "
            f"{'+'.join(map(str, self.steps))} steps of {self.together}"
        )


def join_costs(vectors: int, sandwich: bool = False, last: int = 0) -> Mapping[str, Cost]:
    """Return the costs of the tile functions of `join`, for parts of so many vectors; `last`: more of the last."""
    return {
        "feed_forward_first": Cost(vectors=vectors * (2 if sandwich else 7)),
        "feed_forward_join": Cost(vectors=vectors * 4),
        "feed_forward_last": Cost(vectors=vectors * 4 + last),
    }


def tile(
    form: Format, cols: int, inner: int, norm: rms_norm.Norm, sandwich: bool = False, tokens: Tokens = ONE
) -> Tiling:
    """Divide a feed-forward network into steps of which L2 holds two, by `Staging.order`.

    Tokens are divided here, too. Raises UserError if a core's memory or L2 is too small.
    """
    what = f"feed-forward {cols}x{inner}"
    limits.require_multiple(what, "cols", cols, 2 * limits.BLOCK)
    assert form.feed_forward is not None
    network: FeedForward = form.feed_forward(cols, inner)
    steps = limits.divisors(math.gcd(*network.chunks))
    tilings = [
        Tiling(network, cols, norm, together, sandwich=sandwich, tokens=way)
        for way in in_rows(tokens.count)
        for together in steps
    ]
    tilings = limits.require_any(what, limits.IN_L1, (p for p in tilings if p.fits_l1))
    cuttable = (p for p in tilings if all(map(limits.cuttable, p.steps)))
    tilings = limits.require_any(what, f"descriptors of at most {limits.ITERATIONS} steps", cuttable)
    fitting = limits.require_any(what, limits.IN_L2, (p for p in tilings if p.staging.fits))
    return min((p for p in fitting if p.tokens == fitting[0].tokens), key=lambda p: p.staging.order)


def build(tiling: Tiling) -> AirModule:
    """Build the AIR program with the arguments `gate_up`, `down`, those of `Tiling.rows`, and `out`.

    `gate_up`: i8 `[2 * panels][panel bytes]` (layout `shared_pairs`); `down`: i8 `[SHARES * panels][panel bytes]`
    (layout `shared_lanes`); `norms`: bf16 `[NORMS * cols]`; the others: bf16 `[cols]`. With several tokens, activations
    have them as their first dimension.
    """
    p = tiling
    matrices = {"gate_up": (2, p.network.pairs), "down": (SHARES, p.network.shares)}
    weights = {
        name: air.memref_type((count * cut.panels, cut.panel_bytes), "i8") for name, (count, cut) in matrices.items()
    }
    sizes = {**p.rows, "out": p.cols}
    rows = {name: p.tokens.shape(size) if name in ACTIVATIONS else (size,) for name, size in sizes.items()}
    b = air.Builder("feed_forward", weights | {name: air.memref_type(shape) for name, shape in rows.items()})
    for first in range(0, p.tokens.count, p.tokens.together):
        with b.launch(), b.segment():
            _launch(b, p, first)
    return b.finish()


def _launch(b: Builder, p: Tiling, first: int) -> None:
    """Compute the results of a launch's tokens, from token `first` on."""
    count, each, height = p.tokens.together, p.tokens.each, p.tokens.herd_rows
    fed = b.channel((SHARES, 1), (SHARES, height))
    _feed(b, p, fed)
    rows, end = b.channel((1, height), (SHARES, height)), b.channel((1, height), (1, height))
    _send_rows(b, p, rows, first)
    with b.herd(SHARES, height) as (tx, ty):
        _core(b, p, Streams(fed, rows, b.cascade((SHARES - 1, height)), end), (tx, ty))
    width = each * p.cols
    with collected(b, end, height, width) as out:
        # The compiler cuts the transfer by rows of cores and drops an offset of that dimension, so the offset stays 0.
        at: tuple[tuple[int, int, int], ...] = ((0, count, p.cols),) if p.tokens != ONE else ()
        if each > 1:
            at = (0, height, width), (0, each, p.cols)
        b.dma(b.args["out"].at(*at, (first * p.cols, p.cols, 1)), out)


@contextmanager
def collected(b: Builder, end: Channel, height: int, width: int) -> Iterator[MemRef]:
    """Get the results of the last cores of all rows into L2; yield them, `[height][width]`."""
    with b.alloc(air.L2, (height, width)) as (out,):
        if height > 1:
            with b.parallel(1, height) as (tx, ty):
                b.get(end, (tx, ty), out.at((ty, 1, width), (0, width, 1)))
        else:
            b.get(end, (0, 0), out)
        yield out


@frozen
class Streams:
    """Channels of the cores."""

    fed: Channel
    """Brings chunks of weights."""
    rows: Channel
    """Brings `x` and the norm's weight."""
    chain: Channel
    """Passes sums from core to core."""
    end: Channel
    """Takes the result out of the last core."""


def _send_rows(b: Builder, p: Tiling, rows: Channel, first: int) -> None:
    """Send the rows to all cores. A channel of a shim queues no more transfers than `limits.QUEUE_DEPTH`.

    They do not come by way of L2, where mlir-air (2026-05-08) crashes, or drops rows, if rows of cores receive parts of
    a buffer, and that of 2026-07-29 finds no shim for them.
    """
    each = p.tokens.each
    for row in range(p.tokens.herd_rows):
        for name, size in p.rows.items():
            at = ((first + row * each, each, size),) if p.tokens != ONE and name in ACTIVATIONS else ()
            b.put(rows, (0, row), b.args[name].at(*at, (0, size, 1)))


def _feed(b: Builder, p: Tiling, fed: Channel) -> None:
    """Move all chunks to L2, step by step and contiguous for each column, then one by one to the column's core.

    Each column has one stream, on which the chunks of down follow those of gate and up. Two transfers would take two.
    """
    stream, size = b.channel((SHARES, 1), (SHARES, 1)), p.staging.step_bytes
    for name, steps in zip(("gate_up", "down"), p.steps, strict=True):
        with b.loop(steps) as step:
            for column in range(SHARES):
                b.put(stream, (column, 0), b.args[name].at((column, 1, steps * size), (step * size, size, 1)))
    pass_on(b, stream, fed, p.staging)


def pass_on(b: Builder, stream: Channel, fed: Channel, staging: Staging) -> None:
    """Get a step's chunks into L2, for each column, and put them to the cores one by one.

    Both are in one loop over columns. Then the compiler makes a second buffer, one of which is filled while the other
    is read; of two loops it makes none (mlir-air of 2026-05-08).
    """
    size, chunk = staging.step_bytes, staging.chunk_bytes
    with b.alloc(air.L2, ((SHARES, size), "i8")) as (chunks,), b.loop(sum(staging.steps)):
        with b.parallel(SHARES, 1) as (tx, ty):
            b.get(stream, (tx, ty), chunks.at((tx, 1, size), (0, size, 1)))
            with b.loop(staging.together) as j:
                b.put(fed, (tx, ty), chunks.at((tx, 1, size), (j * chunk, chunk, 1)))


def _core(b: Builder, p: Tiling, streams: Streams, tile: tuple[Index, Index]) -> None:
    """Compute the core's share of all sums, then add those of the cores before it, part by part."""
    inputs, part, each = p.network.pairs.inputs, p.outputs // PARTS, p.tokens.each
    # What comes before there are sums lies in their place: of a sandwich, and of several tokens.
    halves = p.sandwich or each > 1
    of_sums: tuple[tuple[int], str] = ((each * 2 * p.outputs,), "bf16") if halves else ((p.outputs,), "f32")
    rows = [((each - 1) * p.cols + p.row,), *([(inputs,)] if each == 1 else []), (each * p.inner,)]
    more = [(limits.aligned(p.cols, BF16),)] if p.sandwich else []
    held = b.alloc(air.L1, *rows, ((each * p.acc,), "f32"), of_sums, ((each * part,), "f32"), *more)
    with held as buffers:
        x, *own_norm, inner, acc, sums, others = buffers[: len(rows) + 3]
        after = buffers[len(rows) + 3 :]
        # Rows of a buffer that also sends come as one: else it would wait for as many results.
        of_norm = (own_norm[0], 0) if own_norm else (sums, (2 * each - 1) * p.outputs)
        begins = [(x, 0, each * p.cols)]
        if p.sandwich:
            # One transfer brings the norms' weights, and each goes where it is used.
            begins += [(sums, p.outputs, p.cols), (*of_norm, p.cols), (after[0], 0, p.cols)]
            begins += [(sums, 2 * at * p.outputs, p.cols) for at in range(each)]
        else:
            begins.append((*of_norm, p.cols))
        for target, begin, size in begins:
            b.get(streams.rows, tile, target.at((begin, size, 1)))
        # Buffers that only the loop uses would be moved into it, and doubled. So this call is given all of them.
        of_begin = (x, *own_norm, acc, inner, *((sums,) if halves else ()), *after)
        b.call(p.variant, "feed_forward_begin", *of_begin, p.norm.eps)
        with b.loop(sum(p.network.chunks)) as j, b.alloc(air.L1, ((p.network.pairs.chunk_bytes,), "i8")) as (chunk,):
            b.get(streams.fed, tile, chunk)
            b.call(p.variant, "feed_forward_step", chunk, *own_norm, j, acc, inner, sums)
        for i in range(PARTS):
            join(b, p.variant, streams.chain, tile, i, (x, x, sums, others, *after), *([p.norm.eps] if after else []))
        with b.where(tile[0], "eq", LAST):
            b.put(streams.end, (0, tile[1]), x.at((0, each * p.cols, 1)))


def join(
    b: Builder,
    variant: Variant,
    chain: Channel,
    tile: tuple[Index, Index],
    part: int,
    core: tuple[MemRef, ...],
    *eps: float,
) -> None:
    """Pass a part of the sums through a core. The first core adds `x`; the last one writes the total.

    Each core has a branch of its own, because the compiler needs constants for the cores at both ends of a transfer.

    Args:
        variant: that of the tile functions of `kernel_src/aie2p/joined_sums.h`.
        core: its `x`, the buffer for the result, which may be `x`, its own sums, the buffer for the sums of others, and
            of a sandwich the last norm's weight.
        eps: the norm's, of a sandwich.
    """
    x, result, sums, others, *after = core
    tx, ty = tile
    with b.where(tx, "eq", FIRST):
        b.call(variant, "feed_forward_first", x, part, sums, others)
    for column in range(FIRST + 1, LAST + 1):
        with b.where(tx, "eq", column):
            b.get(chain, (column - 1, ty), others)
            b.call(variant, "feed_forward_join", sums, part, others)
    for column in range(FIRST, LAST):
        with b.where(tx, "eq", column):
            b.put(chain, (column, ty), others)
    with b.where(tx, "eq", LAST):
        ending: Iterable[MemRef | float] = (sums, *after, *eps) if after else ()
        b.call(variant, "feed_forward_last", others, part, result, *ending)


OF_A_TOKEN = (
    # Templates for `stages.kernels.grouped`: they exist only for weights in formats that the array reads as stored.
    signature(
        "feed_forward",
        (Arg("gate_up", matrix=True), Arg("down", matrix=True), "x", "norm"),
        f"cols ffn {rms_norm.PARAMS} activation",
        reference,
        host=False,
    ),
    signature(
        "sandwich_feed_forward",
        (Arg("gate_up", matrix=True), Arg("down", matrix=True), "residual", "norms", "x"),
        f"cols ffn {rms_norm.PARAMS} activation",
        reference_sandwich,
        source="feed_forward",
        host=False,
    ),
)

KERNELS = (*OF_A_TOKEN, *map(batched, OF_A_TOKEN))
