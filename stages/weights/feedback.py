"""Rounding with error feedback: what is lost at one input of a row is made good at others.

For inputs X the squared error of a product is tr(E H E^T), with H = X^T X and E the errors of the weights. With
H = M D M^T, M unit upper triangular, input k is best rounded from w_k + sum over j < k of E_j M_jk: LDLQ of QuIP
(Chee et al. 2023, section 3), which shows that GPTQ (Frantar et al. 2022) computes the same. The most important inputs
come first, since nobody makes good for those that come last. Then each number moves to where the error is least with
all the others as they are (coordinate descent), some times over. Scales are chosen before, by least squares that weigh
each input with its diagonal element of H.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from stages.weights.format import Format
from stages.weights.scales import Grid, inverse

DAMPING = 0.01
"""Of the mean of the diagonal, added to it: inputs that hardly ever differ from zero must not be steered by noise."""

MADE_GOOD = 0.5
"""The share of the missing output that is compensated: with all of it, weights fit the calibration text, and lose on
others (docs/benchmarks/notebook.md)."""

RIDGE = 0.1
"""Of the mean of the diagonal, added to it for that."""

_DESCENTS = 2

_ROWS = 512
"""Of weights and of factors, worked on at a time. Fixed, so that results do not depend on the number of threads."""

_COLUMNS = 256
"""Of products of inputs that are worked on at a time."""

_TINY = 1e-12
"""Instead of a mean of zeros."""

Mapped = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]
"""`map`, or that of an executor."""


class Correction:
    """What the products of a matrix's inputs, in whole groups, say. `importance` f32 `[inputs]`: 1 on average. `order`:
    the inputs from the most important one on; `products` f32 `[inputs, inputs]`: in that order, damped. What is made of
    them is as large, so one of it is there at a time, for as long as it is used."""

    def __init__(self, products: np.ndarray, group: int) -> None:
        """`products`: X^T X, f32 `[n, n]`, overwritten: of wide matrices it is what takes the most memory."""
        diagonal, inputs = np.einsum("ii->i", products), len(products)
        self._mean = max(float(diagonal.mean()), _TINY)
        products /= self._mean
        diagonal += np.float32(DAMPING)
        padding = -len(products) % group
        if padding:
            products = np.pad(products, (0, padding))
            np.einsum("ii->i", products)[-padding:] = DAMPING
        self.importance = np.diag(products).copy()
        self.order = np.argsort(-self.importance, kind="stable")
        self._places = np.argsort(self.order)[:inputs]
        _arrange(products, self.order)
        self.products = products

    def carried(self, mapped: Mapped = map) -> np.ndarray:
        """M, f32 `[inputs, inputs]`, in `order`; made anew."""
        carried = _factor(self.products, mapped)
        carried /= np.diag(carried).copy()
        return carried

    def made_good(self, missing: np.ndarray, mapped: Mapped = map) -> np.ndarray:
        """The change of weights, f32 `[rows, inputs]`, that gives products of X a share of what they lack. `missing`:
        X^T of that, f32 `[inputs, rows]`, overwritten. Ridge regression (Hoerl and Kennard 1970); rounding what it
        gives is GPTAQ (Li et al. 2025)."""
        diagonal = np.einsum("ii->i", self.products)
        kept = diagonal.copy()
        diagonal += np.float32(RIDGE)
        factor = _factor(self.products, mapped)
        diagonal[...] = kept
        share = np.float32(MADE_GOOD / self._mean)

        def make_good(first: int) -> None:
            some = missing[:, first : first + _ROWS]
            wanted = np.zeros((len(factor), some.shape[1]), np.float32)
            wanted[self._places] = some * share
            _solve(factor, wanted)
            some[...] = wanted[self._places]

        list(mapped(make_good, range(0, missing.shape[1], _ROWS)))
        return missing.T


def _blocks(inputs: int) -> list[slice]:
    return [slice(first, min(first + _COLUMNS, inputs)) for first in range(0, inputs, _COLUMNS)]


def _arrange(products: np.ndarray, order: np.ndarray) -> None:
    """Rows and columns in that order, in place."""
    for some in _blocks(len(products)):
        products[some] = products[some][:, order]
    for some in _blocks(len(products)):
        products[:, some] = products[order, some]


def _factor(products: np.ndarray, mapped: Mapped) -> np.ndarray:
    """Upper triangular U with U U^T = products, which are damped further where rounding left them not positive."""
    damping = DAMPING
    while True:
        factor = products.copy()
        try:
            _cholesky(factor, mapped)
            return factor
        except np.linalg.LinAlgError:
            np.einsum("ii->i", products)[...] += np.float32(damping)
            damping *= 10


# The library's functions work in float64, in copies of what they are given: they get blocks.


def _cholesky(matrix: np.ndarray, mapped: Mapped) -> None:
    """Upper triangular U with U U^T = matrix, in its place, by blocks of columns from the last one on (Golub and Van
    Loan 2013, section 4.2.6). Raises LinAlgError where it is not positive."""
    for some in reversed(_blocks(len(matrix))):
        behind = matrix[some, some.stop :]
        block = matrix[some, some] - behind @ behind.T
        matrix[some, some] = np.linalg.cholesky(block[::-1, ::-1])[::-1, ::-1]
        list(mapped(partial(_above, matrix, some), range(0, some.start, _ROWS)))
        matrix[some, : some.start] = 0


def _above(matrix: np.ndarray, some: slice, first: int) -> None:
    """Rows of U from the one called `first` on, in columns above a block that is done."""
    rows = slice(first, min(first + _ROWS, some.start))
    matrix[rows, some] -= matrix[rows, some.stop :] @ matrix[some, some.stop :].T
    matrix[rows, some] = np.linalg.solve(matrix[some, some], matrix[rows, some].T).T


def _solve(factor: np.ndarray, values: np.ndarray) -> None:
    """X with U U^T X = values, in their place, by blocks of U, `factor`."""
    blocks = _blocks(len(factor))
    for some in reversed(blocks):
        values[some] -= factor[some, some.stop :] @ values[some.stop :]
        values[some] = np.linalg.solve(factor[some, some], values[some])
    for some in blocks:
        values[some] -= factor[: some.start, some].T @ values[: some.start]
        values[some] = np.linalg.solve(factor[some, some].T, values[some])


def quantise(form: Format, values: np.ndarray, correction: Correction, mapped: Mapped = map) -> np.ndarray:
    """`values` `[rows, inputs]` -> stored elements of `form`, which has a `grid`. `mapped` may run pieces at once."""
    pieces = [values[first : first + _ROWS] for first in range(0, len(values), _ROWS)]
    carried = correction.carried(mapped)
    return np.concatenate(list(mapped(lambda rows: _quantise_rows(form, rows, correction, carried), pieces)))


def _quantise_rows(form: Format, rows: np.ndarray, correction: Correction, carried: np.ndarray) -> np.ndarray:
    assert form.grid is not None
    order, inputs = correction.order, len(correction.order)
    wide = np.zeros((len(rows), inputs), np.float32)
    wide[:, : rows.shape[1]] = rows
    groups = len(rows), -1, form.values
    grid = form.grid(wide.reshape(groups), correction.importance.reshape(groups[1:]))
    rounding = _Rounding(wide.T[order], order // form.values, grid)
    rounding.feed_back(carried)
    for _ in range(_DESCENTS):
        rounding.descend(correction.products)
    wide[:, order] = rounding.numbers.T
    return grid.store(wide.reshape(groups))


@dataclass
class _Rounding:
    """`values` f32 `[inputs, rows]` on their way to `numbers` of a grid, `group` says of which group each input is."""

    values: np.ndarray
    group: np.ndarray
    grid: Grid

    def __post_init__(self) -> None:
        self._scale, self._minimum = (np.ascontiguousarray(each.T) for each in (self.grid.scale, self.grid.minimum))
        self._over = inverse(self._scale)
        self._least, self._most = np.float32(self.grid.least), np.float32(self.grid.most)
        self.numbers, self.errors = np.zeros_like(self.values), np.zeros_like(self.values)

    def feed_back(self, carried: np.ndarray) -> None:
        for some in _blocks(len(self.values)):
            self._settle(some, carried, carried[: some.start, some].T @ self.errors[: some.start])

    def descend(self, products: np.ndarray) -> None:
        for some in _blocks(len(self.values)):
            self._settle(some, products, products[some] @ self.errors)

    def _settle(self, some: slice, coupling: np.ndarray, pulls: np.ndarray) -> None:
        """Inputs one after the other: one half, then the other with the pull of what the first's errors changed by, so
        that nearly all is products of large matrices. `pulls`: f32 `[inputs, rows]`, overwritten, of errors on them."""
        half = (some.stop - some.start) // 2
        if not half:
            wanted = self.values[some.start] - self.errors[some.start]
            wanted += pulls[0] / coupling[some.start, some.start]
            self._round(some.start, wanted)
            return
        first, second = slice(some.start, some.start + half), slice(some.start + half, some.stop)
        before = self.errors[first].copy()
        self._settle(first, coupling, pulls[:half])
        pulls[half:] += coupling[first, second].T @ (self.errors[first] - before)
        self._settle(second, coupling, pulls[half:])

    def _round(self, at: int, wanted: np.ndarray) -> None:
        """An input of all rows; `wanted` f32 `[rows]`, overwritten."""
        group, number, error = self.group[at], self.numbers[at], self.errors[at]
        minimum = self._minimum[group]
        wanted += minimum
        wanted *= self._over[group]
        np.rint(wanted, out=wanted)
        np.minimum(np.maximum(wanted, self._least, out=wanted), self._most, out=number)
        np.multiply(self._scale[group], number, out=error)
        error -= minimum
        np.subtract(self.values[at], error, out=error)
