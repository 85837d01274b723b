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

import numpy as np

from stages.weights.formats import Format
from stages.weights.scales import Grid, inverse

DAMPING = 0.01
"""Of the mean of the diagonal, added to it: inputs that hardly ever differ from zero must not be steered by noise."""

MADE_GOOD = 0.5
"""Of what products lack: with all of it, weights fit the calibration text, and lose on others (BENCHMARKS.md)."""

RIDGE = 0.1
"""Of the mean of the diagonal, added to it for that."""

_DESCENTS = 2

_ROWS = 512
"""That are rounded at a time. Fixed, so that results do not depend on the number of threads."""

_COLUMNS = 256
"""Of products of inputs that are worked on at a time."""

_BLOCK = 32
"""Inputs that are rounded between products of matrices."""

_TINY = 1e-12
"""Instead of a mean of zeros."""

Mapped = Callable[[Callable[[np.ndarray], np.ndarray], Iterable[np.ndarray]], Iterable[np.ndarray]]
"""`map`, or that of an executor."""


class Correction:
    """What the products of a matrix's inputs, in whole groups, say. `importance` f32 `[inputs]`: 1 on average. `order`:
    the inputs from the most important one on; in it, f32 `[inputs, inputs]`: `products`, damped, and `carried`, M."""

    def __init__(self, products: np.ndarray, group: int) -> None:
        """`products`: X^T X, f32 `[n, n]`, overwritten: of wide matrices it is what takes the most memory."""
        diagonal, self._inputs = np.einsum("ii->i", products), len(products)
        self._mean = max(float(diagonal.mean()), _TINY)
        products /= self._mean
        diagonal += np.float32(DAMPING)
        padding = -len(products) % group
        if padding:
            products = np.pad(products, (0, padding))
            np.einsum("ii->i", products)[-padding:] = DAMPING
        self.importance = np.diag(products).copy()
        self.order = np.argsort(-self.importance, kind="stable")
        _arrange(products, self.order)
        self.products = products
        self.carried = _factor(products)
        self.carried /= np.diag(self.carried).copy()

    def made_good(self, missing: np.ndarray) -> np.ndarray:
        """The change of weights, f32 `[rows, inputs]`, that gives products of X a share of what they lack. `missing`:
        X^T of that, f32 `[inputs, rows]`. Ridge regression (Hoerl and Kennard 1970); rounding what it gives is GPTAQ
        (Li et al. 2025)."""
        wanted = np.zeros((len(self.order), missing.shape[1]), np.float32)
        wanted[: len(missing)] = missing
        wanted = wanted[self.order] * np.float32(MADE_GOOD / self._mean)
        diagonal = np.einsum("ii->i", self.products)
        kept = diagonal.copy()
        diagonal += np.float32(RIDGE)
        wanted[self.order] = np.linalg.solve(self.products, wanted)
        diagonal[...] = kept
        return wanted[: self._inputs].T


def _arrange(products: np.ndarray, order: np.ndarray) -> None:
    """Rows and columns in that order, in place."""
    for first in range(0, len(products), _COLUMNS):
        some = slice(first, first + _COLUMNS)
        products[some] = products[some][:, order]
    for first in range(0, len(products), _COLUMNS):
        some = slice(first, first + _COLUMNS)
        products[:, some] = products[order, some]


def _factor(products: np.ndarray) -> np.ndarray:
    """Upper triangular U with U U^T = products, which are damped further where rounding left them not positive."""
    damping = DAMPING
    while True:
        turned = products[::-1, ::-1].copy()
        try:
            _cholesky(turned)
            return turned[::-1, ::-1]
        except np.linalg.LinAlgError:
            np.einsum("ii->i", products)[...] += np.float32(damping)
            damping *= 10


def _cholesky(matrix: np.ndarray) -> None:
    """L with L L^T = matrix, in its place, by blocks of columns (Golub and Van Loan 2013, section 4.2.6): the library's
    would make two more matrices of that size. Raises LinAlgError where it is not positive."""
    for first in range(0, len(matrix), _COLUMNS):
        last = min(first + _COLUMNS, len(matrix))
        columns = matrix[first:, first:last]
        columns -= matrix[first:, :first] @ matrix[first:last, :first].T
        columns[: last - first] = np.linalg.cholesky(columns[: last - first])
        columns[last - first :] = np.linalg.solve(columns[: last - first], columns[last - first :].T).T
        matrix[first:last, last:] = 0


def quantise(form: Format, values: np.ndarray, correction: Correction, mapped: Mapped = map) -> np.ndarray:
    """`values` `[rows, inputs]` -> stored elements of `form`, which has a `grid`. `mapped` may run pieces at once."""
    pieces = [values[first : first + _ROWS] for first in range(0, len(values), _ROWS)]
    return np.concatenate(list(mapped(lambda rows: _quantise_rows(form, rows, correction), pieces)))


def _quantise_rows(form: Format, rows: np.ndarray, correction: Correction) -> np.ndarray:
    assert form.grid is not None
    order, inputs = correction.order, len(correction.order)
    wide = np.pad(rows.astype(np.float32), ((0, 0), (0, inputs - rows.shape[1])))
    groups = wide.reshape(len(wide), -1, form.values)
    grid = form.grid(groups, correction.importance.reshape(-1, form.values))
    rounding = _Rounding(wide.T[order], order // form.values, grid)
    rounding.feed_back(correction.carried)
    for _ in range(_DESCENTS):
        rounding.descend(correction.products)
    numbers = np.empty_like(wide)
    numbers[:, order] = rounding.numbers.T
    return grid.store(numbers.reshape(groups.shape))


@dataclass
class _Rounding:
    """`values` f32 `[inputs, rows]` on their way to `numbers` of a grid, `group` says of which group each input is."""

    values: np.ndarray
    group: np.ndarray
    grid: Grid

    def __post_init__(self) -> None:
        self._scale, self._minimum = (np.ascontiguousarray(each.T) for each in (self.grid.scale, self.grid.minimum))
        self._over = inverse(self._scale)
        self.numbers, self.errors = np.zeros_like(self.values), np.zeros_like(self.values)

    def _round(self, at: int, wanted: np.ndarray) -> None:
        """An input of all rows."""
        group, grid = self.group[at], self.grid
        scale, minimum = self._scale[group], self._minimum[group]
        self.numbers[at] = np.clip(np.rint((wanted + minimum) * self._over[group]), grid.least, grid.most)
        self.errors[at] = self.values[at] - (scale * self.numbers[at] - minimum)

    def feed_back(self, carried: np.ndarray) -> None:
        for first in range(0, len(self.values), _BLOCK):
            last = min(first + _BLOCK, len(self.values))
            wanted = self.values[first:last] + carried[:first, first:last].T @ self.errors[:first]
            for at in range(first, last):
                self._round(at, wanted[at - first])
                wanted[at - first + 1 :] += carried[at, at + 1 : last, None] * self.errors[at]

    def descend(self, products: np.ndarray) -> None:
        for first in range(0, len(self.values), _BLOCK):
            last = min(first + _BLOCK, len(self.values))
            slopes = products[first:last] @ self.errors
            for at in range(first, last):
                before = self.errors[at].copy()
                self._round(at, self.values[at] - before + slopes[at - first] / products[at, at])
                slopes += products[first:last, at, None] * (self.errors[at] - before)
