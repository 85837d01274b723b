"""Rotary position embedding (Su et al. 2021), half-split pairs `(d, d + head_dim/2)` as in Hugging Face's Llama."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from llama_npu2.artifact.dtypes import SIZES
from llama_npu2.frozen import frozen
from stages import air
from stages.air import limits
from stages.engine.lazy import ml_dtypes, np
from stages.kernels import (
    BF16,
    F32,
    KV_FORMATS,
    Arg,
    Cost,
    Kernel,
    Sizes,
    elementwise,
    kv_rows,
    lanes,
    rms_norm,
    signature,
)
from stages.weights.constants import HEAD_POSITION, POSITION

if TYPE_CHECKING:
    from stages.air import AirModule, Builder, Channel, Index, MemRef, Number, Variant


def reference(x: np.ndarray, table: np.ndarray, pos: int, head_dim: int) -> np.ndarray:
    """Return `x` rotated, bf16 `[rows, heads * head_dim]`. Row `r` is at position `pos + r`.

    `x`: bf16 `[rows, heads * head_dim]`; `table`: f32 `[positions, head_dim]` or wider, rows `[cos.., sin..]`.
    """
    rows, width = x.shape
    first, second = np.split(x.astype(np.float32).reshape(rows, width // head_dim, head_dim), 2, axis=-1)
    cos, sin = (t[:, None, :] for t in np.split(table[pos : pos + rows, :head_dim], 2, axis=-1))
    rotated = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.reshape(rows, width).astype(ml_dtypes.bfloat16)


def reference_queries(x: np.ndarray, table: np.ndarray, pos: int, head_dim: int) -> np.ndarray:
    """Return `x` rotated, with the row's position after each head, bf16 `[rows, heads * (head_dim + HEAD_POSITION)]`.

    `table`: f32 `[positions, head_dim + POSITION / 2]`, with the position after the angles of each row.
    """
    rotated = reference(x, table, pos, head_dim).reshape(len(x), -1, head_dim)
    positions = np.ascontiguousarray(table[pos : pos + len(x), head_dim:]).view(ml_dtypes.bfloat16)[:, :HEAD_POSITION]
    by_head = np.broadcast_to(positions[:, None], (*rotated.shape[:2], HEAD_POSITION))
    return np.concatenate([rotated, by_head], axis=-1).reshape(len(x), -1)


def _keys(kernel: Callable[..., np.ndarray], stored: str) -> Callable[..., np.ndarray]:
    """Return the reference of a rotation whose heads become rows of K of a cache in the format `stored`.

    They are `[rows, heads, half_elements]`.
    """

    @functools.wraps(kernel)
    def reference(x: np.ndarray, table: np.ndarray, *others: Any, head_dim: int, **scalars: Any) -> np.ndarray:
        rotated = kernel(x, table, *others, head_dim=head_dim, **scalars)
        return kv_rows.halves(rotated.reshape(len(x), -1, head_dim), kv_rows.KEYS, stored)

    return reference


def _normed(kernel: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """Return the reference of a rotation of heads that are normed first."""

    def reference(
        x: np.ndarray,
        table: np.ndarray,
        weight: np.ndarray,
        pos: int,
        head_dim: int,
        eps: float,
        offset: float = 0.0,
        once: int | bool = False,
    ) -> np.ndarray:
        heads = rms_norm.reference(x.reshape(len(x), -1, head_dim), weight, eps, offset, once)
        return kernel(heads.reshape(x.shape), table, pos, head_dim)

    return reference


OUTS = ROWS, KEYS, QUERIES = "rows", "keys", "queries"
"""Layouts of the output: rows as in the input; the K halves of rows of an interleaved cache; heads with the row's
position after each."""


@frozen
class Tiling:
    """How a rotation is divided: each core has an equal share of the rows."""

    rows: int
    heads: int
    head_dim: int
    out: str
    """`ROWS`, `KEYS` or `QUERIES`."""
    columns: int
    """Columns of the herd, which has one row."""
    tile_rows: int
    """Rows that a core processes at a time."""
    norm: rms_norm.Norm | None = None
    """The norm of each head before the rotation. Its weight comes in front of the table's rows, because a core has only
    two input streams."""
    stored: str = "bf16"
    """The format of the cache that `KEYS` go to."""
    parts: int = 1
    """Steps of the launch, each of which rotates a part of the heads."""

    @property
    def part_heads(self) -> int:
        """Heads that a core has at a time."""
        return self.heads // self.parts

    @property
    def part_width(self) -> int:
        """Elements of an input row that a core has at a time."""
        return self.width // self.parts

    @property
    def out_dtype(self) -> str:
        """The dtype of the output."""
        return kv_rows.element_type(self.stored)

    @property
    def half(self) -> int:
        """Elements of K of a head in a row of the cache."""
        return kv_rows.half_elements(self.head_dim, self.stored)

    @property
    def width(self) -> int:
        """Elements of an input row."""
        return self.heads * self.head_dim

    @property
    def out_width(self) -> int:
        """Elements of an output row in DDR."""
        return {
            ROWS: self.width,
            KEYS: 2 * self.heads * self.half,
            QUERIES: self.width + self.heads * HEAD_POSITION,
        }[self.out]

    @property
    def tile_width(self) -> int:
        """Elements that a core writes of an output row at a time."""
        return (self.heads * self.half if self.out == KEYS else self.out_width) // self.parts

    @property
    def tile_elements(self) -> int:
        """Elements of a core's output buffer, rounded up to where the next buffer may begin."""
        return limits.aligned(self.tile_rows * self.tile_width, SIZES[self.out_dtype])

    @property
    def table_width(self) -> int:
        """Elements of a row of the table. In prefill, positions follow the angles."""
        return self.head_dim + (0 if self.out == ROWS else POSITION * BF16 // F32)

    @property
    def angles(self) -> int:
        """Elements that a core reads of a row of the table."""
        return self.table_width if self.out == QUERIES else self.head_dim

    @property
    def variant(self) -> Variant:
        sizes = {"HEADS": self.part_heads, "HEAD_DIM": self.head_dim, "ROWS": self.tile_rows}
        flags = {name: 1 for name, chosen in (("PLACED", self.out == QUERIES), ("NORM", self.norm)) if chosen}
        macros = sizes | flags | (self.norm.macros if self.norm else {}) | kv_rows.macros(self.stored)
        return air.Variant.of("rope", **macros)

    @property
    def macs(self) -> int:
        return 0

    @property
    def costs(self) -> Mapping[str, Cost]:
        """Return the cost of one call of each tile function.

        It is that of the pairs of each head, and once per row of those of the table, which are split into cosines and
        sines. Heads between positions are stored in parts of one block row each. Norms of heads come on top.
        """
        pairs, heads = self.head_dim // 2, self.part_heads
        row = (heads * 14 + 12) * (pairs // lanes(pairs))
        row += heads * self.norm.vectors(self.head_dim) if self.norm else 0
        if self.out == QUERIES:
            row += heads * (2 * pairs // limits.BLOCK - 2 * pairs // lanes(pairs) + 1) + 1
        if kv_rows.in_numbers(self.stored):
            row += heads * kv_rows.quantising_vectors(self.head_dim)
        return {"rope": Cost(vectors=self.tile_rows * row)}

    def __str__(self) -> str:
        out = {ROWS: "rows", KEYS: "K halves of KV", QUERIES: "heads with positions"}[self.out]
        return (
            f"rope {self.rows}x{self.heads}x{self.head_dim}: herd {self.columns}x1, {self.tile_rows} rows at a time, "
            f"{f'{self.part_heads} heads, ' if self.parts > 1 else ''}out {out}{', of norms' if self.norm else ''}"
            f"{f', in {self.stored}' if kv_rows.in_numbers(self.stored) else ''}"
        )


def tile(
    rows: int,
    heads: int,
    head_dim: int,
    out: str = ROWS,
    norm: rms_norm.Norm | None = None,
    stored: str = "bf16",
) -> Tiling:
    """Divide a rotation so that a core processes as many rows at a time as fit L1, with output, table and a norm.

    The compiler's copies of the buffers count (`limits.copies`). A core makes an even number of steps if the shape
    allows it (`limits.steady`).
    """
    what = f"rope {rows}x{heads}x{head_dim}"
    limits.require_multiple(what, "head_dim", head_dim, limits.VECTOR)
    columns = elementwise.divisors_of_herd(rows)[0]
    share = rows // columns
    tilings = [
        Tiling(rows, heads, head_dim, out, columns, r, norm, stored, parts)
        for parts in limits.divisors(heads)[::-1]
        for r in limits.divisors(share, 1, 8)
    ]
    weight = BF16 * head_dim if norm else 0
    fitting = (p for p in tilings if limits.fits_l1(limits.copies(share // p.tile_rows) * _l1(p), weight))
    tilings = limits.require_any(what, limits.IN_L1, fitting)
    fewest = (p for p in tilings if p.parts == tilings[0].parts)
    return limits.steady_first(what, fewest, lambda p: share // p.tile_rows)[0]


def _l1(p: Tiling) -> int:
    """Return the bytes of input rows, output rows and rows of the table on a core."""
    return p.tile_rows * (BF16 * p.part_width + F32 * p.angles) + SIZES[p.out_dtype] * p.tile_elements


def build(tiling: Tiling) -> AirModule:
    """Build the AIR program with the arguments `x`, `table`, `weight` if heads are normed, and `out`.

    `x`: bf16 `[rows][heads * head_dim]`. `table`: f32 `[rows][head_dim]`, the rows of these positions; for prompts
    `[rows][head_dim + POSITION / 2]`. `weight`: bf16 `[head_dim]`. `out`: bf16, as `x` for `ROWS`,
    `[rows][2 * heads * half]` for `KEYS`, in the cache's format, `[rows][heads * (head_dim + HEAD_POSITION)]` for
    `QUERIES`. With one row, there is no first dimension.
    """
    p = tiling
    shapes = {name: (width,) if p.rows == 1 else (p.rows, width) for name, width in _widths(p).items()}
    shapes |= {"weight": (p.head_dim,)} if p.norm else {}
    dtypes = {"table": "f32", "out": p.out_dtype}
    types = {name: air.memref_type(shape, dtypes.get(name, "bf16")) for name, shape in shapes.items()}
    b = air.Builder("rope", {name: types[name] for name in ("x", "table", "weight", "out") if name in types})
    with b.launch(p.parts, together=False) as (part, _), b.segment():
        angles = _send_angles(b, p) if p.norm else None
        with b.herd(p.columns, 1) as tile, b.alloc(air.L1, *([(p.head_dim,)] if p.norm else [])) as weights:
            for weight in weights:
                b.get(str(angles), tile, weight)
            _rotate(b, p, part if p.parts > 1 else 0, tile, angles, weights)
    return b.finish()


def _widths(p: Tiling) -> dict[str, int]:
    """Return the elements of a row of each argument with rows."""
    return {"x": p.width, "table": p.table_width, "out": p.out_width}


def _rows(p: Tiling, name: str, first: Number) -> list[tuple[Number, int, int]]:
    """Return the dimension of an argument's rows from `first` on; none for a single row."""
    return [] if p.rows == 1 else [(first, p.tile_rows, _widths(p)[name])]


def _send_angles(b: Builder, p: Tiling) -> Channel:
    """Send the norm's weight to each core, and then its rows of the table."""
    angles, share = b.channel((p.columns, 1), (p.columns, 1)), p.rows // p.columns
    for column in range(p.columns):
        b.put(angles, (column, 0), b.args["weight"].at((0, p.head_dim, 1)))
        with b.loop(share // p.tile_rows) as i:
            rows = _rows(p, "table", i * p.tile_rows + column * share)
            b.put(angles, (column, 0), b.args["table"].at(*rows, (0, p.angles, 1)))
    return angles


def _rotate(
    b: Builder, p: Tiling, part: Number, tile: tuple[Index, Index], angles: Channel | None, weights: list[MemRef]
) -> None:
    """Rotate a part of the heads of a core's rows.

    `weights`: that of the norm, if there is one, whose channel brings the angles, too.
    """
    share = p.rows // p.columns
    buffers = ((p.tile_rows, p.part_width), ((p.tile_rows, p.angles), "f32"), ((p.tile_elements,), p.out_dtype))
    with b.loop(share // p.tile_rows) as i, b.alloc(air.L1, *buffers) as (x, table, out):
        first = tile[0] * share + i * p.tile_rows
        b.dma(x, b.args["x"].at(*_rows(p, "x", first), (part * p.part_width, p.part_width, 1)))
        if angles:
            b.get(angles, tile, table)
        else:
            b.dma(table, b.args["table"].at(*_rows(p, "table", first), (0, p.angles, 1)))
        # Buffers that one channel fills are given in its order.
        b.call(p.variant, "rope", x, *weights, table, out, *((p.norm.eps,) if p.norm else ()))
        heads = [(part * p.tile_width, p.tile_width, 1)]
        if p.out == KEYS:
            heads = [(part * p.part_heads, p.part_heads, 2 * p.half), (0, p.half, 1)]
        b.dma(b.args["out"].at(*_rows(p, "out", first), *heads), out.at((0, p.tile_rows * p.tile_width, 1)))


def reference_qkv(
    x: np.ndarray, table: np.ndarray, pos: int, heads: int, kv_heads: int, head_dim: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return Q rotated, bf16 `[heads * head_dim]`, and the row of an interleaved cache, bf16 `[kv_heads, 2, head_dim]`.

    K is rotated in that row, V is as given. `x`: bf16 `[1, (heads + 2 * kv_heads) * head_dim]`, Q, K and V of one row;
    `table`: f32 `[positions, head_dim]` or wider.
    """
    ends = heads * head_dim, (heads + kv_heads) * head_dim
    q, k, v = np.split(x, ends, axis=-1)
    q, k = (reference(part, table, pos, head_dim) for part in (q, k))
    return q[0], np.stack([part.reshape(kv_heads, head_dim) for part in (k, v)], axis=1)


def _variants() -> Iterator[Kernel]:
    """Yield the kernels of a prompt's rotations on the array, and those of heads that are normed first.

    K goes into the K halves of an interleaved cache's rows, and queries have their positions.
    """
    plain = [("rope_q", reference_queries, QUERIES, "bf16")]
    plain += [("rope_kv", reference, KEYS, stored) for stored in KV_FORMATS.values()]
    normed = [("rope", reference, ROWS, "bf16"), *plain]
    named = [*((False, *entry) for entry in plain), *((True, *entry) for entry in normed)]
    for has_norm, name, rotates, out, stored in named:
        computes = _normed(rotates) if has_norm else rotates
        computes = _keys(computes, stored) if kv_rows.in_numbers(stored) else computes

        def tiled(s: Sizes, out: str = out, stored: str = stored, has_norm: bool = has_norm) -> Tiling:
            norm = rms_norm.Norm.of(s) if has_norm else None
            return tile(s["rows"], s["heads"], s["head_dim"], out, norm, stored)

        yield signature(
            f"norm_{name}" if has_norm else name,
            (*_READS, "weight") if has_norm else _READS,
            f"rows pos heads head_dim {rms_norm.PARAMS if has_norm else ''}",
            computes,
            writes=(Arg("out", stored, written=True),),
            source="rope",
            stored=stored,
            host=out == ROWS,
            tiling=tiled,
            program=build,
        )


_READS = ("x", Arg("table", "f32"))

KERNELS = (
    signature(
        "rope",
        _READS,
        "rows pos heads head_dim",
        reference,
        tiling=lambda s: tile(s["rows"], s["heads"], s["head_dim"]),
        program=build,
    ),
    *_variants(),
)
