"""Formats of whole numbers in groups along a row that share a scale: how they are stored, and their panels.

A tensor is stored row by row, as bytes: the row's factors, f32; then for each group its scales and its numbers, one
byte each. That is what quantising makes and dequantising reads; in memory lie the layouts, which pack the bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from stages.weights.constants import GROUP, PANEL_ROWS, QUAD
from stages.weights.format import Format, Layout, Shape
from stages.weights.scales import Grid

LINE = 64
"""Bytes. Scales of as many groups as a line holds, and a line of their minima, are in front of their numbers, so that
all lines are aligned."""


@dataclass(frozen=True)
class Bits:
    """How the numbers of a group of a panel lie. `pack`: u8 `[..., rows, group]` -> bytes u8 `[..., bytes]`; `unpack`:
    back, of PANEL_ROWS rows."""

    bits: int
    pack: Callable[[np.ndarray], np.ndarray]
    unpack: Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Grouped:
    """`factors`: f32 values per row. `scale_values` of `scale_type`: per row and group. `numbers`: how they lie in
    panels. `group`: values that share scales."""

    factors: int
    scale_values: int
    numbers: Bits
    scale_type: type = np.uint8
    group: int = GROUP

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
        """Groups of a panel whose scales are together, a line of each value."""
        return LINE * self.scale_values // (PANEL_ROWS * self.scales)

    @property
    def block_scales(self) -> int:
        """Bytes of the scales of a block."""
        return self.scale_values * LINE

    @property
    def number_bytes(self) -> int:
        """Of a group of a panel."""
        return PANEL_ROWS * self.group * self.numbers.bits // 8

    def stored(self, factors: np.ndarray, scales: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """`factors` f32 `[..., factors]`, `scales` u8 `[..., groups, scales]`, `numbers` of one byte
        `[..., groups, group]` -> i8 `[..., bytes]`."""
        groups = np.concatenate([scales, numbers.view(np.uint8)], axis=-1)
        header = np.ascontiguousarray(factors, np.float32).view(np.uint8)
        return np.concatenate([header, groups.reshape(*groups.shape[:-2], -1)], axis=-1).view(np.int8)

    def parts(self, stored: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What `stored` was made of; numbers are u8."""
        raw = np.ascontiguousarray(stored).view(np.uint8)
        factors = np.ascontiguousarray(raw[..., : self.header]).view(np.float32)
        groups = raw[..., self.header :].reshape(*raw.shape[:-1], -1, self.scales + self.group)
        return factors, groups[..., : self.scales], groups[..., self.scales :]

    def scaled(self, scales: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """`stored` where rows have no factors and scales are floats: `scales` `[..., groups, scale_values]`, `numbers`
        i8 or u8 `[..., groups, group]` -> i8 `[..., bytes]`."""
        raw = np.ascontiguousarray(scales, self.scale_type).view(np.uint8)
        return self.stored(np.empty((*scales.shape[:-2], 0)), raw, numbers)

    def scaled_parts(self, stored: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What `scaled` was made of: scales f32, numbers u8."""
        _, scales, numbers = self.parts(stored)
        return np.ascontiguousarray(scales).view(self.scale_type).astype(np.float32, copy=False), numbers

    def steps(self, stored: np.ndarray) -> np.ndarray:
        """f32 `[..., groups]`: what the numbers of a group are multiplied with."""
        if not self.factors:
            return self.scaled_parts(stored)[0][..., 0]
        factors, scales, _ = self.parts(stored)
        return scales[..., 0] * factors[..., :1]

    def panel_bytes(self, stored_bytes: int) -> int:
        """Of the panel of a tensor whose rows have so many bytes before packing."""
        groups = (stored_bytes - self.header) // (self.scales + self.group)
        blocks = -(-groups // self.block_groups)
        return PANEL_ROWS * self.header + blocks * self.block_scales + groups * self.number_bytes

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
        by_panel = numbers.reshape(panels, PANEL_ROWS, groups, self.group).swapaxes(1, 2)
        packed = self.numbers.pack(by_panel)
        lines = self._scale_lines(scales.reshape(panels, PANEL_ROWS, groups, self.scales))
        out = np.empty((panels, size), np.uint8)
        header = np.ascontiguousarray(factors.reshape(panels, PANEL_ROWS, -1).swapaxes(1, 2))
        at = PANEL_ROWS * self.header
        out[:, :at] = header.reshape(panels, -1).view(np.uint8)
        for first in range(0, groups, step):
            for some in (lines[:, first // step], packed[:, first : first + step]):
                flat = some.reshape(panels, -1)
                out[:, at : at + flat.shape[1]] = flat
                at += flat.shape[1]
        return out.view(np.int8)

    def _scale_lines(self, scales: np.ndarray) -> np.ndarray:
        """u8 `[panels, PANEL_ROWS, groups, scales]` -> `[panels, blocks, block_scales]`, padded with zeros."""
        panels, _, groups, _ = scales.shape
        step, short = self.block_groups, -groups % self.block_groups
        padded: np.ndarray = np.pad(scales, ((0, 0), (0, 0), (0, short), (0, 0))).view(self.scale_type)
        by_block = padded.reshape(panels, PANEL_ROWS, -1, step, self.scale_values).transpose(0, 2, 4, 3, 1)
        lines: np.ndarray = np.ascontiguousarray(by_block)
        if self._minima_in_quads:
            lines[:, :, 1] = _quads(lines[:, :, 1].swapaxes(-1, -2)).reshape(lines[:, :, 1].shape)
        return lines.view(np.uint8).reshape(panels, -1, self.block_scales)

    def _scales_of_lines(self, lines: np.ndarray, groups: int) -> np.ndarray:
        """Back again."""
        panels, step = len(lines), self.block_groups
        values: np.ndarray = np.ascontiguousarray(lines).view(self.scale_type)
        by_block = values.reshape(panels, -1, self.scale_values, step, PANEL_ROWS)
        if self._minima_in_quads:
            quads = by_block[:, :, 1].reshape(panels, -1, 1, PANEL_ROWS, QUAD)
            by_block[:, :, 1] = _of_quads(quads).swapaxes(-1, -2)
        by_row = by_block.transpose(0, 4, 1, 3, 2).reshape(panels, PANEL_ROWS, -1, self.scale_values)
        return np.ascontiguousarray(by_row[:, :, :groups]).view(np.uint8)

    @property
    def _minima_in_quads(self) -> bool:
        """Minima that are bytes are multiplied with sums of inputs as numbers are with inputs, and lie like those."""
        return self.scale_values == 2 and self.scale_type is np.uint8

    def from_panels(self, packed: np.ndarray, shape: Shape) -> np.ndarray:
        """Rows as stored, i8 of that shape, of their panels."""
        rows, stored_bytes = shape
        panels, raw = len(packed), packed.view(np.uint8)
        groups, step = (stored_bytes - self.header) // (self.scales + self.group), self.block_groups
        at = PANEL_ROWS * self.header
        header = np.ascontiguousarray(raw[:, :at]).view(np.float32).reshape(panels, self.factors, PANEL_ROWS)
        scales, numbers = [], []
        for first in range(0, groups, step):
            count = min(step, groups - first)
            middle = at + self.block_scales
            end = middle + count * self.number_bytes
            scales.append(raw[:, at:middle])
            numbers.append(raw[:, middle:end].reshape(panels, count, -1))
            at = end
        by_row = self._scales_of_lines(np.concatenate(scales, axis=1), groups)
        stored = self.stored(
            header.swapaxes(1, 2).reshape(panels * PANEL_ROWS, -1),
            by_row.reshape(panels * PANEL_ROWS, groups, -1),
            self.numbers.unpack(np.concatenate(numbers, axis=1)).swapaxes(1, 2).reshape(-1, groups, self.group),
        )
        return stored[:rows]

    def format(
        self, name: str, quantise: Callable[[np.ndarray], np.ndarray], dequantise: Callable[[np.ndarray], np.ndarray]
    ) -> Format:
        """`quantise`: whole groups f32 `[rows, groups, group]` -> stored; `dequantise`: back."""
        panels = Layout.of_rows(PANEL_ROWS, self.panels_shape, self.to_panels, self.from_panels)
        return Format(
            name,
            "i8",
            partial(_by_rows, quantise, self.group),
            lambda stored, n: dequantise(stored).reshape(*stored.shape[:-1], -1)[..., :n],
            values=self.group,
            elements=self.scales + self.group,
            row_elements=self.header,
            layouts={"panels": panels},
        )

    def grid_format(
        self, name: str, grid: Callable[..., Grid], dequantise: Callable[[np.ndarray], np.ndarray]
    ) -> Format:
        """The same of a format whose scales can be chosen before its numbers: `Format.grid`."""
        return replace(self.format(name, lambda groups: grid(groups).quantise(groups), dequantise), grid=grid)


_CHUNK = 1 << 20
"""Values that are quantised at a time, so that what is in the making stays in the cache."""


def _by_rows(quantise: Callable[[np.ndarray], np.ndarray], group: int, values: np.ndarray) -> np.ndarray:
    """Rows of any length in pieces of whole groups, the last padded with zeros."""
    *outer, length = values.shape
    rows, groups = values.reshape(-1, length), -(-length // group)
    step = max(1, _CHUNK // max(1, length))
    made = []
    for first in range(0, len(rows), step):
        some = rows[first : first + step].astype(np.float32)
        if length % group:
            some = np.pad(some, ((0, 0), (0, groups * group - length)))
        made.append(quantise(some.reshape(len(some), groups, group)))
    return np.concatenate(made).reshape(*outer, -1)


# kernel_src/cpu/grouped.h describes the orders.


def _quads(numbers: np.ndarray) -> np.ndarray:
    """`[..., rows, group]` -> `[..., group / QUAD, rows, QUAD]`, each quad in the order 0, 2, 1, 3."""
    *outer, rows, group = numbers.shape
    by_row = numbers.reshape(*outer, rows, group // QUAD, QUAD // 2, 2).swapaxes(-1, -2)
    return np.moveaxis(by_row, -4, -3).reshape(*outer, group // QUAD, rows, QUAD)


def _of_quads(quads: np.ndarray) -> np.ndarray:
    """Back again."""
    *outer, count, rows, _ = quads.shape
    by_row = np.moveaxis(quads.reshape(*outer, count, rows, 2, QUAD // 2), -4, -3).swapaxes(-1, -2)
    return by_row.reshape(*outer, rows, count * QUAD)


def _pack_fields(bits: int, quads: np.ndarray) -> np.ndarray:
    """Numbers of so few bits: as many quads as fit, each shifted further up, are a line."""
    *outer, count, rows, _ = quads.shape
    fields = quads.reshape(*outer, count * bits // 8, 8 // bits, rows, QUAD)
    return np.bitwise_or.reduce(fields << _shifts(bits), axis=-3).reshape(*outer, -1)


def _unpack_fields(bits: int, packed: np.ndarray) -> np.ndarray:
    outer = packed.shape[:-1]
    lines = packed.reshape(*outer, -1, 1, PANEL_ROWS, QUAD)
    return (lines >> _shifts(bits) & (1 << bits) - 1).reshape(*outer, -1, PANEL_ROWS, QUAD)


def _shifts(bits: int) -> np.ndarray:
    return np.arange(0, 8, bits, dtype=np.uint8)[:, None, None]


def _pack_nibbles(numbers: np.ndarray) -> np.ndarray:
    return _pack_fields(4, _quads(numbers) & 15)


def _unpack_nibbles(packed: np.ndarray) -> np.ndarray:
    return _of_quads(_unpack_fields(4, packed))


def _pack_six_bits(numbers: np.ndarray) -> np.ndarray:
    return np.concatenate([_pack_nibbles(numbers), _pack_fields(2, _quads(numbers) >> 4)], axis=-1)


def _unpack_six_bits(packed: np.ndarray) -> np.ndarray:
    low, high = np.split(packed, [PANEL_ROWS * GROUP // 2], axis=-1)
    return _unpack_nibbles(low) | _of_quads(_unpack_fields(2, high)) << 4


_SIGN = np.uint8(128)
"""What is added to signed numbers, so that all are stored without a sign."""


def _pack_bytes(numbers: np.ndarray) -> np.ndarray:
    return _pack_fields(8, _quads(numbers ^ _SIGN))


def _unpack_bytes(packed: np.ndarray) -> np.ndarray:
    return _of_quads(_unpack_fields(8, packed)) ^ _SIGN


NIBBLES = Bits(4, _pack_nibbles, _unpack_nibbles)
SIX_BITS = Bits(6, _pack_six_bits, _unpack_six_bits)
BYTES = Bits(8, _pack_bytes, _unpack_bytes)
