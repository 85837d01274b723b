"""How matrices in groups lie for the array: a panel's outputs in the lanes of a vector, in the order in which cores
take them, so that every column of the array reads one run of memory.

A panel is cut into chunks of whole groups, each with all that its products need (`kernel_src/aie2p/grouped.h`). How
large they are follows from the memories that they pass through, and so from the matrix alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from stages.air import limits
from stages.weights.constants import BLOCK, GROUP, LANES
from stages.weights.format import Format, Layout, Shape, Stretch
from stages.weights.grouped import Grouped

PANEL_BYTES = limits.L2_BYTES // 4 - 2048
"""At most, of a panel of `LANES` outputs: two rows of a column's cores have one each, which come to L2 while the ones
before are read. Longer rows have panels of half as many outputs."""

LONGEST_BYTES = limits.L2_BYTES // 3 - 8192
"""The same where one row of cores in all columns shares the panels; of an odd number L2 holds three."""

NORMED = 4096
"""Inputs up to which there is room for the weight of their norm, however few outputs a product has."""

PADDED_ROWS = limits.COLUMNS * limits.ROWS * LANES
"""What rows of a vocabulary are a multiple of: a panel for every core."""

SHARES = limits.COLUMNS
"""Of a feed-forward network: the cores that make one."""

PARTS = 4
"""In which its sums go from core to core, so that a core adds to one while the next adds to the one before."""

CHUNK_COST = 512
"""What a chunk costs besides its bytes, in bytes that come in the meantime: its call and its scales."""


@dataclass(frozen=True)
class Cut:
    """How a matrix of so many `groups` in a row is cut: `panels` of `lanes` outputs, each in `chunks` of at most
    `chunk_groups` groups; the last groups may be none of the matrix, with scales of 0."""

    grouped: Grouped
    groups: int
    panels: int
    lanes: int
    chunks: int
    chunk_groups: int

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Bytes of a chunk's factors, of its scales and of its numbers, without what they are padded with."""
        made, groups = self.grouped, self.chunk_groups
        return (
            self.lanes * made.header,
            self.lanes * groups * made.scales,
            self.lanes * groups * GROUP * made.numbers.bits // 8,
        )

    @property
    def starts(self) -> list[int]:
        """Where those three begin in a chunk, and where it ends."""
        return [0, *np.cumsum([_lines(size) for size in self.sizes]).tolist()]

    @property
    def chunk_bytes(self) -> int:
        return self.starts[-1]

    @property
    def panel_bytes(self) -> int:
        return self.chunks * self.chunk_bytes

    @property
    def inputs(self) -> int:
        """Of a row, with those that are none of the matrix."""
        return self.chunks * self.chunk_groups * GROUP


def _lines(size: int) -> int:
    """Bytes of a part of a chunk, so that vectors behind it are aligned."""
    return limits.aligned(size)


def padded(rows: int, step: int = PADDED_ROWS) -> int:
    """Rows of a vocabulary, with those that fill the array; or anything, up to whole steps."""
    return -(-rows // step) * step


def cut(grouped: Grouped, rows: int, groups: int, together: int = 1) -> Cut:
    """Of a matrix. Wide panels where L2 holds those of two rows of cores, or of one in all columns; few chunks, an even
    number of them. `together`: panels that a core takes at a time, each of another matrix.

    UserError if rows are no whole panels or one is too long."""
    what = f"a matrix of {rows} rows of {groups} groups"
    limits.require_multiple(what, "rows", rows, LANES // 2)
    cuts = limits.require_any(what, limits.IN_L1, _cuts(grouped, rows, groups))
    return next((each for each in cuts if together * each.panel_bytes <= _most(each)), cuts[-1])


def _most(each: Cut) -> int:
    return PANEL_BYTES if each.panels % limits.COLUMNS else LONGEST_BYTES


def _cuts(grouped: Grouped, rows: int, groups: int) -> Iterator[Cut]:
    """For wide panels, then for narrow ones."""
    for lanes in (LANES, LANES // 2):
        counts = range(2, max(groups, 2) + 2, 2) if rows % lanes == 0 else ()
        tried = [Cut(grouped, groups, rows // lanes, lanes, count, -(-groups // count)) for count in counts]
        fitting = [each for each in tried if fits(each)] or [each for each in tried if fits(each, beside=False)]
        whole = [each for each in fitting if each.groups % each.chunks == 0 and each.chunks <= 2 * fitting[0].chunks]
        yield from (whole or fitting)[:1]


def fits(each: Cut, beside: bool = True) -> bool:
    """Whether a core holds two chunks, the inputs, its sums and what it knows of groups of inputs, and what is made of
    them: its share of the logits, or less. `beside`: and what may come with the inputs: a residual, with as many values
    as there are outputs, or of no more than `NORMED` inputs the weight of their norm."""
    rows = each.panels * each.lanes
    extra = (each.inputs if each.inputs <= NORMED else min(each.inputs, rows)) if beside else 0
    outputs = 4 * -(-rows // (limits.COLUMNS * limits.ROWS)) if beside else 4 * each.lanes
    sums = 12 * each.lanes + 8 * (each.inputs // GROUP + 1)
    return limits.fits_l1(2 * each.chunk_bytes, 2 * each.inputs, 2 * extra, sums, outputs)


@dataclass(frozen=True)
class FeedForward:
    """How the matrices of a feed-forward network are cut, which the cores of one row make together: each has an equal
    share of the inner width, zeros behind its end, and so of the rows of gate and up, `pairs`, and of the columns of
    down, `shares`, whose panels are an even number. Chunks are alike, because one loop of a core takes them all."""

    pairs: Cut
    shares: Cut

    @property
    def inner(self) -> int:
        """Of a share."""
        return self.pairs.panels * self.pairs.lanes // SHARES

    @property
    def chunks(self) -> tuple[int, int]:
        """That a core takes of gate and up, in turn a panel of each, and then of down."""
        return 2 * self.pairs.panels // SHARES * self.pairs.chunks, self.shares.panels * self.shares.chunks

    @property
    def l1_bytes(self) -> int:
        """What a core holds: two chunks; its inputs, which are outputs at the end, and as they are multiplied; sums of
        all outputs and a part of another core's; its share of the activation; sums of two panels, what is known of
        groups of inputs, and what aligns them."""
        outputs = self.shares.panels * self.shares.lanes
        groups = max(self.pairs.inputs, self.shares.inputs) // GROUP + 1
        rows = 2 * (max(self.pairs.inputs, outputs) + self.pairs.inputs + self.shares.inputs) + 4 * (
            outputs + outputs // PARTS
        )
        return 2 * self.pairs.chunk_bytes + rows + 8 * (self.pairs.lanes + groups) + 2 * limits.ALIGNMENT_BYTES


def feed_forward(grouped: Grouped, groups: int, inner_groups: int) -> FeedForward:
    """Of a model whose rows have so many groups, and whose inner width has. The largest chunks that pay for what the
    last of a row is filled with.

    UserError if a core cannot hold what it needs."""
    share = -(-inner_groups // SHARES)
    rows = -(-groups // 2) * 2

    def cut(chunk_groups: int) -> FeedForward:
        pairs = Cut(grouped, groups, SHARES * share, LANES, -(-groups // chunk_groups), chunk_groups)
        return FeedForward(pairs, replace(pairs, groups=share, panels=rows, chunks=-(-share // chunk_groups)))

    cuts = [network for size in range(min(groups, LANES), 0, -1) if limits.fits_l1((network := cut(size)).l1_bytes)]
    limits.require_any(f"a feed-forward network of {groups} groups", limits.IN_L1, cuts)
    return min(cuts, key=lambda network: sum(network.chunks) * (network.pairs.chunk_bytes + CHUNK_COST))


def for_array(grouped: Grouped, form: Format) -> Format:
    """A format with its layouts for the array: `lanes`; `padded_lanes` with as many rows of zeros that every core has
    whole panels; `paired_lanes`, in which a panel of the second half of the rows follows each of the first; and those
    of a feed-forward network (`FeedForward`): `shared_pairs`, gate and up in such turns, and `shared_lanes`, down, in
    which the panels of a share of the columns follow one another."""

    def layout(step: int) -> Layout:
        return Layout(
            partial(_shape, grouped, step),
            unpack=partial(from_lanes, grouped, step),
            stretches=partial(to_lanes, grouped, step),
        )

    def pairs(cut_of: CutOf) -> Layout:
        return Layout(
            partial(_paired_shape, cut_of), unpack=partial(from_pairs, cut_of), stretches=partial(to_pairs, cut_of)
        )

    shared = Layout(
        partial(_shared_shape, grouped), unpack=partial(from_shares, grouped), stretches=partial(to_shares, grouped)
    )
    arranged = {**form.layouts, "lanes": layout(1), "padded_lanes": layout(PADDED_ROWS), "shared_lanes": shared}
    arranged["paired_lanes"] = pairs(partial(_cut_of, grouped, 1, together=2))
    arranged["shared_pairs"] = pairs(lambda shape: _of_rows(grouped, shape).pairs)
    return replace(
        form,
        layouts=arranged,
        cut=lambda rows, cols, *more: cut(grouped, rows, -(-cols // GROUP), *more),
        feed_forward=lambda cols, inner: feed_forward(grouped, -(-cols // GROUP), -(-inner // GROUP)),
        steps=grouped.steps,
    )


CutOf = Callable[[Shape], Cut]
"""How a matrix as stored is cut, by its shape."""


def _groups_of(grouped: Grouped, stored_bytes: int) -> int:
    """In a row as stored."""
    return (stored_bytes - grouped.header) // (grouped.scales + GROUP)


def _of_rows(grouped: Grouped, shape: Shape) -> FeedForward:
    """By the shape of gate or up, as stored."""
    return feed_forward(grouped, _groups_of(grouped, shape[1]), -(-shape[0] // GROUP))


def _of_columns(grouped: Grouped, shape: Shape) -> FeedForward:
    """By that of down."""
    return feed_forward(grouped, -(-shape[0] // GROUP), _groups_of(grouped, shape[1]))


def _cut_of(grouped: Grouped, step: int, shape: Shape, together: int = 1) -> Cut:
    rows, stored_bytes = shape
    return cut(grouped, padded(rows, step), _groups_of(grouped, stored_bytes), together)


def _half(shape: Shape) -> Shape:
    rows, stored_bytes = shape
    return rows // 2, stored_bytes


def _paired_shape(cut_of: CutOf, shape: Shape) -> Shape:
    found = cut_of(_half(shape))
    return 2 * found.panels, found.panel_bytes


def _shared_shape(grouped: Grouped, shape: Shape) -> Shape:
    found = _of_columns(grouped, shape).shares
    return SHARES * found.panels, found.panel_bytes


def _shape(grouped: Grouped, step: int, shape: Shape) -> Shape:
    found = _cut_of(grouped, step, shape)
    return found.panels, found.panel_bytes


def to_lanes(grouped: Grouped, step: int, shape: Shape) -> list[Stretch]:
    """Rows as stored, i8 `[rows, bytes]`, padded with zeros to a multiple of `step` -> i8 `[panels, panel_bytes]`."""
    found = _cut_of(grouped, step, shape)
    return [Stretch(range(shape[0]), found.lanes, partial(_panels, found))]


def from_lanes(grouped: Grouped, step: int, packed: np.ndarray, shape: Shape) -> np.ndarray:
    """Rows as stored, i8 of that shape, of what `to_lanes` made."""
    return _rows(_cut_of(grouped, step, shape), packed)[: shape[0]]


def to_pairs(cut_of: CutOf, shape: Shape) -> list[Stretch]:
    """Rows as stored of two matrices of one shape, one behind the other, i8 `[rows, bytes]` -> i8 `[panels,
    panel_bytes]`, taking turns."""
    found, (half, _) = cut_of(_half(shape)), _half(shape)
    pack = partial(_panels, found)
    return [Stretch(range(first, first + half), found.lanes, pack, to, 2) for to, first in enumerate((0, half))]


def from_pairs(cut_of: CutOf, packed: np.ndarray, shape: Shape) -> np.ndarray:
    """Rows as stored, i8 of that shape, of what `to_pairs` made."""
    found, (half, _) = cut_of(_half(shape)), _half(shape)
    return np.concatenate([_rows(found, packed[which::2])[:half] for which in (0, 1)])


def to_shares(grouped: Grouped, shape: Shape) -> list[Stretch]:
    """Rows as stored, i8 `[rows, bytes]` -> i8 `[SHARES * panels, panel_bytes]`: all panels of the first share of the
    columns, then those of the second, and so on."""
    found = _of_columns(grouped, shape).shares
    shares = [slice(first, first + found.groups) for first in range(0, SHARES * found.groups, found.groups)]

    def pack(stored: np.ndarray) -> np.ndarray:
        return np.stack([_panels(found, stored, share) for share in shares])

    return [Stretch(range(shape[0]), found.lanes, pack, parts=SHARES)]


def from_shares(grouped: Grouped, packed: np.ndarray, shape: Shape) -> np.ndarray:
    """Rows as stored, i8 of that shape, of what `to_shares` made."""
    found, groups = _of_columns(grouped, shape).shares, _groups_of(grouped, shape[1])
    by_share = packed.view(np.uint8).reshape(SHARES, found.panels, -1)

    def rows(panel: int) -> np.ndarray:
        factors, scales, numbers = zip(*(_values(found, _parts(found, each[panel])) for each in by_share), strict=True)
        return grouped.stored(factors[0], *(np.concatenate(part, axis=1)[:, :groups] for part in (scales, numbers)))

    return np.concatenate([rows(panel) for panel in range(found.panels)])[: shape[0]]


def _panels(found: Cut, stored: np.ndarray, share: slice = slice(None)) -> np.ndarray:
    """As many as there are rows for, of a share of their groups."""
    out = np.zeros((-(-len(stored) // found.lanes), found.panel_bytes), np.uint8)
    for panel in range(len(out)):
        rows = stored[panel * found.lanes :][: found.lanes]
        if len(rows) < found.lanes:
            rows = np.concatenate([rows, np.zeros((found.lanes - len(rows), stored.shape[1]), np.int8)])
        for place, part in zip(_parts(found, out[panel]), _packed(found, rows, share), strict=True):
            place[...] = part
    return out.view(np.int8)


def _rows(found: Cut, packed: np.ndarray) -> np.ndarray:
    """Back again, with the rows that fill the last panel."""
    return np.concatenate(
        [found.grouped.stored(*_values(found, _parts(found, panel))) for panel in packed.view(np.uint8)]
    )


def _parts(found: Cut, panel: np.ndarray) -> list[np.ndarray]:
    """Factors, scales and numbers in all chunks of a panel: u8 views `[chunks, bytes]`."""
    chunks = panel.reshape(found.chunks, found.chunk_bytes)
    return [chunks[:, start : start + size] for start, size in zip(found.starts, found.sizes, strict=False)]


def _packed(found: Cut, rows: np.ndarray, share: slice) -> Iterator[np.ndarray]:
    """What goes into `_parts` of a share of the rows of a panel."""
    made, lanes = found.grouped, found.lanes
    factors, scales, numbers = made.parts(rows)
    by_factor = np.ascontiguousarray(factors.T, np.float32)
    yield np.broadcast_to(by_factor.view(np.uint8).reshape(-1), (found.chunks, lanes * made.header))
    values: np.ndarray = np.ascontiguousarray(scales[:, share]).view(made.scale_type)
    yield np.ascontiguousarray(_by_chunk(found, values)).view(np.uint8).reshape(found.chunks, -1)
    yield _dense(made.numbers.bits, _by_chunk(found, numbers[:, share])).reshape(found.chunks, -1)


def _values(found: Cut, parts: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Factors, scales and numbers of the rows of a panel, as `Grouped.stored` takes them."""
    made, lanes = found.grouped, found.lanes
    factors = np.ascontiguousarray(parts[0][0]).view(np.float32).reshape(-1, lanes).T
    values: np.ndarray = np.ascontiguousarray(parts[1]).view(made.scale_type)
    by_row = _by_row(found, values.reshape(found.chunks, -1, made.scale_values, lanes))
    scales = np.ascontiguousarray(by_row).view(np.uint8)
    return factors, scales, _by_row(found, _loose(found, parts[2]))


def _by_chunk(found: Cut, values: np.ndarray) -> np.ndarray:
    """`[lanes, groups, n]` -> `[chunks, chunk_groups, n, lanes]`, padded with zeros."""
    lanes, groups, n = values.shape
    whole = np.zeros((found.chunks * found.chunk_groups, n, lanes), values.dtype)
    whole[:groups] = values.transpose(1, 2, 0)
    return whole.reshape(found.chunks, found.chunk_groups, n, lanes)


def _by_row(found: Cut, values: np.ndarray) -> np.ndarray:
    """Back again."""
    return np.ascontiguousarray(values.reshape(-1, *values.shape[2:])[: found.groups].transpose(2, 0, 1))


def _dense(bits: int, numbers: np.ndarray) -> np.ndarray:
    """Numbers of a byte each, u8 `[chunks, groups, GROUP, lanes]` -> u8 `[chunks, groups, bytes]`, in blocks of inputs
    and outputs."""
    chunks, groups, _, lanes = numbers.shape
    by_block = numbers.reshape(chunks, groups, GROUP // BLOCK, BLOCK, lanes // BLOCK, BLOCK)
    flat = by_block.swapaxes(3, 4).reshape(chunks, groups, -1)
    if bits == 8:
        return flat
    if bits == 4:
        return _nibbles(flat)
    pairs = (flat >> 4).reshape(chunks, groups, -1, 2, BLOCK * BLOCK)
    upper = (pairs[..., 0, :] | pairs[..., 1, :] << 2).reshape(chunks, groups, -1)
    return np.concatenate([_nibbles(flat & 15), _nibbles(upper)], axis=-1)


def _nibbles(flat: np.ndarray) -> np.ndarray:
    return flat[..., 0::2] | flat[..., 1::2] << 4


def _loose(found: Cut, packed: np.ndarray) -> np.ndarray:
    """The bytes of `_dense`, u8 `[chunks, bytes]` -> numbers u8 `[chunks, chunk_groups, GROUP, lanes]`."""
    bits, shape = found.grouped.numbers.bits, (found.chunks, found.chunk_groups, GROUP, found.lanes)
    flat = packed.reshape(*shape[:2], -1)
    if bits < 8:
        half = GROUP * found.lanes // 2
        low, upper = _of_nibbles(flat[..., :half]), flat[..., half:]
        if bits == 6:
            both = _of_nibbles(upper).reshape(*shape[:2], -1, 1, BLOCK * BLOCK)
            low |= ((both >> np.array([[0], [2]], np.uint8)) & 3).reshape(low.shape) << 4
        flat = low
    by_block = flat.reshape(*shape[:2], GROUP // BLOCK, found.lanes // BLOCK, BLOCK, BLOCK)
    return by_block.swapaxes(3, 4).reshape(shape)


def _of_nibbles(packed: np.ndarray) -> np.ndarray:
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
