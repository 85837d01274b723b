"""Causal grouped-query attention for prefill, online softmax (Dao et al. 2022), scale `1/sqrt(head_dim)`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from ml_dtypes import bfloat16

from stages import air
from stages.air import limits
from stages.kernels import BF16, F32, KV_FORMATS, Arg, Cost, format_kernel, signature

if TYPE_CHECKING:
    from stages.air import AirModule, Builder, Index, MemRef, Number, Variant


def reference(q: np.ndarray, k: np.ndarray, v: np.ndarray, pos: int, heads: int, kv_heads: int) -> np.ndarray:
    """`q` bf16 `[seq, heads * head_dim]`, `k`, `v` `[pos + seq, kv_heads * head_dim]` as the cache holds them -> like
    `q`.

    Row `r` sits at position `pos + r` and sees positions `0 .. pos + r`.
    """
    seq, length = len(q), len(k)
    wide_q = q.astype(np.float32).reshape(seq, heads, -1)
    wide_k, wide_v = (
        np.repeat(t.astype(np.float32).reshape(length, kv_heads, -1), heads // kv_heads, axis=1) for t in (k, v)
    )
    scores = np.einsum("qhd,khd->hqk", wide_q, wide_k) / np.sqrt(wide_q.shape[-1])
    scores[:, np.arange(length) > pos + np.arange(seq)[:, None]] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, wide_v).reshape(seq, -1).astype(bfloat16)


@dataclass(frozen=True)
class Tiling:
    """A herd column per KV head; down a column, `group_rows` query heads of its group times `query_tiles` row tiles.

    K and V lie interleaved, so that one stream per column feeds its tiles. Key tiles that causality masks whole cost a
    call that returns at once. (To stop their transfers as well takes several launches, which the compiler cannot join:
    each would hand its cores a row index at run time.)
    """

    seq: int
    pos: int
    heads: int
    kv_heads: int
    head_dim: int
    columns: int
    group_rows: int
    query_tiles: int
    tile_q: int
    tile_k: int

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def step_rows(self) -> int:
        """Query rows of one launch step."""
        return self.query_tiles * self.tile_q

    @property
    def herd_rows(self) -> int:
        return self.group_rows * self.query_tiles

    @property
    def passes(self) -> tuple[int, int]:
        """How often the herd moves on: over KV heads, and over the query heads of a group."""
        return self.kv_heads // self.columns, self.group // self.group_rows

    @property
    def variant(self) -> Variant:
        return air.Variant.of("flash_attention", HD=self.head_dim, KR=self.tile_k, QR=self.tile_q)

    @property
    def macs(self) -> int:
        """Of the steps that do arithmetic: those whose keys causality masks whole return at once."""
        steps = sum(
            (row + self.tile_q - 1) // self.tile_k + 1 for row in range(self.pos, self.pos + self.seq, self.tile_q)
        )
        return 2 * steps * self.heads * self.tile_q * self.tile_k * self.head_dim

    @property
    def costs(self) -> Mapping[str, Cost]:
        """Softmax: per block of queries, 45 vector operations for a block of keys and 56 for the row's bookkeeping. A
        step whose maxima move also scales the result so far, which few do."""
        blocks, macs = self.tile_q // limits.BLOCK, 2 * self.tile_q * self.tile_k * self.head_dim
        dims = self.head_dim // limits.BLOCK
        step = blocks * (self.tile_k // limits.BLOCK * 45 + 56)
        steps = self.heads * self.seq // self.tile_q * ((self.pos + self.seq) // self.tile_k)
        return {
            "fa_init": Cost(vectors=blocks * (9 * dims + 2)),
            "fa_step": Cost(macs, vectors=step, share=self.macs / (macs * steps)),
            "fa_out": Cost(vectors=blocks * (24 * dims + 24)),
        }

    def __str__(self) -> str:
        return (
            f"flash_attention {self.seq} rows at {self.pos}, heads {self.heads}/{self.kv_heads}x{self.head_dim}: herd "
            f"{self.columns}x{self.herd_rows} ({self.group_rows} heads x {self.query_tiles} row tiles), tile "
            f"{self.tile_q} queries x {self.tile_k} keys"
        )


def tile(seq: int, heads: int, kv_heads: int, head_dim: int, pos: int = 0) -> Tiling:
    """Largest query tile that fits L1 beside what the key loop uses, which the compiler doubles; herd rows that a small
    group leaves over take row tiles."""
    what = f"flash_attention {seq} rows, heads {heads}/{kv_heads}x{head_dim}"
    limits.require_multiple(what, "heads", heads, kv_heads)
    limits.require_multiple(what, "head_dim", head_dim, limits.VECTOR)
    limits.require_multiple(what, "seq", seq, 2 * limits.BLOCK)
    columns = limits.divisors(kv_heads, 1, limits.COLUMNS)[0]
    group_rows = limits.divisors(heads // kv_heads, 1, limits.ROWS)[0]
    keys = pos + seq
    fitting = [
        (q, k)
        for q in limits.divisors(seq, 2 * limits.BLOCK, 64)
        for k in limits.divisors(keys, 2 * limits.BLOCK, 64)
        if limits.fits_l1(
            (BF16 + F32) * q * head_dim,
            limits.copies(keys // k) * BF16 * 2 * k * head_dim,
            2 * F32 * q,
            2 * F32 * q * k,
        )
    ]
    limits.first(what, f"L1 ({limits.L1_BYTES} bytes)", range(len(fitting)))
    fitting = limits.steady_first(what, fitting, lambda tiles: keys // tiles[1])
    tile_q, tile_k = max(fitting, key=lambda tiles: (limits.steady(keys // tiles[1]), tiles))
    query_tiles = limits.divisors(seq // tile_q, 1, limits.ROWS // group_rows)[0]
    staged = 2 * BF16 * group_rows * query_tiles * tile_q * head_dim
    limits.require(what, "bytes of L2 per column", staged, limits.L2_BYTES)
    return Tiling(seq, pos, heads, kv_heads, head_dim, columns, group_rows, query_tiles, tile_q, tile_k)


def build(tiling: Tiling) -> AirModule:
    """Arguments `q`, `out`: bf16 `[seq][heads * head_dim]`; `kv`: bf16 `[pos + seq][kv_heads * 2 * head_dim]`."""
    p = tiling
    queries = air.memref_type((p.seq, p.heads * p.head_dim))
    keys = air.memref_type((p.pos + p.seq, p.kv_heads * 2 * p.head_dim))
    b = air.Builder("flash_attention", {"q": queries, "kv": keys, "out": queries})
    over_kv, over_group = p.passes
    with b.launch(p.seq // p.step_rows, over_kv * over_group) as (x, y), b.segment():
        # Division only where both passes need it: the compiler must see that steps write apart.
        kv_head = (y // over_group if over_group > 1 else y) * p.columns if over_kv > 1 else 0
        member = (y % over_group if over_kv > 1 else y) * p.group_rows if over_group > 1 else 0
        _step(b, p, x, kv_head, member)
    return b.finish()


def _step(b: Builder, p: Tiling, step: Index, kv_head: Number, member: Number) -> None:
    """`step_rows` queries of `columns * group_rows` heads."""
    d, rows, tile = p.head_dim, p.step_rows, p.tile_q * p.head_dim
    width = p.heads * d
    # The compiler splits this transfer by column and drops an offset of that dimension: it stays 0.
    heads = ((0, p.columns, p.group * d), (kv_head * p.group + member, p.group_rows, d))
    place = (*heads, (step * rows, rows, width), (0, d, 1))
    shape = (p.columns, p.group_rows, rows, d)
    with b.alloc(air.L2, shape, shape) as (q_staged, out_staged):
        b.dma(q_staged, b.args["q"].at(*place))
        with b.herd(p.columns, p.herd_rows) as (tx, ty):
            e = limits.BLOCK
            blocks = ((0, p.tile_q // e, e * d), (0, d // e, e), (0, e, d), (0, e, 1))
            mine = ((tx, 1, p.herd_rows * tile), (ty, 1, tile), *blocks)
            row = (step * p.query_tiles + (ty % p.query_tiles if p.query_tiles > 1 else 0)) * p.tile_q + p.pos
            with b.alloc(air.L1, (p.tile_q // e, d // e, e, e)) as (q,):
                b.dma(q, q_staged.at(*mine))
                _attend(b, p, q, row, tx if isinstance(kv_head, int) else kv_head + tx)
                b.dma(out_staged.at(*mine), q)
        b.dma(b.args["out"].at(*place), out_staged)


def _attend(b: Builder, p: Tiling, q: MemRef, row: Index, kv_head: Index) -> None:
    """Online softmax of one query tile over all key tiles; the result replaces the queries."""
    d, k = p.head_dim, p.tile_k
    with b.alloc(air.L1, ((p.tile_q, d), "f32"), ((2, p.tile_q), "f32"), ((p.tile_q, k), "f32")) as (acc, stats, work):
        b.call(p.variant, "fa_init", q, acc, stats)
        with b.loop((p.pos + p.seq) // k) as j, b.alloc(air.L1, (k, 2 * d)) as (kv,):
            b.dma(kv, b.args["kv"].at((j * k, k, p.kv_heads * 2 * d), (kv_head * (2 * d), 2 * d, 1)))
            b.call(p.variant, "fa_step", row, j * k, q, kv, acc, stats, work)
        b.call(p.variant, "fa_out", acc, stats, q)


KERNELS = (
    signature(
        "flash_attention",
        ("q", "kv"),
        "seq pos heads kv_heads head_dim",
        reference,
        attends=True,
        host=False,
        tiling=lambda s: tile(s["seq"], s["heads"], s["kv_heads"], s["head_dim"], s["pos"]),
        program=build,
    ),
    *(
        signature(
            format_kernel("flash_attention_panels", stored),
            ("q", Arg("k_panels", stored), Arg("v_panels", stored)),
            "seq pos heads kv_heads head_dim",
            reference,
            source="flash_attention",
            attends=True,
        )
        for stored in KV_FORMATS.values()
    ),
)
