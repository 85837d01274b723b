"""Rounding with error feedback: the error at one input of a row is compensated at others.

For inputs X the squared error of a product is tr(E H E^T), with H = X^T X and E the errors of the weights. With
H = M D M^T, M unit upper triangular, input k is best rounded from w_k + sum over j < k of E_j M_jk: LDLQ of QuIP
(Chee et al. 2023, section 3), which shows that GPTQ (Frantar et al. 2022) computes the same. The most important inputs
come first, because the errors of the last ones are not compensated. Then each number moves to where the error is least
while all others stay (coordinate descent), a few times. Scales are chosen before, by least squares that weigh each
input with its diagonal element of H.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from stages.engine.lazy import np
from stages.weights.format import Format
from stages.weights.scales import Grid, inverse

DAMPING = 0.01
"""Share of the mean of the diagonal that is added to it, so that noise does not decide on inputs that are nearly
always zero."""

COMPENSATED = 0.5
"""Share of the output error that is compensated. With all of it, weights fit the calibration text and lose on others
(docs/benchmarks/notebook.md)."""

RIDGE = 0.1
"""Share of the mean of the diagonal that is added to it when an output error is compensated."""

_DESCENTS = 2
"""Passes of coordinate descent."""

_ROWS = 512
"""Rows of weights and of factors that are worked on at a time; fixed, so that results do not depend on the number of
threads."""

_COLUMNS = 256
"""Columns of products of inputs that are worked on at a time."""

_TINY = 1e-12
"""Stands for a mean that is zero."""

Mapped = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]
"""`map`, or the `map` of an executor."""


class Correction:
    """The sums of products of a matrix's inputs, X^T X, from which errors are corrected. Inputs are in whole groups.

    Matrices made of `products` are as large as it is. So there is one of them at a time, for as long as it is used.
    """

    importance: np.ndarray
    """f32 `[inputs]`: the diagonal of the products, 1 on average."""
    order: np.ndarray
    """The inputs, the most important one first."""
    products: np.ndarray
    """f32 `[inputs, inputs]`: the products in `order`, scaled and damped."""

    def __init__(self, products: np.ndarray, group: int) -> None:
        """Take X^T X, f32 `[n, n]`, which is overwritten: for wide matrices it takes the most memory."""
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

    def feedback(self, mapped: Mapped = map) -> np.ndarray:
        """Compute M, f32 `[inputs, inputs]`, in `order`: how much of each error goes to each later input."""
        factor = _factor(self.products, mapped)
        factor /= np.diag(factor).copy()
        return factor

    def compensate(self, output_error: np.ndarray, mapped: Mapped = map) -> np.ndarray:
        """Return the change of weights, f32 `[rows, inputs]`, that compensates `COMPENSATED` of the output error E.

        It is c (X^T X + ridge)^-1 X^T E: ridge regression (Hoerl and Kennard 1970). Rounding the changed weights
        is GPTAQ (Li et al. 2025).

        Args:
            output_error: X^T E, f32 `[inputs, rows]`, overwritten.
        """
        diagonal = np.einsum("ii->i", self.products)
        damped = diagonal.copy()
        diagonal += np.float32(RIDGE)
        factor = _factor(self.products, mapped)
        diagonal[...] = damped
        share = np.float32(COMPENSATED / self._mean)

        def compensate_rows(first: int) -> None:
            errors = output_error[:, first : first + _ROWS]
            solution = np.zeros((len(factor), errors.shape[1]), np.float32)
            solution[self._places] = errors * share
            _solve(factor, solution)
            errors[...] = solution[self._places]

        list(mapped(compensate_rows, range(0, output_error.shape[1], _ROWS)))
        return output_error.T


def _blocks(inputs: int) -> list[slice]:
    return [slice(first, min(first + _COLUMNS, inputs)) for first in range(0, inputs, _COLUMNS)]


def _arrange(products: np.ndarray, order: np.ndarray) -> None:
    """Bring rows and columns into an order, in place."""
    for block in _blocks(len(products)):
        products[block] = products[block][:, order]
    for block in _blocks(len(products)):
        products[:, block] = products[order, block]


def _factor(products: np.ndarray, mapped: Mapped) -> np.ndarray:
    """Return the upper triangular U with U U^T = products.

    These are damped further if they are not positive definite after rounding.
    """
    damping = DAMPING
    while True:
        factor = products.copy()
        try:
            _cholesky(factor, mapped)
            return factor
        except np.linalg.LinAlgError:
            np.einsum("ii->i", products)[...] += np.float32(damping)
            damping *= 10


# The library's functions work in float64 on copies of their arguments, so they get blocks.


def _cholesky(matrix: np.ndarray, mapped: Mapped) -> None:
    """Compute the upper triangular U with U U^T = matrix in the matrix's place.

    It goes by blocks of columns from the last one on (Golub and Van Loan 2013, section 4.2.6). Raises LinAlgError if
    the matrix is not positive definite.
    """
    for block in reversed(_blocks(len(matrix))):
        right = matrix[block, block.stop :]
        rest = matrix[block, block] - right @ right.T
        matrix[block, block] = np.linalg.cholesky(rest[::-1, ::-1])[::-1, ::-1]
        list(mapped(partial(_rows_above, matrix, block), range(0, block.start, _ROWS)))
        matrix[block, : block.start] = 0


def _rows_above(matrix: np.ndarray, block: slice, first: int) -> None:
    """Compute `_ROWS` rows of U from row `first` on, in the columns of a block on the diagonal that is done."""
    rows = slice(first, min(first + _ROWS, block.start))
    matrix[rows, block] -= matrix[rows, block.stop :] @ matrix[block, block.stop :].T
    matrix[rows, block] = np.linalg.solve(matrix[block, block], matrix[rows, block].T).T


def _solve(factor: np.ndarray, values: np.ndarray) -> None:
    """Compute X with U U^T X = values in the values' place, by blocks of U, `factor`."""
    blocks = _blocks(len(factor))
    for block in reversed(blocks):
        values[block] -= factor[block, block.stop :] @ values[block.stop :]
        values[block] = np.linalg.solve(factor[block, block], values[block])
    for block in blocks:
        values[block] -= factor[: block.start, block].T @ values[: block.start]
        values[block] = np.linalg.solve(factor[block, block].T, values[block])


def quantise(form: Format, values: np.ndarray, correction: Correction, mapped: Mapped = map) -> np.ndarray:
    """Round values `[rows, inputs]` to stored elements of `form`, which has a `grid`. `mapped` may run rows at once."""
    pieces = [values[first : first + _ROWS] for first in range(0, len(values), _ROWS)]
    coupling = correction.feedback(mapped)
    return np.concatenate(list(mapped(lambda rows: _quantise_rows(form, rows, correction, coupling), pieces)))


def _quantise_rows(form: Format, rows: np.ndarray, correction: Correction, coupling: np.ndarray) -> np.ndarray:
    assert form.grid is not None
    order, inputs = correction.order, len(correction.order)
    values = np.zeros((len(rows), inputs), np.float32)
    values[:, : rows.shape[1]] = rows
    groups = len(rows), -1, form.values
    grid = form.grid(values.reshape(groups), correction.importance.reshape(groups[1:]))
    rounding = _Rounding(values.T[order], order // form.values, grid)
    rounding.feed_back(coupling)
    for _ in range(_DESCENTS):
        rounding.descend(correction.products)
    values[:, order] = rounding.numbers.T
    return grid.store(values.reshape(groups))


@dataclass
class _Rounding:
    """Rounds values to the numbers of a grid, input by input."""

    values: np.ndarray
    """f32 `[inputs, rows]`."""
    group: np.ndarray
    """The group of each input."""
    grid: Grid

    def __post_init__(self) -> None:
        self._scale, self._minimum = np.ascontiguousarray(self.grid.scale.T), np.ascontiguousarray(self.grid.minimum.T)
        self._inverse = inverse(self._scale)
        self._least, self._most = np.float32(self.grid.least), np.float32(self.grid.most)
        self.numbers, self.errors = np.zeros_like(self.values), np.zeros_like(self.values)

    def feed_back(self, coupling: np.ndarray) -> None:
        """Round all inputs in order, each with the feedback of the errors before it. `coupling`: M."""
        for block in _blocks(len(self.values)):
            self._round_block(block, coupling, coupling[: block.start, block].T @ self.errors[: block.start])

    def descend(self, products: np.ndarray) -> None:
        """Round all inputs again, each to where the error is least while the others stay."""
        for block in _blocks(len(self.values)):
            self._round_block(block, products, products[block] @ self.errors)

    def _round_block(self, block: slice, coupling: np.ndarray, pulls: np.ndarray) -> None:
        """Round inputs one after the other: one half, then the other.

        The changes of the first half's errors pull on the other. So nearly all of the work is products of large
        matrices.

        Args:
            coupling: How strongly the error of each input pulls on each other one.
            pulls: f32 `[inputs, rows]`, overwritten: the pulls of all errors so far on these inputs.
        """
        half = (block.stop - block.start) // 2
        if not half:
            target = self.values[block.start] - self.errors[block.start]
            target += pulls[0] / coupling[block.start, block.start]
            self._round_input(block.start, target)
            return
        first, second = slice(block.start, block.start + half), slice(block.start + half, block.stop)
        before = self.errors[first].copy()
        self._round_block(first, coupling, pulls[:half])
        pulls[half:] += coupling[first, second].T @ (self.errors[first] - before)
        self._round_block(second, coupling, pulls[half:])

    def _round_input(self, position: int, target: np.ndarray) -> None:
        """Round an input of all rows to the numbers nearest to `target`, f32 `[rows]`, which is overwritten."""
        group, number, error = self.group[position], self.numbers[position], self.errors[position]
        minimum = self._minimum[group]
        target += minimum
        target *= self._inverse[group]
        np.rint(target, out=target)
        np.minimum(np.maximum(target, self._least, out=target), self._most, out=number)
        np.multiply(self._scale[group], number, out=error)
        error -= minimum
        np.subtract(self.values[position], error, out=error)
