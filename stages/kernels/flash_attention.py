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
from stages.weights.constants import HEAD_POSITION

if TYPE_CHECKING:
    from stages.air import AirModule, Builder, Index, MemRef, Number, Variant

    Place = tuple[tuple[Number, int, int], ...]


def reference(q: np.ndarray, k: np.ndarray, v: np.ndarray, pos: int, heads: int, kv_heads: int) -> np.ndarray:
    """`q` bf16 `[seq, heads * head_dim]`, `k`, `v` `[pos + seq, kv_heads * head_dim]` as the cache holds them -> like
    `q`.

    Row `r` sits at position `pos + r` and sees positions `0 .. pos + r`.
    """
    seq, length = len(q), len(k)
    group = heads // kv_heads
    by_group = q.astype(np.float32).reshape(seq, kv_heads, group, -1).transpose(1, 2, 0, 3)
    wide_k, wide_v = (t.astype(np.float32).reshape(length, kv_heads, 1, -1).transpose(1, 2, 0, 3) for t in (k, v))
    scores = by_group @ wide_k.swapaxes(-1, -2) / np.sqrt(np.float32(by_group.shape[-1]))
    scores[..., np.arange(length) > pos + np.arange(seq)[:, None]] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return (weights @ wide_v).transpose(2, 0, 1, 3).reshape(seq, -1).astype(bfloat16)


def rounded(q: np.ndarray, head_dim: int) -> np.ndarray:
    """Queries as a core multiplies them: scaled, so that scores are exponents of two, and rounded to bf16; in f32, at
    their own scale again."""
    scale = np.float32(np.log2(np.e) / np.sqrt(head_dim))
    return (q.astype(np.float32) * scale).astype(bfloat16).astype(np.float32) / scale


def reference_placed(q: np.ndarray, k: np.ndarray, v: np.ndarray, pos: int, heads: int, kv_heads: int) -> np.ndarray:
    """As `reference`, of queries `[seq, heads * (head_dim + HEAD_POSITION)]` with their positions behind each head,
    `rounded`."""
    own = q.reshape(len(q), heads, -1)[..., :-HEAD_POSITION]
    return reference(rounded(own, own.shape[-1]).reshape(len(q), -1), k, v, pos, heads, kv_heads)


@dataclass(frozen=True)
class Tiling:
    """A herd column per KV head; down a column, `group_rows` query heads of its group times `query_tiles` row tiles.

    K and V lie interleaved, so that one stream per column feeds its tiles. All `window` positions pass; key tiles that
    causality masks whole cost a call that returns at once. Where the rows begin is in the rows: each query has its
    position behind it, so that one program serves every start up to `window - seq`, and no core is told which step of
    the launch it is in. (Launches that end at their own keys would stop masked transfers: at 512 rows they cost more
    than that, at 2048 they save 2 % of attention with heads of 64 and 10 % of 128, by the estimate; mlir-air of
    2026-07-29 finds no shim tiles for two of them in a module.)
    """

    seq: int
    window: int
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
    def width(self) -> int:
        """Elements of a query, with its position."""
        return self.head_dim + HEAD_POSITION

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
        """Of the steps that do arithmetic for rows at the end of the window: those whose keys causality masks whole
        return at once."""
        ends = range(self.window - self.seq + self.tile_q, self.window + 1, self.tile_q)
        steps = sum((end - 1) // self.tile_k + 1 for end in ends)
        return 2 * steps * self.heads * self.tile_q * self.tile_k * self.head_dim

    @property
    def costs(self) -> Mapping[str, Cost]:
        blocks, macs = self.tile_q // limits.BLOCK, 2 * self.tile_q * self.tile_k * self.head_dim
        dims = self.head_dim // limits.BLOCK
        steps = self.heads * self.seq // self.tile_q * (self.window // self.tile_k)
        return {
            "fa_init": Cost(vectors=blocks * (12 * dims + 2)),
            "fa_step": Cost(macs, vectors=softmax_vectors(self.tile_q, self.tile_k), share=self.macs / (macs * steps)),
            "fa_out": Cost(vectors=blocks * (22 * dims + 43)),
        }

    def __str__(self) -> str:
        return (
            f"flash_attention {self.seq} rows over {self.window}, heads {self.heads}/{self.kv_heads}x{self.head_dim}: "
            f"herd {self.columns}x{self.herd_rows} ({self.group_rows} heads x {self.query_tiles} row tiles), tile "
            f"{self.tile_q} queries x {self.tile_k} keys"
        )


def softmax_vectors(queries: int, keys: int) -> int:
    """Vector operations of a step: for a block of queries, 34 for a block of keys and 17 besides. A step whose ceiling
    rises also scales the result so far, which few do (kernel_src/aie2p/flash_attention.h)."""
    return queries // limits.BLOCK * (keys // limits.BLOCK * 34 + 17)


def tile(seq: int, heads: int, kv_heads: int, head_dim: int, window: int = 0) -> Tiling:
    """Largest query tile that fits L1 beside what the key loop uses, which the compiler doubles; herd rows that a small
    group leaves over take row tiles. `window`: as many keys as rows if none is given."""
    window = window or seq
    what = f"flash_attention {seq} rows over {window}, heads {heads}/{kv_heads}x{head_dim}"
    limits.require_multiple(what, "heads", heads, kv_heads)
    limits.require_multiple(what, "head_dim", head_dim, limits.VECTOR)
    limits.require_multiple(what, "seq", seq, 2 * limits.BLOCK)
    limits.require(what, "positions of its window", seq, window)
    columns = limits.divisors(kv_heads, 1, limits.COLUMNS)[0]
    group_rows = limits.divisors(heads // kv_heads, 1, limits.ROWS)[0]
    fitting = [
        (q, k)
        for q in limits.divisors(seq, 2 * limits.BLOCK, 64)
        for k in limits.divisors(window, 2 * limits.BLOCK, 64)
        if limits.fits_l1(
            BF16 * q * (head_dim + HEAD_POSITION),
            F32 * q * head_dim,
            limits.copies(window // k) * BF16 * 2 * k * head_dim,
            2 * F32 * q,
            2 * F32 * q * k,
        )
    ]
    limits.first(what, f"L1 ({limits.L1_BYTES} bytes)", range(len(fitting)))
    fitting = limits.steady_first(what, fitting, lambda tiles: window // tiles[1])
    tile_q, tile_k = max(fitting, key=lambda tiles: (limits.steady(window // tiles[1]), tiles))
    query_tiles = limits.divisors(seq // tile_q, 1, limits.ROWS // group_rows)[0]
    staged = BF16 * group_rows * query_tiles * tile_q * (2 * head_dim + HEAD_POSITION)
    limits.require(what, "bytes of L2 per column", staged, limits.L2_BYTES)
    return Tiling(seq, window, heads, kv_heads, head_dim, columns, group_rows, query_tiles, tile_q, tile_k)


def build(tiling: Tiling) -> AirModule:
    """Arguments `q`: bf16 `[seq][heads][head_dim + HEAD_POSITION]`, each row's position behind each of its heads, as
    i32; `kv`: bf16 `[window][kv_heads * 2 * head_dim]`; `out`: bf16 `[seq][heads * head_dim]`."""
    p = tiling
    shapes = {
        "q": (p.seq, p.heads * p.width),
        "kv": (p.window, p.kv_heads * 2 * p.head_dim),
        "out": (p.seq, p.heads * p.head_dim),
    }
    b = air.Builder("flash_attention", {name: air.memref_type(shape) for name, shape in shapes.items()})
    over_kv, over_group = p.passes
    with b.launch(p.seq // p.step_rows, over_kv * over_group) as (x, y), b.segment():
        # Division only where both passes need it: the compiler must see that steps write apart.
        kv_head = (y // over_group if over_group > 1 else y) * p.columns if over_kv > 1 else 0
        member = (y % over_group if over_kv > 1 else y) * p.group_rows if over_group > 1 else 0
        _step(b, p, x, kv_head, member)
    return b.finish()


def _step(b: Builder, p: Tiling, step: Index, kv_head: Number, member: Number) -> None:
    """`step_rows` queries of `columns * group_rows` heads."""

    def place(width: int) -> Place:
        # The compiler splits this transfer by column and drops an offset of that dimension: it stays 0.
        heads = (0, p.columns, p.group * width), (kv_head * p.group + member, p.group_rows, width)
        return (*heads, (step * p.step_rows, p.step_rows, p.heads * width), (0, width, 1))

    staged = p.columns, p.group_rows, p.step_rows
    with b.alloc(air.L2, (*staged, p.width), (*staged, p.head_dim)) as (q_staged, out_staged):
        b.dma(q_staged, b.args["q"].at(*place(p.width)))
        with b.herd(p.columns, p.herd_rows) as tile:
            e = limits.BLOCK
            with b.alloc(air.L1, (p.tile_q // e, p.width // e, e, e)) as (q,):
                b.dma(q, q_staged.at(*_blocks(p, tile, p.width)))
                _attend(b, p, q, tile[0] if isinstance(kv_head, int) else kv_head + tile[0])
                b.dma(out_staged.at(*_blocks(p, tile, p.head_dim)), q.at((0, p.tile_q * p.head_dim, 1)))
        b.dma(b.args["out"].at(*place(p.head_dim)), out_staged)


def _blocks(p: Tiling, tile: tuple[Index, Index], width: int) -> Place:
    """Of a tile's rows in L2, `width` elements each."""
    e, rows = limits.BLOCK, p.tile_q * width
    blocks = (0, p.tile_q // e, e * width), (0, width // e, e), (0, e, width), (0, e, 1)
    return (tile[0], 1, p.herd_rows * rows), (tile[1], 1, rows), *blocks


def _attend(b: Builder, p: Tiling, q: MemRef, kv_head: Index) -> None:
    """Online softmax of one query tile over all key tiles; the result replaces the queries, from their beginning on."""
    d, k = p.head_dim, p.tile_k
    with b.alloc(air.L1, ((p.tile_q, d), "f32"), ((2, p.tile_q), "f32"), ((p.tile_q, k), "f32")) as (acc, stats, work):
        b.call(p.variant, "fa_init", q, acc, stats)
        with b.loop(p.window // k) as j, b.alloc(air.L1, (k, 2 * d)) as (kv,):
            b.dma(kv, b.args["kv"].at((j * k, k, p.kv_heads * 2 * d), (kv_head * (2 * d), 2 * d, 1)))
            b.call(p.variant, "fa_step", j * k, q, kv, acc, stats, work)
        b.call(p.variant, "fa_out", acc, stats, q)


KERNELS = (
    signature(
        "flash_attention",
        ("q", "kv"),
        "seq window pos heads kv_heads head_dim",
        reference_placed,
        attends=True,
        host=False,
        tiling=lambda s: tile(s["seq"], s["heads"], s["kv_heads"], s["head_dim"], s["window"]),
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
