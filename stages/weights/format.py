"""A format of weights: which values it can hold, and in which layouts they are stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from typing import Any

from llama_npu2.artifact import dtypes
from llama_npu2.frozen import frozen
from stages.engine.lazy import np
from stages.weights.scales import Grid

Shape = tuple[int, ...]

PACKED_AT_ONCE = 1 << 22
"""Values that are packed at a time, where a layout allows it."""


def _unchanged(array: np.ndarray) -> np.ndarray:
    return array


def _first_rows(packed: np.ndarray, shape: Shape) -> np.ndarray:
    """Return the tensor of this shape from rows that are stored in order, with padding after them."""
    return packed.reshape(-1, *shape[1:])[: shape[0]]


def _stacked(matrices: Iterator[np.ndarray], count: int) -> np.ndarray:
    """Return matrices of one shape, at most two of them in memory besides the result."""
    first = next(matrices)
    stacked = np.empty((count, *first.shape), first.dtype)
    stacked[0] = first
    for number, matrix in enumerate(matrices, 1):
        stacked[number] = matrix
    return stacked


@frozen
class PanelRows:
    """Rows of a stored matrix that become panels, each panel whatever the others are."""

    rows: range
    panel_rows: int
    """Rows of the matrix per panel."""
    pack: Callable[[np.ndarray], np.ndarray]
    """Packs some of the rows, a multiple of `panel_rows` but for the last, into panels."""
    first: int = 0
    """The number of the first panel in the packed matrix."""
    step: int = 1
    """How many panels after one the next goes."""
    shares: int = 1
    """Equal shares of the packed matrix. `pack` makes panels for each: `[shares, panels, ...]`."""


@frozen
class Layout:
    """An order of a stored tensor's elements."""

    shape: Callable[[Shape], Shape] = tuple
    """Shape of the stored tensor -> shape after packing."""
    pack: Callable[[np.ndarray], np.ndarray] = _unchanged
    """Packs a stored tensor. Not used if there are `panels`."""
    unpack: Callable[[np.ndarray, Shape], np.ndarray] = _first_rows
    """`unpack(packed, shape)` returns the stored tensor of that shape."""
    serves: tuple[str, ...] = ()
    """Layouts whose readers can read this one as well, because it only adds elements after theirs."""
    panels: Callable[[Shape], list[PanelRows]] | None = None
    """Packs a stored matrix some rows at a time, where that is possible: its shape -> its rows. A panel that none of
    them makes is zeros."""
    of_matrices: bool = True
    """Whether it orders a matrix, so that stacked matrices, `[count, rows, columns]`, lie one after the other."""

    def stacks(self, shape: Shape) -> bool:
        """Whether a tensor of that shape is stacked matrices."""
        return len(shape) == 3 and self.of_matrices

    @classmethod
    def of_panels(cls, panel_rows: int, shape: Callable[[Shape], Shape], pack: Any, unpack: Any) -> Layout:
        """Return a layout of panels in order, each of `panel_rows` rows."""
        return cls(shape, unpack=unpack, panels=lambda stored: [PanelRows(range(stored[0]), panel_rows, pack)])


PLAIN = Layout(of_matrices=False)


@frozen
class Format:
    """How values are stored: `values` values along a tensor's last axis make one block of `elements` elements.

    The last block of a row may be short of values, never of elements. Plain dtypes are formats of one value in one
    element.
    """

    name: str
    dtype: str
    """The dtype of the elements."""
    quantise: Callable[[np.ndarray], np.ndarray]
    """Values `[..., n]` (f32, f16 or bf16) -> stored elements `[..., row_elements + ceil(n / values) * elements]`."""
    dequantise: Callable[[np.ndarray, int], np.ndarray]
    """`dequantise(stored, n)` -> f32 `[..., n]`."""
    values: int = 1
    elements: int = 1
    row_elements: int = 0
    """Elements of a row before its blocks."""
    layouts: Mapping[str, Layout] = field(default_factory=dict, hash=False)
    grid: Callable[..., Grid] | None = None
    """`grid(groups, importance)` chooses the scales of whole groups f32 `[rows, groups, values]` before their numbers,
    for formats where that is possible. `importance`, f32 `[groups, values]`, weighs the squares of errors."""
    cut: Callable[..., Any] | None = None
    """`cut(rows, cols)` returns how the layouts for the array cut a matrix (`stages.weights.cut.Cut`), for formats that
    have them; `cut(rows, cols, together)` how if a core takes that many panels at a time."""
    feed_forward: Callable[[int, int], Any] | None = None
    """`feed_forward(cols, inner)` returns how they cut a feed-forward network (`stages.weights.cut.FeedForward`)."""
    steps: Callable[[np.ndarray], np.ndarray] | None = None
    """`steps(stored)` returns what the numbers of each group are multiplied with, f32 `[rows, groups]`. For formats
    that have `cut`."""

    def layout(self, name: str) -> Layout:
        return PLAIN if name == "plain" else self.layouts[name]

    def stored_shape(self, shape: Shape) -> Shape:
        """Return the shape, in elements and without a layout, of a tensor of logical `shape`."""
        *outer, last = shape
        return (*outer, self.row_elements + -(-last // self.values) * self.elements)

    def packed_shape(self, shape: Shape, layout: str) -> Shape:
        """Return the shape, in elements and as it lies in memory, of a tensor of logical `shape`."""
        if self.layout(layout).stacks(shape):
            return (shape[0], *self.packed_shape(shape[1:], layout))
        return tuple(self.layout(layout).shape(self.stored_shape(shape)))

    def pack(self, tensor: np.ndarray, layout: str) -> np.ndarray:
        """Quantise a tensor's values, and pack them: `packed_shape(tensor.shape, layout)`."""
        return self._packed(tensor, self.quantise, layout, self.stored_shape(tensor.shape))

    def arrange(self, stored: np.ndarray, layout: str) -> np.ndarray:
        """Pack a tensor that is in elements of this format already."""
        return self._packed(stored, _unchanged, layout, stored.shape)

    def _packed(
        self, tensor: np.ndarray, store: Callable[[np.ndarray], np.ndarray], layout_name: str, shape: Shape
    ) -> np.ndarray:
        """Pack `store(tensor)`, which has this shape.

        Some rows are packed after others where the layout allows it, so that intermediate arrays take little memory.
        """
        layout = self.layout(layout_name)
        if layout.stacks(shape):
            each = (self._packed(matrix, store, layout_name, shape[1:]) for matrix in tensor)
            return _stacked(each, shape[0])
        if layout.panels is None:
            return layout.pack(store(tensor))
        packed = np.zeros(layout.shape(shape), dtypes.DTYPES[self.dtype])
        for part in layout.panels(shape):
            by_share = packed.reshape(part.shares, -1, *packed.shape[1:])
            count = part.panel_rows * max(1, PACKED_AT_ONCE // (part.panel_rows * tensor.shape[1]))
            for start in part.rows[::count]:
                panels = part.pack(store(tensor[start : min(start + count, part.rows.stop)]))
                panels = panels.reshape(part.shares, -1, *packed.shape[1:])
                first = part.first + (start - part.rows.start) // part.panel_rows * part.step
                by_share[:, first : first + panels.shape[1] * part.step : part.step] = panels
        return packed

    def unpack(self, packed: np.ndarray, layout: str, shape: Shape) -> np.ndarray:
        """Return the values, f32 of logical `shape`, of a packed tensor."""
        if self.layout(layout).stacks(shape):
            return _stacked((self.unpack(matrix, layout, shape[1:]) for matrix in packed), shape[0])
        stored = self.layout(layout).unpack(packed, self.stored_shape(shape))
        return self.dequantise(stored, shape[-1])

    def common_layout(self, one: str, other: str) -> str:
        """Return the layout that readers of both can read. ValueError if there is none."""
        for name, wanted in ((one, other), (other, one)):
            if name == wanted or wanted in self.layout(name).serves:
                return name
        raise ValueError(f"{self.name} in layout {one} cannot be read as {other}")
