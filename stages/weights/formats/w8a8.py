"""w8a8: 8 bits per weight, `w = s q`. A row has one scale s, f32.

Products quantise their other operand in the same way, with a scale per row, and sum whole numbers. So sums are exact,
whatever the order and the machine.
"""

from __future__ import annotations

from stages.engine.lazy import np
from stages.weights.constants import PANEL_ROWS, QUAD
from stages.weights.format import Format, Layout, Shape

MOST = 127

_SCALE = 4


def quantise_rows(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantise rows f32 or bf16 `[..., n]`. Return numbers i8 `[..., n]` and scales f32 `[..., 1]`.

    The largest magnitude becomes `MOST`; halves are rounded to even. Weights and activations are quantised alike, and
    the kernels compute the same bits. A row that is not finite has a scale that is not.
    """
    wide = values.astype(np.float32)
    largest = np.abs(wide).max(axis=-1, keepdims=True)
    with np.errstate(invalid="ignore", over="ignore"):
        inverse = np.divide(np.float32(MOST), largest, out=np.zeros_like(largest), where=largest != 0)
        return np.rint(wide * inverse).astype(np.int8), largest / np.float32(MOST)


def stored(numbers: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return rows as stored, i8 `[..., 4 + n in whole QUADs]`: each row's scale, then its numbers.

    `numbers`: i8 `[..., n]`; `scales`: f32 `[..., 1]`.
    """
    padding = np.zeros((*numbers.shape[:-1], -numbers.shape[-1] % QUAD), np.int8)
    return np.concatenate([np.ascontiguousarray(scales, np.float32).view(np.int8), numbers, padding], axis=-1)


def parts(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of stored rows, with their padding, and the scales."""
    return rows[..., _SCALE:], np.ascontiguousarray(rows[..., :_SCALE]).view(np.float32)


def dequantise(rows: np.ndarray, n: int) -> np.ndarray:
    """Return the values of stored rows, f32 `[..., n]`."""
    numbers, scales = parts(rows)
    return scales * numbers[..., :n]


def panels_shape(shape: Shape) -> Shape:
    """Return the shape of the panels of stored rows: `[panels, bytes]`."""
    rows, stored_bytes = shape
    return (-(-rows // PANEL_ROWS), PANEL_ROWS * (2 * _SCALE + stored_bytes - _SCALE))


def to_panels(rows: np.ndarray) -> np.ndarray:
    """Pack stored rows into i8 `[ceil(rows / PANEL_ROWS), bytes of a panel]`, padded with rows of zeros.

    A panel has its rows' scales, f32; -128 times the sums of their numbers, i32, which kernels begin their sums with;
    and the numbers, `[quads][PANEL_ROWS][QUAD]`.
    """
    panels = panels_shape(rows.shape)[0]
    padded = np.zeros((panels * PANEL_ROWS, rows.shape[1]), np.int8)
    padded[: len(rows)] = rows
    numbers, scales = parts(padded)
    begin = numbers.sum(axis=-1, dtype=np.int32, keepdims=True) * np.int32(-128)
    quads = numbers.reshape(panels, PANEL_ROWS, -1, QUAD).swapaxes(1, 2)
    return np.concatenate(
        [np.ascontiguousarray(a).view(np.int8).reshape(panels, -1) for a in (scales, begin, quads)], 1
    )


def from_panels(packed: np.ndarray, shape: Shape) -> np.ndarray:
    """Return the stored rows of panels."""
    rows, stored_bytes = shape
    by_panel = packed.reshape(panels_shape(shape))
    line = PANEL_ROWS * _SCALE
    scales = by_panel[:, :line].reshape(-1, _SCALE)
    numbers = by_panel[:, 2 * line :].reshape(len(by_panel), -1, PANEL_ROWS, QUAD).swapaxes(1, 2)
    return np.concatenate([scales, numbers.reshape(-1, stored_bytes - _SCALE)], axis=1)[:rows]


FORMAT = Format(
    "w8a8",
    "i8",
    lambda values: stored(*quantise_rows(values)),
    dequantise,
    values=QUAD,
    elements=QUAD,
    row_elements=_SCALE,
    layouts={"panels": Layout.of_panels(PANEL_ROWS, panels_shape, to_panels, from_panels)},
)
