"""Attention of a token on the array, over the first `window` positions of an interleaved cache that has its K and V."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from stages import air
from stages.air import limits
from stages.kernels import BF16, F32, Cost, decode_attention, signature
from stages.weights.constants import POSITION

if TYPE_CHECKING:
    from stages.air import AirModule, Builder, Index, Variant


def reference(q: np.ndarray, k: np.ndarray, v: np.ndarray, heads: int, kv_heads: int) -> np.ndarray:
    """As `decode_attention`'s, of the queries in `q`: `k` and `v` end at the token's position."""
    return decode_attention.reference(q[:-POSITION], k, v, heads, kv_heads)


@dataclass(frozen=True)
class Tiling:
    """A core per KV head, one in a column, takes all query heads of its group at once, and `tile_k` positions at a
    time. Those behind the token's are read too, and masked: a tile that has no others costs a call that returns at
    once. Queries go to all cores, because a core has two streams in, and the other brings K and V."""

    window: int
    heads: int
    kv_heads: int
    head_dim: int
    columns: int
    tile_k: int

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def queries(self) -> int:
        """Rows of whole blocks that hold a group's."""
        return -(-self.group // limits.BLOCK) * limits.BLOCK

    @property
    def width(self) -> int:
        """Elements of all queries, with the position behind them."""
        return self.heads * self.head_dim + POSITION

    @property
    def steps(self) -> int:
        """Of a core, over the keys."""
        return self.window // self.tile_k

    @property
    def passes(self) -> int:
        """Launches, each for as many KV heads as there are columns. (One that moved on would tell its cores of several
        steps at once.)"""
        return self.kv_heads // self.columns

    @property
    def variant(self) -> Variant:
        sizes = {"HD": self.head_dim, "KR": self.tile_k, "MEMBERS": self.group, "QR": self.queries}
        return air.Variant.of("token_attention", HEADS=self.heads, **sizes)

    @property
    def macs(self) -> int:
        return 2 * self.window * self.kv_heads * self.queries * self.head_dim

    @property
    def costs(self) -> Mapping[str, Cost]:
        """As `flash_attention`'s; a group's rows are put into blocks and out of them again."""
        blocks, dims = self.queries // limits.BLOCK, self.head_dim // limits.BLOCK
        moved = 2 * self.group * dims
        return {
            "ta_init": Cost(vectors=blocks * (11 * dims + 2) + moved // 2),
            "ta_step": Cost(
                2 * self.queries * self.tile_k * self.head_dim,
                vectors=blocks * (self.tile_k // limits.BLOCK * 45 + 56),
            ),
            "ta_out": Cost(vectors=blocks * (26 * dims + 24) + moved // 2),
        }

    def __str__(self) -> str:
        return (
            f"token_attention over {self.window}, heads {self.heads}/{self.kv_heads}x{self.head_dim}: herd "
            f"{self.columns}x1, {self.tile_k} keys at a time"
        )


def tile(window: int, heads: int, kv_heads: int, head_dim: int) -> Tiling:
    """As many columns as KV heads can be dealt out to evenly, a stream from DDR each; the largest key tile that fits
    L1 as often as the compiler copies it. UserError if heads are no whole vectors or nothing fits."""
    what = f"token_attention over {window}, heads {heads}/{kv_heads}x{head_dim}"
    limits.require_multiple(what, "heads", heads, kv_heads)
    limits.require_multiple(what, "head_dim", head_dim, limits.VECTOR)
    limits.require_multiple(what, "window", window, 2 * limits.BLOCK)
    columns = limits.divisors(kv_heads, 1, limits.COLUMNS)[0]
    keys = limits.divisors(window, 2 * limits.BLOCK, 64)
    tilings = [Tiling(window, heads, kv_heads, head_dim, columns, k) for k in keys]
    fitting = [p for p in tilings if _fits(p)]
    limits.first(what, f"L1 ({limits.L1_BYTES} bytes)", range(len(fitting)))
    return limits.steady_first(what, fitting, lambda p: p.steps)[0]


def _fits(p: Tiling) -> bool:
    """Whether a core holds all queries, its results, and what attention makes of them and of the keys. Scores, which
    only the loop over the keys uses, are there as often as the keys."""
    return limits.fits_l1(
        BF16 * p.width,
        BF16 * p.group * p.head_dim,
        (BF16 + F32) * p.queries * p.head_dim,
        limits.copies(p.steps) * (BF16 * 2 * p.head_dim + F32 * p.queries) * p.tile_k,
        2 * F32 * p.queries,
    )


def build(tiling: Tiling) -> AirModule:
    """Arguments `q`: bf16 `[heads * head_dim + POSITION]`, with the token's position behind the queries, as i32; `kv`:
    bf16 `[window][kv_heads * 2 * head_dim]`; `out`: bf16 `[heads * head_dim]`."""
    p = tiling
    keys = air.memref_type((p.window, p.kv_heads * 2 * p.head_dim))
    out = air.memref_type((p.heads * p.head_dim,))
    b = air.Builder("token_attention", {"q": air.memref_type((p.width,)), "kv": keys, "out": out})
    for turn in range(p.passes):
        with b.launch(), b.segment(), b.herd(p.columns, 1) as (tx, _):
            _attend(b, p, tx + turn * p.columns)
    return b.finish()


def _attend(b: Builder, p: Tiling, kv_head: Index) -> None:
    """Online softmax of a group's queries over all key tiles."""
    d, k, mine = p.head_dim, p.tile_k, p.group * p.head_dim
    blocks = (p.queries // limits.BLOCK, d // limits.BLOCK, limits.BLOCK, limits.BLOCK)
    sums = (((p.queries, d), "f32"), ((2, p.queries), "f32"), ((p.queries, k), "f32"))
    with b.alloc(air.L1, (p.width,), blocks, *sums) as (rows, q, acc, stats, work):
        b.dma(rows, b.args["q"].at((0, p.width, 1)))
        b.call(p.variant, "ta_init", rows, kv_head, q, acc, stats)
        with b.loop(p.steps) as j, b.alloc(air.L1, (k, 2 * d)) as (kv,):
            b.dma(kv, b.args["kv"].at((j * k, k, p.kv_heads * 2 * d), (kv_head * (2 * d), 2 * d, 1)))
            b.call(p.variant, "ta_step", rows, j * k, q, kv, acc, stats, work)
        with b.alloc(air.L1, (mine,)) as (out,):
            b.call(p.variant, "ta_out", acc, stats, q, out)
            b.dma(b.args["out"].at((kv_head * mine, mine, 1)), out)


KERNELS = (
    signature(
        "token_attention",
        ("q", "kv"),
        "window pos heads kv_heads head_dim",
        reference,
        attends=True,
        host=False,
        tiling=lambda s: tile(s["window"], s["heads"], s["kv_heads"], s["head_dim"]),
        program=build,
    ),
)
