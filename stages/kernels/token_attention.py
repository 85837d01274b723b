"""Rotation and attention of a token on the array, over the first `window` positions of an interleaved cache, into which
its K and V go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from stages import air
from stages.air import limits
from stages.kernels import BF16, F32, Arg, Cost, decode_attention, flash_attention, lanes, rope, signature
from stages.weights.constants import POSITION

if TYPE_CHECKING:
    from stages.air import AirModule, Builder, Channel, Index, Variant


def reference(
    x: np.ndarray, table: np.ndarray, pos: int, k: np.ndarray, v: np.ndarray, heads: int, kv_heads: int
) -> tuple[np.ndarray, np.ndarray]:
    """`x` and `table` as `rope.reference_qkv` takes them, `k` and `v` bf16 `[positions, kv_heads * head_dim]`, of which
    those before `pos` count -> bf16 `[heads * head_dim]`, and the cache's row of `pos`, bf16 `[kv_heads, 2, head_dim]`.
    """
    q, row = rope.reference_qkv(x, table, pos, heads, kv_heads, k.shape[1] // kv_heads)
    k, v = (np.concatenate([old[:pos], row[:, half].reshape(1, -1)]) for half, old in enumerate((k, v)))
    return decode_attention.reference(flash_attention.rounded(q, row.shape[-1]), k, v, heads, kv_heads), row


@dataclass(frozen=True)
class Tiling:
    """A core per KV head, one in a column, takes all query heads of its group at once, and `tile_k` positions at a
    time. Those behind the token's are read too, and masked: a tile that has no others costs a call that returns at
    once. Q, K and V of the token go to all cores, because a core has two streams in, and the other brings what is in
    the cache. Each rotates its group's, writes its part of the cache's row, and puts it into the tile where it belongs:
    DDR may have the old row or the new one when that is read."""

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
        """Elements of Q, K and V of all heads."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def angles(self) -> int:
        """Of the table's row, with the position behind them."""
        return self.head_dim + POSITION * BF16 // F32

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
        return air.Variant.of("token_attention", HEADS=self.heads, KV_HEADS=self.kv_heads, **sizes)

    @property
    def macs(self) -> int:
        return 2 * self.window * self.kv_heads * self.queries * self.head_dim

    @property
    def costs(self) -> Mapping[str, Cost]:
        """As `flash_attention`'s and `rope`'s; a group's rows are put into blocks and out of them again."""
        pairs = self.head_dim // 2
        rotation = pairs // lanes(pairs) * ((self.group + 1) * 14 + 28)
        blocks, dims = self.queries // limits.BLOCK, self.head_dim // limits.BLOCK
        moved = 2 * self.group * dims
        return {
            "ta_init": Cost(vectors=rotation + blocks * (14 * dims + 2) + moved // 2),
            "ta_step": Cost(
                2 * self.queries * self.tile_k * self.head_dim,
                vectors=flash_attention.softmax_vectors(self.queries, self.tile_k),
            ),
            "ta_out": Cost(vectors=blocks * (24 * dims + 43) + moved // 2),
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
    """Whether a core holds Q, K and V, the table's row and the cache's, its results, and what attention makes of them
    and of the keys. Scores, which only the loop over the keys uses, are there as often as the keys."""
    return limits.fits_l1(
        limits.aligned(BF16 * p.width),
        limits.aligned(F32 * p.angles),
        BF16 * 2 * p.head_dim,
        BF16 * p.group * p.head_dim,
        (BF16 + F32) * p.queries * p.head_dim,
        limits.copies(p.steps) * (BF16 * 2 * p.head_dim + F32 * p.queries) * p.tile_k,
        2 * F32 * p.queries,
    )


def build(tiling: Tiling) -> AirModule:
    """Arguments `x`: bf16 `[(heads + 2 * kv_heads) * head_dim]`; `table`: f32 `[head_dim + POSITION / 2]`, the row of
    the token's position, which is behind the angles, as i32; `kv`: bf16 `[window][kv_heads * 2 * head_dim]`; `out`:
    bf16 `[heads * head_dim]`; `row`: bf16 `[2 * kv_heads * head_dim]`, the position's row of the cache."""
    p = tiling
    kv = p.kv_heads * 2 * p.head_dim
    shapes = {"x": (p.width,), "table": (p.angles,), "kv": (p.window, kv), "out": (p.heads * p.head_dim,), "row": (kv,)}
    dtypes = {"table": "f32"}
    b = air.Builder(
        "token_attention", {name: air.memref_type(shape, dtypes.get(name, "bf16")) for name, shape in shapes.items()}
    )
    for turn in range(p.passes):
        with b.launch(), b.segment():
            rows = b.channel((1, 1), (p.columns, 1))
            for name, size in (("x", p.width), ("table", p.angles)):
                b.put(rows, (0, 0), b.args[name].at((0, size, 1)))
            with b.herd(p.columns, 1) as (tx, ty):
                _attend(b, p, rows, (tx, ty), tx + turn * p.columns)
    return b.finish()


def _attend(b: Builder, p: Tiling, rows: Channel, tile: tuple[Index, Index], kv_head: Index) -> None:
    """Rotation, then online softmax of a group's queries over all key tiles."""
    d, k, mine = p.head_dim, p.tile_k, p.group * p.head_dim
    blocks = (p.queries // limits.BLOCK, d // limits.BLOCK, limits.BLOCK, limits.BLOCK)
    sums = (((p.queries, d), "f32"), ((2, p.queries), "f32"), ((p.queries, k), "f32"))
    mine_in_cache = kv_head * (2 * d), 2 * d, 1
    with b.alloc(air.L1, (p.width,), ((p.angles,), "f32"), (2 * d,), blocks, *sums) as (x, table, row, q, *work):
        b.get(rows, tile, x)
        b.get(rows, tile, table)
        acc, stats, scores = work
        b.call(p.variant, "ta_init", x, table, kv_head, q, acc, stats, row)
        b.dma(b.args["row"].at(mine_in_cache), row)
        with b.loop(p.steps) as j, b.alloc(air.L1, (k, 2 * d)) as (kv,):
            b.dma(kv, b.args["kv"].at((j * k, k, p.kv_heads * 2 * d), mine_in_cache))
            b.call(p.variant, "ta_step", table, j * k, row, q, kv, acc, stats, scores)
        with b.alloc(air.L1, (mine,)) as (out,):
            b.call(p.variant, "ta_out", acc, stats, q, out)
            b.dma(b.args["out"].at((kv_head * mine, mine, 1)), out)


KERNELS = (
    signature(
        "token_attention",
        ("x", Arg("table", "f32"), "kv"),
        "window pos heads kv_heads head_dim",
        reference,
        writes=("out", "row"),
        attends=True,
        host=False,
        tiling=lambda s: tile(s["window"], s["heads"], s["kv_heads"], s["head_dim"]),
        program=build,
    ),
)
