"""The host kernels against numpy, in every instruction set this machine has and for odd shapes.

Every tensor ends right before a page that must not be touched. Bounds are those of the arithmetic: a
result is rounded once to bf16 (relative error U), a sum of n products in f32 errs by n * U32 of the
sum of their magnitudes.
"""

from __future__ import annotations

import ctypes
import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llama_npu2.errors import UserError
from stages.kernels import (
    Arg,
    flash_attention,
    kv_rows,
    rms_norm,
    scale,
    short_conv,
    signature,
)
from stages.kernels.append_kv import reference_panels
from stages.targets.cpu.objects import compile_host
from stages.targets.cpu.prototypes import prototypes
from stages.weights.constants import KV_BLOCK_POSITIONS
from stages.weights.formats import formats
from tests.support.cpu_kernels_util import (
    BF16,
    CPU,
    HOST,
    PLAIN_ISA,
    U32,
    Kernels,
    Teams,
    U,
    compiled,
    guarded,
    in_usual_sets,
    lacking_objects,
    link,
    machine_isas,
    output,
    panels,
)


@pytest.fixture(scope="module", params=machine_isas())
def kernels(request, library):
    kernels = Kernels(library, request.param)
    yield kernels
    kernels.close()


@pytest.fixture(scope="module")
def teams(library, kernels):
    """Each call is done by every team, with equal bits."""
    teams = Teams(library, kernels.isa, (1, 2, 3, 5))
    yield teams
    teams.close()


@pytest.mark.parametrize("isa", ["amx", "avx512bf16", "avx2", PLAIN_ISA])
def test_instruction_sets_of_this_machine(library, isa):
    if isa not in machine_isas():
        pytest.skip(f"this machine has no {isa}: its kernels are not tested")
    team = Kernels(library, isa)
    assert team.isa == isa
    team.close()


@pytest.mark.thorough
@pytest.mark.parametrize("source", lacking_objects())
def test_what_this_machine_cannot_run_compiles(source, artifacts):
    assert compiled(source, artifacts / ".cache/objects").is_file()


@pytest.fixture
def rng():
    return np.random.default_rng(7)


def normal(rng, *shape):
    return guarded(rng.standard_normal(shape, np.float32).astype(BF16))


def wide(array):
    return np.asarray(array, np.float64)


def assert_within(out, expected, bound):
    """`bound` is on top of the one rounding of the result."""
    error = np.abs(wide(out) - expected)
    limit = U * np.abs(expected) + bound + 1e-30
    assert np.all(error <= limit), f"error {np.nanmax(error / limit)} of the bound, {np.isnan(error).sum()} NaN"


# -- elementwise ---------------------------------------------------------------------------------

ROWS_COLS = [(1, 1), (1, 2048), (3, 5), (7, 33), (2, 63), (130, 257)]


@pytest.mark.parametrize("shape", ROWS_COLS)
def test_add_is_the_rounded_sum(teams, rng, shape):
    a, b, out = normal(rng, *shape), normal(rng, *shape), output(shape)
    teams("add", a, b, out, *shape)
    expected = (a.astype(np.float32) + b.astype(np.float32)).astype(BF16)
    np.testing.assert_array_equal(out.view(np.uint16), expected.view(np.uint16))


@pytest.mark.parametrize("shape", ROWS_COLS)
def test_gelu_and_mul(teams, rng, shape):
    gate, up, out = normal(rng, *shape), normal(rng, *shape), output(shape)
    gate[...] = (wide(gate) * 10).astype(BF16)
    teams("silu_and_mul", gate, up, out, *shape, 1)
    torch_gelu = 0.5 * wide(gate) * (1 + np.tanh(np.sqrt(2 / np.pi) * (wide(gate) + 0.044715 * wide(gate) ** 3)))
    np.testing.assert_allclose(wide(out), torch_gelu * wide(up), rtol=2 * U, atol=1e-4)


@pytest.mark.parametrize("once", [0, 1])
@pytest.mark.parametrize("head_dim", [10, 48, 128])
def test_norms_of_heads_and_of_results(teams, rng, head_dim, once):
    """Both are what the separate kernels make, bit for bit."""
    rows, heads, pos, scalars = 5, 3, 7, (1e-5, 1.0, once)
    x, weight = normal(rng, rows * heads, head_dim), guarded(rng.standard_normal(head_dim).astype(BF16))
    table, normed = guarded(rope_table(pos + rows, head_dim)), output(x.shape)
    teams("rms_norm", x, weight, normed, *x.shape, *scalars)
    want = rms_norm.reference(x, weight, *scalars)
    np.testing.assert_allclose(wide(normed), wide(want), rtol=2 * U, atol=1e-3)
    rotated, expected = output(x.shape), output(x.shape)
    teams("rope", normed, table, expected, rows, pos, heads, head_dim)
    teams("norm_rope", x, table, weight, rotated, rows, pos, heads, head_dim, *scalars)
    assert (rotated.view(np.uint16) == expected.view(np.uint16)).all()
    residual, added, sums = normal(rng, *x.shape), output(x.shape), output(x.shape)
    teams("add", residual, normed, sums, *x.shape)
    teams("norm_add", x, residual, weight, added, *x.shape, *scalars)
    assert (added.view(np.uint16) == sums.view(np.uint16)).all()


@pytest.mark.parametrize("rows, cols, out_cols", [(1, 33, 7), (3, 64, 48), (20, 75, 331)])
def test_biases_are_added_before_rounding(teams, rng, rows, cols, out_cols):
    x, weight = normal(rng, rows, cols), normal(rng, out_cols, cols)
    bias = guarded((cols**0.5 * rng.standard_normal(out_cols)).astype(BF16))
    out, row = output((rows, out_cols)), output(out_cols)
    packed = guarded(formats()["bf16"].pack(np.asarray(weight), "panels"))
    teams("gemm_bias", x, packed, bias, out, rows, cols, out_cols)
    exact = wide(x) @ wide(weight).T + wide(bias)
    assert (np.abs(wide(out) - exact) <= U * np.abs(exact) + 1e-5 * cols).all(), "rounded once"
    teams("gemv_bias", packed, x[0], bias, row, out_cols, cols)
    assert (row.view(np.uint16) == out[0].view(np.uint16)).all()


@pytest.mark.parametrize("rows, pos, cols, taps", [(1, 0, 7, 3), (2, 0, 64, 3), (9, 5, 331, 4), (40, 1, 600, 1)])
def test_short_conv(teams, rng, rows, pos, cols, taps):
    """The reference's bits; nothing but the rows' history is written."""
    weight, bcx = normal(rng, cols, 1, taps), normal(rng, rows, 3 * cols)
    history = normal(rng, pos + rows + taps - 1, cols)
    history[: taps - 1] = 0
    before, out = history.copy(), output((rows, cols))
    packed = guarded(formats()["bf16"].pack(np.asarray(weight), "taps"))
    teams("short_conv", bcx, packed, history, out, rows, pos, cols, taps)
    want_history, want = short_conv.reference(bcx, weight, before, pos, taps)
    assert (out.view(np.uint16) == want.view(np.uint16)).all()
    assert (history.view(np.uint16) == want_history.view(np.uint16)).all()
    exact = sum(wide(history[pos + t : pos + t + rows]) * wide(weight[:, 0, t]) for t in range(taps))
    exact = exact * wide(bcx[:, cols : 2 * cols])
    np.testing.assert_allclose(wide(out), exact, rtol=3 * U, atol=1e-30)


ATTENTION = [
    ("flash_attention_panels", "decode_attention_panels"),
    ("flash_attention_panels_sinks", "decode_attention_panels_sinks"),
    ("int8_rows_flash_attention_panels", "int8_rows_decode_attention_panels"),
    ("int8_rows_flash_attention_panels_sinks", "int8_rows_decode_attention_panels_sinks"),
]
"""The kernels of a prompt's rows and of a token's."""


@pytest.mark.sampled(30)
@in_usual_sets("kernels", "prompt, token", {pair: pair for pair in ATTENTION})
@pytest.mark.parametrize("sees", [1, 2, 16, 17, 100, 127, 128, 129, 255, 256, 257, 300, 700])
def test_windows(teams, rng, sees, prompt, token):
    """Against the reference; and a row is the same bits in a prompt, in its pieces and as a token."""
    heads, kv_heads, head_dim, positions = 4, 2, 16, 600
    sizes = (heads, kv_heads, head_dim, 24.0, sees)
    stored = HOST[prompt].stored
    sinks = [guarded(3 * normal(rng, heads))] if prompt.endswith("sinks") else []
    k, v = (normal(rng, positions, kv_heads, head_dim) for _ in "kv")
    panels = [guarded(np.ascontiguousarray(p)) for p in reference_panels(k, v, stored)]
    q, whole = normal(rng, positions, heads * head_dim), output((positions, heads * head_dim))
    teams(prompt, q, *panels, *sinks, whole, positions, 0, *sizes)
    want = flash_attention.reference(
        q, k.reshape(positions, -1), v.reshape(positions, -1), 0, *sizes[:2], *sizes[3:], *sinks
    )
    assert np.abs(wide(whole) - wide(want)).max() < (0.03 if stored == "bf16" else 0.1)
    for first, last in ((sees, min(sees + 40, positions)), (positions - 130, positions)):
        first = min(first, positions - 1)
        piece, row = output((last - first, heads * head_dim)), output(heads * head_dim)
        teams(prompt, q[first:last], *panels, *sinks, piece, last - first, first, *sizes)
        assert (piece.view(np.uint16) == whole[first:last].view(np.uint16)).all()
        teams(token, q[last - 1], *panels, *sinks, row, last - 1, *sizes)
        assert (row.view(np.uint16) == whole[last - 1].view(np.uint16)).all()


@in_usual_sets("kernels", "prompt, token", {pair: pair for pair in ATTENTION if pair[0].endswith("sinks")})
def test_sinks_of_any_size(teams, rng, prompt, token):
    """A sink far above all scores takes all, one far below takes nothing, one between its share: also of one score."""
    heads, head_dim, positions = 4, 16, 300
    stored, sizes = HOST[prompt].stored, (heads, 1, head_dim, 16.0, 700)
    k, v = (normal(rng, positions, 1, head_dim) for _ in "kv")
    panels = [guarded(np.ascontiguousarray(p)) for p in reference_panels(k, v, stored)]
    q, out = (
        guarded((4 * wide(normal(rng, positions, heads * head_dim))).astype(BF16)),
        output((positions, heads * head_dim)),
    )
    sinks = guarded(np.array([100, -100, 12, 3], BF16))
    teams(prompt, q, *panels, sinks, out, positions, 0, *sizes)
    keys = k if stored == "bf16" else wide(k)
    scores = np.einsum("phd,kd->hpk", wide(q).reshape(positions, heads, -1), wide(keys)[:, 0]) / 4
    scores = np.where(np.tri(positions, dtype=bool), scores, -np.inf)
    both = np.concatenate([scores, np.broadcast_to(wide(sinks)[:, None, None], (heads, positions, 1))], axis=-1)
    shares = np.exp(both - both.max(axis=-1, keepdims=True))
    shares = (shares / shares.sum(axis=-1, keepdims=True))[..., :-1]
    assert shares[0].sum() < 1e-20 and shares[1].sum(axis=-1).min() > 0.999
    between = shares[2:].sum(axis=-1)
    assert ((between > 0.1) & (between < 0.9)).any(axis=-1).all(), "some scores are about as large as a sink"
    want = np.einsum("hpk,kd->phd", shares, wide(v)[:, 0]).reshape(positions, -1)
    assert np.abs(wide(out) - want).max() < (0.03 if stored == "bf16" else 0.15)
    assert np.abs(wide(out).reshape(positions, heads, -1)[:, 0]).max() < 1e-20
    for at in (0, 1, 127, 128, 299):
        row = output(heads * head_dim)
        teams(token, q[at], *panels, sinks, row, at, *sizes)
        assert (row.view(np.uint16) == out[at].view(np.uint16)).all()


@pytest.mark.parametrize("cols", [1, 15, 64, 1001])
def test_scale(teams, rng, cols):
    x, out = guarded(rng.standard_normal(cols, np.float32)), output(cols, np.float32)
    teams("scale", x, out, 1, cols, 0.37)
    assert (out == scale.reference(x, 0.37)).all()


@pytest.mark.parametrize("shape", ROWS_COLS)
def test_silu_and_mul(teams, rng, shape):
    gate, up, out = normal(rng, *shape), normal(rng, *shape), output(shape)
    gate[...] = (wide(gate) * 10).astype(BF16)
    teams("silu_and_mul", gate, up, out, *shape)
    expected = wide(gate) / (1 + np.exp(-wide(gate))) * wide(up)
    assert_within(out, expected, 1e-5 * np.abs(expected))  # exp2's argument errs by |x| * U32


@pytest.mark.parametrize("shape", ROWS_COLS)
def test_rms_norm(teams, rng, shape):
    x, weight, out = normal(rng, *shape), normal(rng, shape[1]), output(shape)
    teams("rms_norm", x, weight, out, *shape, 1e-5)
    x64 = wide(x)
    scaled = x64 / np.sqrt((x64**2).mean(axis=1, keepdims=True) + 1e-5)
    # rounded twice: before and after the weight
    assert_within(out, scaled * wide(weight), 1.01 * U * np.abs(scaled * wide(weight)))
    once = scaled.astype(np.float32).astype(BF16).astype(np.float32) * weight.astype(np.float32)
    assert (out == once.astype(BF16)).mean() > 0.98  # all but those that f32 puts on the other side of a tie


def special_values():
    """Every bf16 pattern's sum with a value that forces rounding, NaN and infinity included."""
    bits = np.arange(65536, dtype=np.uint32).astype(np.uint16)
    return bits.view(BF16)


def test_rounding_is_the_same_everywhere(library, kernels):
    a, out = guarded(special_values()), output(65536)
    shifted = np.roll(special_values(), 12345)
    b = guarded((wide(np.nan_to_num(shifted, posinf=0, neginf=0)) * 2.0**-9).astype(BF16))
    kernels("add", a, b, out, 256, 256)
    with np.errstate(over="ignore", invalid="ignore"):
        total = a.astype(np.float32) + b.astype(np.float32)
        expected = total.astype(BF16).astype(np.float32)
    tiny = np.abs(total) < 2.0**-126
    expected[tiny] = np.copysign(np.float32(0), total[tiny])  # subnormals are flushed
    nan = np.isnan(total)
    assert np.isnan(out[nan].astype(np.float32)).all()
    flushed = tiny | (np.abs(a.astype(np.float32)) < 2.0**-126) | (np.abs(b.astype(np.float32)) < 2.0**-126)
    same = ~nan & ~flushed
    np.testing.assert_array_equal(out[same].astype(np.float32), expected[same])
    assert (np.abs(out[flushed & ~nan].astype(np.float32) - expected[flushed & ~nan]) <= 2.0**-126).all()


def test_nan_and_infinity_survive(kernels):
    x = guarded(np.array([np.nan, np.inf, -np.inf, 1] * 5, BF16))
    one, out = guarded(np.ones(20, BF16)), output(20)
    kernels("silu_and_mul", x, one, out, 1, 20)
    row = np.asarray(out[:4], np.float32)
    assert np.isnan(row[0]) and row[1] == np.inf and (np.isnan(row[2]) or row[2] == 0)
    weight = guarded(panels(np.ones((16, 20), BF16)))
    for name, result in (("gemm", output(16)), ("gemv", output(16))):
        tensors = (x, weight, result, 1, 20, 16) if name == "gemm" else (weight, x, result, 16, 20)
        kernels(name, *tensors)
        assert np.isnan(np.asarray(result, np.float32)).all()


# -- projections ---------------------------------------------------------------------------------

PROJECTIONS = [  # rows, cols, out_cols
    (1, 1, 1),
    (1, 64, 48),
    (2, 33, 17),
    (5, 130, 100),
    (6, 2, 16),
    (7, 31, 64),
    (13, 2049, 65),
    (64, 80, 128),
    (259, 63, 130),
    (600, 48, 40),
    (3, 4100, 33),
]


def product(x, weight):
    """The exact product and the bound on the error of its f32 sum."""
    bound = (x.shape[-1] + 2) * U32 * (np.abs(wide(x)) @ np.abs(wide(weight)).T)
    return wide(x) @ wide(weight).T, bound


@pytest.mark.parametrize("rows, cols, out_cols", PROJECTIONS)
def test_gemm(teams, rng, rows, cols, out_cols):
    x, weight, out = normal(rng, rows, cols), normal(rng, out_cols, cols), output((rows, out_cols))
    packed, exact, one = guarded(panels(weight)), output((rows, out_cols), np.float32), output(out_cols, np.float32)
    teams("gemm", x, packed, out, rows, cols, out_cols)
    assert_within(out, *product(x, weight))
    teams("gemm_f32", x, packed, exact, rows, cols, out_cols)
    np.testing.assert_array_equal(out.view(np.uint16), exact.astype(BF16).view(np.uint16))
    teams("gemv_f32", packed, guarded(x[-1]), one, out_cols, cols)
    np.testing.assert_array_equal(exact[-1].view(np.uint32), one.view(np.uint32))


@pytest.mark.parametrize("rows, cols, out_cols", PROJECTIONS)
def test_gemv(teams, rng, rows, cols, out_cols):
    x, weight = normal(rng, cols), normal(rng, out_cols, cols)
    packed, out, logits = guarded(panels(weight)), output(out_cols), output(out_cols, np.float32)
    teams("gemv", packed, x, out, out_cols, cols)
    teams("gemv_f32", packed, x, logits, out_cols, cols)
    expected, bound = product(x, weight)
    assert_within(out, expected, bound)
    assert np.all(np.abs(logits - expected) <= bound + 1e-30)
    np.testing.assert_array_equal(out.view(np.uint16), logits.astype(BF16).view(np.uint16))


@pytest.mark.parametrize("cols, q_cols, kv_cols", [(1, 1, 1), (33, 70, 17), (576, 576, 192), (300, 31, 500)])
def test_q_k_and_v_of_one_product(teams, rng, cols, q_cols, kv_cols):
    widths, x = (q_cols, kv_cols, kv_cols), normal(rng, cols)
    weights, biases = [normal(rng, width, cols) for width in widths], [normal(rng, width) for width in widths]
    packed = [guarded(panels(weight)) for weight in weights]
    for name, added in (("gemv_qkv", []), ("gemv_qkv_bias", biases)):
        results = [output(width) for width in widths]
        teams(name, *packed, x, *added, *results, q_cols, kv_cols, cols)
        for i, result in enumerate(results):
            expected, bound = product(x, weights[i])
            more = wide(added[i]) if added else 0
            assert_within(result, expected + more, bound + U32 * np.abs(expected + more))


@pytest.mark.parametrize(
    "rows, cols, q_cols, kv_cols", [(1, 1, 1, 1), (5, 33, 70, 17), (2, 576, 576, 192), (40, 300, 31, 500)]
)
def test_q_k_and_v_of_several_rows(teams, rng, rows, cols, q_cols, kv_cols):
    widths, x = (q_cols, kv_cols, kv_cols), normal(rng, rows, cols)
    weights, biases = [normal(rng, width, cols) for width in widths], [normal(rng, width) for width in widths]
    packed = [guarded(panels(weight)) for weight in weights]
    for name, added in (("gemm_qkv", []), ("gemm_qkv_bias", biases)):
        results = [output((rows, width)) for width in widths]
        teams(name, x, *packed, *added, *results, rows, cols, q_cols, kv_cols)
        for i, result in enumerate(results):
            expected, bound = product(x, weights[i])
            more = wide(added[i]) if added else 0
            assert_within(result, expected + more, bound + U32 * np.abs(expected + more))


@pytest.mark.parametrize("rows, cols, out_cols", [*PROJECTIONS, (1, 31, 300), (1, 33, 9), (1, 2049, 1000)])
def test_gemv_rows(teams, rng, rows, cols, out_cols):
    x, weight, out = normal(rng, cols), normal(rng, out_cols, cols), output(out_cols, np.float32)
    teams("gemv_rows_f32", weight, x, out, out_cols, cols)
    expected, bound = product(x, weight)
    assert np.all(np.abs(out - expected) <= bound + 1e-30)


@pytest.mark.parametrize("rows, cols, out_cols", PROJECTIONS[2:9])
def test_fused_epilogues_equal_the_separate_kernels(kernels, rng, rows, cols, out_cols):
    x, residual = normal(rng, rows, cols), normal(rng, rows, out_cols)
    gate, up = (guarded(panels(normal(rng, out_cols, cols))) for _ in range(2))
    shape, size = (rows, out_cols), (rows, cols, out_cols)
    gates, ups, expected, out = output(shape), output(shape), output(shape), output(shape)

    kernels.run(kernels.call("gemm", x, gate, gates, *size), kernels.call("gemm", x, up, ups, *size))
    kernels("add", gates, residual, expected, *shape)
    kernels("gemm_add", x, gate, residual, out, *size)
    np.testing.assert_array_equal(out.view(np.uint16), expected.view(np.uint16))
    kernels("silu_and_mul", gates, ups, expected, *shape)
    kernels("gemm_silu", x, gate, up, out, *size)
    np.testing.assert_array_equal(out.view(np.uint16), expected.view(np.uint16))

    size = (out_cols, cols)
    kernels("gemv", gate, x, gates, *size)
    kernels("gemv", up, x, ups, *size)
    kernels("add", gates, residual, expected, 1, out_cols)
    out[0] = residual[0]
    kernels("gemv_add", gate, x, out, out, *size)  # in place
    np.testing.assert_array_equal(out[0].view(np.uint16), expected[0].view(np.uint16))
    kernels("silu_and_mul", gates, ups, expected, 1, out_cols)
    kernels("gemv_silu", gate, up, x, out, *size)
    np.testing.assert_array_equal(out[0].view(np.uint16), expected[0].view(np.uint16))


def test_a_row_of_gemm_does_not_depend_on_the_other_rows_or_the_threads(library, kernels, rng):
    x, weight = normal(rng, 300, 70), guarded(panels(normal(rng, 90, 70)))
    out = output((300, 90))
    kernels("gemm", x, weight, out, 300, 70, 90)
    for threads, first, count in [(1, 0, 300), (3, 17, 5), (5, 299, 1), (2, 100, 101)]:
        team, part = Kernels(library, kernels.isa, threads), output((count, 90))
        team("gemm", guarded(x[first : first + count]), weight, part, count, 70, 90)
        team.close()
        np.testing.assert_array_equal(part.view(np.uint16), out[first : first + count].view(np.uint16))


def test_what_an_earlier_call_left_in_scratch_does_not_matter(kernels, rng):
    nan = guarded(np.full((40, 200), np.nan, BF16))
    x, weight = normal(rng, 40, 77), normal(rng, 48, 77)
    packed, out = guarded(panels(weight)), output((40, 48))
    for name, sizes in (("gemm", (40, 200, 48)), ("gemv", (48, 200)), ("decode_attention_kv", (39, 5, 1, 40))):
        wide_weight, nothing = guarded(panels(nan)), output((40, 200))
        arguments = {
            "gemm": (nan, wide_weight, nothing),
            "gemv": (wide_weight, nan, nothing),
            "decode_attention_kv": (nan, nan, nothing),
        }
        kernels(name, *arguments[name], *sizes)
        kernels("gemm", x, packed, out, 40, 77, 48)
        assert_within(out, *product(x, weight))
        kernels("gemv", packed, x, out, 48, 77)
        assert_within(out[:1], *product(x[:1], weight))
        q, kv = normal(rng, 3 * 46), normal(rng, 9, 46)
        kernels("decode_attention_panels", q, *kv_panels(kv, kv, 1, 46), out, 8, 3, 1, 46)
        assert_within(out.ravel()[: q.size][None], *attention(q[None], kv, kv, 8, 3, 1, 46))


@pytest.mark.parametrize("vocab, cols", [(5, 1), (33, 17), (100, 64), (64, 2051)])
def test_embed_takes_rows_out_of_panels(teams, rng, vocab, cols):
    table = normal(rng, vocab, cols)
    tokens = guarded(np.array([vocab - 1, 0, vocab // 2, 0, vocab, -1, vocab - 1], np.int32))
    out = output((len(tokens), cols))
    teams("embed", tokens, guarded(panels(table)), out, len(tokens), cols, vocab)
    inside = (tokens >= 0) & (tokens < vocab)
    np.testing.assert_array_equal(out[inside].view(np.uint16), table[tokens[inside]].view(np.uint16))
    assert not out[~inside].astype(np.float32).any()


def test_embed_rows_takes_whole_rows(teams, rng):
    table = normal(rng, 33, 17)
    tokens = guarded(np.array([32, 0, 7, 33, -1], np.int32))
    out = output((len(tokens), 17))
    teams("embed_rows", tokens, guarded(table), out, len(tokens), 17, 33)
    np.testing.assert_array_equal(out[:3].view(np.uint16), table[[32, 0, 7]].view(np.uint16))
    assert not out[3:].astype(np.float32).any()


PROBE = """
#include "vec.h"
#include "operand.h"
#include "epilogue.h"
#include "streams.h"
#include "gemv_core.h"
using namespace ISA;
extern "C" float product_of_fresh_line(bf16 value) {
    bf16 line[line_elements];
    for (bf16 &element : line) element = value;
    const bf16 *panels[] = {line};
    const Operand ones[] = {operand(0x3f80), operand(0x3f80)};
    Sum sum = {};
    add_lines<Panels<1>>(panels, ones, 0, 0, &sum);
    for (bf16 &element : line) element = 0;
    return sum[0];
}
"""


@pytest.mark.skipif("avx512bf16" not in machine_isas(), reason="the assembly is for avx512bf16")
def test_assembly_reads_what_was_stored_just_before(tmp_path: Path) -> None:
    """The compiler has to know that it reads the line: else it drops the stores, which nothing else reads."""
    source = tmp_path / "probe.cc"
    source.write_text(PROBE)
    for header in ("one_isa.h", "system.h"):
        (tmp_path / header).symlink_to(CPU / header)
    compile_host(source, tmp_path / "probe.o", "", "avx512bf16")
    library = link([tmp_path / "probe.o"], tmp_path / "probe.so")
    probe = ctypes.CDLL(str(library)).product_of_fresh_line
    probe.restype = ctypes.c_float
    for value in (1.5, -3.0, 64.0):
        assert probe(int(BF16(value).view(np.uint16))) == 2 * value


# -- positions and attention ---------------------------------------------------------------------


def rope_table(positions, head_dim):
    angles = np.outer(np.arange(positions), 10000.0 ** (-2.0 * np.arange(head_dim // 2) / head_dim))
    return np.hstack([np.cos(angles), np.sin(angles)]).astype(np.float32)


@pytest.mark.parametrize("rows, pos, heads, head_dim", [(1, 9, 3, 2), (5, 0, 2, 16), (9, 3, 4, 64), (2, 1, 1, 90)])
def test_rope(teams, rng, rows, pos, heads, head_dim):
    table = guarded(rope_table(pos + rows, head_dim))
    x = normal(rng, rows, heads * head_dim)
    out = output(x.shape)
    teams("rope", x, table, out, rows, pos, heads, head_dim)
    half = head_dim // 2
    cosine, sine = (wide(part)[pos:, None] for part in (table[:, :half], table[:, half:]))
    a, b = np.split(wide(x).reshape(rows, heads, head_dim), 2, axis=2)
    expected = np.concatenate([a * cosine - b * sine, b * cosine + a * sine], axis=2).reshape(x.shape)
    assert_within(out, expected, 4 * U32 * np.abs(wide(x)).max())
    teams("rope", x, table, x, rows, pos, heads, head_dim)
    np.testing.assert_array_equal(x.view(np.uint16), out.view(np.uint16))


INT8 = ("int8_rows_append_kv_panels", "int8_rows_flash_attention_panels", "int8_rows_decode_attention_panels")
KEPT = {"bf16": ("append_kv_panels", "flash_attention_panels", "decode_attention_panels"), "int8_rows": INT8}
IN_ROWS = {
    "bf16": ("append_kv", "decode_attention_kv"),
    "int8_rows": ("int8_rows_append_kv", "int8_rows_decode_attention_kv"),
}
in_all_formats = in_usual_sets("kernels", "stored", KEPT)


def kept(tensor, head_dim, stored):
    """Values of K or V as a cache holds them."""
    rows = tensor.reshape(-1, head_dim)
    return formats()[stored].dequantise(formats()[stored].quantise(rows), head_dim).reshape(tensor.shape)


def attention(q, k, v, pos, heads, kv_heads, head_dim, stored="bf16"):
    """The exact attention and the error bound: weights are rounded to bf16 before they meet V, or to fixed point."""
    seq, total = len(q), pos + len(q)
    k, v = (kept(tensor, head_dim, stored) for tensor in (k, v))
    q = wide(q).reshape(seq, kv_heads, heads // kv_heads, head_dim)
    k, v = (wide(t)[:total].reshape(total, kv_heads, head_dim) for t in (k, v))
    scores = np.einsum("sgqd,pgd->gqsp", q, k) / np.sqrt(head_dim)
    magnitude = np.einsum("sgqd,pgd->gqsp", np.abs(q), np.abs(k)).max() / np.sqrt(head_dim)
    scores[..., np.arange(total)[None, :] > pos + np.arange(seq)[:, None]] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    out, sizes = (np.einsum("gqsp,pgd->sgqd", weights, t).reshape(seq, -1) for t in (v, np.abs(v)))
    # a score errs by its f32 sum, a weight by as much relatively
    bound = (U + 2 * (head_dim + 8) * U32 * magnitude + total * U32) * sizes
    return out, bound if stored == "bf16" else bound + fixed_point_errors(q, k, v, weights).reshape(seq, -1)


def fixed_point_errors(q, k, v, weights):
    """Of attention by heads `[seq, kv_heads, group, head_dim]`, with weights `[kv_heads, group, seq, positions]`.
    Numbers are off by half of 2^-13 of the largest: of q's of a row; of weights times scales of a block."""
    half = 2.0**-14
    most = np.abs(q).max(axis=-1, keepdims=True) * np.abs(k).sum(axis=-1).max() / np.sqrt(q.shape[-1])
    errors = 2 * half * most * np.einsum("gqsp,pgd->sgqd", weights, np.abs(v))
    scales = np.abs(v).max(axis=-1, keepdims=True) / 127
    numbers = np.divide(np.abs(v), scales, out=np.zeros_like(v), where=scales != 0)
    scaled = weights * scales.T[0, :, None, None]
    for first in range(0, len(v), KV_BLOCK_POSITIONS):
        block = slice(first, first + KV_BLOCK_POSITIONS)
        errors += half * np.einsum("gqs,gd->sgqd", scaled[..., block].max(axis=-1), numbers[block].sum(axis=0))
    return errors


def kv_panels(k, v, kv_heads, head_dim, stored="bf16"):
    """The cache in panels that holds k and v, NaN where nothing was written."""
    missing = -len(k) % KV_BLOCK_POSITIONS
    rows = [np.full((len(k) + missing, kv_heads, head_dim), np.nan, BF16) for _ in range(2)]
    for cache, tensor in zip(rows, (k, v), strict=True):
        cache[: len(tensor)] = tensor.reshape(-1, kv_heads, head_dim)
    if stored == "bf16" and len(v) % 2:
        rows[1][len(v)] = 0  # the last position's partner
    return tuple(map(guarded, reference_panels(*rows, stored)))


ATTENTION = [  # seq, pos, heads, kv_heads, head_dim
    (1, 0, 1, 1, 16),
    (5, 0, 4, 2, 16),
    (7, 3, 3, 1, 2),
    (33, 0, 4, 4, 64),
    (130, 0, 8, 2, 64),
    (19, 300, 6, 3, 80),
    (257, 130, 2, 1, 128),
    (3, 127, 10, 2, 46),
    (40, 5, 40, 1, 34),
    (300, 0, 1, 1, 64),
]


@in_all_formats
@pytest.mark.parametrize("seq, pos, heads, kv_heads, head_dim", ATTENTION)
def test_flash_attention(teams, rng, stored, seq, pos, heads, kv_heads, head_dim):
    shape, (_, kernel, _) = (heads, kv_heads, head_dim), KEPT[stored]
    q, out = normal(rng, seq, heads * head_dim), output((seq, heads * head_dim))
    k, v = (normal(rng, pos + seq, kv_heads * head_dim) for _ in range(2))
    teams(kernel, q, *kv_panels(k, v, *shape[1:], stored), out, seq, pos, *shape)
    assert_within(out, *attention(q, k, v, pos, *shape, stored))


@pytest.mark.sampled(96)
@in_all_formats
@pytest.mark.parametrize("pos", [0, 1, 15, 127, 128, 255, 256, 700])
@pytest.mark.parametrize(
    "heads, kv_heads, head_dim", [(4, 4, 16), (8, 2, 64), (7, 1, 80), (6, 3, 34), (5, 5, 96), (3, 1, 128)]
)
def test_decode_attention(teams, rng, stored, pos, heads, kv_heads, head_dim):
    shape, (_, _, kernel) = (heads, kv_heads, head_dim), KEPT[stored]
    q = normal(rng, 1, heads * head_dim)
    k, v = (normal(rng, pos + 1, kv_heads * head_dim) for _ in range(2))
    out = output(q.shape)
    teams(kernel, q, *kv_panels(k, v, *shape[1:], stored), out, pos, *shape)
    assert_within(out, *attention(q, k, v, pos, *shape, stored))


@pytest.mark.sampled(24)
@in_usual_sets("kernels", "stored", {stored: (*names, *IN_ROWS[stored]) for stored, names in KEPT.items()})
@pytest.mark.parametrize("pos", [0, 1, 128, 300])
@pytest.mark.parametrize("heads, kv_heads, head_dim", [(4, 4, 16), (8, 2, 64), (6, 3, 34)])
def test_a_cache_in_rows_changes_no_bit(teams, rng, stored, pos, heads, kv_heads, head_dim):
    """append_kv fills a cache position by position; attention over it equals attention over panels."""
    shape, (append, attend) = (heads, kv_heads, head_dim), IN_ROWS[stored]
    q = normal(rng, 1, heads * head_dim)
    k, v = (normal(rng, pos + 1, kv_heads * head_dim) for _ in range(2))
    want = kv_rows.rows(*(t.reshape(pos + 1, kv_heads, head_dim) for t in (k, v)), stored)
    cache, first = guarded(np.zeros_like(want)), max(0, pos - 150)
    cache[:first] = want[:first]
    for row in range(first, pos + 1):
        teams(append, guarded(k[row]), guarded(v[row]), cache, row, kv_heads, head_dim)
    assert cache.tobytes() == want.tobytes()
    over_rows, over_panels = output(q.shape), output(q.shape)
    teams(attend, q, cache, over_rows, pos, *shape)
    panels = kv_panels(k, v, kv_heads, head_dim, stored)
    teams(KEPT[stored][-1], q, *panels, over_panels, pos, *shape)
    np.testing.assert_array_equal(over_rows.view(np.uint16), over_panels.view(np.uint16))


@in_all_formats
@pytest.mark.parametrize("seq, pos, heads, kv_heads, head_dim", ATTENTION)
def test_rows_come_into_panels_in_any_number(teams, rng, stored, seq, pos, heads, kv_heads, head_dim):
    k, v = (normal(rng, pos + seq, kv_heads * head_dim) for _ in range(2))
    k[0] = 0  # no scale
    v[-1] *= BF16(2.0**120)
    expected = reference_panels(*(t.reshape(-1, kv_heads, head_dim) for t in (k, v)), stored)
    caches = [guarded(np.zeros_like(t)) for t in expected]
    for first, last in [(0, pos // 2), (pos // 2, pos), (pos, pos + 1), (pos + 1, pos + seq)]:
        rows = guarded(k[first:last]), guarded(v[first:last])
        teams(KEPT[stored][0], *rows, *caches, last - first, first, kv_heads, head_dim)
    for got, want in zip(caches, expected, strict=True):
        assert got.tobytes() == want.tobytes()


@in_usual_sets("kernels", "which", dict.fromkeys("qkv", INT8))
def test_what_is_not_a_number_stays_so_in_whole_numbers(kernels, rng, which):
    """And rows before it do not see it."""
    seq, shape = 40, (2, 1, 34)
    tensors = {"q": normal(rng, seq, 68), "k": normal(rng, seq, 34), "v": normal(rng, seq, 34)}
    tensors[which][17, 3] = np.nan
    q, k, v = tensors.values()
    caches = [guarded(np.zeros_like(t)) for t in kv_panels(k, v, *shape[1:], "int8_rows")]
    append, attend, _ = INT8
    kernels(append, k, v, *caches, seq, 0, *shape[1:])
    out = output((seq, 68))
    kernels(attend, q, *caches, out, seq, 0, *shape)
    nan = np.isnan(out.astype(np.float32)).any(axis=1)
    assert nan.tolist() == [row == 17 if which == "q" else row >= 17 for row in range(seq)]


@in_all_formats
def test_large_scores_do_not_overflow(kernels, rng, stored):
    seq, shape, kernel = 200, (2, 1, 64), KEPT[stored][1]
    q, out = normal(rng, seq, 128), output((seq, 128))
    q[...] = (wide(q) * 100).astype(BF16)
    k, v = normal(rng, seq, 64), normal(rng, seq, 64)
    kernels(kernel, q, *kv_panels(k, v, *shape[1:], stored), out, seq, 0, *shape)
    assert_within(out, *attention(q, k, v, 0, *shape, stored))


def test_chunked_prefill_equals_one_shot_and_decode_is_close(kernels, rng):
    seq, shape = 300, (8, 2, 64)
    q, out = normal(rng, seq, 512), output((seq, 512))
    k, v = normal(rng, seq, 128), normal(rng, seq, 128)
    kernels("flash_attention_panels", q, *kv_panels(k, v, *shape[1:]), out, seq, 0, *shape)
    _, bound = attention(q, k, v, 0, *shape)
    for first, last in [(0, 100), (100, 101), (101, 260), (260, 300)]:
        part = output((last - first, 512))
        # the cache ends where the chunk does
        cache = kv_panels(k[:last], v[:last], *shape[1:])
        kernels("flash_attention_panels", guarded(q[first:last]), *cache, part, last - first, first, *shape)
        np.testing.assert_array_equal(part.view(np.uint16), out[first:last].view(np.uint16))
    for row in (0, 1, 99, 127, 128, 255, 256, 299):
        single = output((1, 512))
        cache = kv_panels(k[: row + 1], v[: row + 1], *shape[1:])
        kernels("decode_attention_panels", guarded(q[row]), *cache, single, row, *shape)
        assert_within(single[0], wide(out[row]), 2 * bound[row])


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@in_all_formats
@given(data=st.data())
def test_any_shape(kernels, stored, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    rows, cols, out_cols = (data.draw(st.integers(1, most)) for most in (20, 150, 150))
    x, weight, out = normal(rng, rows, cols), normal(rng, out_cols, cols), output((rows, out_cols))
    kernels("gemm", x, guarded(panels(weight)), out, rows, cols, out_cols)
    assert_within(out, *product(x, weight))

    seq, pos, kv_heads, group, half = (data.draw(st.integers(*r)) for r in [(1, 60), (0, 200), (1, 3), (1, 5), (1, 40)])
    shape = (kv_heads * group, kv_heads, 2 * half)
    q = normal(rng, seq, shape[0] * shape[2])
    k, v = (normal(rng, pos + seq, kv_heads * shape[2]) for _ in range(2))
    out = output(q.shape)
    kernels(KEPT[stored][1], q, *kv_panels(k, v, *shape[1:], stored), out, seq, pos, *shape)
    assert_within(out, *attention(q, k, v, pos, *shape, stored))


# -- the team ------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_every_index_is_handed_out_once(library, threads):
    team = Kernels(library, "portable", threads)
    counts = guarded(np.zeros(1000, np.int32))
    sizes = [(1000, 1), (1, 7), (0, 1), (999, 10), (3, 1000), (500, 3)] * 20
    # no barriers between the loops inside of a call list would need several entries; calls are separate
    team.run(*(team.call("count", counts, size, chunk) for size, chunk in sizes))
    expected = sum((np.arange(1000) < size).astype(np.int32) for size, _ in sizes)
    np.testing.assert_array_equal(counts, expected)
    team.close()


def test_every_worker_begins_with_a_share_of_its_own(library):
    team = Kernels(library, "portable", 3)
    for _ in range(20):
        owners = guarded(np.full(3 * 5 + 1, -1, np.int32))
        owners[-1] = 0
        team("shares", owners, 5)
        assert owners.tolist() == [*np.repeat([0, 1, 2], 5), 3]
    team.close()


def test_a_share_that_was_empty_for_long_is_handed_out(library):
    team = Kernels(library, "portable", 3)
    counts = guarded(np.zeros(9, np.int32))
    for _ in range(2):
        team("count", counts, 9, 1)
        # The number of a loop has 24 bits: of two, the one that is less than half of them further is the later one.
        for _ in range(3):
            team("age", 1 << 22)
    team("count", counts, 9, 1)
    assert counts.tolist() == [3] * 9
    team.close()


def test_team_size_and_repeated_submissions(library):
    team = Kernels(library, "portable", 0)
    assert team.threads() == len(os.sched_getaffinity(0))
    for _ in range(200):
        team.run(*[team.call("nothing")] * 5)
    team.run()  # nothing to do
    team.close()


@pytest.mark.parametrize("kernel", ["append_kv", "embed_rows", "gemv_rows_f32"])
def test_a_late_worker_leaves_no_work_undone_at_a_barrier(library, rng, kernel):
    team = Kernels(library, "portable", 2)
    a, b, table = normal(rng, 64), normal(rng, 64), normal(rng, 33, 64)
    written, copy = output((128,)), output((128,))
    logits = written.view(np.float32)
    tokens = guarded(np.array([5, 7], np.int32))
    calls = {
        "append_kv": team.call("append_kv", a, b, written, 0, 2, 32),
        "embed_rows": team.call("embed_rows", tokens, table, written, 2, 64, 33),
        "gemv_rows_f32": team.call("gemv_rows_f32", table, a, logits, 33, 64),
    }
    zeros = guarded(np.zeros(128, BF16))
    for _ in range(3):
        written[:] = 0
        team.run(team.call("nap"), calls[kernel], team.call("add", written, zeros, copy, 1, 128))
        np.testing.assert_array_equal(copy, written)
        assert written.astype(np.float32).any()
    team.close()


def test_a_barrier_does_not_wait_for_a_worker_without_work(library):
    team = Kernels(library, "portable", 2)
    state = guarded(np.zeros(3, np.int32))
    for _ in range(3):
        state[:] = 0
        team("late", state)
        passed, seen, work = state
        assert (passed, seen, work) == (1, 1, 100)
    team.close()


def test_team_works_in_a_forked_child(library, rng):
    team = Kernels(library, "portable", 3)
    a, b, out = normal(rng, 50, 50), normal(rng, 50, 50), output((50, 50))
    team("add", a, b, out, 50, 50)
    child = os.fork()
    if child == 0:
        try:
            again = output((50, 50))
            team("add", a, b, again, 50, 50)
            team.close()
            os._exit(0 if (again == out).all() else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    team("add", a, b, out, 50, 50)
    team.close()


@pytest.mark.parametrize("name", ["", "unknown", "AVX2", "amx"])
def test_an_unknown_or_higher_instruction_set_is_not_forced(library, name):
    team = Kernels(library, name, 1)
    assert team.isa == machine_isas()[0]
    team.close()


# -- signatures ----------------------------------------------------------------------------------


def test_every_kernel_of_the_host_is_tested():
    here = Path(__file__)
    text = here.read_text() + (here.parents[1] / "unit/test_bfp16.py").read_text()
    # Others are tested by format, in test_grouped_kernels.py, test_lanes.py and test_experts.py.
    elsewhere = {*formats(), "moe", "route"}
    stems = {name: kernel.source.removesuffix("_lanes").removesuffix("_moe") for name, kernel in HOST.items()}
    of_bf16 = [name for name, stem in stems.items() if stem not in elsewhere and HOST[name].activations == "bf16"]
    assert not [name for name in of_bf16 if f'"{name}"' not in text]


def test_kernels_stay_inside_of_their_library(library):
    loaded = ctypes.CDLL(str(library.path("")))
    assert hasattr(loaded, "entry_add") and hasattr(loaded, "team_create")
    assert not [name for name in HOST if hasattr(loaded, name)]


@pytest.mark.parametrize(
    "first_arg, params, compiles",
    [
        (Arg("x"), "rows cols eps:float offset:float once", True),
        (Arg("x", "f32"), "rows cols eps:float offset:float once", False),
        (Arg("x", written=True), "rows cols eps:float offset:float once", False),
        (Arg("x"), "rows cols eps offset:float once", False),
        (Arg("x"), "rows eps:float offset:float once", False),
    ],
    ids=["as it is", "format", "written", "kind", "parameters"],
)
def test_a_source_with_another_signature_does_not_compile(tmp_path, first_arg, params, compiles):
    kernel = signature("rms_norm", (first_arg, "weight"), params, lambda: None)
    compile_it = partial(
        compile_host, CPU / "rms_norm.cc", tmp_path / "out.o", prototypes([kernel], "portable"), "portable"
    )
    if compiles:
        compile_it()
    else:
        with pytest.raises(UserError, match=r"conflicting (declaration|types)"):
            compile_it()
