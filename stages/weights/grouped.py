"""Group-wise formats: whole numbers, of which groups along a row share a scale. How they are stored, and their panels.

A tensor is stored row by row, as bytes: the row's factors, f32, and for each group its scales and its numbers, one byte
each. Quantising makes that and dequantising reads it. Memory holds layouts of it, in which numbers are packed bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from llama_npu2.frozen import frozen
from stages.engine.lazy import np
from stages.weights.constants import GROUP, PANEL_ROWS, QUAD
from stages.weights.format import Format, Layout, Shape
from stages.weights.scales import Grid, asymmetric, inverse

LINE = 64
"""Bytes of a cache line. In a panel, a line of scales, and one of minima if there are any, come before the numbers of
all groups whose scales fit in it. So all lines are aligned."""


_SIZES = {"uint8": 1, "float16": 2, "float32": 4}
"""Bytes of a value of a scale, by its dtype."""


@frozen
class Bits:
    """How the numbers of a group of a panel are packed."""

    bits: int
    """Bits of a number."""
    pack: Callable[[np.ndarray], np.ndarray]
    """u8 `[..., rows, group]` -> bytes u8 `[..., bytes]`."""
    unpack: Callable[[np.ndarray], np.ndarray]
    """The inverse of `pack`, for PANEL_ROWS rows."""


@frozen
class Grouped:
    """The geometry of a group-wise format."""

    factors: int
    """f32 values per row."""
    scale_values: int
    """Values per row and group: a scale, or a scale and a minimum."""
    numbers: Bits
    """How numbers are packed in panels."""
    scale_type: str = "uint8"
    """Type of `scale_values`."""
    group: int = GROUP
    """Values that share scales."""

    @property
    def scales(self) -> int:
        """Bytes of scales per row and group."""
        return self.scale_values * _SIZES[self.scale_type]

    @property
    def header(self) -> int:
        """Bytes of a row's factors."""
        return 4 * self.factors

    @property
    def block_groups(self) -> int:
        """Groups of a panel whose scales lie together, one line for each of `scale_values`."""
        return LINE * self.scale_values // (PANEL_ROWS * self.scales)

    @property
    def block_scales(self) -> int:
        """Bytes of the scales of a block of `block_groups` groups."""
        return self.scale_values * LINE

    @property
    def number_bytes(self) -> int:
        """Bytes of the numbers of a group of a panel."""
        return PANEL_ROWS * self.group * self.numbers.bits // 8

    def groups_of(self, stored_bytes: int) -> int:
        """Return the groups of a row that has `stored_bytes` bytes as stored."""
        return (stored_bytes - self.header) // (self.scales + self.group)

    def stored(self, factors: np.ndarray, scales: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Return stored rows, i8 `[..., bytes]`.

        Args:
            factors: f32 `[..., factors]`.
            scales: u8 `[..., groups, scales]`.
            numbers: i8 or u8 `[..., groups, group]`.
        """
        groups = np.concatenate([scales, numbers.view(np.uint8)], axis=-1)
        header = np.ascontiguousarray(factors, np.float32).view(np.uint8)
        return np.concatenate([header, groups.reshape(*groups.shape[:-2], -1)], axis=-1).view(np.int8)

    def parts(self, stored: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the factors, scales and numbers of stored rows, as `stored` takes them; numbers are u8."""
        raw = np.ascontiguousarray(stored).view(np.uint8)
        factors = np.ascontiguousarray(raw[..., : self.header]).view(np.float32)
        groups = raw[..., self.header :].reshape(*raw.shape[:-1], -1, self.scales + self.group)
        return factors, groups[..., : self.scales], groups[..., self.scales :]

    def scaled(self, scales: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Return stored rows, i8 `[..., bytes]`, of a format without factors, whose scales are floats.

        Args:
            scales: `[..., groups, scale_values]`.
            numbers: i8 or u8 `[..., groups, group]`.
        """
        raw = np.ascontiguousarray(scales, self.scale_type).view(np.uint8)
        return self.stored(np.empty((*scales.shape[:-2], 0)), raw, numbers)

    def scaled_parts(self, stored: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return scales f32 and numbers u8 of stored rows, as `scaled` takes them."""
        _, scales, numbers = self.parts(stored)
        return np.ascontiguousarray(scales).view(self.scale_type).astype(np.float32, copy=False), numbers

    def steps(self, stored: np.ndarray) -> np.ndarray:
        """Return what the numbers of each group are multiplied with, f32 `[..., groups]`."""
        if not self.factors:
            return self.scaled_parts(stored)[0][..., 0]
        factors, scales, _ = self.parts(stored)
        return scales[..., 0] * factors[..., :1]

    def panel_bytes(self, stored_bytes: int) -> int:
        """Return the bytes of a panel of rows that have `stored_bytes` bytes each as stored."""
        groups = self.groups_of(stored_bytes)
        blocks = -(-groups // self.block_groups)
        return PANEL_ROWS * self.header + blocks * self.block_scales + groups * self.number_bytes

    def panels_shape(self, shape: Shape) -> Shape:
        """Return the shape of the panels of stored rows: `[panels, bytes]`."""
        rows, stored_bytes = shape
        return (-(-rows // PANEL_ROWS), self.panel_bytes(stored_bytes))

    def to_panels(self, stored: np.ndarray) -> np.ndarray:
        """Pack stored rows into i8 `[ceil(rows / PANEL_ROWS), bytes of a panel]`, padded with rows of zeros."""
        panels, size = self.panels_shape(stored.shape)
        padded = np.zeros((panels * PANEL_ROWS, stored.shape[1]), np.int8)
        padded[: len(stored)] = stored
        factors, scales, numbers = self.parts(padded)
        groups, step = numbers.shape[-2], self.block_groups
        packed = self.numbers.pack(numbers.reshape(panels, PANEL_ROWS, groups, self.group).swapaxes(1, 2))
        lines = self._scale_lines(scales.reshape(panels, PANEL_ROWS, groups, self.scales))
        header = np.ascontiguousarray(factors.reshape(panels, PANEL_ROWS, -1).swapaxes(1, 2))
        out = np.empty((panels, size), np.uint8)
        begin = PANEL_ROWS * self.header
        out[:, :begin] = header.reshape(panels, -1).view(np.uint8)
        for first in range(0, groups, step):
            for piece in (lines[:, first // step], packed[:, first : first + step]):
                end = begin + piece[0].size
                out[:, begin:end] = piece.reshape(panels, -1)
                begin = end
        return out.view(np.int8)

    def _scale_lines(self, scales: np.ndarray) -> np.ndarray:
        """Order u8 `[panels, PANEL_ROWS, groups, scales]` as `[panels, blocks, block_scales]`, padded with zeros."""
        panels, _, groups, _ = scales.shape
        step, missing = self.block_groups, -groups % self.block_groups
        padded: np.ndarray = np.pad(scales, ((0, 0), (0, 0), (0, missing), (0, 0))).view(self.scale_type)
        by_block = padded.reshape(panels, PANEL_ROWS, -1, step, self.scale_values).transpose(0, 2, 4, 3, 1)
        lines: np.ndarray = np.ascontiguousarray(by_block)
        if self._minima_in_quads:
            lines[:, :, 1] = _to_quads(lines[:, :, 1].swapaxes(-1, -2)).reshape(lines[:, :, 1].shape)
        return lines.view(np.uint8).reshape(panels, -1, self.block_scales)

    def _from_scale_lines(self, lines: np.ndarray, groups: int) -> np.ndarray:
        """Undo `_scale_lines`."""
        panels, step = len(lines), self.block_groups
        values: np.ndarray = np.ascontiguousarray(lines).view(self.scale_type)
        by_block = values.reshape(panels, -1, self.scale_values, step, PANEL_ROWS)
        if self._minima_in_quads:
            quads = by_block[:, :, 1].reshape(panels, -1, 1, PANEL_ROWS, QUAD)
            by_block[:, :, 1] = _from_quads(quads).swapaxes(-1, -2)
        by_row = by_block.transpose(0, 4, 1, 3, 2).reshape(panels, PANEL_ROWS, -1, self.scale_values)
        return np.ascontiguousarray(by_row[:, :, :groups]).view(np.uint8)

    @property
    def _minima_in_quads(self) -> bool:
        """Whether minima are in the order of numbers.

        Those that are bytes are, because kernels multiply them with sums of inputs as they multiply numbers with
        inputs.
        """
        return self.scale_values == 2 and self.scale_type == "uint8"

    def from_panels(self, packed: np.ndarray, shape: Shape) -> np.ndarray:
        """Return the stored rows, i8 of this shape, of their panels."""
        rows, stored_bytes = shape
        panels, raw = len(packed), packed.view(np.uint8)
        groups, step = self.groups_of(stored_bytes), self.block_groups
        begin = PANEL_ROWS * self.header
        header = np.ascontiguousarray(raw[:, :begin]).view(np.float32).reshape(panels, self.factors, PANEL_ROWS)
        lines, numbers = [], []
        for first in range(0, groups, step):
            count = min(step, groups - first)
            middle = begin + self.block_scales
            end = middle + count * self.number_bytes
            lines.append(raw[:, begin:middle])
            numbers.append(raw[:, middle:end].reshape(panels, count, -1))
            begin = end
        scales = self._from_scale_lines(np.concatenate(lines, axis=1), groups)
        stored = self.stored(
            header.swapaxes(1, 2).reshape(panels * PANEL_ROWS, -1),
            scales.reshape(panels * PANEL_ROWS, groups, -1),
            self.numbers.unpack(np.concatenate(numbers, axis=1)).swapaxes(1, 2).reshape(-1, groups, self.group),
        )
        return stored[:rows]

    def format(
        self, name: str, quantise: Callable[[np.ndarray], np.ndarray], dequantise: Callable[[np.ndarray], np.ndarray]
    ) -> Format:
        """Return the format.

        Args:
            quantise: Whole groups f32 `[rows, groups, group]` -> stored rows.
            dequantise: Stored rows -> f32 `[..., groups, group]`.
        """
        panels = Layout.of_panels(PANEL_ROWS, self.panels_shape, self.to_panels, self.from_panels)
        return Format(
            name,
            "i8",
            partial(_quantise_rows, quantise, self.group),
            lambda stored, n: dequantise(stored).reshape(*stored.shape[:-1], -1)[..., :n],
            values=self.group,
            elements=self.scales + self.group,
            row_elements=self.header,
            layouts={"panels": panels},
        )

    def grid_format(
        self, name: str, grid: Callable[..., Grid], dequantise: Callable[[np.ndarray], np.ndarray]
    ) -> Format:
        """Return the format, if its scales can be chosen before its numbers by `grid` (`Format.grid`)."""
        return replace(self.format(name, lambda groups: grid(groups).quantise(groups), dequantise), grid=grid)


def exact_format(name: str, grouped: Grouped, least: int, most: int) -> Format:
    """Return a format for checkpoints: `w = s q - m`, each operation rounded to f32.

    Numbers q go from `least` to `most`; each group has a scale s and a minimum m, f32.
    """
    dtype = "int8" if least < 0 else "uint8"

    def quantise(groups: np.ndarray) -> np.ndarray:
        scale, minimum = asymmetric(groups, most - least)
        if least:
            minimum += scale * least
        numbers = np.clip(np.rint((groups + minimum[..., None]) * inverse(scale)[..., None]), least, most)
        return grouped.scaled(np.stack([scale, minimum], axis=-1), numbers.astype(dtype))

    def dequantise(stored: np.ndarray) -> np.ndarray:
        scales, numbers = grouped.scaled_parts(stored)
        return scales[..., :1] * numbers.view(dtype) - scales[..., 1:]

    return grouped.format(name, quantise, dequantise)


_CHUNK = 1 << 18
"""Values that are quantised at a time, so that intermediate arrays stay in the cache."""


def _quantise_rows(quantise: Callable[[np.ndarray], np.ndarray], group: int, values: np.ndarray) -> np.ndarray:
    """Quantise rows of any length some at a time, as whole groups, the last padded with zeros."""
    *outer, length = values.shape
    rows, groups = values.reshape(-1, length), -(-length // group)
    step = max(1, _CHUNK // max(1, length))
    stored = []
    for first in range(0, len(rows), step):
        chunk = rows[first : first + step].astype(np.float32)
        if length % group:
            chunk = np.pad(chunk, ((0, 0), (0, groups * group - length)))
        stored.append(quantise(chunk.reshape(len(chunk), groups, group)))
    return np.concatenate(stored).reshape(*outer, -1)


# kernel_src/cpu/grouped.h describes the orders.


def _to_quads(numbers: np.ndarray) -> np.ndarray:
    """Order `[..., rows, group]` as `[..., group / QUAD, rows, QUAD]`, each quad in the order 0, 2, 1, 3."""
    *outer, rows, group = numbers.shape
    by_row = numbers.reshape(*outer, rows, group // QUAD, QUAD // 2, 2).swapaxes(-1, -2)
    return np.moveaxis(by_row, -4, -3).reshape(*outer, group // QUAD, rows, QUAD)


def _from_quads(quads: np.ndarray) -> np.ndarray:
    """Undo `_to_quads`."""
    *outer, count, rows, _ = quads.shape
    by_row = np.moveaxis(quads.reshape(*outer, count, rows, 2, QUAD // 2), -4, -3).swapaxes(-1, -2)
    return by_row.reshape(*outer, rows, count * QUAD)


def _pack_fields(bits: int, quads: np.ndarray) -> np.ndarray:
    """Pack numbers of `bits` bits: each line holds 8 / bits rows of quads, each shifted up by `bits` more bits."""
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
    return _pack_fields(4, _to_quads(numbers) & 15)


def _unpack_nibbles(packed: np.ndarray) -> np.ndarray:
    return _from_quads(_unpack_fields(4, packed))


def _pack_six_bits(numbers: np.ndarray) -> np.ndarray:
    return np.concatenate([_pack_nibbles(numbers), _pack_fields(2, _to_quads(numbers) >> 4)], axis=-1)


def _unpack_six_bits(packed: np.ndarray) -> np.ndarray:
    low, high = np.split(packed, [PANEL_ROWS * GROUP // 2], axis=-1)
    return _unpack_nibbles(low) | _from_quads(_unpack_fields(2, high)) << 4


_SIGN = 128
"""Added to signed numbers, so that all are stored without a sign."""


def _pack_bytes(numbers: np.ndarray) -> np.ndarray:
    return _pack_fields(8, _to_quads(numbers ^ np.uint8(_SIGN)))


def _unpack_bytes(packed: np.ndarray) -> np.ndarray:
    return _from_quads(_unpack_fields(8, packed)) ^ np.uint8(_SIGN)


NIBBLES = Bits(4, _pack_nibbles, _unpack_nibbles)
SIX_BITS = Bits(6, _pack_six_bits, _unpack_six_bits)
BYTES = Bits(8, _pack_bytes, _unpack_bytes)
