"""mxfp4: 4.25 bits per weight, `w = t[q] 2^(s - 127)` (Open Compute Project, Microscaling Formats 1.0).

32 weights with numbers q, four bits each, share a scale s of 8 bits, E8M0. A number is a sign and one of the eight
magnitudes of E2M1. Scale 255 stands for NaN.
"""

from __future__ import annotations

from stages.engine.lazy import np
from stages.weights.grouped import NIBBLES, Grouped

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The values of the numbers 0 to 7; those of 8 to 15 are the same with the other sign."""

_SIGN = 8
_BIAS = 127
_MOST = 254
"""The largest scale of a number."""
_LARGEST = 2
"""The exponent of the largest magnitude."""

GROUPED = Grouped(factors=0, scale_values=1, scale_type="uint8", numbers=NIBBLES)


def scale_values(scales: np.ndarray) -> np.ndarray:
    """Return what scales u8 stand for, f32. That of 0 is below f32's normal range, and exact."""
    values = np.ldexp(np.float32(1), np.minimum(scales, _MOST).astype(np.int32) - _BIAS, dtype=np.float32)
    return np.where(scales > _MOST, np.float32(np.nan), values)


def stored(scales: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Return stored rows of scales u8 `[..., groups]` and numbers u8 `[..., groups, 32]` from 0 to 15."""
    return GROUPED.scaled(scales[..., None], numbers)


def quantise(groups: np.ndarray) -> np.ndarray:
    """Round f32 `[rows, groups, 32]` to nearest. Return stored rows.

    The largest magnitude is 4 to 6 units, or 6 to 8, which are cut off: of the two scales, that with less error is
    taken.
    """
    largest = np.abs(groups).max(axis=-1)
    least = np.clip(np.frexp(largest)[1] - 1 - _LARGEST + _BIAS, 0, _MOST)
    rounded = [(scales, *_rounded(groups, scales)) for scales in (least, np.minimum(least + 1, _MOST))]
    (scales, numbers, error), (larger, other, other_error) = rounded
    better = 4 * other_error < error
    return stored(np.where(better, larger, scales).astype(np.uint8), np.where(better[..., None], other, numbers))


def _rounded(groups: np.ndarray, scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the nearest numbers, halves the even ones, and the sum of squares of each group's errors, in its unit."""
    scaled = np.abs(groups) / scale_values(scales)[..., None]
    # Magnitudes are 0.5 apart up to 2, 1 up to 4, and 2 from there on, where numbers are 0, 4 and 6.
    exponents = (scaled >= 2).astype(np.int32) + (scaled >= 4)
    step = np.ldexp(np.float32(0.5), exponents)
    steps = np.rint(scaled / step)
    numbers = np.minimum(steps + 2 * exponents, 7)
    error = np.square(np.minimum(steps * step, np.float32(MAGNITUDES[-1])) - scaled).sum(axis=-1)
    return numbers.astype(np.uint8) + np.uint8(_SIGN) * np.signbit(groups), error


def dequantise(rows: np.ndarray) -> np.ndarray:
    """Return the values of stored rows, f32 `[..., groups, 32]`."""
    _, scales, numbers = GROUPED.parts(rows)
    table = np.array([*MAGNITUDES, *(-m for m in MAGNITUDES)], np.float32)
    return table[numbers] * scale_values(scales)


FORMAT = GROUPED.format("mxfp4", quantise, dequantise)
