"""Chooses the scales of groups by least squares, and rounds scales themselves."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from llama_npu2.frozen import frozen
from stages.engine.lazy import np

_STRETCHES = 8


@cache
def _stretches() -> np.ndarray:
    """Return ranges that are tried, each given by how many steps it is longer than the largest value.

    Beyond these none ever won on trained weights; each costs a pass.
    """
    return np.linspace(-0.9, 1.2, _STRETCHES, dtype=np.float32)


_REFITS = 2
"""How often values are rounded to the best fit and fitted again."""


@frozen
class Grid:
    """The values that numbers stand for once scales are chosen: `scale * number - minimum`."""

    scale: np.ndarray
    """f32 `[rows, groups]`, as it is stored."""
    minimum: np.ndarray
    """f32 `[rows, groups]`, as it is stored."""
    least: int
    """The smallest number."""
    most: int
    """The largest number."""
    store: Callable[[np.ndarray], np.ndarray]
    """Turns numbers f32 `[rows, groups, group]` into stored elements."""

    def quantise(self, groups: np.ndarray) -> np.ndarray:
        """Round f32 `[rows, groups, group]` to the nearest values. Return stored elements."""
        shifted = groups + self.minimum[..., None]
        return self.store(np.clip(np.rint(shifted * inverse(self.scale)[..., None]), self.least, self.most))


def symmetric(groups: np.ndarray, least: int, most: int, importance: np.ndarray | None = None) -> np.ndarray:
    """Return scales f32 `[...]` >= 0 of groups f32 `[..., n]`, so that `g ~ scale * q`, with whole numbers q.

    Each range that is tried gives numbers q; the scale is refitted to these by weighted least squares,
    `s = sum(w g q) / sum(w q q)`, and the one with the least squared error is kept.

    Args:
        least: The smallest q.
        most: The largest q.
        importance: f32, the weights w of the squares; None: 1.
    """
    largest = np.abs(groups).max(axis=-1)
    best, least_error = np.zeros_like(largest), np.full_like(largest, np.inf)
    for stretch in _stretches():
        numbers = np.clip(np.rint(groups * inverse(largest / (most + stretch))[..., None]), least, most)
        weighted = _weighted(numbers, importance)
        squares = np.einsum("...i,...i->...", weighted, numbers)
        scale = np.einsum("...i,...i->...", groups, weighted) * inverse(squares)
        # The error is sum(w g g) - s^2 sum(w q q), of which the first sum is the same for all.
        error = -scale * scale * squares
        better = error < least_error
        best, least_error = np.where(better, scale, best), np.where(better, error, least_error)
    return np.maximum(best, 0)


def asymmetric(groups: np.ndarray, most: int, importance: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return scale and minimum f32 `[...]`, both >= 0, of groups f32 `[..., n]`.

    With whole numbers q from 0 to `most`, `g ~ scale * q - minimum`.

    Each range that is tried, and then the best fit so far, gives numbers q, to which scale and minimum are refitted
    (`_LeastSquares`). The fit with the least squared error is kept.

    Args:
        importance: f32, the weights of the squares; None: 1.
    """
    least_squares = _LeastSquares(groups, importance)
    low = np.minimum(groups.min(axis=-1), 0)
    span, shifted = groups.max(axis=-1) - low, groups - low[..., None]
    best_scale, best_minimum = np.zeros_like(low), np.zeros_like(low)
    least_error = np.full_like(low, np.inf)
    for attempt in range(_STRETCHES + _REFITS):
        if attempt < _STRETCHES:
            numbers = shifted * inverse(span / (most + _stretches()[attempt]))[..., None]
        else:
            numbers = (groups + best_minimum[..., None]) * inverse(best_scale)[..., None]
        np.clip(np.rint(numbers, out=numbers), 0, most, out=numbers)
        scale, offset, error = least_squares.fit(numbers)
        better = (error < least_error) & (scale >= 0)
        best_scale, best_minimum = np.where(better, scale, best_scale), np.where(better, -offset, best_minimum)
        least_error = np.where(better, error, least_error)
    return best_scale, best_minimum


class _LeastSquares:
    """Fits `g ~ s q + o` to values g and numbers q of each group: minimises `E = sum(w (g - s q - o)^2)`.

    With sums over a group written as W = sum(w), G = sum(w g), Q = sum(w q), GG = sum(w g g), GQ = sum(w g q) and
    QQ = sum(w q q), where both derivatives of E are 0

        s = (W GQ - Q G) / (W QQ - Q^2)    o = (QQ G - Q GQ) / (W QQ - Q^2)
        E = GG + s (s QQ - 2 GQ) + o (2 s Q + W o - 2 G)
    """

    def __init__(self, groups: np.ndarray, importance: np.ndarray | None) -> None:
        """Take values f32 `[..., n]`, and their weights w, 1 if None."""
        self._groups, self._importance = groups, importance
        self._w = np.asarray(groups.shape[-1] if importance is None else importance.sum(axis=-1), np.float32)
        weighted = _weighted(groups, importance)
        self._g, self._gg = weighted.sum(axis=-1), np.einsum("...i,...i->...", weighted, groups)

    def fit(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return s, o <= 0 and E, f32 `[...]`, for the numbers q f32 `[..., n]`."""
        weighted = _weighted(numbers, self._importance)
        w, g, q = self._w, self._g, weighted.sum(axis=-1)
        qq = np.einsum("...i,...i->...", weighted, numbers)
        gq = np.einsum("...i,...i->...", self._groups, weighted)
        determinant = inverse(w * qq - q * q)
        scale, offset = (w * gq - q * g) * determinant, (qq * g - q * gq) * determinant
        # If all q are equal, either s or o is enough: o fits values below 0, s those above.
        equal = (numbers == numbers[..., :1]).all(axis=-1)
        below = equal & (g < 0)
        both = (offset <= 0) & ~equal
        scale, offset = np.where(both, scale, gq * inverse(qq)), np.where(both, offset, 0)
        scale, offset = np.where(below, 0, scale), np.where(below, g * inverse(w), offset)
        error = self._gg + scale * (scale * qq - 2 * gq) + offset * (2 * scale * q + w * offset - 2 * g)
        return scale, offset, error


def _weighted(values: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    return values if importance is None else values * importance


def quantise_scales(scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Round scales >= 0, f32 `[rows, groups]`. Return a factor f32 `[rows, 1]` and whole numbers f32 from 0 to 255."""
    factor = scales.max(axis=-1, keepdims=True) / np.float32(255)
    return factor, np.clip(np.rint(scales * inverse(factor)), 0, 255)


def inverse(values: np.ndarray) -> np.ndarray:
    """Return 1 / values, f32, and 0 for values next to 0."""
    return np.divide(np.float32(1), values, out=np.zeros_like(values), where=np.abs(values) > np.float32(1e-30))
