"""Formats of whole numbers in groups of 32 along a row that share a scale: how they are stored, and their panels.

A tensor is stored row by row, as bytes: the row's factors, f32; then for each group its scales and 32 numbers, one byte
each. That is what quantising makes and dequantising reads; in memory lie the layouts, which pack the bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from stages.weights.constants import GROUP, PANEL_ROWS
from stages.weights.formats import Format, Layout, Shape

LINE = 64
"""Bytes. A line of scales is in front of the numbers of as many groups as it holds, so that all lines are aligned."""

Pack = Callable[[np.ndarray], np.ndarray]
"""Numbers u8 `[..., rows, GROUP]` -> bytes u8 `[..., bytes of a group of PANEL_ROWS rows]`."""


@dataclass(frozen=True)
class Grouped:
    """`factors`: f32 values per row. `scale_values` of `scale_type`: per row and group. `bits`: of a number."""

    factors: int
    scale_values: int
    bits: int
    pack: Pack
    scale_type: type = np.uint8

    @property
    def scales(self) -> int:
        """Bytes of scales per row and group."""
        return self.scale_values * np.dtype(self.scale_type).itemsize

    @property
    def header(self) -> int:
        """Bytes of a row's factors."""
        return 4 * self.factors

    @property
    def block_groups(self) -> int:
        """Groups that share a line of scales."""
        return LINE // (PANEL_ROWS * self.scales)

    @property
    def number_bytes(self) -> int:
        """Of a group of a panel."""
        return PANEL_ROWS * GROUP * self.bits // 8

    def stored(self, factors: np.ndarray, scales: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """`factors` f32 `[..., factors]`, `scales` u8 `[..., groups, scales]`, `numbers` of one byte
        `[..., groups, GROUP]` -> i8 `[..., bytes]`."""
        groups = np.concatenate([scales, numbers.view(np.uint8)], axis=-1)
        header = np.ascontiguousarray(factors, np.float32).view(np.uint8)
        return np.concatenate([header, groups.reshape(*groups.shape[:-2], -1)], axis=-1).view(np.int8)

    def parts(self, stored: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What `stored` was made of; numbers are u8."""
        raw = np.ascontiguousarray(stored).view(np.uint8)
        factors = np.ascontiguousarray(raw[..., : self.header]).view(np.float32)
        groups = raw[..., self.header :].reshape(*raw.shape[:-1], -1, self.scales + GROUP)
        return factors, groups[..., : self.scales], groups[..., self.scales :]

    def panel_bytes(self, stored_bytes: int) -> int:
        """Of the panel of a tensor whose rows have so many bytes before packing."""
        groups = (stored_bytes - self.header) // (self.scales + GROUP)
        lines = -(-groups // self.block_groups)
        return PANEL_ROWS * self.header + lines * LINE + groups * self.number_bytes

    def panels_shape(self, shape: Shape) -> Shape:
        rows, stored_bytes = shape
        return (-(-rows // PANEL_ROWS), self.panel_bytes(stored_bytes))

    def to_panels(self, stored: np.ndarray) -> np.ndarray:
        """Rows as stored -> i8 `[ceil(rows / PANEL_ROWS), bytes of a panel]`, padded with rows of zeros."""
        panels, size = self.panels_shape(stored.shape)
        padded = np.zeros((panels * PANEL_ROWS, stored.shape[1]), np.int8)
        padded[: len(stored)] = stored
        factors, scales, numbers = self.parts(padded)
        groups, step = numbers.shape[-2], self.block_groups
        by_panel = numbers.reshape(panels, PANEL_ROWS, groups, GROUP).swapaxes(1, 2)
        packed = self.pack(by_panel)
        lines = np.zeros((panels, -(-groups // step) * step, PANEL_ROWS * self.scales), np.uint8)
        lines[:, :groups] = self._scale_lines(scales.reshape(panels, PANEL_ROWS, groups, self.scales))
        out = np.empty((panels, size), np.uint8)
        header = np.ascontiguousarray(factors.reshape(panels, PANEL_ROWS, -1).swapaxes(1, 2))
        at = PANEL_ROWS * self.header
        out[:, :at] = header.reshape(panels, -1).view(np.uint8)
        for first in range(0, groups, step):
            out[:, at : at + LINE] = lines[:, first : first + step].reshape(panels, LINE)
            some = packed[:, first : first + step].reshape(panels, -1)
            out[:, at + LINE : at + LINE + some.shape[1]] = some
            at += LINE + some.shape[1]
        return out.view(np.int8)

    def _scale_lines(self, scales: np.ndarray) -> np.ndarray:
        """u8 `[panels, PANEL_ROWS, groups, scales]` -> `[panels, groups, PANEL_ROWS * scales]`, value by value."""
        panels, _, groups, _ = scales.shape
        values = np.ascontiguousarray(scales).view(self.scale_type).transpose(0, 2, 3, 1)
        return np.ascontiguousarray(values).view(np.uint8).reshape(panels, groups, -1)

    def format(
        self, name: str, quantise: Callable[[np.ndarray], np.ndarray], dequantise: Callable[[np.ndarray], np.ndarray]
    ) -> Format:
        """`quantise`: whole groups f32 `[rows, groups, GROUP]` -> stored; `dequantise`: back."""
        return Format(
            name,
            "i8",
            partial(_by_rows, quantise),
            lambda stored, n: dequantise(stored).reshape(*stored.shape[:-1], -1)[..., :n],
            values=GROUP,
            elements=self.scales + GROUP,
            row_elements=self.header,
            layouts={"panels": Layout(self.panels_shape, self.to_panels)},
        )


_CHUNK = 1 << 20
"""Values that are quantised at a time, so that what is in the making stays in the cache."""


def _by_rows(quantise: Callable[[np.ndarray], np.ndarray], values: np.ndarray) -> np.ndarray:
    """Rows of any length in pieces of whole groups, the last padded with zeros."""
    *outer, length = values.shape
    rows, groups = values.reshape(-1, length), -(-length // GROUP)
    step = max(1, _CHUNK // max(1, length))
    made = []
    for first in range(0, len(rows), step):
        some = rows[first : first + step].astype(np.float32)
        if length % GROUP:
            some = np.pad(some, ((0, 0), (0, groups * GROUP - length)))
        made.append(quantise(some.reshape(len(some), groups, GROUP)))
    return np.concatenate(made).reshape(*outer, -1)


# Numbers of a group of a panel -> its bytes; kernel_src/cpu/grouped.h describes the orders.


def nibbles(numbers: np.ndarray) -> np.ndarray:
    """The low four bits: `[4 lines][rows][2][2]`, two nibbles to a byte."""
    *outer, rows, _ = numbers.shape
    by_line = numbers.reshape(*outer, rows, GROUP // 8, 2, 2, 2) & 15  # row, line, byte, nibble, half
    both = by_line[..., 0, :] | by_line[..., 1, :] << 4
    return np.moveaxis(both, -4, -3).swapaxes(-1, -2).reshape(*outer, -1)


def two_bits(numbers: np.ndarray) -> np.ndarray:
    """Bits 4 and 5: `[2 lines][rows][2]` words of 16 bits."""
    *outer, rows, _ = numbers.shape
    by_line = (numbers.reshape(*outer, rows, GROUP // 16, 8, 2) >> 4 & 3).astype(np.uint16)
    words = (by_line << 2 * np.arange(8, dtype=np.uint16)[:, None]).sum(axis=-2, dtype=np.uint16)
    return np.ascontiguousarray(np.moveaxis(words, -3, -2)).reshape(*outer, -1).view(np.uint8)


def pairs(numbers: np.ndarray) -> np.ndarray:
    """Whole bytes: `[8 lines][quarters of the rows][2 pairs][rows of a quarter][2]`."""
    *outer, rows, _ = numbers.shape
    by_line = numbers.reshape(*outer, 4, rows // 4, GROUP // 4, 2, 2)  # quarter, row, line, pair, half
    return np.moveaxis(by_line, (-3, -5, -2, -4), (-5, -4, -3, -2)).reshape(*outer, -1)
