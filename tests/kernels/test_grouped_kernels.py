"""Host kernels of grouped weights against numpy, in every instruction set this machine has and for odd shapes, and
products of prompts against those of tokens, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from stages.kernels import ACTIVATIONS
from stages.kernels import kernels as all_kernels
from stages.kernels.grouped import GROUPED, in_bytes
from stages.weights.formats import formats, int4, int4_f32, int6, int8, int8_f32, int8_f32_16, mxfp4, w8a8
from tests.support.cpu_kernels_util import BF16, HOST, U32, Teams, U, format_of, guarded, in_sets, output

NAMES = [stored.name for stored in GROUPED]
PRODUCTS = [*NAMES, *(f"{name}{ACTIVATIONS['int8']}" for name in NAMES)]
"""What comes before the names of products with group-wise weights."""
SHAPES = [(1, 1), (16, 32), (7, 33), (48, 64), (130, 100), (33, 577), (257, 96), (64, 2048), (9, 31)]
EVERY_NUMBER = {
    **{form.FORMAT.name: (form, np.arange(-128, 128, dtype=np.int8)) for form in (int8, int8_f32, int8_f32_16)},
    "int4_f32": (int4_f32, np.arange(16, dtype=np.uint8)),
}
EXTREMES = {"int4": (int4, 0, 15), "int6": (int6, 0, 63), "mxfp4": (mxfp4, 7, 15)}
"""Smallest and largest number of a format."""


@pytest.fixture(scope="module")
def teams(request, library):
    """Each call is done by every team of an instruction set, with equal bits."""
    teams = Teams(library, request.param, (1, 3))
    yield teams
    teams.close()


def weight(rng, name, rows, cols):
    """Panels, and the values that they hold."""
    stored = format_of(name).quantise(rng.standard_normal((rows, cols), np.float32))
    return guarded(format_of(name).arrange(stored, "panels")), format_of(name).dequantise(stored, cols)


def activations(rng, *shape):
    return guarded(rng.standard_normal(shape, np.float32).astype(BF16))


def fixed(x):
    """Rows of x in fixed point, as the products take them: blocks of 512 with 15 bits each."""
    out = np.array(x, np.float64)
    for first in range(0, x.shape[-1], 512):
        block = out[..., first : first + 512]
        largest = np.abs(block).max(axis=-1, keepdims=True)
        unit = 2.0 ** (np.floor(np.log2(largest, where=largest > 0, out=np.zeros_like(largest))) - 13)
        block[...] = np.rint(block / unit) * unit
    return out


def taken(name, x):
    """Rows of x as the products take them."""
    in_eight_bits = HOST[f"{name}_gemm"].activations == "int8"
    return in_bytes(x, format_of(name).values).astype(np.float64) if in_eight_bits else fixed(x)


def assert_product(name, out, x, wide, rounded=True):
    x64, w64 = taken(name, x), np.asarray(wide, np.float64)
    exact, size = x64 @ w64.T, np.abs(x64) @ np.abs(w64).T
    # A minimum is subtracted from products that are up to fifteen times as large as their difference.
    limit = (U if rounded else 0) * np.abs(exact) + 16 * (8 + w64.shape[1] ** 0.5) * U32 * size + 1e-30
    if name == "int4_a8":  # minima, of which none is larger than a weight, are multiplied with sums of 16 bits
        groups = np.pad(np.atleast_2d(x64), ((0, 0), (0, -x64.shape[-1] % 32))).reshape(-1, -(-x64.shape[-1] // 32), 32)
        most = np.abs(groups.sum(axis=-1)).max(axis=-1)
        limit += 2.0**-16 * groups.shape[1] * np.outer(most, np.abs(w64).max(axis=1)).reshape(exact.shape)
    assert (np.abs(np.asarray(out, np.float64) - exact) <= limit).all()


@in_sets(PRODUCTS)
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("weight", [1, -1])
def test_largest_sums_fit(teams, name, sign, weight):
    """Largest numbers and scales, or minima, and the bf16 with most bits, 255 * 2^6 in fixed point: in groups, and in a
    block of 512."""
    cols, rows = 576, 16
    weights = np.full((rows, cols), weight, np.float32)
    weights[:, ::32] = 0  # what is all the same has no minimum
    stored = format_of(name).quantise(weights)
    panels, wide = guarded(format_of(name).arrange(stored, "panels")), format_of(name).dequantise(stored, cols)
    assert_same_sums(teams, name, panels, wide, np.full(cols, sign * 255 / 128, BF16))


def assert_same_sums(teams, name, panels, wide, x):
    """Products of a row, of a few rows and of a prompt's are right, and the same."""
    one = output(len(wide))
    teams(f"{name}_gemv", panels, guarded(x), one, len(wide), len(x))
    assert_product(name, one[None], x[None], wide)
    for count in (1, 2, 7):
        out = output((count, len(wide)))
        teams(f"{name}_gemm", guarded(np.tile(x, (count, 1))), panels, out, count, len(x), len(wide))
        np.testing.assert_array_equal(out.view(np.uint16), np.tile(one, (count, 1)).view(np.uint16))


LOWEST_BYTES = [1, *[2.0**-6] * 511]
"""A block of x with as many numbers of 128, whose low byte is the furthest from zero, as fit."""


@in_sets([form + taken for form in EXTREMES for taken in ACTIVATIONS.values()])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("largest", [False, True])
def test_sums_of_extreme_numbers_fit(teams, name, largest, sign):
    """Every weight is the largest or the smallest of its format, and x has the largest high or low bytes.

    What could overflow are sums of products of bytes in 16 bits (mxfp4, with AVX2), and in 32 bits sums times a scale
    that is a whole number (int4), which is why int6, whose numbers are larger, multiplies in f32.
    """
    form, *numbers_of_it = EXTREMES[format_of(name).name]
    rows, cols = 16, 1024
    most = 255 if form.GROUPED.factors else 127  # the exponent of 1
    scale = np.full((rows, cols // 32, form.GROUPED.scale_values), most, np.uint8)
    numbers = np.full((rows, cols // 32, 32), numbers_of_it[largest], np.uint8)
    stored = form.GROUPED.stored(np.full((rows, form.GROUPED.factors), 2.0**-7, np.float32), scale, numbers)
    panels, wide = guarded(form.FORMAT.arrange(stored, "panels")), form.FORMAT.dequantise(stored, cols)
    x = np.array([*[255 / 128] * 512, *LOWEST_BYTES], BF16) * BF16(sign)
    assert_same_sums(teams, name, panels, wide, x)


@in_sets(PRODUCTS)
@pytest.mark.parametrize("rows, cols", SHAPES)
def test_products(teams, name, rows, cols):
    rng = np.random.default_rng(rows * cols)
    panels, wide = weight(rng, name, rows, cols)
    for count in (1, 2, 3, 4, 7, 13):
        x, out, one = activations(rng, count, cols), output((count, rows)), output((count, rows))
        teams(f"{name}_gemm", x, panels, out, count, cols, rows)
        assert_product(name, out, x, wide)
        for r in range(count):
            teams(f"{name}_gemv", panels, guarded(x[r]), one[r], rows, cols)
        np.testing.assert_array_equal(out.view(np.uint16), one.view(np.uint16))
    exact, together = output(rows, np.float32), output((count, rows), np.float32)
    teams(f"{name}_gemv_f32", panels, guarded(x[0]), exact, rows, cols)
    assert_product(name, exact, x[0], wide, rounded=False)
    teams(f"{name}_gemm_f32", x, panels, together, count, cols, rows)
    np.testing.assert_array_equal(together[0].view(np.uint32), exact.view(np.uint32))
    np.testing.assert_array_equal(together.astype(BF16).view(np.uint16), out.view(np.uint16))
    np.testing.assert_array_equal(exact.astype(BF16).view(np.uint16), one[0].view(np.uint16))


@in_sets([*PRODUCTS, "w8a8"])
def test_rows_of_many_tasks_are_those_of_one(teams, name):
    """More rows than a task of any instruction set has, in panels that are no whole group."""
    rng = np.random.default_rng(7)
    rows, cols, count = 151, 129, 600
    panels, _ = weight(rng, name, rows, cols)
    x, whole = activations(rng, count, cols), output((count, rows))
    teams(f"{name}_gemm", x, panels, whole, count, cols, rows)
    for first, last in ((0, 1), (1, 40), (40, 43), (43, 556), (556, 600)):
        some = output((last - first, rows))
        teams(f"{name}_gemm", guarded(x[first:last]), panels, some, last - first, cols, rows)
        np.testing.assert_array_equal(some.view(np.uint16), whole[first:last].view(np.uint16))


@in_sets([*PRODUCTS, "w8a8"])
def test_more_outputs_than_are_kept(teams, name):
    """Of vectors: chunks of results are written where they belong, also over the residual, and no further."""
    rng = np.random.default_rng(8)
    rows, cols = 9005, 33
    panels, _ = weight(rng, name, rows, cols)
    x, expected, out = activations(rng, 1, cols), output((1, rows)), output(rows)
    teams(f"{name}_gemm", x, panels, expected, 1, cols, rows)
    teams(f"{name}_gemv", panels, x[0], out, rows, cols)
    np.testing.assert_array_equal(out.view(np.uint16), expected[0].view(np.uint16))
    residual, added = activations(rng, rows), output((1, rows))
    teams(f"{name}_gemm_add", x, panels, residual, added, 1, cols, rows)
    out[:] = residual
    teams(f"{name}_gemv_add", panels, x[0], out, out, rows, cols)
    np.testing.assert_array_equal(out.view(np.uint16), added[0].view(np.uint16))


@in_sets(["w8a8"])
@pytest.mark.parametrize("rows, cols", [*SHAPES, (40, 5000)])
def test_integer_products_are_the_reference(teams, name, rows, cols):
    """Of every instruction set, bit for bit, but for what follows a product by the exponential function."""
    rng = np.random.default_rng(rows * cols)
    stored = formats()["w8a8"].quantise(rng.standard_normal((rows, cols), np.float32))
    panels = guarded(formats()["w8a8"].arrange(stored, "panels"))
    for count in (1, 2, 3, 4, 7, 300 if rows * cols < 1000 else 13):
        x, residual = activations(rng, count, cols), activations(rng, count, rows)
        x[0, rng.integers(cols)] = 1000  # an outlier
        x[count // 2] = 0
        sizes = {"rows": count, "cols": cols, "out_cols": rows}
        for kernel, rest in ((f"{name}_gemm", ()), (f"{name}_gemm_add", (residual,))):
            out = output((count, rows))
            teams(kernel, x, panels, *rest, out, *sizes.values())
            expected = all_kernels()[kernel].reference(x, stored, *rest, cols=cols)
            np.testing.assert_array_equal(out.view(np.uint16), expected.view(np.uint16))
        exact, expected = output(rows, np.float32), all_kernels()["w8a8_gemv_f32"].reference(stored, x[0], cols=cols)
        teams("w8a8_gemv_f32", panels, guarded(x[0]), exact, rows, cols)
        np.testing.assert_array_equal(exact.view(np.uint32), expected.view(np.uint32))


@in_sets(["w8a8", *(f"{name}{ACTIVATIONS['int8']}" for name in EVERY_NUMBER if name.startswith("int8"))])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("number", [-128, 127])
def test_products_of_the_largest_bytes_fit(teams, name, sign, number):
    """-128 too, which quantising never makes and a file may hold. AVX2 sums two products of bytes in 16 bits."""
    rows, cols = 33, 640
    form = format_of(name)
    if name == "w8a8":
        stored = w8a8.stored(np.full((rows, cols), number, np.int8), np.ones((rows, 1), np.float32))
    else:
        grouped = EVERY_NUMBER[form.name][0].GROUPED
        numbers = np.full((rows, cols // grouped.group, grouped.group), number, np.int8)
        scales = np.ones((*numbers.shape[:2], grouped.scale_values))
        scales[..., 1:] = 0  # minima
        stored = grouped.scaled(scales, numbers)
    panels = guarded(form.arrange(stored, "panels"))
    expected = (np.full(rows, sign * 127 * cols) * float(number)).astype(BF16)
    for count in (1, 2, 3, 4, 6, 9, 17):
        x, out = guarded(np.full((count, cols), sign * 127, BF16)), output((count, rows))
        teams(f"{name}_gemm", x, panels, out, count, cols, rows)
        np.testing.assert_array_equal(out.view(np.uint16), np.tile(expected, (count, 1)).view(np.uint16))
    teams(f"{name}_gemv", panels, x[0], out[0], rows, cols)
    np.testing.assert_array_equal(out[0].view(np.uint16), expected.view(np.uint16))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@in_sets(["w8a8", *PRODUCTS[len(NAMES) :]])
def test_integer_products_of_what_is_not_finite_are_not(teams, name, value):
    panels, _ = weight(np.random.default_rng(0), name, 33, 40)
    x, out = guarded(np.ones(40, BF16)), output(33)
    x[3] = value
    teams(f"{name}_gemv", panels, x, out, 33, 40)
    assert not np.isfinite(out.astype(np.float32)).any()


@in_sets([*NAMES, "w8a8"])
@pytest.mark.parametrize("vocab, cols", [(5, 1), (33, 100), (64, 577)])
def test_embed(teams, name, vocab, cols):
    rng = np.random.default_rng(cols)
    panels, wide = weight(rng, name, vocab, cols)
    tokens, out = guarded(np.array([vocab - 1, 0, vocab, -1], np.int32)), output((4, cols))
    teams(f"{name}_embed", tokens, panels, out, 4, cols, vocab)
    assert (
        np.abs(out[:2].astype(np.float32) - wide[[vocab - 1, 0]]) <= 2 * U * np.abs(wide[[vocab - 1, 0]]) + 1e-6
    ).all()
    assert not out[2:].astype(np.float32).any()


@in_sets(EVERY_NUMBER)
def test_every_number(teams, name):
    """With scales and minima of both signs, where values are exact in bf16. -128 too, which quantising never makes and
    a file may hold."""
    form, numbers = EVERY_NUMBER[name]
    grouped = form.GROUPED
    numbers = np.resize(numbers, (16, 2, grouped.group))
    row = np.arange(16)[:, None, None]
    scales = ((-1) ** row * 2.0 ** (row % 5 - 2)).repeat(2, axis=1)
    minima = scales * np.random.default_rng(0).integers(-100, 100, scales.shape)
    stored = grouped.scaled(np.concatenate([scales, minima][: grouped.scale_values], axis=-1), numbers)
    cols = numbers[0].size
    wide, panels = form.FORMAT.dequantise(stored, cols), guarded(form.FORMAT.arrange(stored, "panels"))
    product, rows = output((cols, 16)), output((16, cols))
    teams(f"{name}_gemm", guarded(np.eye(cols, dtype=BF16)), panels, product, cols, cols, 16)
    np.testing.assert_array_equal(product.astype(np.float32).T, wide)
    teams(f"{name}_embed", guarded(np.arange(16, dtype=np.int32)), panels, rows, 16, cols, 16)
    np.testing.assert_array_equal(rows.astype(np.float32), wide)


@in_sets(["mxfp4"])
def test_every_scale_and_number_of_mxfp4(teams, name):
    """All 256 scales with all 16 numbers: 0 and 1 reach below f32's normal range, 255 is NaN."""
    scales = np.arange(256, dtype=np.uint8)[:, None]
    stored = mxfp4.stored(scales, np.resize(np.arange(16, dtype=np.uint8), (256, 1, 32)))
    wide = mxfp4.FORMAT.dequantise(stored, 32)
    with np.errstate(over="ignore"):
        exact = (np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6]) * 2.0 ** (np.arange(256)[:, None] - 127)).astype(np.float32)
    np.testing.assert_array_equal(wide[:255], np.tile(np.concatenate([exact, -exact], axis=1), 2)[:255])
    assert np.isnan(wide[255]).all()
    panels, rows = guarded(mxfp4.FORMAT.arrange(stored, "panels")), output((256, 32))
    teams(f"{name}_embed", guarded(np.arange(256, dtype=np.int32)), panels, rows, 256, 32, 256)
    normal = np.where(np.abs(wide) < 2.0**-126, 0, wide)
    np.testing.assert_array_equal(rows.astype(np.float32), normal.astype(BF16).astype(np.float32))
    for column in range(16):
        x, product = guarded(np.eye(32, dtype=BF16)[column]), output(256, np.float32)
        teams(f"{name}_gemv_f32", panels, x, product, 256, 32)
        # Sums in fixed point are up to 2^17 times as large.
        np.testing.assert_array_equal(product[:237], wide[:237, column])
        assert np.isnan(product[255])


def test_mxfp4_holds_what_it_holds():
    """Its values come back as they are, and others become the nearest, halves the even one of two."""
    rng = np.random.default_rng(3)
    stored = mxfp4.stored(rng.integers(1, 254, (40, 3)).astype(np.uint8), rng.integers(0, 16, (40, 3, 32), np.uint8))
    wide = mxfp4.FORMAT.dequantise(stored, 96)
    np.testing.assert_array_equal(mxfp4.FORMAT.dequantise(mxfp4.FORMAT.quantise(wide), 96), wide)
    row = np.array([[6, -6, 0.25, 0.26, 0.75, -1.25, 1.75, 2.5, -3.5, 3.51, 5, 5.01, *[0] * 20]], np.float32)
    nearest = [6, -6, 0, 0.5, 1, -1, 2, 2, -4, 4, 4, 6]
    np.testing.assert_array_equal(mxfp4.FORMAT.dequantise(mxfp4.FORMAT.quantise(row), 32)[0, :12], nearest)
