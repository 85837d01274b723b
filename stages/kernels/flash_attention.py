"""Causal grouped-query attention (GQA) for prefill with online softmax (Dao et al. 2022)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from llama_npu2.artifact.dtypes import SIZES
from llama_npu2.artifact.plan import WINDOW, View
from llama_npu2.frozen import frozen
from stages import air
from stages.air import limits
from stages.engine.lazy import ml_dtypes, np
from stages.kernels import BF16, F32, KV_FORMATS, Arg, Cost, Sizes, format_kernel, kv_rows, signature
from stages.weights.constants import HEAD_POSITION
from stages.weights.scalars import ALL as ALL

if TYPE_CHECKING:
    from stages.air import AirModule, Builder, Index, MemRef, Number, Variant

    Pattern = tuple[tuple[Number, int, int], ...]


PARAMS = "heads kv_heads head_dim scalar:float sees"
"""The scalars of attention: scores are divided by the root of `scalar`, and a row attends to the last `sees` positions,
its own included."""


SINKS: tuple[tuple[str, ...], ...] = ((), ("sinks",))
"""What attention takes besides queries, keys and values: there are kernels for both."""


def reference(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    pos: int,
    heads: int,
    kv_heads: int,
    scalar: float | None = None,
    sees: int = ALL,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """Return attention, bf16 `[seq, heads * head_dim]`.

    Row `r` of `q` is at position `pos + r` and attends to the last `sees` of positions `0 .. pos + r`. Scores are
    divided by the root of `scalar`, by default the head's size. `q`: bf16 `[seq, heads * head_dim]`; `k`, `v`:
    `[pos + seq, kv_heads * head_dim]`, as the cache holds them; `sinks`: bf16 `[heads]`, scores without values.
    """
    seq, length = len(q), len(k)
    group = heads // kv_heads
    by_group = q.astype(np.float32).reshape(seq, kv_heads, group, -1).transpose(1, 2, 0, 3)
    wide_k, wide_v = (t.astype(np.float32).reshape(length, kv_heads, 1, -1).transpose(1, 2, 0, 3) for t in (k, v))
    scores = by_group @ wide_k.swapaxes(-1, -2) / np.sqrt(np.float32(scalar or by_group.shape[-1]))
    scores[..., ~visible(pos, seq, length, sees)] = -np.inf
    top, beside = scores.max(axis=-1, keepdims=True), np.float32(0)
    if sinks is not None:
        sink = sinks.astype(np.float32).reshape(kv_heads, group, 1, 1)
        top = np.maximum(top, sink)
        beside = np.exp(sink - top)
    weights = np.exp(scores - top)
    weights /= weights.sum(axis=-1, keepdims=True) + beside
    return (weights @ wide_v).transpose(2, 0, 1, 3).reshape(seq, -1).astype(ml_dtypes.bfloat16)


def visible(pos: int, seq: int, length: int, sees: int = ALL) -> np.ndarray:
    """Return which of `length` positions each of `seq` rows attends to, bool `[seq, length]`."""
    behind = pos + np.arange(seq)[:, None] - np.arange(length)
    return (behind >= 0) & (behind < sees)


def rounded(q: np.ndarray, scalar: float) -> np.ndarray:
    """Return queries with a core's rounding, in f32 at their own scale.

    The core multiplies queries by `log2(e) / sqrt(scalar)`, so that scores are exponents of two, and rounds to bf16.
    """
    scale = np.float32(math.log2(math.e) / math.sqrt(scalar))
    return (q.astype(np.float32) * scale).astype(ml_dtypes.bfloat16).astype(np.float32) / scale


def taken(q: np.ndarray, scalar: float, stored: str) -> np.ndarray:
    """Return queries as a core takes them for a cache in the format `stored`.

    Products of whole numbers take 15 bits of what shares an exponent with the largest, which rounds nothing of it.
    """
    return q if kv_rows.in_numbers(stored) else rounded(q, scalar)


def reference_placed(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    pos: int,
    heads: int,
    kv_heads: int,
    scalar: float | None = None,
    sees: int = ALL,
    sinks: np.ndarray | None = None,
    stored: str = "bf16",
) -> np.ndarray:
    """Return `reference` of `taken` queries that have their position after each head.

    `q`: bf16 `[seq, heads * (head_dim + HEAD_POSITION)]`; `stored`: the cache's format.
    """
    queries = q.reshape(len(q), heads, -1)[..., :-HEAD_POSITION]
    scaled = taken(queries, scalar or queries.shape[-1], stored).reshape(len(q), -1)
    return reference(scaled, k, v, pos, heads, kv_heads, scalar, sees, sinks)


@frozen
class Scores:
    """What scores are multiplied with, and which of them count."""

    scalar: float | None = None
    """They are divided by its root. None: the head's size."""
    sees: int | None = None
    """The last positions that a row attends to, its own included. None: all."""

    @staticmethod
    def of(sizes: Sizes) -> Scores:
        """Return those of a launch with these scalars. A window that holds all positions is none."""
        scalar, sees = sizes.get("scalar"), sizes.get("sees", ALL)
        return Scores(None if scalar == sizes["head_dim"] else scalar, sees if sees < sizes["window"] else None)

    def view(self, tile: int) -> View:
        """Return the view of a cache that begins with the first of such tiles of which a first row sees something."""
        return View(WINDOW, self.sees or 0, tile)

    def positions(self, rows: int, tile: int) -> int:
        """Return the positions of that view that so many rows see something of at most, as an even number of tiles."""
        assert self.sees
        return -(-(rows + self.sees + tile - 2) // (2 * tile)) * 2 * tile

    @property
    def macros(self) -> dict[str, int]:
        """The macros with which `kernel_src/aie2p/flash_attention.h` is compiled."""
        scale = {"SCALE": int(np.float32(self.scalar**-0.5).view(np.int32))} if self.scalar else {}
        return scale | ({"SEES": self.sees} if self.sees else {})

    def steps(self, first: int, rows: int, keys: int) -> range:
        """Return the tiles of so many keys that rows from position `first` on see something of."""
        seen = max(first + 1 - self.sees, 0) if self.sees else 0
        return range(seen // keys, (first + rows - 1) // keys + 1)


PLAIN = Scores()

SLIDING_KEYS = (64, 32, 16)
"""How many keys a core may process at a time where it finds the begin of a window. They are powers of two, so that it
rounds a position down to a tile with a mask."""


@frozen
class Tiling(kv_rows.Heads):
    """How attention is divided: a column of the herd takes a KV head, its cores the query heads of that head's group.

    Where there are few KV heads, all columns take the same one, and row tiles or query heads of their own.

    K and V are interleaved, so that one stream per column feeds its cores, or one stream all of them. All `window`
    positions pass; a key tile that causality masks completely costs a call that returns at once. The rows themselves
    say where they begin: each query has its position after it. So one program serves every start up to `window - seq`,
    and no core needs to know which step of the launch it is in. (Launches that end at their own keys would avoid masked
    transfers. By the estimate they cost more than they save at 512 rows; at 2048 rows they save 2 % of attention with
    heads of 64, and 10 % with heads of 128. mlir-air of 2026-07-29 finds no shim tiles for two such launches in a
    module.)
    """

    seq: int
    """Query rows."""
    window: int
    """Positions of the KV cache that are read (the context bucket)."""
    heads: int
    kv_heads: int
    head_dim: int
    columns: int
    """KV heads at a time, each in a column of the herd."""
    group_rows: int
    """Query heads of a column that are processed at a time."""
    query_tiles: int
    """Row tiles of a column that are processed at a time. The herd has `group_rows * query_tiles` rows."""
    tile_q: int
    """Queries of a core's tile."""
    tile_k: int
    """Keys that a core processes at a time."""
    scores: Scores = PLAIN
    stored: str = "bf16"
    """The cache's format."""
    column_tiles: int = 1
    """Columns that take row tiles of their own, of one KV head at a time."""
    column_members: int = 1
    """Columns that take query heads of their own, of one KV head at a time."""

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads

    @property
    def width(self) -> int:
        """Elements of a query, including its position."""
        return self.head_dim + HEAD_POSITION

    @property
    def column_rows(self) -> int:
        """Query rows that a column processes in one launch step."""
        return self.query_tiles * self.tile_q

    @property
    def step_rows(self) -> int:
        """Query rows of one launch step."""
        return self.column_tiles * self.column_rows

    @property
    def herd(self) -> tuple[int, int]:
        """Columns and rows of cores."""
        return self.columns * self.column_tiles * self.column_members, self.group_rows * self.query_tiles

    @property
    def members(self) -> int:
        """Query heads of a group that are processed at a time."""
        return self.column_members * self.group_rows

    @property
    def passes(self) -> tuple[int, int]:
        """Steps over the KV heads, and over the query heads of a group."""
        return self.kv_heads // self.columns, self.group // self.members

    @property
    def variant(self) -> Variant:
        sizes = {"HD": self.head_dim, "KR": self.tile_k, "QR": self.tile_q}
        return air.Variant.of("flash_attention", **sizes, **self.scores.macros, **kv_rows.macros(self.stored))

    @property
    def macs(self) -> int:
        """Multiply-accumulates for rows at the end of the window. Steps whose keys are all masked do none."""
        firsts = range(self.window - self.seq, self.window, self.tile_q)
        steps = sum(len(self.scores.steps(first, self.tile_q, self.tile_k)) for first in firsts)
        return 2 * steps * self.heads * self.tile_q * self.tile_k * self.head_dim

    @property
    def costs(self) -> Mapping[str, Cost]:
        blocks, macs = self.tile_q // limits.BLOCK, 2 * self.tile_q * self.tile_k * self.head_dim
        dims = self.head_dim // limits.BLOCK
        steps = self.heads * self.seq // self.tile_q * (self.window // self.tile_k)
        share = self.macs / (macs * steps)
        if kv_rows.in_numbers(self.stored):
            units = self.tile_q // unit(self.stored)
            return {
                "fa_init": Cost(vectors=units * number_begin_vectors(self.head_dim)),
                "fa_step": replace(number_step(self.tile_q, self.tile_k, self.head_dim), share=share),
                "fa_out": Cost(vectors=units * number_finish_vectors(self.head_dim)),
            }
        return {
            "fa_init": Cost(vectors=blocks * (12 * dims + 2)),
            "fa_step": Cost(macs, vectors=softmax_vectors(self.tile_q, self.tile_k), share=share),
            "fa_out": Cost(vectors=blocks * (22 * dims + 43)),
        }

    def __str__(self) -> str:
        return (
            f"flash_attention {self.seq} rows over {self.window}, heads {self.heads}/{self.kv_heads}x{self.head_dim}: "
            f"herd {self.herd[0]}x{self.herd[1]} ({self.columns * self.members} heads x "
            f"{self.column_tiles * self.query_tiles} row tiles), tile "
            f"{self.tile_q} queries x {self.tile_k} keys"
            f"{f', of a cache in {self.stored}' if kv_rows.in_numbers(self.stored) else ''}"
        )


def softmax_vectors(queries: int, keys: int) -> int:
    """Return the vector operations of a step: per block of queries, 34 for each block of keys and 17 once.

    A step in which the ceiling of scores rises also scales the result so far; few do
    (kernel_src/aie2p/flash_attention.h).
    """
    return queries // limits.BLOCK * (keys // limits.BLOCK * 34 + 17)


def number_step(queries: int, keys: int, head_dim: int) -> Cost:
    """Return the cost of a step over a cache of whole numbers (kernel_src/aie2p/int8_rows_attention.h).

    Two units of queries, where there are as many, share each block of K and V that is loaded. Two blocks of keys, or of
    dimensions, are processed at a time.
    """
    units, pairs, dims = queries // (limits.BLOCK // 2), keys // (2 * limits.BLOCK), head_dim // limits.BLOCK
    shared = 2 if units % 2 == 0 else 1
    scales, of_scores, of_weights = (92, 10, 6) if units > 1 else (36, 32, 36)
    groups = units // shared
    products = groups * dims * pairs * ((4 + 3 * shared) + (2 + 3 * shared))
    scores = pairs * (scales + groups * (of_scores + 30 * shared))
    softmax = units * (57 + pairs * (2 * 4 + 35 + of_weights))
    return Cost(vectors=scores + softmax + units * dims // 2 * 18, scheduled=products)


def number_begin_vectors(head_dim: int) -> int:
    """Return the vector operations before the first key of whole numbers, for each unit of queries."""
    return 13 * (head_dim // limits.BLOCK) + 62


def number_finish_vectors(head_dim: int) -> int:
    """Return the vector operations behind the last key of whole numbers, for each unit of queries."""
    return 11 * (head_dim // limits.BLOCK) + 69


def unit(stored: str) -> int:
    """Return how many queries a core takes at a time for a cache in this format: the rows of a product."""
    return limits.BLOCK // 2 if kv_rows.in_numbers(stored) else limits.BLOCK


def stats_shape(queries: int, stored: str) -> tuple[int, ...]:
    """Return the shape, in f32, of what a core keeps of so many queries besides their results.

    For products of whole numbers it is four lines of a unit's lanes for each unit
    (kernel_src/aie2p/int8_rows_attention.h).
    """
    return (4 * queries, limits.BLOCK) if kv_rows.in_numbers(stored) else (2, queries)


def scores_shape(queries: int, keys: int, stored: str) -> tuple[int, ...]:
    """Return the shape, in f32, of the scores of a tile of keys, and of what a core knows of each key."""
    if not kv_rows.in_numbers(stored):
        return (queries, keys)
    # In f32: scales and exponents of a key, or for each query of a unit.
    facts = 4 if queries == unit(stored) else 14
    return (queries + facts, keys)


@contextmanager
def tiles(
    b: Builder, steps: int, p: kv_rows.Heads, kv_head: Number, first: Number | None = None
) -> Iterator[tuple[Number, MemRef]]:
    """Repeat the body for each tile of keys of a KV head. Yield the tile's number, and its K and V in L1.

    K and V are `[keys][kv_head]` elements; whole numbers come with a block of all keys after the other, so that eight
    keys lie together: `[kv_head / BLOCK][keys][BLOCK]`. `first`: the head's first element in a row, where it is there
    already.
    """

    def fill(j: Number, kv: MemRef) -> None:
        keys = j * p.tile_k, p.tile_k, p.kv_row
        b.dma(kv, b.args["kv"].at(keys, (kv_head * p.kv_head if first is None else first, p.kv_head, 1)))

    with tiles_of(b, steps, p, fill) as tile:
        yield tile


@contextmanager
def tiles_of(
    b: Builder, steps: int, p: kv_rows.Heads, fill: Callable[[Number, MemRef], None]
) -> Iterator[tuple[Number, MemRef]]:
    """Repeat the body as `tiles` does; `fill` moves a tile, given its number, into a buffer as it is to lie there."""
    blocks = p.kv_head // limits.BLOCK
    in_numbers = kv_rows.in_numbers(p.stored)
    shape = (blocks, p.tile_k, limits.BLOCK) if in_numbers else (p.tile_k, p.kv_head)
    with b.loop(steps) as j, b.alloc(air.L1, (shape, p.kv_dtype)) as (kv,):
        in_blocks = (0, p.tile_k, limits.BLOCK), (0, blocks, p.tile_k * limits.BLOCK), (0, limits.BLOCK, 1)
        fill(j, kv.at(*in_blocks) if in_numbers else kv)
        yield j, kv


def tile(seq: int, heads: int, kv_heads: int, head_dim: int, window: int = 0, stored: str = "bf16") -> Tiling:
    """Divide attention so that query tiles are the largest that fit L1, together with the buffers of the key loop.

    The compiler doubles the buffers of that loop. Herd rows that a small group does not need take further row tiles.
    `window`: 0 means `seq`. UserError names the limit that no tile size meets.
    """
    window = window or seq
    what = f"flash_attention {seq} rows over {window}, heads {heads}/{kv_heads}x{head_dim}"
    limits.require_multiple(what, "heads", heads, kv_heads)
    limits.require_multiple(what, "head_dim", head_dim, limits.VECTOR)
    limits.require_multiple(what, "seq", seq, 2 * limits.BLOCK)
    limits.require(what, "positions of its window", seq, window)
    keys = limits.divisors(window, 2 * limits.BLOCK, 64)
    if kv_rows.in_numbers(stored):
        keys = [k for k in _number_keys(head_dim, stored) if window % k == 0]
    fitting = (
        (q, k)
        for q in limits.divisors(seq, 2 * limits.BLOCK, 64)
        for k in keys
        if _fits(q, k, head_dim, stored, limits.copies(window // k))
    )
    sizes = limits.require_any(what, limits.IN_L1, fitting)
    sizes = limits.steady_first(what, sizes, lambda tiles: window // tiles[1])
    tile_q, tile_k = max(sizes, key=lambda tiles: (limits.steady(window // tiles[1]), tiles))
    given = Tiling(seq, window, heads, kv_heads, head_dim, 1, 1, 1, tile_q, tile_k, stored=stored)
    # Each pass over keys is for as many heads and row tiles as there are cores.
    tiling = max(_spread(given), key=lambda p: math.prod(p.herd))
    staged = BF16 * tiling.herd[1] * tile_q * (2 * head_dim + HEAD_POSITION)
    limits.require(what, "bytes of L2 per column", staged, limits.L2_BYTES)
    return tiling


def _spread(p: Tiling) -> Iterator[Tiling]:
    """Yield a division over the herd's columns by KV heads, by row tiles, and by query heads of a group."""

    def most(number: int, available: int) -> int:
        return limits.divisors(number, 1, available)[0]

    rows = p.seq // p.tile_q
    by_heads = most(p.group, limits.ROWS)
    tiles = most(rows, limits.ROWS // by_heads)
    yield replace(p, columns=most(p.kv_heads, limits.COLUMNS), group_rows=by_heads, query_tiles=tiles)
    yield replace(p, column_tiles=most(rows // tiles, limits.COLUMNS), group_rows=by_heads, query_tiles=tiles)
    members = most(p.group, limits.COLUMNS)
    by_heads = most(p.group // members, limits.ROWS)
    yield replace(p, column_members=members, group_rows=by_heads, query_tiles=most(rows, limits.ROWS // by_heads))


def _fits(queries: int, keys: int, head_dim: int, stored: str, copies: int) -> bool:
    """Return whether a core has room for a tile of queries, and for so many copies of one of keys."""
    return limits.fits_l1(
        BF16 * queries * (head_dim + HEAD_POSITION),
        F32 * queries * head_dim,
        copies * keys * SIZES[kv_rows.element_type(stored)] * kv_rows.head_elements(head_dim, stored),
        F32 * math.prod(stats_shape(queries, stored)),
        2 * F32 * math.prod(scores_shape(queries, keys, stored)),
    )


def _number_keys(head_dim: int, stored: str) -> list[int]:
    """Return the tile of keys of whole numbers, if there is one.

    Results depend on it, so it is the same for all rows and windows, and decided on without them: the largest with
    which the most queries fit. Windows have room for an even number of the largest, or for one.
    """
    queries = (4 * limits.BLOCK, 2 * limits.BLOCK)
    return [keys for q in queries for keys in SLIDING_KEYS if _fits(q, keys, head_dim, stored, 2)][:1]


def build(tiling: Tiling) -> AirModule:
    """Build the AIR program with the arguments `q`, `kv` and `out`.

    `q`: bf16 `[seq][heads][head_dim + HEAD_POSITION]`, with the row's position as i32 after each of its heads. `kv`:
    `[window][kv_row]`. `out`: bf16 `[seq][heads * head_dim]`.
    """
    p = tiling
    types = {
        "q": air.memref_type((p.seq, p.heads * p.width)),
        "kv": air.memref_type((p.window, p.kv_row), p.kv_dtype),
        "out": air.memref_type((p.seq, p.heads * p.head_dim)),
    }
    b = air.Builder("flash_attention", types)
    over_kv, over_group = p.passes
    with b.launch(over_kv * over_group, p.seq // p.step_rows) as (y, x), b.segment():
        # Division only where it is needed: the compiler must see that steps write to different places.
        kv_head = (y // over_group if over_group > 1 else y) * p.columns if over_kv > 1 else 0
        first: Number
        if p.columns == 1:
            first = y * p.members
        else:
            first = kv_head * p.group + ((y % over_group if over_kv > 1 else y) * p.members if over_group > 1 else 0)
        _step(b, p, x, kv_head, first)
    return b.finish()


def _step(b: Builder, p: Tiling, step: Index, kv_head: Number, first: Number) -> None:
    """Compute attention of `step_rows` queries of `columns * members` heads, from head `first` on."""

    def rows_in_ddr(width: int) -> Pattern:
        row = p.heads * width
        apart = (
            p.group * width if p.columns > 1 else p.column_rows * row if p.column_tiles > 1 else p.group_rows * width
        )
        # The compiler splits this transfer by column and drops an offset of that dimension, so the offset stays 0.
        heads = (0, p.herd[0], apart), (first, p.group_rows, width)
        return (*heads, (step * p.step_rows, p.column_rows, row), (0, width, 1))

    staged = p.herd[0], p.group_rows, p.column_rows
    with b.alloc(air.L2, (*staged, p.width), (*staged, p.head_dim)) as (q_staged, out_staged):
        b.dma(q_staged, b.args["q"].at(*rows_in_ddr(p.width)))
        with b.herd(*p.herd) as tile:
            e = limits.BLOCK
            with b.alloc(air.L1, (p.tile_q // e, p.width // e, e, e)) as (q,):
                b.dma(q, q_staged.at(*_blocks(p, tile, p.width)))
                # Where columns have a KV head each, a step that has all of them has no index of its own.
                of_column = tile[0] if isinstance(kv_head, int) else kv_head + tile[0]
                _attend(b, p, q, of_column if p.columns > 1 else kv_head)
                b.dma(out_staged.at(*_blocks(p, tile, p.head_dim)), q.at((0, p.tile_q * p.head_dim, 1)))
        b.dma(b.args["out"].at(*rows_in_ddr(p.head_dim)), out_staged)


def _blocks(p: Tiling, tile: tuple[Index, Index], width: int) -> Pattern:
    """Return the pattern that walks a tile's rows in L2, of `width` elements each, in 8x8 blocks."""
    e, rows = limits.BLOCK, p.tile_q * width
    blocks = (0, p.tile_q // e, e * width), (0, width // e, e), (0, e, width), (0, e, 1)
    return (tile[0], 1, p.herd[1] * rows), (tile[1], 1, rows), *blocks


def _attend(b: Builder, p: Tiling, q: MemRef, kv_head: Number) -> None:
    """Compute attention of one query tile over all key tiles. The result overwrites the first elements of `q`."""
    sums = ((p.tile_q, p.head_dim), "f32"), (stats_shape(p.tile_q, p.stored), "f32")
    scores = scores_shape(p.tile_q, p.tile_k, p.stored), "f32"
    with b.alloc(air.L1, *sums, scores) as (acc, stats, work):
        b.call(p.variant, "fa_init", q, acc, stats)
        with tiles(b, p.window // p.tile_k, p, kv_head) as (j, kv):
            b.call(p.variant, "fa_step", j * p.tile_k, q, kv, acc, stats, work)
        b.call(p.variant, "fa_out", acc, stats, q)


KERNELS = (
    *(
        signature(
            "flash_attention",
            ("q", Arg("kv", stored)),
            f"seq window pos {PARAMS}",
            partial(reference_placed, stored=stored),
            source="flash_attention",
            stored=stored,
            attends=True,
            host=False,
            tiling=lambda s, stored=stored: replace(
                tile(s["seq"], s["heads"], s["kv_heads"], s["head_dim"], s["window"], stored), scores=Scores.of(s)
            ),
            program=build,
        )
        for stored in KV_FORMATS.values()
    ),
    signature(
        "flash_attention_sinks",
        ("q", "kv", "sinks"),
        f"seq window pos {PARAMS}",
        reference_placed,
        attends=True,
        host=False,
    ),
    *(
        signature(
            f"flash_attention_panels_{more}" if (more := "".join(sinks)) else "flash_attention_panels",
            ("q", Arg("k_panels", stored), Arg("v_panels", stored), *sinks),
            f"seq pos {PARAMS}",
            reference,
            source=format_kernel("attention", stored),
            stored=stored,
            attends=True,
            paged=True,
        )
        for stored in KV_FORMATS.values()
        for sinks in SINKS
    ),
)
