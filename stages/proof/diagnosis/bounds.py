"""Bound how far a right launch may be from its reference, by the number formats on its way.

Both compute the same function of the same inputs, but sum in other orders: before a result is rounded, they are a small
`error` apart. After rounding they are equal, unless the border between two numbers of bf16 lies between them. This
happens with a certain `chance`, and then they differ by a unit in the last place. Intermediate roundings of a kernel
are counted in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from llama_npu2.frozen import frozen
from stages.kernels import (
    HOST_SET,
    add,
    bias,
    feed_forward,
    flash_attention,
    gemm,
    rms_norm,
    rope,
    silu_and_mul,
    token_attention,
)
from stages.kernels.grouped import UNPACKING, byte_product, in_bytes, integer_product
from stages.model.part import KV
from stages.proof.diagnosis.ops import Op
from stages.weights.constants import BLOCK, GROUP, HEAD_POSITION, KV_BLOCK_POSITIONS, SHORT_GROUP
from stages.weights.formats import bfp16, formats, int6, int8, w8a8

U = 2.0**-8
"""Unit roundoff of bf16: rounding changes a value by at most half a unit in the last place."""
U32 = 2.0**-24
"""Unit roundoff of f32."""
SURE = 8.0
"""Roundings are independent and as often up as down, so a sum of n of them grows like sqrt(n). With this factor a bound
fails with a probability of 2 exp(-SURE^2 / 2) = 3e-14 (Higham and Mary, SIAM J. Sci. Comput. 41 (2019), theorem
2.4)."""
LEAST = 2.0**-126
"""Kernels may treat smaller magnitudes as zero."""
FIXED_VALUES, FIXED_BITS = 512, 13
"""Where the host multiplies in fixed point, 512 inputs share a unit: 2^-13 of the power of two of the largest
(kernel_src/cpu/fixed_point.h)."""
WITH_MINIMUM = 16
"""A minimum is subtracted from numbers up to 15 times a scale: terms are up to 16 times as large as the difference."""
WITHOUT_MINIMUM = {int6.FORMAT.name, int8.FORMAT.name}
"""Group-wise formats that have no minimum."""
BLOCK_FLOAT = 2.0**-7
"""Error of each of eight inputs that share an exponent, relative to the largest of them."""


@frozen
class Arithmetic:
    """Relative errors of what a kernel set computes in f32, or in pairs of bf16 (kernel_src/aie2p/tile.h)."""

    activation: float
    exponential: float
    """The exponential in an activation that is rounded before it is multiplied; 0 where it is not rounded."""
    rotation: float
    """A rotated pair."""
    root: float
    """The reciprocal root of a norm."""
    score: float
    """A score of attention."""
    weight: float
    """The weight that attention gives a position, rounded to bf16."""
    query: float
    """The chance that a scaled query, rounded before it is multiplied, becomes another number."""


ARITHMETIC = {
    HOST_SET: Arithmetic(
        activation=2.0**-16, exponential=0, rotation=2.0**-22, root=2.0**-21, score=2.0**-20, weight=U, query=0
    ),
    # A pair of bf16 keeps 2^-17, a product of two 2^-16; the activation's reciprocal 2^-13. Both a weight and the sum
    # that it is divided by are rounded. A query that is 2^-17 off lies so near the middle between two bf16 with a
    # chance of 2^-8.
    "aie2p": Arithmetic(
        activation=2.0**-12,
        exponential=U,
        rotation=2.0**-16,
        root=2.0**-15,
        score=2.0**-16,
        weight=2 * U,
        query=2.0**-8,
    ),
}


@frozen
class ErrorBound:
    """How far each element of a result may be from the reference's."""

    limit: np.ndarray
    """The largest allowed error."""
    chance: np.ndarray
    """The probability that the element is another number at all."""
    rounded: tuple[np.ndarray, ...] = ()
    """Intermediate values, of the result's shape, that were rounded too, and may have been rounded wrong."""


@frozen
class Weight:
    """A weight `[rows, cols]` or `[cols]`, as it is stored."""

    stored: np.ndarray
    format: str
    shape: tuple[int, ...]

    @cached_property
    def values(self) -> np.ndarray:
        """f32."""
        return formats()[self.format].dequantise(self.stored, self.shape[-1])

    @cached_property
    def magnitudes(self) -> np.ndarray:
        """Absolute values, f32."""
        return np.abs(self.values)

    @cached_property
    def steps(self) -> np.ndarray:
        """The magnitude of one quantisation step, f32 `[rows, groups]`."""
        form = formats()[self.format]
        assert form.steps is not None
        return np.abs(form.steps(self.stored))

    def by_groups(self, size: int) -> np.ndarray:
        """Return the values `[rows, groups, size]`, padded with zeros."""
        return _groups(self.values, size)


@frozen
class Case:
    """One call of a launch: what it was given, and what it should have made of it."""

    op: Op
    inputs: Mapping[str, Any]
    """Values of arguments and scalars, by name."""
    weights: Mapping[str, Weight]
    """Weights among the arguments, by name."""
    results: tuple[np.ndarray, ...]
    """The reference's."""

    @property
    def arithmetic(self) -> Arithmetic:
        """The arithmetic of the kernel set that computed it."""
        return ARITHMETIC[self.op.kernel_set]

    def wide(self, name: str) -> np.ndarray:
        """Return an input in f32."""
        return np.asarray(self.inputs[name], np.float32)


def ulp(values: np.ndarray) -> np.ndarray:
    """Return a unit in the last place of bf16 for each value, f32."""
    exponents = np.frexp(np.abs(np.asarray(values, np.float32)))[1]
    return np.ldexp(np.float32(1), np.maximum(exponents - 8, -133)).astype(np.float32)


def in_fixed_point(x: np.ndarray) -> np.ndarray:
    """Return rows as products with group-wise weights take them on the host, f32."""
    rows = np.atleast_2d(x).astype(np.float32)
    blocks = _groups(rows, FIXED_VALUES)
    unit = np.exp2(np.frexp(np.abs(blocks).max(axis=-1, keepdims=True))[1] - np.float32(1 + FIXED_BITS))
    fixed: np.ndarray = (np.rint(blocks / unit) * unit).reshape(len(rows), -1)[:, : rows.shape[-1]].reshape(x.shape)
    return fixed


def error_bounds(case: Case) -> tuple[ErrorBound, ...]:
    """Return the bound of each result of a launch."""
    bounds = _ERROR_BOUNDS.get(case.op.operation, _bound_unknown)(case)
    if not case.op.in_numbers:
        return bounds
    written = zip(case.op.written, bounds, case.results, strict=True)
    return tuple(
        _in_numbers(bound, values) if case.op.slots[arg.name].keeps == KV else bound for arg, bound, values in written
    )


def _in_numbers(bound: ErrorBound, values: np.ndarray) -> ErrorBound:
    """Bound rows `[.., head_dim]` that are rounded to numbers once they have an error: to the next, and their scale."""
    limit = bound.limit.reshape(values.shape)
    steps = (np.abs(values).max(axis=-1, keepdims=True) + limit.max(axis=-1, keepdims=True)) / w8a8.MOST
    off = np.where(limit.max(axis=-1, keepdims=True) > 0, steps + 2 * limit.max(axis=-1, keepdims=True), 0)
    off = np.broadcast_to(off, values.shape)
    return ErrorBound(off, np.sign(off))


def _no_error(shape: tuple[int, ...]) -> ErrorBound:
    return ErrorBound(np.zeros(shape), np.zeros(shape))


def _bound_exact(case: Case) -> tuple[ErrorBound, ...]:
    return tuple(_no_error(result.shape) for result in case.results)


def _bound_rows(case: Case) -> tuple[ErrorBound, ...]:
    """Bound rounded weights: numbers and minima are as large as the largest value of a group."""
    values = case.results[0].astype(np.float32)
    if case.op.format == "bf16":
        return (_rounded(values, np.zeros(values.shape)),)
    return (_rounded(values, WITH_MINIMUM * U32 * _largest(values, GROUP) + LEAST),)


def _bound_float_rows(case: Case) -> tuple[ErrorBound, ...]:
    """Bound rounded weights in block floating point, whose steps are 1/128 to 1/64 of the largest of a block.

    A value may be one step off, and so may its whole block where the block gets another exponent.
    """
    values = case.results[0].astype(np.float32)
    if case.op.kernel.arg("weight").format == "bf16":
        return (_no_error(values.shape),)
    step = _largest(values, BLOCK) / 64 + LEAST
    error = WITH_MINIMUM * U32 * _largest(values, GROUP)
    return (ErrorBound(2 * step, np.minimum(1, 2 * 2 * BLOCK * error / step)),)


def _rounded(values: np.ndarray, error: np.ndarray) -> ErrorBound:
    """Bound values that were off by `error` before they were rounded once. Where the error is 0, they are equal."""
    unit = ulp(np.abs(np.asarray(values, np.float32)) + error)
    limit = np.where(error > 0, error + unit + LEAST, 0)
    return ErrorBound(limit, np.minimum(1, error / unit))


Row = tuple[np.ndarray, ErrorBound]
"""What a product multiplies `[rows, cols]`, and its bound."""


def _product(case: Case, weight: str = "weight", row: Row | None = None) -> tuple[np.ndarray, ErrorBound]:
    """Return the rounded product of `x`, or another row, and a weight, and its bound: 0 where numbers are whole."""
    x, of_x = row or _multiplied(case)
    of = case.weights[weight]
    if case.op.format == w8a8.FORMAT.name:
        product = integer_product(x, of.stored).astype(bfloat16)
        return product, _rounded(product, np.zeros(product.shape))
    if case.op.in_eight_bits:
        product = byte_product(x, of.stored, formats()[of.format]).astype(bfloat16)
        return product, _rounded(product, _product_error(case, x.astype(np.float32), of))
    product = gemm.reference(x, of.values)
    return product, _rounded(product, _product_error(case, x.astype(np.float32), of) + _carried(of_x, of))


def _multiplied(case: Case) -> Row:
    """Return the input of a product, `x` or its norm `[rows, cols]`, and its bound."""
    x = np.atleast_2d(case.inputs["x"])
    if "norm" not in case.inputs:
        return x, _no_error(x.shape)
    normed = rms_norm.reference(x, case.inputs["norm"], *_norm_scalars(case))
    return normed, _norm(case, x.astype(np.float32), case.wide("norm"), normed)


def _norm_scalars(case: Case) -> tuple[float, float, int]:
    """Return the epsilon of a norm, its offset and whether it is rounded once."""
    return case.inputs["eps"], case.inputs.get("offset", 0.0), case.inputs.get("once", 0)


def _norm_of(case: Case, x: Row, weight: np.ndarray) -> Row:
    """Return the norm of a row that may be off itself. `weight`: bf16 `[cols]`."""
    rows, of_rows = x
    wide, wide_weight = rows.astype(np.float32), weight.astype(np.float32)
    normed = rms_norm.reference(rows, weight, *_norm_scalars(case))
    own, size = _norm(case, wide, wide_weight, normed), np.sqrt(np.square(wide).mean(axis=-1, keepdims=True))
    carried = of_rows.limit * np.abs(wide_weight + case.inputs.get("offset", 0.0)) / (size + LEAST)
    limit = np.where(carried > 0, own.limit + carried + ulp(np.abs(normed.astype(np.float32)) + carried), own.limit)
    return normed, ErrorBound(limit, np.ones(limit.shape))


def _added(residual: Row, x: Row) -> Row:
    """Return the sum of two rows that may be off."""
    result = add.reference(residual[0], x[0])
    limit = residual[1].limit + x[1].limit
    limit = np.where(limit > 0, limit + ulp(np.abs(result.astype(np.float32)) + limit), 0)
    return result, ErrorBound(limit, np.ones(limit.shape))


def _carried(of_x: ErrorBound, weight: Weight) -> np.ndarray:
    """Return the error of a product that comes from the errors of its inputs, which are independent."""
    carried: np.ndarray = SURE * np.sqrt((of_x.chance * np.square(of_x.limit)) @ np.square(weight.values).T)
    return carried


def _product_error(case: Case, x: np.ndarray, weight: Weight) -> np.ndarray:
    """Return the error `[rows, out]` of a product before it is rounded, that of the reference's own sums included."""
    op = case.op
    if op.in_eight_bits:
        x = in_bytes(x, formats()[op.format].values)
    size = np.abs(x) @ weight.magnitudes.T
    sums = SURE * np.sqrt(x.shape[-1]) * U32 * size
    if op.format == bfp16.FORMAT.name:
        return 2 * sums + BLOCK_FLOAT * _largest(x, BLOCK) @ weight.magnitudes.T
    if op.format == "bf16":
        return 2 * sums
    if op.kernel_set != HOST_SET:
        return sums + _in_whole_numbers(x, weight)
    # The inputs are whole numbers here too, so sums of groups are exact; three operations add each to the last.
    whole = op.fixed_point or op.in_eight_bits
    terms = 3 * np.ceil(x.shape[-1] / SHORT_GROUP) if whole else x.shape[-1]
    larger = 1 if whole and op.format in WITHOUT_MINIMUM else WITH_MINIMUM
    return sums + SURE * np.sqrt(terms) * U32 * larger * size


def _in_whole_numbers(x: np.ndarray, weight: Weight) -> np.ndarray:
    """Return the error of a product on the array's cores.

    They multiply numbers with inputs in fixed point, whose unit is at most 2^-14 of the largest of a group, and add the
    sums of groups as pairs of bf16.
    """
    inputs, values = _groups(x, GROUP), weight.by_groups(GROUP)
    numbers = np.abs(values) + WITH_MINIMUM * weight.steps[..., None]
    fixed = SURE * 2.0**-15 * np.sqrt(np.square(inputs).max(axis=-1) @ np.square(numbers).sum(axis=-1).T)
    products = np.einsum("rgi,ogi->rog", inputs, values)
    minima = (np.abs(values).max(axis=-1) + WITH_MINIMUM * weight.steps) * np.abs(inputs.sum(axis=-1))[:, None]
    paired: np.ndarray = 3 * SURE * 2.0**-16 * np.sqrt(np.square(np.abs(products) + minima).sum(axis=-1))
    return fixed + paired


def _groups(matrix: np.ndarray, size: int) -> np.ndarray:
    """Reshape `[rows, cols]` to `[rows, groups, size]`, padded with zeros."""
    return np.pad(matrix, [(0, 0), (0, -matrix.shape[-1] % size)]).reshape(len(matrix), -1, size)


def _largest(matrix: np.ndarray, size: int) -> np.ndarray:
    """Return for each value of `[rows, cols]` the largest magnitude of its group."""
    largest: np.ndarray = np.abs(_groups(matrix, size)).max(axis=-1).repeat(size, axis=-1)[:, : matrix.shape[-1]]
    return largest


def _bound_product(case: Case) -> tuple[ErrorBound, ...]:
    return (_product(case)[1],)


def _bound_sums(case: Case) -> tuple[ErrorBound, ...]:
    """Bound a product that stays in f32, and is hardly ever the same number."""
    if case.op.format == w8a8.FORMAT.name:
        return _bound_exact(case)
    (x, of_x), weight = _multiplied(case), case.weights["weight"]
    error = _product_error(case, x.astype(np.float32), weight) + _carried(of_x, weight)
    return (ErrorBound(error, np.ones(error.shape)),)


def _bound_residual(case: Case) -> tuple[ErrorBound, ...]:
    product, first = _product(case)
    limit = np.where(first.limit > 0, first.limit + ulp(np.abs(case.results[0].astype(np.float32)) + first.limit), 0)
    return (ErrorBound(limit, first.chance, (product.astype(np.float32),)),)


def _bound_activation(case: Case, products: tuple[tuple[np.ndarray, ErrorBound], ...]) -> tuple[ErrorBound, ...]:
    """Bound silu(gate) * up, or gelu(gate) * up, whose slopes are at most 1.13 in `gate`."""
    (gate, of_gate), (up, of_up) = products
    g, u = np.abs(gate.astype(np.float32)), np.abs(up.astype(np.float32))
    result = np.abs(case.results[0].astype(np.float32).reshape(g.shape))
    inputs = 1.13 * of_gate.limit * (u + of_up.limit) + g * of_up.limit
    if case.arithmetic.exponential:
        limit = inputs + u * _rounded_silu(gate.astype(np.float32), case.arithmetic, case.inputs.get("activation", 0))
        return (ErrorBound(limit + ulp(result + limit), np.ones(limit.shape)),)
    error = case.arithmetic.activation * result
    last = _rounded(result, error + LEAST)
    return (ErrorBound(inputs + last.limit, np.minimum(1, of_gate.chance + of_up.chance + last.chance)),)


def _rounded_silu(gate: np.ndarray, arithmetic: Arithmetic, activation: int) -> np.ndarray:
    """Return the error of a silu, or a gelu, that is rounded, and whose exponential is rounded.

    The exponential is a factor where the gate is negative, and otherwise a part of the divisor.
    """
    exponent = np.abs(silu_and_mul.exponent(gate, activation))
    small = np.exp(-exponent)
    part = np.where(gate < 0, 1, small) / (1 + small)
    exponential = arithmetic.exponential + exponent * 2.0**-16
    silu = np.abs(gate) * np.where(gate < 0, small, 1) / (1 + small)
    return _rounded(silu, (arithmetic.activation + exponential * part) * silu + silu_and_mul.LEAST).limit


def _bound_two_products(case: Case) -> tuple[ErrorBound, ...]:
    return _bound_activation(case, (_product(case, "gate"), _product(case, "up")))


def _bound_paired_product(
    case: Case, apart: int | None = None, weight: str = "weight", row: Row | None = None
) -> tuple[ErrorBound, ...]:
    """Bound a gate-up product whose columns alternate, `apart` of each; None: the gate's, then up's."""
    both, spread = _product(case, weight, row)

    def halves(part: np.ndarray) -> tuple[np.ndarray, ...]:
        turns = part.reshape(len(part), -1, 2, apart or part.shape[-1] // 2)
        return tuple(turns[:, :, which].reshape(len(part), -1) for which in (0, 1))

    parts = map(halves, (both, spread.limit, spread.chance))
    return _bound_activation(
        case, tuple((p, ErrorBound(limit, chance)) for p, limit, chance in zip(*parts, strict=True))
    )


def _network(case: Case, row: Row) -> Row:
    """Return the product of down in a feed-forward network of a row, not rounded, and what it is off by."""
    down, (gate, up) = case.weights["down"], np.split(case.weights["gate_up"].values, 2)
    inner = np.atleast_2d(gemm.reference_silu(row[0], gate, up, case.inputs.get("activation", 0)))
    (of_inner,) = _bound_paired_product(replace(case, results=(inner,)), weight="gate_up", row=row)
    wide = inner.astype(np.float32)
    error = _product_error(case, wide, down) + _carried(of_inner, down)
    return wide @ down.values.T, ErrorBound(error, np.ones(error.shape))


def _bound_feed_forward(case: Case) -> tuple[ErrorBound, ...]:
    """Bound the feed-forward: the activation and its error go through `down`; sums stay in f32 up to the end."""
    _, product = _network(case, _multiplied(case))
    return (_rounded(case.results[0], (product.limit + LEAST).reshape(case.results[0].shape)),)


def _bound_sandwich(case: Case) -> tuple[ErrorBound, ...]:
    """Bound a feed-forward network between norms of what is added to the residual stream."""
    x, residual = ((row, _no_error(row.shape)) for row in (np.atleast_2d(case.inputs[n]) for n in ("x", "residual")))
    of_x, of_sum, of_network = np.split(case.inputs["norms"], feed_forward.NORMS)
    mixed = _added(residual, _norm_of(case, x, of_x))
    wide, product = _network(case, _norm_of(case, mixed, of_sum))
    down = wide.astype(bfloat16)
    _, bound = _added(mixed, _norm_of(case, (down, _rounded(down, product.limit + LEAST)), of_network))
    shape = case.results[0].shape
    return (ErrorBound(bound.limit.reshape(shape), bound.chance.reshape(shape)),)


def _bound_silu(case: Case) -> tuple[ErrorBound, ...]:
    gate, up = case.inputs["gate"], case.inputs["up"]
    return _bound_activation(case, ((gate, _no_error(gate.shape)), (up, _no_error(up.shape))))


def _bound_biased_product(case: Case) -> tuple[ErrorBound, ...]:
    """Bound a product that is rounded only after its bias is added; also before it where launches of their own add."""
    (x, of_x), weight, result = _multiplied(case), case.weights["weight"], case.results[0]
    size = np.abs(case.wide("bias")) + np.abs(np.atleast_2d(result).astype(np.float32))
    error = U32 * size
    if case.op.format != w8a8.FORMAT.name:
        error = error + _product_error(case, x.astype(np.float32), weight) + _carried(of_x, weight)
    bound = _rounded(result, error.reshape(result.shape))
    if not _rounds_products(case):
        return (bound,)
    product = (np.atleast_2d(result).astype(np.float32) - case.wide("bias")).reshape(result.shape)
    return (ErrorBound(bound.limit + ulp(np.abs(product) + bound.limit), np.ones(result.shape)),)


def _bound_qkv(case: Case) -> tuple[ErrorBound, ...]:
    """Bound the products of Q, K and V: each is a product of its own."""
    bounds: tuple[ErrorBound, ...] = ()
    for which, result in zip("qkv", case.results, strict=True):
        own = replace(case, weights={"weight": case.weights[f"w{which}"]}, results=(result,))
        if (bias := case.inputs.get(f"b{which}")) is None:
            bounds += _bound_product(own)
        else:
            bounds += _bound_biased_product(replace(own, inputs={**case.inputs, "bias": bias}))
    return bounds


def _rounds_products(case: Case) -> bool:
    """Return whether a biased product is rounded before the sum."""
    kernel = case.op.kernel
    if case.op.kernel_set == HOST_SET or kernel.tiling is None:
        return False
    return case.op.operation.startswith("gemm") or isinstance(kernel.tiling(case.inputs), bias.Biased)


def _bound_added_norm(case: Case) -> tuple[ErrorBound, ...]:
    """Bound a norm that is rounded and added to the residual stream."""
    inputs, (result,) = case.inputs, case.results
    normed = rms_norm.reference(*(inputs[name] for name in ("x", "weight", "eps", "offset", "once")))
    of_norm = _norm(case, case.wide("x"), case.wide("weight"), normed)
    limit = of_norm.limit.reshape(result.shape)
    unit = ulp(np.abs(result.astype(np.float32)) + limit)
    chance = np.ones(result.shape) if inputs["once"] == 0 else of_norm.chance.reshape(result.shape)
    return (ErrorBound(np.where(limit > 0, limit + unit, 0), chance),)


def _bound_normed_rotation(case: Case) -> tuple[ErrorBound, ...]:
    """Bound rotated heads that are normed first."""
    inputs, (result,) = case.inputs, case.results
    angles = inputs["table"][:, : inputs["head_dim"]]
    return (_normed_rotation(case, np.atleast_2d(inputs["x"]), inputs["weight"], angles, result),)


def _normed_rotation(
    case: Case, x: np.ndarray, weight: np.ndarray, angles: np.ndarray, result: np.ndarray
) -> ErrorBound:
    """Bound rotated rows of heads `[rows, width]` that are normed first."""
    inputs, heads = case.inputs, x.reshape(-1, angles.shape[-1])
    normed = rms_norm.reference(heads, weight, *(inputs[name] for name in ("eps", "offset", "once")))
    of_norm = _norm(case, heads.astype(np.float32), weight.astype(np.float32), normed)
    last = _rotation(case, normed.reshape(x.shape), angles, result.reshape(x.shape))
    carried, chance = (_of_pairs(part).reshape(x.shape) for part in (of_norm.limit, of_norm.chance))
    limit = carried + last.limit + ulp(np.abs(result.astype(np.float32)).reshape(x.shape) + carried)
    return ErrorBound(limit.reshape(result.shape), np.minimum(1, chance + last.chance).reshape(result.shape))


def _of_pairs(part: np.ndarray) -> np.ndarray:
    """Return for each value of heads `[heads, head_dim]` the sum over the pair that is rotated into it."""
    sums = np.add(*np.split(part, 2, axis=-1))
    return np.concatenate([sums, sums], axis=-1)


def _bound_norm(case: Case) -> tuple[ErrorBound, ...]:
    return (_norm(case, case.wide("x"), case.wide("weight"), case.results[0]),)


def _norm(case: Case, rows: np.ndarray, weight: np.ndarray, result: np.ndarray) -> ErrorBound:
    """Bound a norm, which is rounded before and after the product with the weight; that product is exact.

    With `once` it is rounded only after it.
    """
    cols, weight = rows.shape[-1], weight + np.float32(case.inputs.get("offset", 0))
    normed = rows / np.sqrt(np.square(rows).mean(axis=-1, keepdims=True) + case.inputs["eps"])
    error = (case.arithmetic.root + SURE * np.sqrt(cols) * U32) * np.abs(normed)
    if case.inputs.get("once"):
        return _rounded(result.reshape(normed.shape), np.abs(weight) * (error + 2 * U32 * np.abs(normed)))
    first = _rounded(normed, error)
    size = np.abs(result.astype(np.float32).reshape(normed.shape))
    limit = np.abs(weight) * first.limit
    return ErrorBound(limit + ulp(size + limit), first.chance)


def _rotation(case: Case, x: np.ndarray, angles: np.ndarray, result: np.ndarray) -> ErrorBound:
    """Bound rotated rows of heads `[rows, width]`: two products and their sum."""
    rows = np.abs(np.asarray(x, np.float32))
    cos, sin = np.split(np.abs(angles[case.inputs["pos"] :][: len(rows), None]), 2, axis=-1)
    first, second = np.split(rows.reshape(len(rows), -1, angles.shape[-1]), 2, axis=-1)
    size = np.concatenate([first * cos + second * sin, second * cos + first * sin], axis=-1).reshape(rows.shape)
    return _rounded(result.reshape(rows.shape), case.arithmetic.rotation * size)


def _bound_rotation(case: Case) -> tuple[ErrorBound, ...]:
    """Bound rotated rows. Tables may have positions after the angles."""
    angles = case.inputs["table"][:, : case.inputs["head_dim"]]
    return (_rotation(case, np.atleast_2d(case.inputs["x"]), angles, case.results[0]),)


def _bound_query_rotation(
    case: Case, rotation: Callable[[Case], tuple[ErrorBound, ...]] = _bound_rotation
) -> tuple[ErrorBound, ...]:
    """Bound rotated heads that are followed by positions, which are exact."""
    heads = case.results[0].reshape(len(case.results[0]), case.inputs["heads"], -1)
    own = heads[..., :-HEAD_POSITION]
    (spread,) = rotation(replace(case, results=(own.reshape(len(own), -1),)))

    def with_position(part: np.ndarray) -> np.ndarray:
        exact = np.zeros((*own.shape[:2], HEAD_POSITION))
        return np.concatenate([part.reshape(own.shape), exact], axis=-1).reshape(case.results[0].shape)

    return (ErrorBound(with_position(spread.limit), with_position(spread.chance)),)


def _bound_token_attention(case: Case) -> tuple[ErrorBound, ...]:
    """Bound attention of a token and its new row of the cache.

    Each rotated query and the newest key may have been rounded wrong; V is exact.
    """
    inputs, (out, row) = case.inputs, case.results
    head_dim, position = inputs["head_dim"], inputs["pos"]
    ends = inputs["heads"] * head_dim, (inputs["heads"] + inputs["kv_heads"]) * head_dim
    q, k, _ = np.split(np.atleast_2d(inputs["x"]), ends, axis=-1)
    angles = inputs["table"][:, :head_dim]
    own = np.ascontiguousarray(row[:, 0])
    if "q_norm" in inputs:
        names = ("heads", "q_norm", "k_norm", "eps", "offset", "once")
        normed = token_attention.normed_heads(np.atleast_2d(inputs["x"]), *(inputs[name] for name in names))
        rotated = rope.reference(normed[:, : ends[0]], inputs["table"], position, head_dim)[0]
        of_q = _normed_rotation(case, q, inputs["q_norm"], angles, rotated)
        of_k = _normed_rotation(case, k, inputs["k_norm"], angles, own)
    else:
        rotated = rope.reference(q, inputs["table"], position, head_dim)[0]
        of_q, of_k = _rotation(case, q, angles, rotated), _rotation(case, k, angles, own)
    newest = [
        np.concatenate([inputs[which][:position], row[:, half].reshape(1, -1)]) for half, which in enumerate("kv")
    ]
    scalar = inputs.get("scalar", head_dim)
    of_key = _in_numbers(of_k, own) if case.op.in_numbers else of_k
    off = _score_error(of_q, newest[0], head_dim, scalar) + _score_error(of_key, rotated, head_dim, scalar)
    attention = replace(case, inputs={**inputs, "q": rotated, "k": newest[0], "v": newest[1]}, results=(out,))

    def with_v(part: np.ndarray) -> np.ndarray:
        halves = part.reshape(inputs["kv_heads"], head_dim)
        return np.stack([halves, np.zeros(halves.shape)], axis=1)

    return (*_bound_attention(attention, off), ErrorBound(with_v(of_k.limit), with_v(of_k.chance)))


def _score_error(inputs: ErrorBound, others: np.ndarray, head_dim: int, scalar: float) -> float:
    """Return the largest error of a score that comes from inputs that are multiplied with `others`."""
    squares = (inputs.chance * np.square(inputs.limit)).reshape(-1, head_dim).sum(axis=-1).max()
    return float(SURE * np.sqrt(squares / scalar) * np.abs(others.astype(np.float32)).max())


def _bound_attention(case: Case, of_inputs: float = 0.0) -> tuple[ErrorBound, ...]:
    """Bound attention: weights of positions are rounded, and scores carry the error of their sums and `of_inputs`."""
    inputs, arithmetic = case.inputs, case.arithmetic
    heads, kv_heads = inputs["heads"], inputs["kv_heads"]
    # A position follows each query of a prompt.
    rows = case.wide("q")
    q = rows.reshape(len(np.atleast_2d(rows)), kv_heads, heads // kv_heads, -1)[..., : inputs["head_dim"]]
    k, v = (case.wide(which).reshape(len(inputs[which]), kv_heads, -1) for which in "kv")
    seq, (length, _, head_dim) = len(q), k.shape
    scalar = inputs.get("scalar", head_dim)
    scores, sizes = (_scores(a, b, scalar) for a, b in ((q, k), (np.abs(q), np.abs(k))))
    seen = flash_attention.visible(inputs["pos"], seq, length, inputs.get("sees", flash_attention.ALL))
    scores[..., ~seen] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    of_scaling = _score_error(ErrorBound(2 * U * np.abs(q), np.full(q.shape, arithmetic.query)), k, head_dim, scalar)
    of_scores = (arithmetic.score + 2 * (head_dim + 8) * U32) * sizes.max() + of_scaling + of_inputs
    error = (arithmetic.weight + of_scores + length * U32) * _weighted(weights, np.abs(v))
    if case.op.format != "bf16":
        # On the array weights count from less than four times the largest of a tile on.
        error += _fixed_point_attention(q, k, v, weights) * (4 if case.op.in_numbers else 1)
    error = error.reshape(case.results[0].shape)
    unit = ulp(np.abs(case.results[0].astype(np.float32)) + error)
    return (ErrorBound(error + unit, np.minimum(1, error / unit)),)


def _bound_short_conv(case: Case) -> tuple[ErrorBound, ...]:
    """Bound a short convolution. On the host it has no error, and nowhere has what goes into the history."""
    history, mixed = case.results
    if case.op.kernel_set == HOST_SET:
        return _bound_exact(case)
    taps, rows = case.inputs["taps"], len(history) - case.inputs["taps"] + 1
    seen, factors = history.astype(np.float32), case.wide("weight")[:, 0].T
    terms = np.stack([seen[tap : tap + rows] * factors[tap] for tap in range(taps)])
    total = _rounded(terms.sum(axis=0), taps * U32 * np.abs(terms).sum(axis=0))
    after = np.abs(np.split(np.atleast_2d(case.wide("bcx")), 3, axis=-1)[1])
    limit = (after * total.limit).reshape(mixed.shape)
    limit = np.where(limit > 0, limit + ulp(np.abs(mixed.astype(np.float32)) + limit), 0)
    return _no_error(history.shape), ErrorBound(limit, total.chance.reshape(mixed.shape))


def _scores(q: np.ndarray, k: np.ndarray, scalar: float) -> np.ndarray:
    """`[kv_heads, group, seq, positions]`."""
    scores: np.ndarray = np.einsum("sgmd,pgd->gmsp", q, k) / np.sqrt(scalar)
    return scores


def _weighted(weights: np.ndarray, v: np.ndarray) -> np.ndarray:
    """`[seq, kv_heads, group, head_dim]`."""
    return np.einsum("gmsp,pgd->sgmd", weights, v)


def _fixed_point_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the error of attention over a cache in 8 bits (kernel_src/cpu/kv_format.h).

    Numbers are off by half a unit, 2^-14 of the largest: those of a row of q, and those of weights times scales of a
    block.
    """
    half = 2.0 ** -(1 + FIXED_BITS)
    most = np.abs(q).max(axis=-1, keepdims=True) * np.abs(k).sum(axis=-1).max() / np.sqrt(q.shape[-1])
    errors = 2 * half * most * _weighted(weights, np.abs(v))
    scales = np.abs(v).max(axis=-1, keepdims=True) / w8a8.MOST
    numbers = np.divide(np.abs(v), scales, out=np.zeros_like(v), where=scales != 0)
    scaled = weights * scales[..., 0].T[:, None, None]
    for first in range(0, len(v), KV_BLOCK_POSITIONS):
        block = slice(first, first + KV_BLOCK_POSITIONS)
        errors += half * np.einsum("gms,gd->sgmd", scaled[..., block].max(axis=-1), numbers[block].sum(axis=0))
    return errors


def _bound_unknown(case: Case) -> tuple[ErrorBound, ...]:
    """Bound the results of a kernel that this module does not know: a unit in the last place."""
    units = [ulp(result.astype(np.float32)) for result in case.results]
    return tuple(ErrorBound(unit, np.ones(unit.shape)) for unit in units)


_ERROR_BOUNDS: Mapping[str, Callable[[Case], tuple[ErrorBound, ...]]] = {
    **dict.fromkeys(("add", "scale", "append_kv", "append_kv_panels", "append_v"), _bound_exact),
    **dict.fromkeys(("embed", "embed_rows", *UNPACKING), _bound_rows),
    **dict.fromkeys((f"{kernel}_bfp16" for kernel in UNPACKING), _bound_float_rows),
    **dict.fromkeys(("gemm", "gemv", "gemm_kv", "norm_gemv"), _bound_product),
    **dict.fromkeys(("gemm_add", "gemv_add"), _bound_residual),
    **dict.fromkeys(("gemm_silu", "gemv_silu"), _bound_two_products),
    **dict.fromkeys(("gemm_f32", "gemv_f32", "gemv_rows_f32", "norm_gemv_f32"), _bound_sums),
    **dict.fromkeys(("rope", "rope_kv"), _bound_rotation),
    **dict.fromkeys(("flash_attention", "flash_attention_panels"), _bound_attention),
    **dict.fromkeys(("decode_attention_kv", "decode_attention_panels"), _bound_attention),
    "gemm_swiglu": partial(_bound_paired_product, apart=BLOCK),
    "norm_gemv_swiglu": _bound_paired_product,
    "feed_forward": _bound_feed_forward,
    "sandwich_feed_forward": _bound_sandwich,
    "silu_and_mul": _bound_silu,
    "rms_norm": _bound_norm,
    "norm_add": _bound_added_norm,
    **dict.fromkeys(("norm_rope", "norm_rope_kv"), _bound_normed_rotation),
    "norm_rope_q": partial(_bound_query_rotation, rotation=_bound_normed_rotation),
    **dict.fromkeys(("gemm_bias", "gemm_kv_bias", "gemv_bias", "norm_gemv_bias"), _bound_biased_product),
    **dict.fromkeys(("gemm_qkv", "gemm_qkv_bias", "gemv_qkv", "gemv_qkv_bias"), _bound_qkv),
    "rope_q": _bound_query_rotation,
    "short_conv": _bound_short_conv,
    **dict.fromkeys(("token_attention", "norm_token_attention"), _bound_token_attention),
}
"""The function that bounds each operation, whatever its format."""
