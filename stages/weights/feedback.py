"""Rounding with error feedback: what is lost at one input of a row is made good at those that come after it.

For inputs X the squared error of a product is tr(E H E^T), with H = X^T X and E the errors of the weights. With
H = M D M^T, M unit upper triangular, input k is best rounded from w_k + sum over j < k of E_j M_jk: LDLQ of QuIP
(Chee et al. 2023, section 3), which shows that GPTQ (Frantar et al. 2022) computes the same. Scales are chosen before,
by least squares that weigh each input with its diagonal element of H.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from stages.weights.formats import Format
from stages.weights.scales import Grid, inverse

DAMPING = 0.01
"""Of the mean of the diagonal, added to it: inputs that hardly ever differ from zero must not be steered by noise."""

_ROWS = 512
"""That are rounded at a time. Fixed, so that results do not depend on the number of threads."""

_TINY = 1e-12
"""Instead of a mean of zeros."""

Mapped = Callable[[Callable[[np.ndarray], np.ndarray], Iterable[np.ndarray]], Iterable[np.ndarray]]
"""`map`, or that of an executor."""


class Correction:
    """What the products of a matrix's inputs say: `importance` f32 `[inputs]`, 1 on average, and `carried` f32
    `[inputs, inputs]`, M, both for inputs in whole groups."""

    def __init__(self, products: np.ndarray, group: int) -> None:
        """`products`: X^T X, f32 `[n, n]`, overwritten: of wide matrices it is what takes the most memory."""
        diagonal = np.einsum("ii->i", products)
        products /= max(float(diagonal.mean()), _TINY)
        diagonal += np.float32(DAMPING)
        padding = -len(products) % group
        if padding:
            products = np.pad(products, (0, padding))
            np.einsum("ii->i", products)[-padding:] = DAMPING
        self.importance = np.diag(products).copy()
        self.carried = _factor(products)
        self.carried /= np.diag(self.carried).copy()


def _factor(products: np.ndarray) -> np.ndarray:
    """Upper triangular U with U U^T = products, which are damped further where rounding left them not positive."""
    flipped, damping = products[::-1, ::-1], DAMPING
    while True:
        try:
            return np.linalg.cholesky(flipped)[::-1, ::-1]
        except np.linalg.LinAlgError:
            np.einsum("ii->i", products)[...] += np.float32(damping)
            damping *= 10


def quantise(form: Format, values: np.ndarray, correction: Correction, mapped: Mapped = map) -> np.ndarray:
    """`values` `[rows, inputs]` -> stored elements of `form`, which has a `grid`. `mapped` may run pieces at once."""
    pieces = [values[first : first + _ROWS] for first in range(0, len(values), _ROWS)]
    return np.concatenate(list(mapped(lambda rows: _quantise_rows(form, rows, correction), pieces)))


def _quantise_rows(form: Format, rows: np.ndarray, correction: Correction) -> np.ndarray:
    assert form.grid is not None
    inputs = len(correction.importance)
    wide = np.pad(rows.astype(np.float32), ((0, 0), (0, inputs - rows.shape[1])))
    groups = wide.reshape(len(wide), -1, form.values)
    grid = form.grid(groups, correction.importance.reshape(-1, form.values))
    numbers = _fed_back(np.ascontiguousarray(wide.T), grid, correction.carried, form.values)
    return grid.store(np.ascontiguousarray(numbers.T).reshape(groups.shape))


def _fed_back(values: np.ndarray, grid: Grid, carried: np.ndarray, group: int) -> np.ndarray:
    """Numbers f32 of `values` f32, both `[inputs, rows]`."""
    numbers, errors = np.empty_like(values), np.zeros_like(values)
    for index, first in enumerate(range(0, len(values), group)):
        scale, minimum = grid.scale[:, index], grid.minimum[:, index]
        over, last = inverse(scale), first + group
        wanted = values[first:last] + carried[:first, first:last].T @ errors[:first]
        for at in range(first, last):
            numbers[at] = np.clip(np.rint((wanted[at - first] + minimum) * over), grid.least, grid.most)
            errors[at] = values[at] - (scale * numbers[at] - minimum)
            wanted[at - first + 1 :] += carried[at, at + 1 : last, None] * errors[at]
    return numbers
