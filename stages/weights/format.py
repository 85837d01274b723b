"""A format of weights: which values it can hold, and in which layouts they are stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from llama_npu2.artifact.dtypes import DTYPES
from stages.weights.scales import Grid

Shape = tuple[int, ...]

PACKED_AT_ONCE = 1 << 22
"""Values."""


def _unchanged(array: np.ndarray) -> np.ndarray:
    return array


def _first(packed: np.ndarray, shape: Shape) -> np.ndarray:
    """Of rows that lie as they are, with others behind them."""
    return packed.reshape(-1, *shape[1:])[: shape[0]]


@dataclass(frozen=True)
class Stretch:
    """Rows of a stored matrix, each `unit` of which `pack` makes one of what is packed of, whatever the others are:
    that at `to`, then every `step`th. `parts`: of what is packed, which `pack` makes for each of these at once."""

    rows: range
    unit: int
    pack: Callable[[np.ndarray], np.ndarray]
    to: int = 0
    step: int = 1
    parts: int = 1


@dataclass(frozen=True)
class Layout:
    """An order of a stored tensor's elements. `shape`: of the stored tensor -> after packing; `pack`: the same for the
    tensor, or `stretches`, of the shape of a stored matrix, where some rows can be packed after others, zeros being
    what none is packed to; `unpack(packed, shape)`: the stored tensor of that shape again. `serves`: layouts whose
    readers can read this one as well, because it only adds elements behind theirs."""

    shape: Callable[[Shape], Shape] = tuple
    pack: Callable[[np.ndarray], np.ndarray] = _unchanged
    unpack: Callable[[np.ndarray, Shape], np.ndarray] = _first
    serves: tuple[str, ...] = ()
    stretches: Callable[[Shape], list[Stretch]] | None = None

    @classmethod
    def of_rows(cls, rows: int, shape: Callable[[Shape], Shape], pack: Any, unpack: Any) -> Layout:
        """One in which so many rows become one."""
        return cls(shape, unpack=unpack, stretches=lambda stored: [Stretch(range(stored[0]), rows, pack)])


PLAIN = Layout()


@dataclass(frozen=True)
class Format:
    """`values` logical values along a tensor's last axis make one block of `elements` elements of `dtype`; the last
    block of a row may be short of values, never of elements. `row_elements` of a row are in front of its blocks.

    `quantise`: values `[..., n]` (f32, f16 or bf16) -> stored elements
    `[..., row_elements + ceil(n / values) * elements]`;
    `dequantise(stored, n)`: back to f32 `[..., n]`. Plain dtypes are formats of one value in one element.
    `grid(groups, importance)`: the scales of whole groups f32 `[rows, groups, values]`, where they can be chosen before
    the numbers; `importance` f32 `[groups, values]` weighs the squares of errors. `cut(rows, cols)`: how the layouts
    for the array cut a matrix (`stages.weights.lanes.Cut`), where it has them; `cut(rows, cols, together)` where a core
    takes panels of so many at a time; `feed_forward(cols, inner)`: how they cut a feed-forward network's
    (`stages.weights.lanes.FeedForward`). `steps(stored)` f32 `[rows, groups]`, there too: what whole numbers are
    multiplied with.
    """

    name: str
    dtype: str
    quantise: Callable[[np.ndarray], np.ndarray]
    dequantise: Callable[[np.ndarray, int], np.ndarray]
    values: int = 1
    elements: int = 1
    row_elements: int = 0
    layouts: Mapping[str, Layout] = field(default_factory=dict, hash=False)
    grid: Callable[..., Grid] | None = None
    cut: Callable[..., Any] | None = None
    feed_forward: Callable[[int, int], Any] | None = None
    steps: Callable[[np.ndarray], np.ndarray] | None = None

    def layout(self, name: str) -> Layout:
        return PLAIN if name == "plain" else self.layouts[name]

    def stored_shape(self, shape: Shape) -> Shape:
        """Of a tensor of logical `shape`, in elements of `dtype`, before any layout."""
        *outer, last = shape
        return (*outer, self.row_elements + -(-last // self.values) * self.elements)

    def packed_shape(self, shape: Shape, layout: str) -> Shape:
        """Of a tensor of logical `shape`, in elements of `dtype`, as it lies in memory."""
        return tuple(self.layout(layout).shape(self.stored_shape(shape)))

    def pack(self, tensor: np.ndarray, layout: str) -> np.ndarray:
        """A tensor's values, stored and arranged: `packed_shape(tensor.shape, layout)`."""
        return self._arranged(tensor, self.quantise, layout, self.stored_shape(tensor.shape))

    def arrange(self, stored: np.ndarray, layout: str) -> np.ndarray:
        """The same of what is stored already."""
        return self._arranged(stored, _unchanged, layout, stored.shape)

    def _arranged(
        self, tensor: np.ndarray, store: Callable[[np.ndarray], np.ndarray], layout: str, shape: Shape
    ) -> np.ndarray:
        """Of the stored shape; where a layout allows it, some rows after others, so that what is in the making takes
        little memory."""
        chosen = self.layout(layout)
        if chosen.stretches is None:
            return chosen.pack(store(tensor))
        packed = np.zeros(chosen.shape(shape), DTYPES[self.dtype])
        for each in chosen.stretches(shape):
            step = each.unit * max(1, PACKED_AT_ONCE // (each.unit * tensor.shape[1]))
            for first in each.rows[::step]:
                some = each.pack(store(tensor[first : min(first + step, each.rows.stop)]))
                some = some.reshape(each.parts, -1, *packed.shape[1:])
                begin = each.to + (first - each.rows.start) // each.unit * each.step
                parts = packed.reshape(each.parts, -1, *packed.shape[1:])
                parts[:, begin : begin + some.shape[1] * each.step : each.step] = some
        return packed

    def unpack(self, packed: np.ndarray, layout: str, shape: Shape) -> np.ndarray:
        """The values, f32 of logical `shape`, of what `pack` made."""
        stored = self.layout(layout).unpack(packed, self.stored_shape(shape))
        return self.dequantise(stored, shape[-1])

    def common_layout(self, one: str, other: str) -> str:
        """The layout that readers of both can read. ValueError if there is none."""
        for name, wanted in ((one, other), (other, one)):
            if name == wanted or wanted in self.layout(name).serves:
                return name
        raise ValueError(f"{self.name} in layout {one} cannot be read as {other}")
