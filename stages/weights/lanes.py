"""The layouts of group-wise quantised matrices for the array (`stages.weights.cut` says how they are cut).

The outputs of a panel are the lanes of a vector. Panels lie in the order in which cores take them, so that every column
of the array reads one run of memory. A chunk of a panel has all that its products need: `kernel_src/aie2p/grouped.h`
describes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from stages.engine.lazy import np
from stages.weights.constants import BLOCK, GROUP
from stages.weights.cut import PADDED_ROWS, SHARES, Cut, FeedForward, cut_feed_forward, cut_matrix, padded_rows
from stages.weights.format import Format, Layout, PanelRows, Shape
from stages.weights.grouped import Grouped

CutOf = Callable[[Shape], Cut]
"""Returns the cut of a stored matrix, given its shape `(rows, bytes)`."""


def for_array(grouped: Grouped, form: Format) -> Format:
    """Return a format with its layouts for the array.

    - `lanes`: the panels of a matrix in order.
    - `padded_lanes`: the same, padded with rows of zeros so that every core has whole panels; for a vocabulary.
    - `paired_lanes`: two matrices of one shape, stored one after the other, whose panels alternate.
    - `shared_pairs`: the same for gate and up, cut as for `FeedForward`.
    - `shared_lanes`: down, cut as for `FeedForward`: all panels of the first share of its columns, then those of the
      second, and so on.
    """

    def cut(shape: Shape, step: int = 1, together: int = 1) -> Cut:
        rows, stored_bytes = shape
        return cut_matrix(grouped, padded_rows(rows, step), grouped.groups_of(stored_bytes), together)

    def cut_gate(shape: Shape) -> Cut:
        inner, stored_bytes = shape
        return cut_feed_forward(grouped, grouped.groups_of(stored_bytes), -(-inner // GROUP)).pairs

    def cut_down(shape: Shape) -> Cut:
        cols, stored_bytes = shape
        return cut_feed_forward(grouped, -(-cols // GROUP), grouped.groups_of(stored_bytes)).shares

    def cut_values(rows: int, cols: int, together: int = 1) -> Cut:
        return cut_matrix(grouped, rows, -(-cols // GROUP), together)

    def cut_network(cols: int, inner: int) -> FeedForward:
        return cut_feed_forward(grouped, -(-cols // GROUP), -(-inner // GROUP))

    layouts = {
        "lanes": _matrix(cut),
        "padded_lanes": _matrix(partial(cut, step=PADDED_ROWS)),
        "paired_lanes": _pairs(partial(cut, together=2)),
        "shared_pairs": _pairs(cut_gate),
        "shared_lanes": _shares(cut_down),
    }
    return replace(
        form, layouts={**form.layouts, **layouts}, cut=cut_values, feed_forward=cut_network, steps=grouped.steps
    )


def _matrix(cut_of: CutOf) -> Layout:
    """Return the layout of one matrix: its panels in order."""

    def panels(shape: Shape) -> list[PanelRows]:
        cut = cut_of(shape)
        return [PanelRows(range(shape[0]), cut.lanes, partial(_pack, cut))]

    def unpack(packed: np.ndarray, shape: Shape) -> np.ndarray:
        return _unpack(cut_of(shape), packed)[: shape[0]]

    return Layout(lambda shape: cut_of(shape).shape, unpack=unpack, panels=panels)


def _pairs(cut_of: CutOf) -> Layout:
    """Return the layout of two matrices of one shape, stored one after the other, whose panels alternate."""

    def half(shape: Shape) -> Shape:
        return shape[0] // 2, shape[1]

    def packed_shape(shape: Shape) -> Shape:
        cut = cut_of(half(shape))
        return 2 * cut.panels, cut.panel_bytes

    def panels(shape: Shape) -> list[PanelRows]:
        cut, (rows, _) = cut_of(half(shape)), half(shape)
        matrices = enumerate((range(rows), range(rows, 2 * rows)))
        return [PanelRows(matrix, cut.lanes, partial(_pack, cut), first, step=2) for first, matrix in matrices]

    def unpack(packed: np.ndarray, shape: Shape) -> np.ndarray:
        cut, (rows, _) = cut_of(half(shape)), half(shape)
        return np.concatenate([_unpack(cut, packed[first::2])[:rows] for first in (0, 1)])

    return Layout(packed_shape, unpack=unpack, panels=panels)


def _shares(cut_of: CutOf) -> Layout:
    """Return the layout of a matrix whose columns are shared by cores: the panels of each share, share by share.

    `cut_of` returns the cut of a share.
    """

    def packed_shape(shape: Shape) -> Shape:
        cut = cut_of(shape)
        return SHARES * cut.panels, cut.panel_bytes

    def panels(shape: Shape) -> list[PanelRows]:
        cut = cut_of(shape)
        groups = [slice(first, first + cut.groups) for first in range(0, SHARES * cut.groups, cut.groups)]

        def pack(stored: np.ndarray) -> np.ndarray:
            return np.stack([_pack(cut, stored, share) for share in groups])

        return [PanelRows(range(shape[0]), cut.lanes, pack, shares=SHARES)]

    def unpack(packed: np.ndarray, shape: Shape) -> np.ndarray:
        cut = cut_of(shape)
        groups, by_share = cut.grouped.groups_of(shape[1]), packed.view(np.uint8).reshape(SHARES, cut.panels, -1)

        def rows(panel: int) -> np.ndarray:
            shares = [_unpack_panel(cut, share[panel]) for share in by_share]
            factors, scales, numbers = zip(*shares, strict=True)
            joined = (np.concatenate(values, axis=1)[:, :groups] for values in (scales, numbers))
            return cut.grouped.stored(factors[0], *joined)

        return np.concatenate([rows(panel) for panel in range(cut.panels)])[: shape[0]]

    return Layout(packed_shape, unpack=unpack, panels=panels)


def _pack(cut: Cut, stored: np.ndarray, groups: slice = slice(None)) -> np.ndarray:
    """Pack some groups of stored rows into panels, i8 `[panels, panel_bytes]`, padded with rows of zeros."""
    packed = np.zeros((-(-len(stored) // cut.lanes), cut.panel_bytes), np.uint8)
    for number, panel in enumerate(packed):
        rows = stored[number * cut.lanes :][: cut.lanes]
        if len(rows) < cut.lanes:
            rows = np.concatenate([rows, np.zeros((cut.lanes - len(rows), stored.shape[1]), np.int8)])
        for target, content in zip(_parts(cut, panel), _chunked(cut, rows, groups), strict=True):
            target[...] = content
    return packed.view(np.int8)


def _unpack(cut: Cut, packed: np.ndarray) -> np.ndarray:
    """Return the stored rows of panels, with the rows that pad the last panel."""
    return np.concatenate([cut.grouped.stored(*_unpack_panel(cut, panel)) for panel in packed.view(np.uint8)])


def _parts(cut: Cut, panel: np.ndarray) -> list[np.ndarray]:
    """Return views of the factors, scales and numbers in all chunks of a panel: u8 `[chunks, bytes]`."""
    chunks = panel.reshape(cut.chunks, cut.chunk_bytes)
    return [chunks[:, start : start + size] for start, size in zip(cut.starts, cut.sizes, strict=False)]


def _chunked(cut: Cut, rows: np.ndarray, groups: slice) -> Iterator[np.ndarray]:
    """Yield the content of `_parts` for some groups of the stored rows of a panel."""
    factors, scales, numbers = cut.grouped.parts(rows)
    by_factor = np.ascontiguousarray(factors.T, np.float32)
    yield np.broadcast_to(by_factor.view(np.uint8).reshape(-1), (cut.chunks, cut.sizes[0]))
    values: np.ndarray = np.ascontiguousarray(scales[:, groups]).view(cut.grouped.scale_type)
    yield np.ascontiguousarray(_to_lanes(cut, values)).view(np.uint8).reshape(cut.chunks, -1)
    yield _pack_numbers(cut.grouped.numbers.bits, _to_lanes(cut, numbers[:, groups])).reshape(cut.chunks, -1)


def _unpack_panel(cut: Cut, panel: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the factors, scales and numbers of the rows of a panel, as `Grouped.stored` takes them."""
    factors, scales, numbers = _parts(cut, panel)
    by_row = np.ascontiguousarray(factors[0]).view(np.float32).reshape(-1, cut.lanes).T
    values: np.ndarray = np.ascontiguousarray(scales).view(cut.grouped.scale_type)
    values = _from_lanes(cut, values.reshape(cut.chunks, -1, cut.grouped.scale_values, cut.lanes))
    return by_row, values.view(np.uint8), _from_lanes(cut, _unpack_numbers(cut, numbers))


def _to_lanes(cut: Cut, values: np.ndarray) -> np.ndarray:
    """Order `[lanes, groups, n]` as `[chunks, chunk_groups, n, lanes]`, padded with zeros."""
    lanes, groups, n = values.shape
    padded = np.zeros((cut.chunks * cut.chunk_groups, n, lanes), values.dtype)
    padded[:groups] = values.transpose(1, 2, 0)
    return padded.reshape(cut.chunks, cut.chunk_groups, n, lanes)


def _from_lanes(cut: Cut, values: np.ndarray) -> np.ndarray:
    """Undo `_to_lanes`."""
    return np.ascontiguousarray(values.reshape(-1, *values.shape[2:])[: cut.groups].transpose(2, 0, 1))


def _pack_numbers(bits: int, numbers: np.ndarray) -> np.ndarray:
    """Pack numbers of a byte each, u8 `[chunks, groups, GROUP, lanes]`, into u8 `[chunks, groups, bytes]`.

    They are in blocks of BLOCK inputs and BLOCK outputs. Of 6 bits, the lower four of all numbers come before the upper
    two.
    """
    chunks, groups, _, lanes = numbers.shape
    by_block = numbers.reshape(chunks, groups, GROUP // BLOCK, BLOCK, lanes // BLOCK, BLOCK)
    flat = by_block.swapaxes(3, 4).reshape(chunks, groups, -1)
    if bits == 8:
        return flat
    if bits == 4:
        return _pack_nibbles(flat)
    blocks = (flat >> 4).reshape(chunks, groups, -1, 2, BLOCK * BLOCK)
    upper = (blocks[..., 0, :] | blocks[..., 1, :] << 2).reshape(chunks, groups, -1)
    return np.concatenate([_pack_nibbles(flat & 15), _pack_nibbles(upper)], axis=-1)


def _unpack_numbers(cut: Cut, packed: np.ndarray) -> np.ndarray:
    """Undo `_pack_numbers`: u8 `[chunks, bytes]` -> u8 `[chunks, chunk_groups, GROUP, lanes]`."""
    bits, shape = cut.grouped.numbers.bits, (cut.chunks, cut.chunk_groups, GROUP, cut.lanes)
    flat = packed.reshape(*shape[:2], -1)
    if bits < 8:
        half = GROUP * cut.lanes // 2
        low, upper = _unpack_nibbles(flat[..., :half]), flat[..., half:]
        if bits == 6:
            two_blocks = _unpack_nibbles(upper).reshape(*shape[:2], -1, 1, BLOCK * BLOCK)
            low |= ((two_blocks >> np.array([[0], [2]], np.uint8)) & 3).reshape(low.shape) << 4
        flat = low
    by_block = flat.reshape(*shape[:2], GROUP // BLOCK, cut.lanes // BLOCK, BLOCK, BLOCK)
    return by_block.swapaxes(3, 4).reshape(shape)


def _pack_nibbles(flat: np.ndarray) -> np.ndarray:
    return flat[..., 0::2] | flat[..., 1::2] << 4


def _unpack_nibbles(packed: np.ndarray) -> np.ndarray:
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
