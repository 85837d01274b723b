"""Scales of groups by least squares, and scales of scales."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

_STRETCHES = np.linspace(-0.9, 1.2, 8, dtype=np.float32)
"""Ranges that are tried: by how many steps one is longer than the largest value. Beyond these none ever won on trained
weights; each costs a pass."""

_REFITS = 2
"""How often the best of them is rounded to and fitted again."""


@dataclass(frozen=True)
class Grid:
    """What numbers stand for once scales are chosen: `scale * number - minimum`, whole numbers from `least` to `most`.
    `scale`, `minimum`: f32 `[rows, groups]` as they are stored; `store`: numbers f32 `[rows, groups, group]` -> stored.
    """

    scale: np.ndarray
    minimum: np.ndarray
    least: int
    most: int
    store: Callable[[np.ndarray], np.ndarray]

    def quantise(self, groups: np.ndarray) -> np.ndarray:
        """f32 `[rows, groups, group]` -> stored: the nearest of each value."""
        shifted = groups + self.minimum[..., None]
        return self.store(np.clip(np.rint(shifted * inverse(self.scale)[..., None]), self.least, self.most))


def symmetric(groups: np.ndarray, least: int, most: int, importance: np.ndarray | None = None) -> np.ndarray:
    """Scales f32 `[...]` >= 0 of groups f32 `[..., n]`: of those tried, each refitted by least squares to the numbers
    it gives, the one with the least squared error. `importance`: f32, weighs the squares."""
    largest = np.abs(groups).max(axis=-1)
    best, error = np.zeros_like(largest), np.full_like(largest, np.inf)
    for stretch in _STRETCHES:
        numbers = np.clip(np.rint(groups * inverse(largest / (most + stretch))[..., None]), least, most)
        weighted = _weighted(numbers, importance)
        square = np.einsum("...i,...i->...", weighted, numbers)
        scale = np.einsum("...i,...i->...", groups, weighted) * inverse(square)
        # Of the fit: |g|^2 - s^2 |q|^2.
        found = -scale * scale * square
        better = found < error
        best, error = np.where(better, scale, best), np.where(better, found, error)
    return np.maximum(best, 0)


def affine(groups: np.ndarray, most: int, importance: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Scale and minimum f32 `[...]`, both >= 0, of groups f32 `[..., n]`, so that `g ~ scale * q - minimum` with q from
    0 to `most`: of the ranges tried, each refitted by least squares, the one with the least squared error.
    `importance`: f32, weighs the squares."""
    weight = np.asarray(groups.shape[-1] if importance is None else importance.sum(axis=-1), np.float32)
    weighted = _weighted(groups, importance)
    total, squares = weighted.sum(axis=-1), np.einsum("...i,...i->...", weighted, groups)
    low = np.minimum(groups.min(axis=-1), 0)
    span, shifted = groups.max(axis=-1) - low, groups - low[..., None]
    best = np.zeros((2, *low.shape), np.float32)
    error = np.full_like(low, np.inf)
    for turn in range(len(_STRETCHES) + _REFITS):
        if turn < len(_STRETCHES):
            numbers = shifted * inverse(span / (most + _STRETCHES[turn]))[..., None]
        else:
            numbers = (groups + best[1][..., None]) * inverse(best[0])[..., None]
        numbers = np.clip(np.rint(numbers), 0, most)
        weighted = _weighted(numbers, importance)
        q, qq = weighted.sum(axis=-1), np.einsum("...i,...i->...", weighted, numbers)
        gq = np.einsum("...i,...i->...", groups, weighted)
        over = inverse(weight * qq - q * q)
        scale, offset = (weight * gq - q * total) * over, (qq * total - q * gq) * over
        # Numbers that are all the same leave one of the two open: a minimum serves values below 0, a scale those above.
        same = numbers.max(axis=-1) == numbers.min(axis=-1)
        below = same & (total < 0)
        free = (offset <= 0) & ~same
        scale, offset = np.where(free, scale, gq * inverse(qq)), np.where(free, offset, 0)
        scale, offset = np.where(below, 0, scale), np.where(below, total * inverse(weight), offset)
        found = squares + scale * (scale * qq - 2 * gq) + offset * (2 * scale * q + weight * offset - 2 * total)
        better = (found < error) & (scale >= 0)
        best[0], best[1] = np.where(better, scale, best[0]), np.where(better, -offset, best[1])
        error = np.where(better, found, error)
    return best[0], best[1]


def _weighted(values: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    return values if importance is None else values * importance


def level(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Values >= 0 f32 `[rows, groups]` as whole numbers f32 from 0 to 255 times a factor f32 `[rows, 1]`."""
    factor = values.max(axis=-1, keepdims=True) / np.float32(255)
    return factor, np.clip(np.rint(values * inverse(factor)), 0, 255)


def inverse(values: np.ndarray) -> np.ndarray:
    """1 / values, 0 where that is not a number."""
    return np.divide(np.float32(1), values, out=np.zeros_like(values), where=np.abs(values) > np.float32(1e-30))
