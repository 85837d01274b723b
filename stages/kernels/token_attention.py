"""Rotation and attention of a token, or of a few tokens at consecutive positions, on the array.

They attend over the first `window` positions of an interleaved KV cache (the context bucket) and return the cache's
rows with their own K and V.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from llama_npu2.artifact.dtypes import SIZES
from llama_npu2.artifact.plan import WHOLE, View
from llama_npu2.frozen import frozen
from stages import air
from stages.air import limits
from stages.engine.lazy import np
from stages.kernels import (
    BF16,
    F32,
    KV_FORMATS,
    Arg,
    Cost,
    Kernel,
    Sizes,
    decode_attention,
    flash_attention,
    kv_rows,
    lanes,
    rms_norm,
    rope,
    signature,
)
from stages.kernels.tokens import COUNTS, ONE, PREFIX, Sequences, Tokens, of_sequence
from stages.weights.constants import POSITION

if TYPE_CHECKING:
    from stages.air import AirModule, Builder, Channel, Index, MemRef, Number, Variant


def reference(
    x: np.ndarray,
    table: np.ndarray,
    pos: int,
    k: np.ndarray,
    v: np.ndarray,
    heads: int,
    kv_heads: int,
    scalar: float | None = None,
    sees: int = flash_attention.ALL,
    stored: str = "bf16",
) -> tuple[np.ndarray, np.ndarray]:
    """Return attention, bf16 `[heads * head_dim]`, and the cache's row of `pos`, `[kv_heads, 2, half_elements]`.

    `x`, `table`: as in `rope.reference_qkv`; `k`, `v`: `[positions, kv_heads * head_dim]`, as the cache holds them, of
    which the rows before `pos` are read; `stored`: the cache's format.
    """
    head_dim = k.shape[1] // kv_heads
    q, new = rope.reference_qkv(x, table, pos, heads, kv_heads, head_dim)
    row = kv_rows.rows(new[:, 0], new[:, 1], stored)
    own = kv_rows.values(row, stored)
    k, v = (np.concatenate([cached[:pos], half.reshape(1, -1)]) for half, cached in zip(own, (k, v), strict=True))
    scaled = flash_attention.taken(q, scalar or head_dim, stored)
    return decode_attention.reference(scaled, k, v, heads, kv_heads, scalar, sees), row


def reference_norm(
    x: np.ndarray,
    table: np.ndarray,
    q_norm: np.ndarray,
    k_norm: np.ndarray,
    pos: int,
    k: np.ndarray,
    v: np.ndarray,
    heads: int,
    kv_heads: int,
    eps: float,
    scalar: float | None = None,
    sees: int = flash_attention.ALL,
    offset: float = 0.0,
    once: int | bool = False,
    stored: str = "bf16",
) -> tuple[np.ndarray, np.ndarray]:
    """Return `reference` with the RMS norms of the heads of Q and K, whose weights are bf16 `[head_dim]`."""
    normed = normed_heads(x, heads, q_norm, k_norm, eps, offset, once)
    return reference(normed, table, pos, k, v, heads, kv_heads, scalar, sees, stored)


def _reference_batched(one: Callable[..., tuple[np.ndarray, np.ndarray]], stored: str) -> Callable[..., Any]:
    """Return the reference of attention of several tokens, each of which attends to those before it, too.

    Weights of norms come as one, `[2 * head_dim]`.
    """
    one = partial(one, stored=stored)

    def reference(
        x: np.ndarray, table: np.ndarray, *norms: np.ndarray, pos: int, k: np.ndarray, v: np.ndarray, **scalars: Any
    ) -> tuple[np.ndarray, np.ndarray]:
        outs, rows = [], []
        of_heads = [half for joined in norms for half in np.split(joined, len(_NORMS))]
        for token, row_of_x in enumerate(x):
            out, row = one(row_of_x[None], table, *of_heads, pos=pos + token, k=k, v=v, **scalars)
            k, v = (
                np.concatenate([cached[: pos + token], half.reshape(1, -1)])
                for half, cached in zip(kv_rows.values(row, stored), (k, v), strict=True)
            )
            outs.append(out)
            rows.append(row)
        return np.stack(outs), np.stack(rows)

    return reference


def _reference_of_sequences(
    one: Callable[..., tuple[np.ndarray, np.ndarray]], stored: str, together: int
) -> Callable[..., Any]:
    """Return the reference of attention of a launch's sequences: those from `sequence` on, of which `x` has rows.

    `pos`, `k` and `v` are sequences with those of each.
    """
    one = partial(one, stored=stored)

    def reference(
        x: np.ndarray,
        *tensors: np.ndarray,
        pos: Sequence[int],
        k: Sequence[np.ndarray],
        v: Sequence[np.ndarray],
        sequence: int,
        sequences: int,
        **scalars: Any,
    ) -> tuple[np.ndarray, np.ndarray]:
        tables, norms = tensors[:together], tensors[together:]
        own = zip(x[sequence : sequence + together], tables, pos, k, v, strict=True)
        results = [one(row[None], table, *norms, pos=at, k=ks, v=vs, **scalars) for row, table, at, ks, vs in own]
        outs, rows = zip(*results, strict=True)
        return np.stack(outs), np.stack(rows)

    return reference


def normed_heads(
    x: np.ndarray, heads: int, q_norm: np.ndarray, k_norm: np.ndarray, eps: float, offset: float, once: int | bool
) -> np.ndarray:
    """Return Q, K and V of one row with heads of Q and K normed. All as in `reference_norm`."""
    rows = x.reshape(-1, len(q_norm))
    kv_heads = (len(rows) - heads) // 2
    weights = (heads, q_norm), (kv_heads, k_norm)
    normed, first = rows.copy(), 0
    for count, weight in weights:
        part = slice(first, first + count)
        normed[part] = rms_norm.reference(rows[part], weight, eps, offset, once)
        first += count
    return normed.reshape(x.shape)


@frozen
class Tiling(kv_rows.Heads):
    """How a token's attention is divided: one core per KV head and column, for all query heads of its group.

    Positions after the token's are read too, and masked; a tile that has no others costs a call that returns at once.
    Q, K and V of the token go to all cores, because a core has only two input streams, and the other one brings the
    cache. Each core rotates its group's heads, writes its part of the cache's row, and also puts that row into the tile
    of keys to which it belongs, because DDR may contain the old row or the new one when the tile is read.

    With several tokens, the cores of a column are given the same keys and have tokens of their own (`Tokens`). Each
    rotates K of all tokens of its launch, because later tokens attend to earlier ones. Rows of an earlier launch's are
    in DDR by then.

    With several sequences, a core does for one after the other what it does for a token alone. Configuring the array
    takes longer than that, so a launch takes as many as a channel of a shim queues caches. So it does with several
    tokens where it has no room for two (`in_turn`): the keys are then read for each. (Of cores with one token each,
    mlir-air of 2026-05-08 crashes now and then, by addresses.)
    """

    window: int
    """Positions of the cache that are read: the context bucket, or those of `view`."""
    heads: int
    kv_heads: int
    head_dim: int
    columns: int
    """Columns of the herd, which has one row."""
    tile_k: int
    """Positions that a core processes at a time."""
    scores: flash_attention.Scores = flash_attention.PLAIN
    norm: rms_norm.Norm | None = None
    """The norm of each head of Q and K before the rotation. Its two weights come in front of the table's row."""
    slides: bool = False
    """Whether positions are read from `view` on, else from the first."""
    tokens: Tokens = ONE
    """Tokens at consecutive positions."""
    in_turn: bool = False
    """Whether each core takes all of several tokens, one after the other."""
    sequences: Sequences | None = None
    """Those whose tokens it takes, if `x` and `out` have a row for each of several sequences."""
    stored: str = "bf16"
    """The cache's format."""

    @property
    def view(self) -> View:
        """The view of the cache: it begins at the tile with the first position that the token attends to."""
        return self.scores.view(self.tile_k) if self.slides else WHOLE

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads

    @property
    def unit(self) -> int:
        """Queries that a core takes at a time."""
        return flash_attention.unit(self.stored)

    @property
    def queries(self) -> int:
        """Rows of the whole units that hold a group's queries."""
        return -(-self.group // self.unit) * self.unit

    @property
    def width(self) -> int:
        """Elements of Q, K and V of all heads."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def angles(self) -> int:
        """Elements of the table's row, including the position after the angles."""
        return self.head_dim + POSITION * BF16 // F32

    @property
    def fresh(self) -> int:
        """Elements of the cache's rows of a launch's tokens for a KV head, and of their positions after them."""
        element = SIZES[self.kv_dtype]
        count = self.tokens.together
        return limits.aligned(count * self.kv_head, element) + limits.aligned(count * POSITION, element)

    @property
    def gathers(self) -> bool:
        """Whether Q, K and V of several tokens are on a core together, else each in the place of the one before.

        The compiler makes the buffers that a channel fills a ring, in which a buffer that is filled several times in a
        row has one place (mlir-air of 2026-05-08). In herds of more than four cores the channel also brings the keys,
        and each filling has its place.
        """
        return self.tokens != ONE and not self.in_turn and self.columns * self.tokens.herd_rows <= limits.ROWS

    @property
    def inputs(self) -> int:
        """Elements of Q, K and V on a core."""
        return self.width * (self.tokens.together if self.gathers else 1)

    @property
    def steps(self) -> int:
        """Steps of a core's loop over the keys."""
        return self.window // self.tile_k

    @property
    def passes(self) -> int:
        """Return how many launches there are, each for as many KV heads as there are columns.

        The compiler would tell the cores of a single launch of several steps at once.
        """
        return self.kv_heads // self.columns

    @property
    def variant(self) -> Variant:
        sizes = {"HD": self.head_dim, "KR": self.tile_k, "MEMBERS": self.group, "QR": self.queries}
        heads = {"HEADS": self.heads, "KV_HEADS": self.kv_heads}
        norm = {"NORM": 1, **self.norm.macros} if self.norm else {}
        slides = {"SLIDES": 1} if self.slides else {}
        several = {"TOKENS": self.tokens.together} if self.tokens != ONE else {}
        several |= {"GATHERED": 1} if self.gathers else {}
        macros = heads | sizes | self.scores.macros | norm | slides | several | kv_rows.macros(self.stored)
        return air.Variant.of("token_attention", **macros)

    @property
    def macs(self) -> int:
        count = self.sequences.together if self.sequences else self.tokens.count
        pairs = count * self.kv_heads * self.queries
        return 2 * self.seen * self.tile_k * pairs * self.head_dim

    @property
    def seen(self) -> int:
        """Steps for the last position whose keys are not all masked."""
        return len(self.scores.steps(self.window - 1, 1, self.tile_k))

    @property
    def costs(self) -> Mapping[str, Cost]:
        """Return the cost of one call of each tile function.

        It is that of `flash_attention` and `rope`, plus moving a group's rows into blocks and out of them.
        """
        blocks, dims = self.queries // self.unit, self.head_dim // limits.BLOCK
        moved = 2 * self.group * dims
        if kv_rows.in_numbers(self.stored):
            into_blocks = blocks * (flash_attention.number_begin_vectors(self.head_dim) + dims) + moved
            out_of_blocks = blocks * (flash_attention.number_finish_vectors(self.head_dim) + dims) + moved // 2
            row = 2 * kv_rows.quantising_vectors(self.head_dim)
            step = flash_attention.number_step(self.queries, self.tile_k, self.head_dim)
        else:
            into_blocks = blocks * (14 * dims + 2) + moved // 2
            out_of_blocks, row = blocks * (24 * dims + 43) + moved // 2, 0
            vectors = flash_attention.softmax_vectors(self.queries, self.tile_k)
            step = Cost(2 * self.queries * self.tile_k * self.head_dim, vectors=vectors)
        begin = {"ta_init": Cost(vectors=self._rotation(self.group + 1) + into_blocks + row)}
        if self.tokens != ONE:
            share = 1.0 if self.in_turn else 1 / self.tokens.together
            queries = Cost(vectors=self._rotation(self.group) + into_blocks, share=share)
            begin = {"ta_row": Cost(vectors=self._rotation(1) + row), "ta_queries": queries}
        if self.sequences or self.in_turn:
            begin |= {_KEEP: Cost()}
        return {
            **begin,
            "ta_step": replace(step, share=self.seen / self.steps),
            "ta_out": Cost(vectors=out_of_blocks),
        }

    def _rotation(self, heads: int) -> int:
        """Return the vector operations of the rotation of so many heads, and of their norm."""
        pairs = self.head_dim // 2
        rotation = pairs // lanes(pairs) * (heads * 14 + 28)
        return rotation + (heads * self.norm.vectors(self.head_dim) if self.norm else 0)

    def __str__(self) -> str:
        of_sequences = self.sequences.text if self.sequences else ""
        return (
            f"token_attention over {self.window}, heads {self.heads}/{self.kv_heads}x{self.head_dim}"
            f"{self.tokens.text}{of_sequences}: herd {self.columns}x{self.tokens.herd_rows}, {self.tile_k} keys at a "
            f"time{', of norms' if self.norm else ''}{', from the window on' if self.slides else ''}"
            f"{f', of a cache in {self.stored}' if kv_rows.in_numbers(self.stored) else ''}"
        )


def tile(
    window: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    norm: rms_norm.Norm | None = None,
    stored: str = "bf16",
) -> Tiling:
    """Divide a token's attention: the most columns among which KV heads divide evenly, then the largest tile of keys.

    Each column has a stream from DDR. The tile fits L1 as often as the compiler copies it. Raises UserError if a head
    is not a whole number of vectors, or if no tile fits.
    """
    what = f"token_attention over {window}, heads {heads}/{kv_heads}x{head_dim}"
    limits.require_multiple(what, "window", window, 2 * limits.BLOCK)
    columns = _columns(what, heads, kv_heads, head_dim)
    keys = limits.divisors(window, 2 * limits.BLOCK, 64)
    tilings = [Tiling(window, heads, kv_heads, head_dim, columns, k, norm=norm, stored=stored) for k in keys]
    fitting = limits.require_any(what, limits.IN_L1, filter(_fits, tilings))
    return limits.steady_first(what, fitting, lambda p: p.steps)[0]


def _columns(what: str, heads: int, kv_heads: int, head_dim: int) -> int:
    """Return the columns of the herd. Raises UserError if heads do not divide or are not whole vectors."""
    limits.require_multiple(what, "heads", heads, kv_heads)
    limits.require_multiple(what, "head_dim", head_dim, limits.VECTOR)
    return limits.divisors(kv_heads, 1, limits.COLUMNS)[0]


def tile_sliding(
    heads: int,
    kv_heads: int,
    head_dim: int,
    scores: flash_attention.Scores,
    norm: rms_norm.Norm | None = None,
    stored: str = "bf16",
) -> Tiling:
    """Divide a token's attention over what its window sees, as `tile`.

    The view is as long as it must be where the window begins at a tile's last position, and has an even number of
    tiles.
    """
    what = f"token_attention over the last {scores.sees}, heads {heads}/{kv_heads}x{head_dim}"
    columns = _columns(what, heads, kv_heads, head_dim)
    tilings = (
        Tiling(scores.positions(1, k), heads, kv_heads, head_dim, columns, k, scores, norm, slides=True, stored=stored)
        for k in flash_attention.SLIDING_KEYS
    )
    return limits.require_any(what, limits.IN_L1, filter(_fits, tilings))[0]


def several(one: Tiling, tokens: Tokens) -> Tiling:
    """Return how the attention of several tokens is divided, given that of one: with the same tiles of keys.

    So each has the bits that it has alone. Raises UserError if a core has no room for that.
    """
    what = f"{one}, of {tokens.count} tokens"
    window = one.scores.positions(tokens.count, one.tile_k) if one.slides else one.window
    ways = [
        # The compiler puts herds of two to four cores into one column, where the keys of two heads lose their order.
        replace(one, tokens=way, columns=one.columns if one.columns * _TOKEN_ROWS > limits.ROWS else 1)
        for way in _launches(tokens.count)
        if way.together > _TOKEN_ROWS
    ]
    ways = [replace(way, tokens=replace(way.tokens, each=way.tokens.together // _TOKEN_ROWS)) for way in ways]
    # A channel of a memory tile can use half of its descriptors, of which others there take some.
    sent = 2 + bool(one.norm)
    in_turn = (way for way in _launches(tokens.count) if way.together * sent <= limits.MEMTILE_DESCRIPTORS // 3)
    ways += [replace(one, tokens=way, in_turn=True) for way in in_turn]
    # A core derives where a view begins from the first token of its launch.
    usable = (replace(way, window=window) for way in ways if way.tokens.launches == 1 or not one.slides)
    return limits.require_any(what, limits.IN_L1, filter(_fits, usable))[0]


def _launches(count: int) -> Iterator[Tokens]:
    """Yield how tokens are divided among launches, the fewest first. Each core takes all of a launch."""
    for launches in limits.divisors(count)[::-1]:
        yield Tokens(count, count // launches, launches)


_TOKEN_ROWS = 2
"""Rows of cores among which tokens are divided: four streams lead from a column's cores to its memory tile, and each
core has two, one for its results and one for the cache's rows."""


def _fits(p: Tiling) -> bool:
    """Return whether the buffers of a core fit L1.

    In order: Q, K and V, and the table's row of each token; weights of norms; where there are several tokens, their
    rows of the cache with their positions; of each of the core's tokens the cache's row, the result, queries and
    accumulators, maxima and sums; keys, values and scores, which the compiler copies because only the loop over the
    keys uses them.
    """
    count, each, element = p.tokens.together, 1 if p.in_turn else p.tokens.each, SIZES[p.kv_dtype]
    own = BF16 * p.group * p.head_dim + (BF16 + F32) * p.queries * p.head_dim + F32 * math.prod(_stats(p))
    return limits.fits_l1(
        limits.aligned(BF16 * p.inputs) + limits.aligned(count * F32 * p.angles),
        BF16 * 2 * p.head_dim if p.norm else 0,
        element * p.fresh if p.tokens != ONE else 0,
        each * (own + limits.aligned(element * p.kv_head)),
        limits.copies(p.steps) * (element * p.kv_head * p.tile_k + F32 * math.prod(_scores(p))),
    )


def _stats(p: Tiling) -> tuple[int, ...]:
    return flash_attention.stats_shape(p.queries, p.stored)


def _scores(p: Tiling) -> tuple[int, ...]:
    return flash_attention.scores_shape(p.queries, p.tile_k, p.stored)


def build(tiling: Tiling) -> AirModule:
    """Build the AIR program with the arguments `x`, `table`, `q_norm` and `k_norm` for norms, `kv`, `out` and `row`.

    `x`: bf16 `[(heads + 2 * kv_heads) * head_dim]`. `table`: f32 `[head_dim + POSITION / 2]`, the row of the token's
    position, which follows the angles as i32. `q_norm`, `k_norm`: bf16 `[head_dim]`. `kv`: `[window][kv_row]`, the
    cache in `view`. `out`: bf16 `[heads * head_dim]`. `row`: `[kv_row]`, the position's row of the cache. With several
    tokens, `x`, `table`, `out` and `row` have them as their first dimension, and the norms' weights are one argument
    `qk_norm`, bf16 `[2 * head_dim]`: a channel queues no more transfers than with that. With several sequences `x` and
    `out` have them as their first dimension, and there is a `table`, a `kv` and a `row` of each (`of_sequence`).
    """
    p = tiling
    # In the order in which a core uses them.
    separate, joined = dict.fromkeys(_NORMS, p.head_dim), {_JOINED: len(_NORMS) * p.head_dim}
    norms = (separate if p.tokens == ONE else joined) if p.norm else {}
    given = {"x": p.width, **norms, "table": p.angles}
    shapes = {name: (size,) if name in norms else p.tokens.shape(size) for name, size in given.items()}
    shapes |= {"kv": (p.window, p.kv_row), "out": p.tokens.shape(p.heads * p.head_dim), "row": p.tokens.shape(p.kv_row)}
    dtypes = {"table": "f32", "kv": p.kv_dtype, "row": p.kv_dtype}
    types = {name: air.memref_type(shape, dtypes.get(name, "bf16")) for name, shape in shapes.items()}
    if p.sequences:
        types |= {name: air.memref_type((p.sequences.count, *shapes[name])) for name in ("x", "out")}
        of_each = range(p.sequences.together)
        types |= {of_sequence(name, number): types[name] for name in OF_EACH for number in of_each}
    b = air.Builder("token_attention", types)
    for launch in range(p.passes):
        first = launch * p.columns
        if p.tokens != ONE:
            for number in range(p.tokens.launches):
                with b.launch(), b.segment():
                    _attend_several(b, p, first, number * p.tokens.together)
            continue
        with b.launch(), b.segment():
            if p.sequences:
                _attend_sequences(b, p, p.sequences, first)
                continue
            rows = b.channel((1, 1), (p.columns, 1))
            for name, size in given.items():
                b.put(rows, (0, 0), b.args[name].at((0, size, 1)))
            with b.herd(p.columns, 1) as (tx, ty):
                _attend(b, p, rows, (tx, ty), tx + first)
    return b.finish()


_NORMS, _JOINED = ("q_norm", "k_norm"), "qk_norm"


def _attend(b: Builder, p: Tiling, rows: Channel, tile: tuple[Index, Index], kv_head: Index) -> None:
    """Rotate a group's queries, then compute their attention over all key tiles."""
    width, first = p.group * p.head_dim, kv_head * p.kv_head
    with b.alloc(air.L1, *token_buffers(p)) as (x, table, *work), b.alloc(air.L1, *_norm_weights(p)) as norms:
        for given in (x, *norms, table):
            b.get(rows, tile, given)
        row = _begin(b, p, kv_head, (x, *norms, table), work)
        b.dma(b.args["row"].at((first, p.kv_head, 1)), row)
        with flash_attention.tiles(b, p.steps, p, kv_head, first) as (j, kv):
            _step(b, p, table, j, kv, work)
        with b.alloc(air.L1, (width,)) as (out,):
            _end(b, p, work, out)
            b.dma(b.args["out"].at((kv_head * width, width, 1)), out)


def token_buffers(p: Tiling) -> Iterator[tuple[int, ...] | tuple[tuple[int, ...], str]]:
    """Yield a core's buffers for a token: `x` and `table`, then its row of the cache, queries, sums and scores."""
    yield (p.width,)
    yield (p.angles,), "f32"
    yield (_row_elements(p),), p.kv_dtype
    yield p.queries // p.unit, p.head_dim // limits.BLOCK, p.unit, limits.BLOCK
    yield (p.queries, p.head_dim), "f32"
    yield _stats(p), "f32"
    yield _scores(p), "f32"


def _row_elements(p: Tiling) -> int:
    """Return the elements of the buffer for a head's part of the cache's row, whose end is padding."""
    return limits.aligned(p.kv_head, SIZES[p.kv_dtype])


def _of_row(p: Tiling, buffer: MemRef) -> MemRef:
    """Return that part without the padding."""
    return _filled(buffer, _row_elements(p), p.kv_head)


def _norm_weights(p: Tiling) -> list[tuple[int, ...]]:
    return [(p.head_dim,)] * len(_NORMS) if p.norm else []


def _begin(b: Builder, p: Tiling, kv_head: Index, given: Iterable[MemRef], work: Sequence[MemRef]) -> MemRef:
    """Rotate a token's K and queries; return its row of the cache."""
    row, q, acc, stats, _ = work
    b.call(p.variant, "ta_init", *given, kv_head, q, acc, stats, row, *([p.norm.eps] if p.norm else []))
    return _of_row(p, row)


def _step(b: Builder, p: Tiling, table: MemRef, j: Number, kv: MemRef, work: Sequence[MemRef]) -> None:
    row, q, acc, stats, scores = work
    b.call(p.variant, "ta_step", table, j * p.tile_k, row, q, kv, acc, stats, scores)


def _end(b: Builder, p: Tiling, work: Sequence[MemRef], out: MemRef) -> None:
    _, q, acc, stats, _ = work
    b.call(p.variant, "ta_out", acc, stats, q, out)


def _attend_sequences(b: Builder, p: Tiling, of: Sequences, first: int) -> None:
    """Compute the attention of a launch's sequences, one after the other, for a KV head a column, from `first` on."""
    width, numbers, columns = p.group * p.head_dim, range(of.together), range(p.columns)
    rows = b.channel((1, 1), (p.columns, 1))
    _send_sequences(b, p, of, rows)
    keys, own_rows = (b.channel((p.columns, 1), (p.columns, 1)) for _ in range(2))
    for number in numbers:
        _send_keys(b, p, keys, of_sequence("kv", number), first)
    with b.alloc(air.L2, (p.columns, of.together * width)) as (results,):
        with b.herd(p.columns, 1) as tile:
            _attend_sequences_in_turn(b, p, of.together, (rows, keys, own_rows), tile, first, results)
        for number in numbers:
            for column in columns:
                row = b.args[of_sequence("row", number)].at(((first + column) * p.kv_head, p.kv_head, 1))
                b.get(own_rows, (column, 0), row)
        # The compiler cuts this transfer by column and drops an offset of that dimension, so the offset stays 0.
        places = (of.first, of.together, p.heads * p.head_dim), (first * width, width, 1)
        b.dma(b.args["out"].at((0, p.columns, width), *places), results)


def _send_sequences(b: Builder, p: Tiling, of: Sequences, rows: Channel) -> None:
    """Send to all cores, for each sequence, what a token takes but for the cache.

    A channel of a shim queues fewer transfers than that, so all comes by way of L2, on two channels.
    """
    staged = b.channel((2, 1), (2, 1))
    norms = _NORMS if p.norm else ()
    b.put(staged, (0, 0), b.args["x"].at((of.first * p.width, of.together * p.width, 1)))
    for name in norms:
        b.put(staged, (0, 0), b.args[name].at((0, p.head_dim, 1)))
    for number in range(of.together):
        b.put(staged, (1, 0), b.args[of_sequence("table", number)].at((0, p.angles, 1)))
    of_tables = [((p.angles,), "f32")] * of.together
    with (
        b.alloc(air.L2, (of.together, p.width), *_norm_weights(p)) as (x, *weights),
        b.alloc(air.L2, *of_tables) as tables,
    ):
        for target in (x, *weights):
            b.get(staged, (0, 0), target)
        for target in tables:
            b.get(staged, (1, 0), target)
        for number, table in enumerate(tables):
            for source in (x.at((number, 1, p.width), (0, p.width, 1)), *weights, table):
                b.put(rows, (0, 0), source)


def _attend_sequences_in_turn(
    b: Builder,
    p: Tiling,
    count: int,
    streams: tuple[Channel, Channel, Channel],
    tile: tuple[Index, Index],
    first: int,
    results: MemRef,
) -> None:
    """Attend for so many sequences, one after the other, on a core.

    Args:
        streams: what brings tokens, what brings keys, and what takes rows of the cache.
        first: the KV head of the first column.
        results: `[columns][count * elements]` in L2.
    """
    (rows, keys, own_rows), kv_head, width = streams, tile[0] + first, p.group * p.head_dim
    with (
        b.alloc(air.L1, *token_buffers(p), (width,)) as (x, table, *work, out),
        b.alloc(air.L1, *_norm_weights(p)) as norms,
    ):
        # Buffers that only the loop uses would be moved into it, and doubled.
        b.call(p.variant, _KEEP, x, table, *work, out, *norms)
        with b.loop(count) as number:
            for given in (x, *norms, table):
                b.get(rows, tile, given)
            b.put(own_rows, tile, _begin(b, p, kv_head, (x, *norms, table), work))
            with flash_attention.tiles_of(b, p.steps, p, lambda _, kv: b.get(keys, tile, kv)) as (j, kv):
                _step(b, p, table, j, kv, work)
            _end(b, p, work, out)
            b.dma(results.at((tile[0], 1, count * width), (number * width, width, 1)), out)


def _attend_several(b: Builder, p: Tiling, first: int, token: int) -> None:
    """Compute the attention of a launch's tokens, from `token` on, for a KV head a column, from head `first` on."""
    together, width = p.tokens.together, p.group * p.head_dim
    herd = p.columns, p.tokens.herd_rows
    rows = b.channel((1, 1), herd)
    if p.in_turn:
        keys = _send_in_turn(b, p, rows, first, token)
    else:
        _send_once(b, p, rows, token)
    rows_of_head = (p.columns, together * p.kv_head), p.kv_dtype
    with b.alloc(air.L2, rows_of_head, (p.columns, together * width)) as results:
        with b.herd(*herd) as tile:
            if p.in_turn:
                _attend_tokens_in_turn(b, p, (rows, keys), tile, first, results)
            else:
                _attend_own(b, p, rows, tile, first, results)
        # The compiler cuts these transfers by column and drops an offset of that dimension, so the offset stays 0.
        sizes, wholes = (p.kv_head, width), (p.kv_row, p.heads * p.head_dim)
        for name, size, whole, result in zip(("row", "out"), sizes, wholes, results, strict=True):
            b.dma(b.args[name].at((0, p.columns, size), (token, together, whole), (first * size, size, 1)), result)


def _send_once(b: Builder, p: Tiling, rows: Channel, token: int) -> None:
    """Send the tokens of a launch, from `token` on, to all cores."""
    together = p.tokens.together
    b.put(rows, (0, 0), b.args["table"].at((token * p.angles, together * p.angles, 1)))
    if p.norm:
        b.put(rows, (0, 0), b.args[_JOINED].at((0, len(_NORMS) * p.head_dim, 1)))
    if p.gathers:
        b.put(rows, (0, 0), b.args["x"].at((token * p.width, p.inputs, 1)))
    else:
        with b.loop(together) as i:
            row = i + token if token else i
            b.put(rows, (0, 0), b.args["x"].at((row, 1, p.width), (0, p.width, 1)))


def _send_in_turn(b: Builder, p: Tiling, rows: Channel, first: int, token: int) -> Channel:
    """Send all cores a token at a time, from `token` on, with what all of them need, and each column its keys as often.

    Return the channel of keys. What a stream brings again and again comes by way of L2.
    """
    count, staged = p.tokens.together, b.channel((1, 1), (1, 1))
    sizes = {"x": count * p.width, **({_JOINED: len(_NORMS) * p.head_dim} if p.norm else {}), "table": count * p.angles}
    for name, size in sizes.items():
        start = 0 if name == _JOINED else token * size // count
        b.put(staged, (0, 0), b.args[name].at((start, size, 1)))
    held = [((size,), "f32" if name == "table" else "bf16") for name, size in sizes.items()]
    with b.alloc(air.L2, *held) as (x, *others):
        for target in (x, *others):
            b.get(staged, (0, 0), target)
        for number in range(count):
            for source in (x.at((number * p.width, p.width, 1)), *others):
                b.put(rows, (0, 0), source)
    keys = b.channel((p.columns, 1), (p.columns, 1))
    with b.loop(count):
        _send_keys(b, p, keys, "kv", first)
    return keys


def _send_keys(b: Builder, p: Tiling, keys: Channel, cache: str, first: int) -> None:
    """Send each column the keys of its KV head, from head `first` on, tile by tile."""
    with b.loop(p.steps) as j:
        for column in range(p.columns):
            head = (first + column) * p.kv_head, p.kv_head, 1
            b.put(keys, (column, 0), b.args[cache].at((j * p.tile_k, p.tile_k, p.kv_row), head))


def _attend_tokens_in_turn(
    b: Builder,
    p: Tiling,
    streams: tuple[Channel, Channel],
    tile: tuple[Index, Index],
    first: int,
    results: Sequence[MemRef],
) -> None:
    """Attend for a launch's tokens, one after the other, on a core.

    Args:
        streams: what brings tokens, and what brings keys.
        first: the KV head of the first column.
        results: as in `_attend_own`.
    """
    (rows, keys), count, kv_head = streams, p.tokens.together, tile[0] + first
    norm, eps = ([(len(_NORMS) * p.head_dim,)], [p.norm.eps]) if p.norm else ([], [])
    x, _, row, *work = token_buffers(p)
    tables, fresh = ((count * p.angles,), "f32"), ((p.fresh,), p.kv_dtype)
    with (
        b.alloc(air.L1, x, *norm, tables) as given,
        b.alloc(air.L1, *work, fresh, row, (p.group * p.head_dim,)) as (
            q,
            acc,
            stats,
            scores,
            fresh_rows,
            *own_results,
        ),
    ):
        # Buffers that only the loop uses would be moved into it, and doubled.
        b.call(p.variant, _KEEP, *given, q, acc, stats, scores, fresh_rows, *own_results)
        with b.loop(count) as i:
            for target in given:
                b.get(rows, tile, target)
            b.call(p.variant, "ta_row", *given, kv_head, i, fresh_rows, *eps)
            b.call(p.variant, "ta_queries", *given, kv_head, i, i, q, acc, stats, *eps)
            with flash_attention.tiles_of(b, p.steps, p, lambda _, kv: b.get(keys, tile, kv)) as (j, kv):
                b.call(p.variant, "ta_step", fresh_rows, i, j * p.tile_k, kv, q, acc, stats, scores)
            b.call(p.variant, "ta_out", acc, stats, q, fresh_rows, i, 0, *own_results)
            own_row, out = own_results
            for result, own_result, size in zip(
                results, (_of_row(p, own_row), out), (p.kv_head, p.group * p.head_dim), strict=True
            ):
                b.dma(result.at((tile[0], 1, count * size), (i * size, size, 1)), own_result)


def _attend_own(
    b: Builder, p: Tiling, rows: Channel, tile: tuple[Index, Index], first: int, results: Sequence[MemRef]
) -> None:
    """Rotate K of a launch's tokens and the queries of a core's own, then compute attention of these over all keys.

    Args:
        first: the KV head of the first column.
        results: the cache's rows, and the results, each `[columns][tokens of the launch * elements]` in L2.
    """
    count, each, (tx, ty) = p.tokens.together, p.tokens.each, tile
    d, width, kv_head = p.head_dim, p.group * p.head_dim, tx + first
    blocks = (p.queries // p.unit, d // limits.BLOCK, p.unit, limits.BLOCK)
    of_token: list[tuple[int, ...] | tuple[tuple[int, ...], str]]
    of_token = [blocks, ((p.queries, d), "f32"), (_stats(p), "f32")]
    new_rows, weights = ((p.fresh,), p.kv_dtype), (_scores(p), "f32")
    norm, eps = ([(len(_NORMS) * d,)], [p.norm.eps]) if p.norm else ([], [])
    with (
        b.alloc(air.L1, new_rows, weights, *of_token * each) as (fresh, scores, *buffers),
        b.alloc(air.L1, ((count * p.angles,), "f32"), (p.inputs,), *norm) as (table, x, *norms),
    ):
        own = [(ty * each + token, buffers[3 * token : 3 * token + 3]) for token in range(each)]
        for given in (table, *norms):
            b.get(rows, tile, given)
        for i in range(count):
            if i == 0 or not p.gathers:
                b.get(rows, tile, x)
            b.call(p.variant, "ta_row", x, *norms, table, kv_head, i, fresh, *eps)
            for token, work in own:
                b.call(p.variant, "ta_queries", x, *norms, table, kv_head, i, token, *work, *eps)
        with flash_attention.tiles(b, p.steps, p, kv_head) as (j, kv):
            for token, work in own:
                b.call(p.variant, "ta_step", fresh, token, j * p.tile_k, kv, *work, scores)
        kept = limits.aligned(each * p.kv_head, SIZES[p.kv_dtype])
        with b.alloc(air.L1, ((kept,), p.kv_dtype), (each * width,)) as own_results:
            for number, (token, (q, acc, stats)) in enumerate(own):
                b.call(p.variant, "ta_out", acc, stats, q, fresh, token, number, *own_results)
            filled = (kept, p.kv_head), (each * width, width)
            for result, own_result, (elements, size) in zip(results, own_results, filled, strict=True):
                place = (tx, 1, p.tokens.together * size), (ty * each * size, each * size, 1)
                b.dma(result.at(*place), _filled(own_result, elements, each * size))


def _filled(buffer: MemRef, elements: int, count: int) -> MemRef:
    """Return the first `count` of a buffer's elements, which may be all of them."""
    return buffer if elements == count else buffer.at((0, count, 1))


def _tile(sizes: Sizes, norm: rms_norm.Norm | None = None, stored: str = "bf16") -> Tiling:
    tiling = tile(sizes["window"], sizes["heads"], sizes["kv_heads"], sizes["head_dim"], norm, stored)
    return _of_tokens(replace(tiling, scores=flash_attention.Scores.of(sizes)), sizes)


def _sliding(sizes: Sizes, norm: rms_norm.Norm | None = None, stored: str = "bf16") -> Tiling:
    scores = flash_attention.Scores.of({**sizes, "window": flash_attention.ALL})
    heads = sizes["heads"], sizes["kv_heads"], sizes["head_dim"]
    return _of_tokens(tile_sliding(*heads, scores, norm, stored), sizes)


def _of_tokens(one: Tiling, sizes: Sizes) -> Tiling:
    return several(one, Tokens(sizes["rows"])) if "rows" in sizes else one


OF_EACH = ("table", "kv", "row")
"""Arguments that each of several sequences has of its own."""
_KEEP = f"ta{air.KEEP}"


def of_sequences(count: int) -> str:
    """Return what the names of kernels for the tokens of so many sequences begin with, after the format."""
    return f"sequences{count}_"


def together(sequences: int) -> int:
    """Return how many of so many sequences a launch attends for: a shim's channel queues no more caches."""
    return limits.divisors(sequences, 1, limits.QUEUE_DEPTH)[0]


def _tiled(tile: Callable[..., Tiling], normed: bool, stored: str, sequences: int) -> Callable[[Sizes], Tiling]:
    """Return what divides a launch, of so many sequences if they are more than 0."""

    def tiled(sizes: Sizes) -> Tiling:
        one = tile(sizes, rms_norm.Norm.of(sizes) if normed else None, stored)
        of = Sequences(sizes["sequences"], sizes["sequence"], sequences) if sequences else None
        return replace(one, sequences=of)

    return tiled


def _kernel(stored: str, norms: tuple[str, ...], prefix: str, rows: str, reference: Any, sequences: int = 0) -> Kernel:
    """Return a kernel. `rows`: its parameters before those of attention; `sequences`: those of a launch, if several."""
    tables, caches, own_rows = ([of_sequence(name, n) for n in range(sequences or 1)] for name in OF_EACH)
    return signature(
        f"{prefix}{'norm_' if norms else ''}token_attention",
        ("x", *(Arg(name, "f32") for name in tables), *norms, *(Arg(name, stored) for name in caches)),
        f"{rows}window pos {flash_attention.PARAMS}{f' {rms_norm.PARAMS}' if norms else ''}",
        reference,
        writes=("out", *(Arg(name, stored, written=True) for name in own_rows)),
        source="token_attention",
        stored=stored,
        attends=True,
        host=False,
        tiling=_tiled(_tile, bool(norms), stored, sequences),
        sliding=_tiled(_sliding, bool(norms), stored, sequences),
        program=build,
    )


def _kernels() -> Iterator[Kernel]:
    for stored in KV_FORMATS.values():
        for norms, one in (((), reference), (_NORMS, reference_norm)):
            yield _kernel(stored, norms, "", "", partial(one, stored=stored))
            yield _kernel(stored, norms and (_JOINED,), PREFIX, "rows ", _reference_batched(one, stored))
            for count in sorted({together(sequences) for sequences in COUNTS}):
                several = _reference_of_sequences(one, stored, count)
                yield _kernel(stored, norms, of_sequences(count), "sequences sequence ", several, count)


KERNELS = tuple(_kernels())
