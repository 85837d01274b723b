"""How far a right launch may be from its reference, by the number formats on its way.

Both compute the same function of the same inputs, but sum in other orders: before a result is rounded, they are a small
`error` apart. Rounded, they are the same unless the border between two numbers of bf16 lies between them, which has a
`chance`; then they differ by a unit in the last place. Roundings that a kernel makes on its way count alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from stages.kernels import HOST_SET, gemm, gemv, rms_norm, rope, silu_and_mul
from stages.kernels.grouped import UNPACKING, integer_product
from stages.proof.diagnosis.sites import Site
from stages.weights.constants import (
    BLOCK,
    GROUP,
    HEAD_POSITION,
    KV_BLOCK_POSITIONS,
    SHORT_GROUP,
)
from stages.weights.formats import bfp16, formats, int6, int8, w8a8

U = 2.0**-8
"""Unit roundoff of bf16: half a unit in the last place, at most, of what is rounded."""
U32 = 2.0**-24
"""That of f32."""
SURE = 8.0
"""Roundings are independent and as often up as down, so that a sum of n of them grows like sqrt(n): with this factor a
bound fails with a probability of 2 exp(-SURE^2 / 2) = 3e-14 (Higham and Mary, SIAM J. Sci. Comput. 41 (2019), theorem
2.4)."""
LEAST = 2.0**-126
"""What is smaller in magnitude, kernels may take for zero."""
FIXED_VALUES, FIXED_BITS = 512, 13
"""Where the host multiplies in fixed point, so many inputs share a unit, 2^-13 of the power of two of the largest
(kernel_src/cpu/fixed_point.h)."""
WITH_MINIMUM = 16
"""A minimum is subtracted from numbers up to fifteen times a scale: terms are so much larger than their difference."""
WITHOUT_MINIMUM = {int6.FORMAT.name, int8.FORMAT.name}
"""Formats in groups that have none."""
BLOCK_FLOAT = 2.0**-7
"""Of the largest of eight inputs, which share an exponent: what each of them may be off by."""


@dataclass(frozen=True)
class Arithmetic:
    """Relative errors of what a kernel set computes in f32, or in pairs of bf16 (kernel_src/aie2p/tile.h): the
    activation, a rotated pair, the reciprocal root, a score of attention; and of a weight that attention gives a
    position, which is rounded to bf16. `exponential`: of that in an activation that is rounded before it is
    multiplied; 0 where it is not. `query`: the chance that a scaled query, rounded before it is multiplied, becomes
    another number."""

    activation: float
    exponential: float
    rotation: float
    root: float
    score: float
    weight: float
    query: float


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


@dataclass(frozen=True)
class Spread:
    """Of one result, elementwise. `limit`: most that it may be off by; `chance`: of being another number at all.
    `rounded`: what else of its size was rounded on the way to it, and may have been rounded wrong."""

    limit: np.ndarray
    chance: np.ndarray
    rounded: tuple[np.ndarray, ...] = ()


@dataclass(frozen=True)
class Weight:
    """A weight `[rows, cols]` (or `[cols]`), as it is stored."""

    stored: np.ndarray
    format: str
    shape: tuple[int, ...]

    @cached_property
    def values(self) -> np.ndarray:
        """f32."""
        return formats()[self.format].dequantise(self.stored, self.shape[-1])

    @cached_property
    def magnitudes(self) -> np.ndarray:
        return np.abs(self.values)

    @cached_property
    def steps(self) -> np.ndarray:
        """f32 `[rows, groups]`: the magnitude of one step of the numbers."""
        form = formats()[self.format]
        assert form.steps is not None
        return np.abs(form.steps(self.stored))

    def by_groups(self, size: int) -> np.ndarray:
        """Values `[rows, groups, size]`, zeros behind the last."""
        return _groups(self.values, size)


@dataclass(frozen=True)
class Given:
    """What a launch is judged by: `known` by arguments and scalars, weights among them as `weights`; `results` of the
    reference."""

    site: Site
    known: Mapping[str, Any]
    weights: Mapping[str, Weight]
    results: tuple[np.ndarray, ...]

    @property
    def arithmetic(self) -> Arithmetic:
        return ARITHMETIC[self.site.kernel_set]

    def wide(self, name: str) -> np.ndarray:
        return np.asarray(self.known[name], np.float32)


def ulp(values: np.ndarray) -> np.ndarray:
    """A unit in the last place of bf16, f32."""
    exponents = np.frexp(np.abs(np.asarray(values, np.float32)))[1]
    return np.ldexp(np.float32(1), np.maximum(exponents - 8, -133)).astype(np.float32)


def in_fixed_point(x: np.ndarray) -> np.ndarray:
    """Rows as products with weights in groups take them, f32."""
    rows = np.atleast_2d(x).astype(np.float32)
    blocks = _groups(rows, FIXED_VALUES)
    unit = np.exp2(np.frexp(np.abs(blocks).max(axis=-1, keepdims=True))[1] - np.float32(1 + FIXED_BITS))
    fixed: np.ndarray = (np.rint(blocks / unit) * unit).reshape(len(rows), -1)[:, : rows.shape[-1]].reshape(x.shape)
    return fixed


def spreads(given: Given) -> tuple[Spread, ...]:
    """Of each result of a launch."""
    return _SPREADS.get(given.site.operation, _unknown)(given)


def _exactly(shape: tuple[int, ...]) -> Spread:
    return Spread(np.zeros(shape), np.zeros(shape))


def _exact(given: Given) -> tuple[Spread, ...]:
    return tuple(_exactly(result.shape) for result in given.results)


def _of_rows(given: Given) -> tuple[Spread, ...]:
    """Values of weights, rounded; numbers and minima are as large as the largest of a group."""
    values = given.results[0].astype(np.float32)
    if given.site.format == "bf16":
        return (_rounded(values, np.zeros(values.shape)),)
    return (_rounded(values, WITH_MINIMUM * U32 * _largest(values, GROUP) + LEAST),)


def _of_float_rows(given: Given) -> tuple[Spread, ...]:
    """The same in block floating point, whose steps are a 128th to a 64th of the largest of a block: a value may be one
    more, or all of its block where that has another exponent."""
    values = given.results[0].astype(np.float32)
    if given.site.kernel.arg("weight").format == "bf16":
        return (_exactly(values.shape),)
    step = _largest(values, BLOCK) / 64 + LEAST
    error = WITH_MINIMUM * U32 * _largest(values, GROUP)
    return (Spread(2 * step, np.minimum(1, 2 * 2 * BLOCK * error / step)),)


def _rounded(values: np.ndarray, error: np.ndarray) -> Spread:
    """Of one rounding of what is off by `error`; where that is zero, of the same number."""
    unit = ulp(np.abs(np.asarray(values, np.float32)) + error)
    limit = np.where(error > 0, error + unit + LEAST, 0)
    return Spread(limit, np.minimum(1, error / unit))


def _product(given: Given, weight: str = "weight") -> tuple[np.ndarray, Spread]:
    """The rounded product of `x` and a weight, and how far it may be off: not at all where numbers are whole."""
    x, of_x = _multiplied(given)
    of = given.weights[weight]
    if given.site.format == w8a8.FORMAT.name:
        product = integer_product(x, of.stored).astype(bfloat16)
        return product, _rounded(product, np.zeros(product.shape))
    product = gemm.reference(x, of.values)
    return product, _rounded(product, _product_error(given, x.astype(np.float32), of) + _carried(of_x, of))


def _multiplied(given: Given) -> tuple[np.ndarray, Spread]:
    """What a product multiplies with, `[rows, cols]`: `x`, or its norm, and how far that may be off."""
    x = np.atleast_2d(given.known["x"])
    if "norm" not in given.known:
        return x, _exactly(x.shape)
    normed = rms_norm.reference(x, given.known["norm"], given.known["eps"])
    return normed, _norm(given, x.astype(np.float32), given.wide("norm"), normed)


def _carried(of_x: Spread, weight: Weight) -> np.ndarray:
    """Of a product, what comes of inputs that are off, each by itself."""
    carried: np.ndarray = SURE * np.sqrt((of_x.chance * np.square(of_x.limit)) @ np.square(weight.values).T)
    return carried


def _product_error(given: Given, x: np.ndarray, weight: Weight) -> np.ndarray:
    """`[rows, out]`: of a product before it is rounded, the reference's own sums included."""
    site, size = given.site, np.abs(x) @ weight.magnitudes.T
    sums = SURE * np.sqrt(x.shape[-1]) * U32 * size
    if site.format == bfp16.FORMAT.name:
        return 2 * sums + BLOCK_FLOAT * _largest(x, BLOCK) @ weight.magnitudes.T
    if site.format == "bf16":
        return 2 * sums
    if site.kernel_set != HOST_SET:
        return sums + _in_whole_numbers(x, weight)
    # In fixed point, as inputs are here then, too, sums of groups are exact; three operations join each to the last.
    terms = 3 * np.ceil(x.shape[-1] / SHORT_GROUP) if site.fixed_point else x.shape[-1]
    larger = 1 if site.fixed_point and site.format in WITHOUT_MINIMUM else WITH_MINIMUM
    return sums + SURE * np.sqrt(terms) * U32 * larger * size


def _in_whole_numbers(x: np.ndarray, weight: Weight) -> np.ndarray:
    """Cores multiply numbers with inputs in fixed point, whose unit is at most 2^-14 of the largest of a group; then go
    on with sums of groups as pairs of bf16."""
    inputs, values = _groups(x, GROUP), weight.by_groups(GROUP)
    numbers = np.abs(values) + WITH_MINIMUM * weight.steps[..., None]
    fixed = SURE * 2.0**-15 * np.sqrt(np.square(inputs).max(axis=-1) @ np.square(numbers).sum(axis=-1).T)
    products = np.einsum("rgi,ogi->rog", inputs, values)
    minima = (np.abs(values).max(axis=-1) + WITH_MINIMUM * weight.steps) * np.abs(inputs.sum(axis=-1))[:, None]
    paired: np.ndarray = 3 * SURE * 2.0**-16 * np.sqrt(np.square(np.abs(products) + minima).sum(axis=-1))
    return fixed + paired


def _groups(matrix: np.ndarray, size: int) -> np.ndarray:
    """`[rows, cols]` -> `[rows, groups, size]`, zeros behind the last."""
    return np.pad(matrix, [(0, 0), (0, -matrix.shape[-1] % size)]).reshape(len(matrix), -1, size)


def _largest(matrix: np.ndarray, size: int) -> np.ndarray:
    """`[rows, cols]`: of each value's group the largest magnitude."""
    found: np.ndarray = np.abs(_groups(matrix, size)).max(axis=-1).repeat(size, axis=-1)[:, : matrix.shape[-1]]
    return found


def _of_product(given: Given) -> tuple[Spread, ...]:
    return (_product(given)[1],)


def _of_sums(given: Given) -> tuple[Spread, ...]:
    """Of a product that stays in f32, and is hardly ever the same number."""
    if given.site.format == w8a8.FORMAT.name:
        return _exact(given)
    (x, of_x), weight = _multiplied(given), given.weights["weight"]
    error = _product_error(given, x.astype(np.float32), weight) + _carried(of_x, weight)
    return (Spread(error, np.ones(error.shape)),)


def _of_residual(given: Given) -> tuple[Spread, ...]:
    product, first = _product(given)
    limit = np.where(first.limit > 0, first.limit + ulp(np.abs(given.results[0].astype(np.float32)) + first.limit), 0)
    return (Spread(limit, first.chance, (product.astype(np.float32),)),)


def _of_activation(given: Given, products: tuple[tuple[np.ndarray, Spread], ...]) -> tuple[Spread, ...]:
    """silu(gate) * up, whose slope is at most 1.1 in `gate`."""
    (gate, of_gate), (up, of_up) = products
    g, u = np.abs(gate.astype(np.float32)), np.abs(up.astype(np.float32))
    result = np.abs(given.results[0].astype(np.float32).reshape(g.shape))
    inputs = 1.1 * of_gate.limit * (u + of_up.limit) + g * of_up.limit
    if given.arithmetic.exponential:
        limit = inputs + u * _rounded_silu(gate.astype(np.float32), given.arithmetic)
        return (Spread(limit + ulp(result + limit), np.ones(limit.shape)),)
    error = given.arithmetic.activation * result
    last = _rounded(result, error + LEAST)
    return (Spread(inputs + last.limit, np.minimum(1, of_gate.chance + of_up.chance + last.chance)),)


def _rounded_silu(gate: np.ndarray, arithmetic: Arithmetic) -> np.ndarray:
    """How far silu may be off that is rounded, and whose exp(-|gate|) is: a factor where the gate is negative, and else
    a part of what it is divided by."""
    small = np.exp(-np.abs(gate))
    part = np.where(gate < 0, 1, small) / (1 + small)
    exponential = arithmetic.exponential + np.abs(gate) * 2.0**-16
    silu = np.abs(gate) * np.where(gate < 0, small, 1) / (1 + small)
    return _rounded(silu, (arithmetic.activation + exponential * part) * silu + silu_and_mul.LEAST).limit


def _of_two_products(given: Given) -> tuple[Spread, ...]:
    return _of_activation(given, (_product(given, "gate"), _product(given, "up")))


def _of_paired_product(given: Given, apart: int | None = None, weight: str = "weight") -> tuple[Spread, ...]:
    """Of one whose columns are in turn so many of the gate's and of the other's; None: one behind the other."""
    both, spread = _product(given, weight)

    def halves(part: np.ndarray) -> tuple[np.ndarray, ...]:
        turns = part.reshape(len(part), -1, 2, apart or part.shape[-1] // 2)
        return tuple(turns[:, :, which].reshape(len(part), -1) for which in (0, 1))

    parts = map(halves, (both, spread.limit, spread.chance))
    return _of_activation(given, tuple((p, Spread(limit, chance)) for p, limit, chance in zip(*parts, strict=True)))


def _of_feed_forward(given: Given) -> tuple[Spread, ...]:
    """Of the activation, and of what down makes of it and of how far it may be off; sums stay in f32 up to the end."""
    known, down = given.known, given.weights["down"]
    x, norm, eps = (known[name] for name in ("x", "norm", "eps"))
    inner = np.atleast_2d(gemv.reference_norm_swiglu(given.weights["gate_up"].values, x, norm, eps))
    (of_inner,) = _of_paired_product(replace(given, results=(inner,)), weight="gate_up")
    error = _product_error(given, inner.astype(np.float32), down) + _carried(of_inner, down)
    return (_rounded(given.results[0], (error + LEAST).reshape(given.results[0].shape)),)


def _of_silu(given: Given) -> tuple[Spread, ...]:
    gate, up = given.known["gate"], given.known["up"]
    return _of_activation(given, ((gate, _exactly(gate.shape)), (up, _exactly(up.shape))))


def _of_norm(given: Given) -> tuple[Spread, ...]:
    return (_norm(given, given.wide("x"), given.wide("weight"), given.results[0]),)


def _norm(given: Given, rows: np.ndarray, weight: np.ndarray, result: np.ndarray) -> Spread:
    """Rounded before and after the product with the weight, which is exact."""
    cols = rows.shape[-1]
    normed = rows / np.sqrt(np.square(rows).mean(axis=-1, keepdims=True) + given.known["eps"])
    error = (given.arithmetic.root + SURE * np.sqrt(cols) * U32) * np.abs(normed)
    first = _rounded(normed, error)
    size = np.abs(result.astype(np.float32).reshape(normed.shape))
    limit = np.abs(weight) * first.limit
    return Spread(limit + ulp(size + limit), first.chance)


def _rotation(given: Given, x: np.ndarray, angles: np.ndarray, result: np.ndarray) -> Spread:
    """Of rows of heads `[rows, width]`: two products and their sum."""
    rows = np.abs(np.asarray(x, np.float32))
    cos, sin = np.split(np.abs(angles[given.known["pos"] :][: len(rows), None]), 2, axis=-1)
    first, second = np.split(rows.reshape(len(rows), -1, angles.shape[-1]), 2, axis=-1)
    size = np.concatenate([first * cos + second * sin, second * cos + first * sin], axis=-1).reshape(rows.shape)
    return _rounded(result.reshape(rows.shape), given.arithmetic.rotation * size)


def _of_rotation(given: Given) -> tuple[Spread, ...]:
    """Tables may have positions behind the angles."""
    angles = given.known["table"][:, : given.known["head_dim"]]
    return (_rotation(given, np.atleast_2d(given.known["x"]), angles, given.results[0]),)


def _of_query_rotation(given: Given) -> tuple[Spread, ...]:
    """Heads with positions behind them, which are what they are."""
    made = given.results[0].reshape(len(given.results[0]), given.known["heads"], -1)
    own = made[..., :-HEAD_POSITION]
    (spread,) = _of_rotation(replace(given, results=(own.reshape(len(own), -1),)))

    def with_position(part: np.ndarray) -> np.ndarray:
        behind = np.zeros((*own.shape[:2], HEAD_POSITION))
        return np.concatenate([part.reshape(own.shape), behind], axis=-1).reshape(given.results[0].shape)

    return (Spread(with_position(spread.limit), with_position(spread.chance)),)


def _of_token_attention(given: Given) -> tuple[Spread, ...]:
    """Of rotated queries, each of which may be rounded wrong, as may the newest key; and of the new row of the cache,
    of which V is as it was."""
    known, (out, row) = given.known, given.results
    head_dim, position = known["head_dim"], known["pos"]
    ends = known["heads"] * head_dim, (known["heads"] + known["kv_heads"]) * head_dim
    q, k, _ = np.split(np.atleast_2d(known["x"]), ends, axis=-1)
    angles = known["table"][:, :head_dim]
    rotated = rope.reference(q, known["table"], position, head_dim)[0]
    of_q, of_k = _rotation(given, q, angles, rotated), _rotation(given, k, angles, np.ascontiguousarray(row[:, 0]))
    newest = [np.concatenate([known[which][:position], row[:, half].reshape(1, -1)]) for half, which in enumerate("kv")]
    off = _of_scores(of_q, newest[0], head_dim) + _of_scores(of_k, rotated, head_dim)
    attention = replace(given, known={**known, "q": rotated, "k": newest[0], "v": newest[1]}, results=(out,))

    def with_v(part: np.ndarray) -> np.ndarray:
        halves = part.reshape(known["kv_heads"], head_dim)
        return np.stack([halves, np.zeros(halves.shape)], axis=1)

    return (*_of_attention(attention, off), Spread(with_v(of_k.limit), with_v(of_k.chance)))


def _of_scores(inputs: Spread, others: np.ndarray, head_dim: int) -> float:
    """How far a score may be off at most because of what is multiplied with `others`."""
    squares = (inputs.chance * np.square(inputs.limit)).reshape(-1, head_dim).sum(axis=-1).max()
    return float(SURE * np.sqrt(squares / head_dim) * np.abs(others.astype(np.float32)).max())


def _of_attention(given: Given, of_inputs: float = 0.0) -> tuple[Spread, ...]:
    """Weights of positions are rounded, and scores are as far off as their sums are, and `of_inputs`."""
    known, arithmetic = given.known, given.arithmetic
    heads, kv_heads = known["heads"], known["kv_heads"]
    # Positions lie behind each query of a prompt.
    rows = given.wide("q")
    q = rows.reshape(len(np.atleast_2d(rows)), kv_heads, heads // kv_heads, -1)[..., : known["head_dim"]]
    k, v = (given.wide(which).reshape(len(known[which]), kv_heads, -1) for which in "kv")
    seq, (length, _, head_dim) = len(q), k.shape
    scores, sizes = (_scores(*pair) for pair in ((q, k), (np.abs(q), np.abs(k))))
    scores[..., np.arange(length) > known["pos"] + np.arange(seq)[:, None]] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    of_scaling = _of_scores(Spread(2 * U * np.abs(q), np.full(q.shape, arithmetic.query)), k, head_dim)
    of_scores = (arithmetic.score + 2 * (head_dim + 8) * U32) * sizes.max() + of_scaling + of_inputs
    error = (arithmetic.weight + of_scores + length * U32) * _weighted(weights, np.abs(v))
    if given.site.format != "bf16":
        error += _fixed_point_attention(q, k, v, weights)
    error = error.reshape(given.results[0].shape)
    unit = ulp(np.abs(given.results[0].astype(np.float32)) + error)
    return (Spread(error + unit, np.minimum(1, error / unit)),)


def _scores(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """`[kv_heads, group, seq, positions]`."""
    scores: np.ndarray = np.einsum("sgmd,pgd->gmsp", q, k) / np.sqrt(q.shape[-1])
    return scores


def _weighted(weights: np.ndarray, v: np.ndarray) -> np.ndarray:
    """`[seq, kv_heads, group, head_dim]`."""
    return np.einsum("gmsp,pgd->sgmd", weights, v)


def _fixed_point_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Over a cache in 8 bits numbers are off by half a unit, 2^-14 of the largest: those of a row of q, and those of
    weights times scales of a block (kernel_src/cpu/kv_format.h)."""
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


def _unknown(given: Given) -> tuple[Spread, ...]:
    """Of a kernel of which nothing is said here: its reference, but for the last place."""
    units = [ulp(result.astype(np.float32)) for result in given.results]
    return tuple(Spread(unit, np.ones(unit.shape)) for unit in units)


_SPREADS: Mapping[str, Callable[[Given], tuple[Spread, ...]]] = {
    **dict.fromkeys(("add", "append_kv", "append_kv_panels"), _exact),
    **dict.fromkeys(("embed", "embed_rows", *UNPACKING), _of_rows),
    **dict.fromkeys((f"{kernel}_bfp16" for kernel in UNPACKING), _of_float_rows),
    **dict.fromkeys(("gemm", "gemv", "gemm_kv", "norm_gemv"), _of_product),
    **dict.fromkeys(("gemm_add", "gemv_add"), _of_residual),
    **dict.fromkeys(("gemm_silu", "gemv_silu"), _of_two_products),
    **dict.fromkeys(("gemv_f32", "gemv_rows_f32", "norm_gemv_f32"), _of_sums),
    **dict.fromkeys(("rope", "rope_kv"), _of_rotation),
    **dict.fromkeys(
        (
            "flash_attention",
            "flash_attention_panels",
            "decode_attention_kv",
            "decode_attention_panels",
        ),
        _of_attention,
    ),
    "gemm_swiglu": partial(_of_paired_product, apart=BLOCK),
    "norm_gemv_swiglu": _of_paired_product,
    "feed_forward": _of_feed_forward,
    "silu_and_mul": _of_silu,
    "rms_norm": _of_norm,
    "rope_q": _of_query_rotation,
    "token_attention": _of_token_attention,
}
"""By what a kernel computes, whatever the format."""
