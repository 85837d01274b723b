"""A token's whole feed-forward network on the array in one launch, with weights in groups: norm, gate, up, SwiGLU, down
and residual. Cores share the inner width, as machines do in tensor parallelism (Shoeybi et al. 2019, section 3)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from stages import air
from stages.air import limits
from stages.kernels import BF16, F32, Arg, Cost, gemv, grouped_gemv, rms_norm, signature, silu_and_mul
from stages.weights.constants import GROUP
from stages.weights.lanes import PARTS, SHARES, FeedForward

if TYPE_CHECKING:
    from stages.air import AirModule, Builder, Channel, Index, MemRef, Variant
    from stages.weights.formats import Format


def reference(gate_up: np.ndarray, down: np.ndarray, x: np.ndarray, norm: np.ndarray, eps: float) -> np.ndarray:
    """`gate_up` `[2 * ffn, cols]`, gate's rows and then up's, `down` `[cols, ffn]`, `x` and `norm` bf16 `[cols]` ->
    bf16 `[cols]`: `x` and what the network makes of its RMS norm, in f32 up to their sum."""
    inner = gemv.reference_norm_swiglu(gate_up, x, norm, eps)
    return (x.astype(np.float32) + gemv.reference_f32(down, inner)).astype(x.dtype)


FIRST, LAST = 0, SHARES - 1
"""Columns of the cores at the ends."""


@dataclass(frozen=True)
class Tiling:
    """One row of cores, each with a share of the inner width (`FeedForward`). Its chunks of gate and up, then of down,
    come to its column's L2 `together` at a time while those before are read. `x` and the norm's weight come to all
    cores at once. Sums go from core to core, and each adds its own, the first the residual, too: by the cascade, as a
    core's two streams in are taken. (Where sums and `x` went from core to core by one DMA, the compiler handed `x` on
    when the sums were done: mlir-air of 2026-05-08.)

    Of a layer's matrices only these are summed so: those before them would have to come back to all cores.
    """

    made: FeedForward
    cols: int
    eps: float
    together: int

    @property
    def outputs(self) -> int:
        """Sums, those of rows that fill the last panels among them."""
        return self.made.shares.panels * self.made.shares.lanes

    @property
    def inner(self) -> int:
        """Elements of a core's activation, with what fills its last chunk."""
        return limits.aligned(self.made.shares.inputs, BF16)

    @property
    def acc(self) -> int:
        """f32 that a core keeps: sums of two panels, two for each group of inputs, and what they begin with."""
        groups = max(self.made.pairs.inputs, self.made.shares.inputs) // GROUP
        return limits.aligned(2 * self.made.pairs.lanes + 2 * groups + 1, F32)

    @property
    def steps(self) -> tuple[int, int]:
        """Of `together` chunks: of gate and up, and of down."""
        pairs, down = (chunks // self.together for chunks in self.made.chunks)
        return pairs, down

    @property
    def step_bytes(self) -> int:
        return self.together * self.made.pairs.chunk_bytes

    @property
    def variant(self) -> Variant:
        pairs, shares = self.made.pairs, self.made.shares
        chunks = {"STEPS": pairs.chunks, "DOWN_STEPS": shares.chunks, "PAIR_CHUNKS": self.made.chunks[0]}
        sizes = {"COLS": self.cols, "INNER": self.made.inner, "OUTS": self.outputs, "PARTS": PARTS}
        return air.Variant.of("feed_forward", **sizes, **chunks, **grouped_gemv.macros(pairs))

    @property
    def macs(self) -> int:
        cut = self.made.pairs
        return SHARES * sum(self.made.chunks) * cut.lanes * cut.chunk_groups * GROUP

    @property
    def panel_vectors(self) -> int:
        """Vector operations that the activation of a panel takes."""
        return self.made.pairs.lanes // 16 + 2 * 3 + silu_and_mul.vectors(self.made.pairs.lanes)

    @property
    def costs(self) -> Mapping[str, Cost]:
        panels = self.made.inner // self.made.pairs.lanes
        vectors = panels * self.panel_vectors + grouped_gemv.FIXED * self.made.shares.inputs // GROUP
        each = self.outputs // PARTS // (limits.VECTOR // 2)
        return {
            "feed_forward_begin": Cost(
                vectors=rms_norm.row_vectors(self.cols) + grouped_gemv.FIXED * self.made.pairs.inputs // GROUP
            ),
            "feed_forward_step": Cost(
                vectors=-(-vectors // sum(self.made.chunks)), scheduled=grouped_gemv.chunk_vectors(self.made.pairs)
            ),
            "feed_forward_first": Cost(vectors=each * 7),
            "feed_forward_join": Cost(vectors=each * 4),
            "feed_forward_last": Cost(vectors=each * 4),
        }

    def __str__(self) -> str:
        cut = self.made.pairs
        return (
            f"feed-forward {self.cols}, inside {SHARES} shares of {self.made.inner}, in groups: herd {SHARES}x1, "
            f"chunks of {cut.lanes}x{cut.chunk_groups * GROUP} in {cut.chunk_bytes} bytes, "
            f"{'+'.join(map(str, self.steps))} steps of {self.together}"
        )


def tile(form: Format, cols: int, inner: int, eps: float) -> Tiling:
    """The largest steps of which L2 holds as many as the compiler makes. UserError if a core or L2 cannot hold what it
    needs."""
    what = f"feed-forward {cols}x{inner}"
    limits.require_multiple(what, "cols", cols, 2 * limits.BLOCK)
    assert form.feed_forward is not None
    made: FeedForward = form.feed_forward(cols, inner)
    sizes = limits.divisors(math.gcd(*made.chunks))
    tilings = [p for p in (Tiling(made, cols, eps, size) for size in sizes) if all(map(limits.cuttable, p.steps))]
    limits.first(what, f"descriptors of at most {limits.ITERATIONS} steps", range(len(tilings)))
    tilings = [p for p in tilings if _l2(p) <= limits.L2_BYTES]
    limits.first(what, f"L2 ({limits.L2_BYTES} bytes)", range(len(tilings)))
    return tilings[0]


def _l2(p: Tiling) -> int:
    """Bytes of a column's steps, as often as the compiler copies them, and of the result."""
    return limits.copies(sum(p.steps)) * p.step_bytes + BF16 * p.cols


def build(tiling: Tiling) -> AirModule:
    """Arguments `gate_up`: i8 `[2 * panels][panel bytes]` (layout `shared_pairs`), `down`: i8 `[SHARES * panels][panel
    bytes]` (`shared_lanes`), `x`, `norm`, `out`: bf16 `[cols]`."""
    p = tiling
    matrices = {"gate_up": (2, p.made.pairs), "down": (SHARES, p.made.shares)}
    weights = {
        name: air.memref_type((times * cut.panels, cut.panel_bytes), "i8") for name, (times, cut) in matrices.items()
    }
    b = air.Builder("feed_forward", weights | {name: air.memref_type((p.cols,)) for name in ("x", "norm", "out")})
    with b.launch(), b.segment():
        fed = b.channel((SHARES, 1), (SHARES, 1))
        _feed(b, p, fed)
        rows, end = b.channel((1, 1), (SHARES, 1)), b.channel((1, 1), (1, 1))
        for name in ("x", "norm"):
            b.put(rows, (0, 0), b.args[name].at((0, p.cols, 1)))
        with b.herd(SHARES, 1) as (tx, ty):
            _core(b, p, _Streams(fed, rows, b.cascade((SHARES - 1, 1)), end), (tx, ty))
        with b.alloc(air.L2, (p.cols,)) as (out,):
            b.get(end, (0, 0), out)
            b.dma(b.args["out"].at((0, p.cols, 1)), out)
    return b.finish()


@dataclass(frozen=True)
class _Streams:
    """Of cores: chunks; `x` and the norm's weight; sums from core to core; and out of the last."""

    fed: Channel
    rows: Channel
    chain: Channel
    end: Channel


def _feed(b: Builder, p: Tiling, fed: Channel) -> None:
    """All chunks: to L2 step by step, a run for each column, then one by one to its core. A stream for each column, on
    which those of down follow: two transfers would take two."""
    stream, size, chunk = b.channel((SHARES, 1), (SHARES, 1)), p.step_bytes, p.made.pairs.chunk_bytes
    for name, steps in zip(("gate_up", "down"), p.steps, strict=True):
        with b.loop(steps) as step:
            for column in range(SHARES):
                b.put(stream, (column, 0), b.args[name].at((column, 1, steps * size), (step * size, size, 1)))
    with b.alloc(air.L2, ((SHARES, size), "i8")) as (chunks,), b.loop(sum(p.steps)):
        with b.parallel(SHARES, 1) as (tx, ty):
            b.get(stream, (tx, ty), chunks.at((tx, 1, size), (0, size, 1)))
        with b.parallel(SHARES, 1) as (tx, ty), b.loop(p.together) as j:
            b.put(fed, (tx, ty), chunks.at((tx, 1, size), (j * chunk, chunk, 1)))


def _core(b: Builder, p: Tiling, streams: _Streams, tile: tuple[Index, Index]) -> None:
    """The core's share of all sums, and then those of the cores up to it, part by part."""
    row, inputs, part = max(p.made.pairs.inputs, p.outputs), p.made.pairs.inputs, p.outputs // PARTS
    f32 = [((size,), "f32") for size in (p.acc, p.outputs, part)]
    with b.alloc(air.L1, (row,), (inputs,), (p.inner,), *f32) as (x, normed, inner, acc, sums, others):
        for taken in (x, normed):
            b.get(streams.rows, tile, taken.at((0, p.cols, 1)))
        # What only the loop uses would be moved into it, and doubled.
        b.call(p.variant, "feed_forward_begin", x, normed, acc, inner, p.eps)
        with b.loop(sum(p.made.chunks)) as j, b.alloc(air.L1, ((p.made.pairs.chunk_bytes,), "i8")) as (chunk,):
            b.get(streams.fed, tile, chunk)
            b.call(p.variant, "feed_forward_step", chunk, normed, j, acc, inner, sums)
        for i in range(PARTS):
            _join(b, p, streams.chain, tile[0], i, (x, sums, others))
        with b.where(tile[0], "eq", LAST):
            b.put(streams.end, (0, 0), x.at((0, p.cols, 1)))


def _join(b: Builder, p: Tiling, chain: Channel, tx: Index, part: int, core: tuple[MemRef, MemRef, MemRef]) -> None:
    """A part of the sums goes through a core, whose `x`, sums and place for those of others are `core`; the last
    replaces `x`. The compiler wants to be told of each core from which and to which."""
    x, sums, others = core
    with b.where(tx, "eq", FIRST):
        b.call(p.variant, "feed_forward_first", x, part, sums, others)
    for column in range(FIRST + 1, LAST + 1):
        with b.where(tx, "eq", column):
            b.get(chain, (column - 1, 0), others)
            b.call(p.variant, "feed_forward_join", sums, part, others)
    for column in range(FIRST, LAST):
        with b.where(tx, "eq", column):
            b.put(chain, (column, 0), others)
    with b.where(tx, "eq", LAST):
        b.call(p.variant, "feed_forward_last", others, part, x)


KERNELS = (
    # Of weights in formats that the array takes as they are stored.
    signature(
        "feed_forward",
        (Arg("gate_up", matrix=True), Arg("down", matrix=True), "x", "norm"),
        "cols ffn eps:float",
        reference,
        host=False,
    ),
)
