"""How far a right result may be from the numpy reference's, per element: by the formats, not by what was seen.

Both sides round to bf16 at the same places, so where f32 arithmetic inside differs by less than half a unit, a result
differs by at most one unit in the last place. What is added to that is the f32 arithmetic's own error.
"""

from __future__ import annotations

import numpy as np

from stages.kernels import silu_and_mul

ULP = 2.0**-7
"""bf16's unit in the last place, of a value."""
F32 = 2.0**-23
BFP16 = 2.0**-7
"""What a value in block floating point is off by at most, of the largest of its eight."""


def magnitude(x: np.ndarray) -> np.ndarray:
    return np.abs(x.astype(np.float64))


def one_ulp(want: np.ndarray) -> np.ndarray:
    return ULP * magnitude(want)


def silu(want: np.ndarray) -> np.ndarray:
    """Rounded are the exponential, silu, its product, and the reference: half a unit each."""
    return 2 * one_ulp(want) + silu_and_mul.LEAST


def norm(want: np.ndarray) -> np.ndarray:
    """Two roundings in a row: a unit of the first becomes at most two of the second."""
    return 2 * one_ulp(want)


def rotation(x: np.ndarray, heads: int, want: np.ndarray) -> np.ndarray:
    """Cosine and sine in two bf16: 2^-17 of each product; a pair's products are at most |x1| + |x2|."""
    halves = magnitude(x).reshape(len(x), heads, 2, -1).sum(axis=2, keepdims=True).repeat(2, axis=2)
    return one_ulp(want) + 2.0**-16 * halves.reshape(want.shape)


def product(x: np.ndarray, weight: np.ndarray, want: np.ndarray, rounded: bool = True) -> np.ndarray:
    """f32 sums of n products in any order differ by at most n * 2^-23 of the sum of magnitudes."""
    sums = x.shape[-1] * F32 * (magnitude(x) @ magnitude(weight).T)
    return sums + (one_ulp(want) if rounded else 0)


def block_float(x: np.ndarray, weight: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Eight values share the exponent of the largest, on both sides."""
    a, b = (magnitude(m).reshape(len(m), -1, 8).max(axis=2).repeat(8, axis=1) for m in (x, weight))
    error = a @ magnitude(weight).T + magnitude(x) @ b.T + BFP16 * (a @ b.T)
    return BFP16 * error + product(x, weight, want)


def attention(q: np.ndarray, k: np.ndarray, dim: int, spread: np.ndarray, want: np.ndarray) -> np.ndarray:
    """`spread`: attention over |v|. Weights carry an error of half a unit, and what their polynomial is off by, in
    numerator and sum alike; scores carry 2^-16 of themselves into the exponent."""
    longest = [np.linalg.norm(t.astype(np.float64).reshape(-1, dim), axis=1).max() for t in (q, k)]
    weight_error = 2.0**-8 + 2.0**-12 + float(longest[0] * longest[1] / np.sqrt(dim)) * 2.0**-16
    return one_ulp(want) + 2 * weight_error * magnitude(spread)


def relative(launches: int, bfp16: bool = False) -> float:
    """Of a program's result, in the norm. Where two roundings fall apart, a number is off by at most a unit in the last
    place: 2^-8 in the root mean square. Those of different launches are independent, so errors add in squares. Products
    in block floating point are off by up to four times as much."""
    return float(np.sqrt(launches)) * (2.0**-6 if bfp16 else 2.0**-8)
