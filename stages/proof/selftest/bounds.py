"""Bounds how far each element of a right result may be from the numpy reference's.

Bounds come from number formats, not from observation.

Both sides round to bf16 at the same places. Where f32 arithmetic differs by less than half a unit, a result differs by
at most one unit in the last place. The error of the f32 arithmetic itself is added to that.
"""

from __future__ import annotations

import numpy as np

from stages.kernels import silu_and_mul
from stages.weights.constants import GROUP

ULP = 2.0**-7
"""The unit in the last place of bf16, relative to a value."""
F32 = 2.0**-23
BFP16 = 2.0**-7
"""The error of a value in block floating point, relative to the largest of its eight."""


def magnitude(x: np.ndarray) -> np.ndarray:
    """Return |x| in f64."""
    return np.abs(x.astype(np.float64))


def one_ulp(want: np.ndarray) -> np.ndarray:
    """Return one unit in the last place."""
    return ULP * magnitude(want)


def silu(want: np.ndarray) -> np.ndarray:
    """Bound SwiGLU's activation: the exponential, silu, the product and the reference are rounded, half a unit each."""
    return 2 * one_ulp(want) + silu_and_mul.LEAST


def norm(want: np.ndarray) -> np.ndarray:
    """Bound a norm, which is rounded twice: a unit of the first rounding becomes at most two of the second."""
    return 2 * one_ulp(want)


def rotation(x: np.ndarray, heads: int, want: np.ndarray) -> np.ndarray:
    """Bound a rotation. Cosine and sine are two bf16 each: 2^-17 of each product; a pair's are at most |x1| + |x2|."""
    halves = magnitude(x).reshape(len(x), heads, 2, -1).sum(axis=2, keepdims=True).repeat(2, axis=2)
    return one_ulp(want) + 2.0**-16 * halves.reshape(want.shape)


def product(x: np.ndarray, weight: np.ndarray, want: np.ndarray, rounded: bool = True) -> np.ndarray:
    """Bound a product: f32 sums of n terms in any order differ by at most n * 2^-23 of the sum of magnitudes."""
    sums = x.shape[-1] * F32 * (magnitude(x) @ magnitude(weight).T)
    return sums + (one_ulp(want) if rounded else 0)


def block_float(x: np.ndarray, weight: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Bound a product in block floating point, where eight values share an exponent, on both sides."""
    a, b = (magnitude(m).reshape(len(m), -1, 8).max(axis=2).repeat(8, axis=1) for m in (x, weight))
    error = a @ magnitude(weight).T + magnitude(x) @ b.T + BFP16 * (a @ b.T)
    return BFP16 * error + product(x, weight, want)


def grouped(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Bound a product of the array with weights in groups, in f32 `[outs]`.

    Inputs lie in fixed point, whose unit is at most 2^-14 of the largest of a group of 32, a group's sum is taken in
    two parts of 8 bits, and a minimum is subtracted from numbers up to 15 times a scale.

    Args:
        x: `[cols]`.
        weight: The dequantised weight, `[outs, cols]`.
    """
    largest = 16 * magnitude(weight).max(axis=1)
    groups = np.pad(magnitude(x), (0, -len(x) % GROUP)).reshape(-1, GROUP)
    bounded: np.ndarray = largest * (2.0**-15 * GROUP * groups.max(axis=1).sum() + 2.0**-16 * groups.sum())
    return bounded


def passed_on(weight: np.ndarray, off: np.ndarray) -> np.ndarray:
    """Bound what errors of `x` make of its product with `weight`: they are independent, so they add in squares.

    One in a billion of products is off by more than six times the root of the sum.
    """
    bounded: np.ndarray = 6 * np.sqrt(magnitude(weight) ** 2 @ off**2)
    return bounded


def gated(gate: np.ndarray, up: np.ndarray, off_gate: np.ndarray, off_up: np.ndarray) -> np.ndarray:
    """Bound `silu(gate) * up`, whose factors may be off by so much. The slope of silu is 1.1 at most.

    Both factors, the exponential, silu and the product are rounded.
    """
    off_gate, off_up = off_gate + one_ulp(gate), off_up + one_ulp(up)
    product = magnitude(gate) * magnitude(up)
    return (
        1.13 * off_gate * (magnitude(up) + off_up) + magnitude(gate) * off_up + 4 * ULP * product + silu_and_mul.LEAST
    )


def attention(
    q: np.ndarray, k: np.ndarray, dim: int, spread: np.ndarray, want: np.ndarray, score: float = 2.0**-16
) -> np.ndarray:
    """Bound attention; `spread` is attention over |v|.

    Weights have an error of half a unit and that of their polynomial, in numerator and sum alike. Scores have a
    relative error of `score`, which goes into the exponent.
    """
    longest = [np.linalg.norm(t.astype(np.float64).reshape(-1, dim), axis=1).max() for t in (q, k)]
    weight_error = 2.0**-8 + 2.0**-12 + float(longest[0] * longest[1] / np.sqrt(dim)) * score
    return one_ulp(want) + 2 * weight_error * magnitude(spread)


def relative(launches: int, bfp16: bool = False) -> float:
    """Bound the relative error, in the norm, of a program's result.

    Where two roundings differ, a number is off by at most a unit in the last place: 2^-8 in the root mean square.
    Errors of different launches are independent, so they add in squares. Products in block floating point have up to
    four times the error.
    """
    return float(np.sqrt(launches)) * (2.0**-6 if bfp16 else 2.0**-8)
