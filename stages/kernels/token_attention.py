"""Rotation and attention of a token, or of a few tokens at consecutive positions, on the array.

They attend over the first `window` positions of an interleaved KV cache (the context bucket) and return the cache's
rows with their own K and V.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from llama_npu2.artifact.plan import WHOLE, View
from stages import air
from stages.air import limits
from stages.engine.lazy import np
from stages.kernels import (
    BF16,
    F32,
    Arg,
    Cost,
    Sizes,
    decode_attention,
    flash_attention,
    lanes,
    rms_norm,
    rope,
    signature,
)
from stages.kernels.tokens import ONE, PREFIX, Tokens
from stages.weights.constants import POSITION

if TYPE_CHECKING:
    from stages.air import AirModule, Builder, Channel, Index, MemRef, Variant


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
) -> tuple[np.ndarray, np.ndarray]:
    """Return attention, bf16 `[heads * head_dim]`, and the cache's row of `pos`, bf16 `[kv_heads, 2, head_dim]`.

    `x`, `table`: as in `rope.reference_qkv`; `k`, `v`: bf16 `[positions, kv_heads * head_dim]`, of which the rows
    before `pos` are read.
    """
    q, row = rope.reference_qkv(x, table, pos, heads, kv_heads, k.shape[1] // kv_heads)
    k, v = (np.concatenate([cached[:pos], row[:, half].reshape(1, -1)]) for half, cached in enumerate((k, v)))
    scaled = flash_attention.rounded(q, scalar or row.shape[-1])
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
) -> tuple[np.ndarray, np.ndarray]:
    """Return `reference` with the RMS norms of the heads of Q and K, whose weights are bf16 `[head_dim]`."""
    normed = normed_heads(x, heads, q_norm, k_norm, eps, offset, once)
    return reference(normed, table, pos, k, v, heads, kv_heads, scalar, sees)


def _reference_batched(one: Callable[..., tuple[np.ndarray, np.ndarray]]) -> Callable[..., Any]:
    """Return the reference of attention of several tokens, each of which attends to those before it, too."""

    def reference(
        x: np.ndarray, table: np.ndarray, *norms: np.ndarray, pos: int, k: np.ndarray, v: np.ndarray, **scalars: Any
    ) -> tuple[np.ndarray, np.ndarray]:
        outs, rows = [], []
        for token, row_of_x in enumerate(x):
            out, row = one(row_of_x[None], table, *norms, pos=pos + token, k=k, v=v, **scalars)
            k, v = (
                np.concatenate([cached[: pos + token], row[:, half].reshape(1, -1)])
                for half, cached in enumerate((k, v))
            )
            outs.append(out)
            rows.append(row)
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


@dataclass(frozen=True)
class Tiling:
    """How a token's attention is divided: one core per KV head and column, for all query heads of its group.

    Positions after the token's are read too, and masked; a tile that has no others costs a call that returns at once.
    Q, K and V of the token go to all cores, because a core has only two input streams, and the other one brings the
    cache. Each core rotates its group's heads, writes its part of the cache's row, and also puts that row into the tile
    of keys to which it belongs, because DDR may contain the old row or the new one when the tile is read.

    With several tokens, the cores of a column are given the same keys and have tokens of their own (`Tokens`). Each
    rotates K of all tokens, because later tokens attend to earlier ones.
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

    @property
    def view(self) -> View:
        """The view of the cache: it begins at the tile with the first position that the token attends to."""
        return self.scores.view(self.tile_k) if self.slides else WHOLE

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads

    @property
    def queries(self) -> int:
        """Rows of the whole blocks that hold a group's queries."""
        return -(-self.group // limits.BLOCK) * limits.BLOCK

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
        """Elements of the cache's rows of all tokens for a KV head, and of their positions after them."""
        return self.tokens.count * (2 * self.head_dim) + limits.aligned(self.tokens.count * POSITION, BF16)

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
        several = {"TOKENS": self.tokens.count} if self.tokens != ONE else {}
        return air.Variant.of("token_attention", **heads, **sizes, **self.scores.macros, **norm, **slides, **several)

    @property
    def macs(self) -> int:
        pairs = self.tokens.count * self.kv_heads * self.queries
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
        blocks, dims = self.queries // limits.BLOCK, self.head_dim // limits.BLOCK
        moved = 2 * self.group * dims
        into_blocks = blocks * (14 * dims + 2) + moved // 2
        begin = {"ta_init": Cost(vectors=self._rotation(self.group + 1) + into_blocks)}
        if self.tokens != ONE:
            share = 1 / self.tokens.count
            queries = Cost(vectors=self._rotation(self.group) + into_blocks, share=share)
            begin = {"ta_row": Cost(vectors=self._rotation(1)), "ta_queries": queries}
        return {
            **begin,
            "ta_step": Cost(
                2 * self.queries * self.tile_k * self.head_dim,
                vectors=flash_attention.softmax_vectors(self.queries, self.tile_k),
                share=self.seen / self.steps,
            ),
            "ta_out": Cost(vectors=blocks * (24 * dims + 43) + moved // 2),
        }

    def _rotation(self, heads: int) -> int:
        """Return the vector operations of the rotation of so many heads, and of their norm."""
        pairs = self.head_dim // 2
        rotation = pairs // lanes(pairs) * (heads * 14 + 28)
        return rotation + (heads * self.norm.vectors(self.head_dim) if self.norm else 0)

    def __str__(self) -> str:
        return (
            f"token_attention over {self.window}, heads {self.heads}/{self.kv_heads}x{self.head_dim}"
            f"{self.tokens.text}: herd {self.columns}x{self.tokens.herd_rows}, {self.tile_k} keys at a time"
            f"{', of norms' if self.norm else ''}{', from the window on' if self.slides else ''}"
        )


def tile(window: int, heads: int, kv_heads: int, head_dim: int, norm: rms_norm.Norm | None = None) -> Tiling:
    """Divide a token's attention: the most columns among which KV heads divide evenly, then the largest tile of keys.

    Each column has a stream from DDR. The tile fits L1 as often as the compiler copies it. Raises UserError if a head
    is not a whole number of vectors, or if no tile fits.
    """
    what = f"token_attention over {window}, heads {heads}/{kv_heads}x{head_dim}"
    limits.require_multiple(what, "window", window, 2 * limits.BLOCK)
    columns = _columns(what, heads, kv_heads, head_dim)
    keys = limits.divisors(window, 2 * limits.BLOCK, 64)
    tilings = [Tiling(window, heads, kv_heads, head_dim, columns, k, norm=norm) for k in keys]
    fitting = limits.require_any(what, limits.IN_L1, filter(_fits, tilings))
    return limits.steady_first(what, fitting, lambda p: p.steps)[0]


def _columns(what: str, heads: int, kv_heads: int, head_dim: int) -> int:
    """Return the columns of the herd. Raises UserError if heads do not divide or are not whole vectors."""
    limits.require_multiple(what, "heads", heads, kv_heads)
    limits.require_multiple(what, "head_dim", head_dim, limits.VECTOR)
    return limits.divisors(kv_heads, 1, limits.COLUMNS)[0]


def tile_sliding(
    heads: int, kv_heads: int, head_dim: int, scores: flash_attention.Scores, norm: rms_norm.Norm | None = None
) -> Tiling:
    """Divide a token's attention over what its window sees, as `tile`.

    The view is as long as it must be where the window begins at a tile's last position, and has an even number of
    tiles.
    """
    what = f"token_attention over the last {scores.sees}, heads {heads}/{kv_heads}x{head_dim}"
    columns = _columns(what, heads, kv_heads, head_dim)
    tilings = (
        Tiling(scores.positions(1, k), heads, kv_heads, head_dim, columns, k, scores, norm, slides=True)
        for k in flash_attention.SLIDING_KEYS
    )
    return limits.require_any(what, limits.IN_L1, filter(_fits, tilings))[0]


def several(one: Tiling, tokens: Tokens) -> Tiling:
    """Return how the attention of several tokens is divided, given that of one: with the same tiles of keys.

    So each has the bits that it has alone. Raises UserError if a core has no room for that, or with weights of norms,
    which are too many transfers.
    """
    what = f"{one}, of {tokens.count} tokens"
    limits.require(what, "tasks at a channel", _TASKS + (len(_NORMS) if one.norm else 0), limits.QUEUE_DEPTH)
    window = one.scores.positions(tokens.count, one.tile_k) if one.slides else one.window
    ways = [
        # The compiler puts herds of two to four cores into one column, where the keys of two heads lose their order.
        replace(one, window=window, tokens=way, columns=one.columns if one.columns * rows > limits.ROWS else 1)
        for rows, way in _ways(tokens.count)
    ]
    return limits.require_any(what, limits.IN_L1, filter(_fits, ways))[0]


def _ways(count: int) -> Iterator[tuple[int, Tokens]]:
    """Yield rows of cores, and how tokens are divided among them, the fewest launches first: each reads all keys."""
    for launches in limits.divisors(count)[::-1]:
        for rows in limits.divisors(count // launches, 1, _TOKEN_ROWS):
            yield rows, Tokens(count, count // (launches * rows), launches)


_TASKS = 3
"""Tasks that send Q, K and V of all tokens, and their rows of the table."""

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
    count, each = p.tokens.count, p.tokens.each
    own = BF16 * (2 + p.group) * p.head_dim + (BF16 + F32) * p.queries * p.head_dim + 2 * F32 * p.queries
    return limits.fits_l1(
        limits.aligned(BF16 * p.width) + limits.aligned(count * F32 * p.angles),
        BF16 * 2 * p.head_dim if p.norm else 0,
        BF16 * p.fresh if count > 1 else 0,
        each * own,
        limits.copies(p.steps) * (BF16 * 2 * p.head_dim + F32 * p.queries) * p.tile_k,
    )


def build(tiling: Tiling) -> AirModule:
    """Build the AIR program with the arguments `x`, `table`, `q_norm` and `k_norm` for norms, `kv`, `out` and `row`.

    `x`: bf16 `[(heads + 2 * kv_heads) * head_dim]`. `table`: f32 `[head_dim + POSITION / 2]`, the row of the token's
    position, which follows the angles as i32. `q_norm`, `k_norm`: bf16 `[head_dim]`. `kv`: bf16
    `[window][kv_heads * 2 * head_dim]`, the cache in `view`. `out`: bf16 `[heads * head_dim]`. `row`: bf16
    `[2 * kv_heads * head_dim]`, the position's row of the cache. With several tokens, `x`, `table`, `out` and `row`
    have them as their first dimension.
    """
    p = tiling
    kv = p.kv_heads * 2 * p.head_dim
    # In the order in which a core uses them.
    norms = dict.fromkeys(_NORMS, p.head_dim) if p.norm else {}
    given = {"x": p.width, **norms, "table": p.angles}
    shapes = {name: (size,) if name in norms else p.tokens.shape(size) for name, size in given.items()}
    shapes |= {"kv": (p.window, kv), "out": p.tokens.shape(p.heads * p.head_dim), "row": p.tokens.shape(kv)}
    dtypes = {"table": "f32"}
    b = air.Builder(
        "token_attention", {name: air.memref_type(shape, dtypes.get(name, "bf16")) for name, shape in shapes.items()}
    )
    for launch in range(p.passes):
        if p.tokens != ONE:
            for number in range(p.tokens.launches):
                with b.launch(), b.segment():
                    _attend_several(b, p, launch * p.columns, number * p.tokens.together)
            continue
        with b.launch(), b.segment():
            rows = b.channel((1, 1), (p.columns, 1))
            for name, size in given.items():
                b.put(rows, (0, 0), b.args[name].at((0, size, 1)))
            with b.herd(p.columns, 1) as (tx, ty):
                _attend(b, p, rows, (tx, ty), tx + launch * p.columns)
    return b.finish()


_NORMS = ("q_norm", "k_norm")


def _attend(b: Builder, p: Tiling, rows: Channel, tile: tuple[Index, Index], kv_head: Index) -> None:
    """Rotate a group's queries, then compute their attention over all key tiles."""
    d, k, width = p.head_dim, p.tile_k, p.group * p.head_dim
    blocks = (p.queries // limits.BLOCK, d // limits.BLOCK, limits.BLOCK, limits.BLOCK)
    sums = (((p.queries, d), "f32"), ((2, p.queries), "f32"), ((p.queries, k), "f32"))
    head_in_cache = kv_head * (2 * d), 2 * d, 1
    weights, eps = ([(d,)] * len(_NORMS), [p.norm.eps]) if p.norm else ([], [])
    with (
        b.alloc(air.L1, (p.width,), ((p.angles,), "f32"), (2 * d,), blocks, *sums) as (x, table, row, q, *work),
        b.alloc(air.L1, *weights) as norms,
    ):
        for given in (x, *norms, table):
            b.get(rows, tile, given)
        acc, stats, scores = work
        b.call(p.variant, "ta_init", x, *norms, table, kv_head, q, acc, stats, row, *eps)
        b.dma(b.args["row"].at(head_in_cache), row)
        with b.loop(p.steps) as j, b.alloc(air.L1, (k, 2 * d)) as (kv,):
            b.dma(kv, b.args["kv"].at((j * k, k, p.kv_heads * 2 * d), head_in_cache))
            b.call(p.variant, "ta_step", table, j * k, row, q, kv, acc, stats, scores)
        with b.alloc(air.L1, (width,)) as (out,):
            b.call(p.variant, "ta_out", acc, stats, q, out)
            b.dma(b.args["out"].at((kv_head * width, width, 1)), out)


def _attend_several(b: Builder, p: Tiling, first: int, token: int) -> None:
    """Compute the attention of a launch's tokens, from `token` on, for a KV head a column, from head `first` on."""
    count, d, width, kv = p.tokens.count, p.head_dim, p.group * p.head_dim, p.kv_heads * 2 * p.head_dim
    herd = p.columns, p.tokens.herd_rows
    rows = b.channel((1, 1), herd)
    b.put(rows, (0, 0), b.args["table"].at((0, count * p.angles, 1)))
    with b.loop(count) as i:
        b.put(rows, (0, 0), b.args["x"].at((i, 1, p.width), (0, p.width, 1)))
    together = p.tokens.together
    with b.alloc(air.L2, (p.columns, together * 2 * d), (p.columns, together * width)) as results:
        with b.herd(*herd) as tile:
            _attend_own(b, p, rows, tile, first, token, results)
        # The compiler cuts these transfers by column and drops an offset of that dimension, so the offset stays 0.
        for name, size, whole, result in zip(("row", "out"), (2 * d, width), (kv, p.heads * d), results, strict=True):
            b.dma(b.args[name].at((0, p.columns, size), (token, together, whole), (first * size, size, 1)), result)


def _attend_own(
    b: Builder, p: Tiling, rows: Channel, tile: tuple[Index, Index], first: int, start: int, results: Sequence[MemRef]
) -> None:
    """Rotate K of all tokens and the queries of a core's own, then compute the attention of these over all key tiles.

    Args:
        first: the KV head of the first column.
        start: the launch's first token.
        results: the cache's rows, and the results, each `[columns][tokens of the launch * elements]` in L2.
    """
    count, each, (tx, ty) = p.tokens.count, p.tokens.each, tile
    d, k, width, kv_head = p.head_dim, p.tile_k, p.group * p.head_dim, tx + first
    blocks = (p.queries // limits.BLOCK, d // limits.BLOCK, limits.BLOCK, limits.BLOCK)
    of_token: list[tuple[int, ...] | tuple[tuple[int, ...], str]]
    of_token = [blocks, ((p.queries, d), "f32"), ((2, p.queries), "f32")]
    with (
        b.alloc(air.L1, (p.fresh,), ((p.queries, k), "f32"), *of_token * each) as (fresh, scores, *buffers),
        b.alloc(air.L1, ((count * p.angles,), "f32"), (p.width,)) as (table, x),
    ):
        own = [(ty * each + (start + token), buffers[3 * token : 3 * token + 3]) for token in range(each)]
        b.get(rows, tile, table)
        for i in range(count):
            b.get(rows, tile, x)
            b.call(p.variant, "ta_row", x, table, kv_head, i, fresh)
            for token, work in own:
                b.call(p.variant, "ta_queries", x, table, kv_head, i, token, *work)
        with b.loop(p.steps) as j, b.alloc(air.L1, (k, 2 * d)) as (kv,):
            b.dma(kv, b.args["kv"].at((j * k, k, p.kv_heads * 2 * d), (kv_head * (2 * d), 2 * d, 1)))
            for token, work in own:
                b.call(p.variant, "ta_step", fresh, token, j * k, kv, *work, scores)
        with b.alloc(air.L1, (each * 2 * d,), (each * width,)) as own_results:
            for number, (token, (q, acc, stats)) in enumerate(own):
                b.call(p.variant, "ta_out", acc, stats, q, fresh, token, number, *own_results)
            for result, own_result, size in zip(results, own_results, (2 * d, width), strict=True):
                place = (tx, 1, p.tokens.together * size), (ty * each * size, each * size, 1)
                b.dma(result.at(*place), own_result)


def _tile(sizes: Sizes, norm: rms_norm.Norm | None = None) -> Tiling:
    tiling = tile(sizes["window"], sizes["heads"], sizes["kv_heads"], sizes["head_dim"], norm)
    return _of_tokens(replace(tiling, scores=flash_attention.Scores.of(sizes)), sizes)


def _sliding(sizes: Sizes, norm: rms_norm.Norm | None = None) -> Tiling:
    scores = flash_attention.Scores.of({**sizes, "window": flash_attention.ALL})
    return _of_tokens(tile_sliding(sizes["heads"], sizes["kv_heads"], sizes["head_dim"], scores, norm), sizes)


def _of_tokens(one: Tiling, sizes: Sizes) -> Tiling:
    return several(one, Tokens(sizes["rows"])) if "rows" in sizes else one


def _with_norm(tiled: Callable[[Sizes, rms_norm.Norm], Tiling]) -> Callable[[Sizes], Tiling]:
    return lambda sizes: tiled(sizes, rms_norm.Norm.of(sizes))


KERNELS = tuple(
    signature(
        f"{prefix}{name}",
        ("x", Arg("table", "f32"), *norms, "kv"),
        f"{rows}window pos {flash_attention.PARAMS}{scalars}",
        _reference_batched(computes) if prefix else computes,
        writes=("out", "row"),
        source="token_attention",
        attends=True,
        host=False,
        tiling=_with_norm(_tile) if norms else _tile,
        sliding=_with_norm(_sliding) if norms else _sliding,
        program=build,
    )
    for name, norms, scalars, computes in (
        ("token_attention", (), "", reference),
        ("norm_token_attention", _NORMS, f" {rms_norm.PARAMS}", reference_norm),
    )
    for prefix, rows in (("", ""), (PREFIX, "rows "))
)
