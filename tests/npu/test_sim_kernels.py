"""Every NPU kernel, executed from its MLIR on the simulator, against its numpy reference.

Bounds follow from bf16, not from what was seen. Both sides round to bf16 at the same places, so where f32 arithmetic
inside differs by less than half a unit, a result differs by at most one unit in the last place: 2^-7 of its value.
What is added to that is the f32 arithmetic's own error, bounded per kernel below.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16

from stages.air import AirModule, Variant
from stages.kernels import (
    Kernel,
    add,
    bias,
    flash_attention,
    gemm,
    gemv,
    kernels,
    rms_norm,
    rope,
    short_conv,
    silu_and_mul,
    token_attention,
)
from stages.model.config import position_rows
from stages.weights.constants import POSITION
from stages.weights.formats import bfp16, formats
from stages.weights.formats.bf16 import pad_rows, to_blocks
from tests.support.sim_kernels import ULP, assert_close, attention_case, empty, execute, random
from tests.support.sim_support import run

F32 = 2.0**-23
NO_SILU = 2.0**-118
"""More than 87 exp(-87): what the array makes at most of gates whose activation is nothing."""


def by_element(name: str, rows: int, cols: int, activation: int = 0) -> AirModule:
    kernel = kernels()[name]
    assert kernel.program and kernel.tiling
    return kernel.program(kernel.tiling({"rows": rows, "cols": cols, "activation": activation}))


def magnitude(x: np.ndarray) -> np.ndarray:
    return np.abs(x.astype(np.float64))


def execute_two(made: AirModule, *arrays: np.ndarray) -> list[np.ndarray]:
    """The last two slots after a run."""
    slots, _ = run(made.module, arrays)
    return slots[-2:]


SHAPES = [(128, 256), (1, 2048), (128, 576), (1, 960), (24, 48)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rows, cols", SHAPES)
def test_add(rows: int, cols: int) -> None:
    a, b = random(rows, cols, seed=1), random(rows, cols, seed=2)
    got = execute(by_element("add", rows, cols), a, b, empty(rows, cols))
    assert (got == add.reference(a, b)).all(), "one f32 addition and one rounding leave no room"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rows, cols, activation", [(64, 768, 0), (1, 1536, 1), (8, 48, 1), (3, 32, 0)])
def test_silu_and_mul(rows: int, cols: int, activation: int) -> None:
    gate, up = random(rows, cols, seed=3, scale=4), random(rows, cols, seed=4)
    gate.reshape(-1)[:40] = np.linspace(-100, 100, 40)
    got = execute(by_element("silu_and_mul", rows, cols, activation), gate, up, empty(rows, cols))
    with np.errstate(over="ignore"):
        want = silu_and_mul.reference(gate, up, activation)
    # Rounded are the exponential, silu, its product, and the reference: half a unit each.
    assert_close(got, want, 2 * ULP * magnitude(want) + NO_SILU * magnitude(up))


@pytest.mark.parametrize("activation", [0, 1])
def test_activation_of_every_number(activation: int) -> None:
    """All finite bf16: within the exponential's rounding and silu's."""
    gate = np.arange(2**16, dtype=np.uint16).view(bfloat16)
    gate[~np.isfinite(gate.astype(np.float32))] = 0
    up = np.ones_like(gate)
    made = by_element("silu_and_mul", 16, 2**12, activation)
    got = execute(made, gate.reshape(16, -1), up.reshape(16, -1), empty(16, 2**12)).reshape(-1)
    with np.errstate(over="ignore"):
        wide = gate.astype(np.float64)
        inner = 1.5957691216 * (wide + 0.044715 * wide**3) if activation else wide
        exact = wide / (1 + np.exp(-inner))
    # What the exponential is off by counts in proportion to its part of 1 + e, and less than it where that is all.
    small = np.exp(-np.abs(inner))
    part = np.where(wide < 0, 1, small) / (1 + small)
    assert_close(got, exact, ULP / 2 * (1 + part + 2.0**-4) * np.abs(exact) + NO_SILU)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rows, cols, taps", [(1, 256, 3), (16, 256, 3), (1, 48, 4), (24, 96, 2), (2, 1536, 5)])
def test_short_conv(rows: int, cols: int, taps: int) -> None:
    """The host's bits. The rows before are those of the history, and nothing but the new ones is written."""
    bcx, weight = random(rows, 3 * cols, seed=7), random(cols * taps, seed=8).reshape(cols, 1, taps)
    history = random(rows + taps - 1, cols, seed=9).reshape(-1, cols)
    packed = formats()["bf16"].pack(np.asarray(weight), "taps")
    got, out = execute_two(short_conv.build(short_conv.tile(rows, cols, taps)), bcx, packed, history, empty(rows, cols))
    want_history, want = short_conv.reference(bcx, weight, history, 0, taps)
    assert (got.view(np.uint16) == want_history.view(np.uint16)).all()
    assert (out.view(np.uint16) == want.view(np.uint16)).all()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("offset, once", [(0.0, 0), (1.0, 1), (1.0, 0), (0.0, 1)])
@pytest.mark.parametrize("rows, cols, scale", [(128, 256, 3.0), (1, 576, 3.0), (8, 48, 3.0), (8, 64, 0.003)])
def test_rms_norm(rows: int, cols: int, scale: float, offset: float, once: int) -> None:
    """The smallest scale is that of epsilon's root. Weights of -0.99 nearly vanish with an offset."""
    x, weight = random(rows, cols, seed=5, scale=scale), random(cols, seed=6)
    weight[::7] = -0.99
    norm = rms_norm.Norm(1e-5, offset, once)
    got = execute(rms_norm.build(rms_norm.tile(rows, cols, norm)), x, weight, empty(rows, cols))
    want = rms_norm.reference(x, weight, 1e-5, offset, once)
    # Two roundings in a row: a unit of the first becomes at most two of the second.
    assert_close(got, want, (1 if once else 2) * ULP * magnitude(want))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rows, cols, offset, once", [(128, 2560, 1.0, 1), (1, 576, 1.0, 1), (24, 48, 0.0, 0)])
def test_norm_add(rows: int, cols: int, offset: float, once: int) -> None:
    """To the bit what norm and sum make one after another; also in several steps."""
    x, residual, weight = random(rows, cols, seed=5), random(rows, cols, seed=6), random(cols, seed=7)
    norm = rms_norm.Norm(1e-5, offset, once)
    normed = execute(rms_norm.build(rms_norm.tile(rows, cols, norm)), x, weight, empty(rows, cols))
    got = execute(
        rms_norm.build_add(rms_norm.tile(rows, cols, norm, adds=True)), x, residual, weight, empty(rows, cols)
    )
    assert got.tobytes() == add.reference(residual, normed).tobytes()


NORMS = (rms_norm.Norm(1e-6), rms_norm.Norm(0.02, offset=1.0, once=1))
"""Qwen's and Gemma's."""


def head_weights(head_dim: int, count: int, norm: rms_norm.Norm | None) -> list[np.ndarray]:
    """No two alike, so that no norm passes for another."""
    return [random(head_dim, seed=40 + which, scale=2.0) for which in range(count)] if norm else []


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "window, heads, kv_heads, head_dim, scores, norm",
    [
        (128, 4, 2, 64, {}, None),
        (256, 9, 3, 64, {"sees": 65, "scalar": 24.0}, None),
        (128, 10, 1, 32, {}, None),
        (128, 10, 10, 64, {}, NORMS[0]),
        (256, 3, 1, 32, {"sees": 1}, None),
        (256, 3, 1, 32, {"sees": 64}, None),
        (256, 8, 1, 32, {"sees": 200}, None),
        (128, 6, 2, 96, {"sees": 100}, NORMS[1]),
    ],
    ids=str,
)
def test_token_attention(
    window: int, heads: int, kv_heads: int, head_dim: int, scores: dict[str, Any], norm: rms_norm.Norm | None
) -> None:
    """At the first position, inside a tile of keys, at its end and at the window's. What lies behind is not seen, what
    the cache has at the position itself is not either, and no more than the last positions are. With norms of heads, to
    the bit what they and attention make one after the other."""
    width = kv_heads * head_dim
    x, kv = random(heads * head_dim + 2 * width, seed=12), random(window, kv_heads, 2, head_dim, seed=13)
    tiling = token_attention.tile(window, heads, kv_heads, head_dim, norm)
    tiling = replace(tiling, scores=flash_attention.Scores(**scores))
    weights = head_weights(head_dim, 2, norm)
    normed = in_heads(x, ((heads, weights[0]), (kv_heads, weights[1])), norm) if norm else x
    edge = scores.get("sees", 63)
    for position in sorted({0, 37, edge - 1, edge, edge + 1, window - 1}):
        table = token_table(position, head_dim)
        seen = kv.copy()
        seen[position:] = 1000
        rest = (seen.reshape(window, -1), empty(heads * head_dim), empty(2 * width))
        out, row = execute_two(token_attention.build(replace(tiling, norm=None)), normed, table[0], *rest)
        if norm:
            got = execute_two(token_attention.build(tiling), x, *weights, table[0], *rest)
            assert [each.tobytes() for each in got] == [out.tobytes(), row.tobytes()]
        k, v = (kv[:, :, which].reshape(window, -1) for which in (0, 1))
        tables = np.repeat(table, position + 1, axis=0)
        want, want_row = token_attention.reference(normed[None], tables, position, k, v, heads, kv_heads, **scores)
        got_row = row.reshape(want_row.shape)
        assert_close(got_row, want_row, ULP * magnitude(want_row) + 2.0**-15)
        assert (got_row[:, 1] == x[-width:].reshape(kv_heads, head_dim)).all(), "V is copied"
        # Weights are rounded to bf16, and so are rotated values and the result; values are of size 1.
        assert_close(out, want, ULP * magnitude(want) + 2 * ULP)


def in_heads(x: np.ndarray, parts: tuple[tuple[int, np.ndarray], ...], norm: rms_norm.Norm) -> np.ndarray:
    """A row of heads after the array's norms of them: of so many with a weight, then of so many with the next."""
    rows, first = x.reshape(-1, len(parts[0][1])).copy(), 0
    for count, weight in parts:
        made, part = rms_norm.build(rms_norm.tile(count, len(weight), norm)), slice(first, first + count)
        given = rows[part] if count > 1 else rows[first]
        rows[part] = execute(made, given, weight, empty(*given.shape))
        first += count
    return rows.reshape(x.shape)


def token_table(position: int, head_dim: int) -> np.ndarray:
    """A row of angles, and the position behind it."""
    table = np.zeros((1, head_dim + POSITION // 2), np.float32)
    angles = np.random.default_rng(11).uniform(-4, 4, head_dim // 2)
    table[0, :head_dim] = np.concatenate([np.cos(angles), np.sin(angles)])
    table.view(np.int32)[0, head_dim] = position
    return table


@pytest.mark.sampled(1)
@pytest.mark.parametrize("norm", [None, *NORMS], ids=["plain", "norm", "norm once"])
@pytest.mark.parametrize(
    "rows, heads, head_dim, out",
    [
        (128, 4, 64, rope.ROWS),
        (1, 9, 64, rope.ROWS),
        (16, 3, 32, rope.ROWS),
        (128, 2, 64, rope.KEYS),
        (16, 8, 128, rope.KEYS),
        (128, 4, 64, rope.QUERIES),
        (16, 3, 96, rope.QUERIES),
    ],
)
def test_rope(rows: int, heads: int, head_dim: int, out: str, norm: rms_norm.Norm | None) -> None:
    """With norms of heads, to the bit what they and the rotation make one after the other."""
    x, angles = random(rows, heads * head_dim, seed=7), np.random.default_rng(8).normal(size=(rows, head_dim // 2)) * 50
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    placed = np.concatenate([table, position_rows(70000, rows)], axis=1)
    weights = head_weights(head_dim, 1, norm)
    tiling = rope.tile(rows, heads, head_dim, out, norm)
    given = table if out == rope.ROWS else placed
    got = execute(rope.build(tiling), x, given, *weights, empty(rows, tiling.out_width))
    if norm:
        x = in_heads(x, ((rows * heads, weights[0]),), norm)
        plain = rope.build(replace(tiling, norm=None))
        assert got.tobytes() == execute(plain, x, given, empty(rows, tiling.out_width)).tobytes()
    if out == rope.KEYS:
        pairs = got.reshape(rows, heads, 2, head_dim)
        assert np.isnan(pairs[:, :, 1].astype(np.float32)).all(), "rope wrote where V goes"
        got = pairs[:, :, 0].reshape(rows, -1)
    if out == rope.QUERIES:
        by_head = [t.reshape(rows, heads, -1) for t in (got, rope.reference_queries(x, placed, 0, head_dim))]
        assert by_head[0][..., head_dim:].tobytes() == by_head[1][..., head_dim:].tobytes()
        assert (
            70000 + np.arange(rows) == by_head[0][..., head_dim : head_dim + 2].copy().view(np.int32)[..., 0].T
        ).all()
        got = by_head[0][..., :head_dim].reshape(rows, -1)
    want = rope.reference(x, table, 0, head_dim)
    # Cosine and sine in two bf16: 2^-17 of each product; a pair's products are at most |x1| + |x2|.
    halves = magnitude(x).reshape(rows, heads, 2, -1).sum(axis=2, keepdims=True).repeat(2, axis=2).reshape(rows, -1)
    assert_close(got, want, ULP * magnitude(want) + 2.0**-16 * halves)


@pytest.mark.parametrize("norm", [None, rms_norm.Norm(1e-6)])
@pytest.mark.parametrize("out", rope.OUTS)
def test_heads_that_a_core_has_no_room_for_are_rotated_in_parts(out: str, norm: rms_norm.Norm | None) -> None:
    """With the bits that they have at once."""
    assert [rope.tile(128, heads, 128, rope.QUERIES).parts for heads in (40, 80)] == [1, 2]
    x, table = random(16, 6 * 64, seed=7), np.random.default_rng(8).normal(size=(16, 64)).astype(np.float32)
    table = table if out == rope.ROWS else np.concatenate([table, position_rows(3, 16)], axis=1)
    whole = rope.tile(16, 6, 64, out, norm)
    given = x, table, *head_weights(64, 1, norm)
    found = [execute(rope.build(each), *given, empty(16, whole.out_width)) for each in (whole, replace(whole, parts=3))]
    assert found[0].tobytes() == found[1].tobytes()


@pytest.mark.parametrize("head_dim", [None, 32])
def test_rows_that_a_core_has_no_room_for_get_their_bias_in_parts(head_dim: int | None) -> None:
    """The V halves of heads, or all of a row; nothing else is written."""
    assert [bias.tile(128, cols).parts for cols in (4096, 10240)] == [1, 2]
    tiling = replace(bias.tile(16, 192, head_dim), parts=3)
    rows, added = random(16, 192 * (2 if head_dim else 1), seed=7), random(192, seed=8)
    slots, _ = run(bias._add(tiling).module, (rows.copy(), added))
    want = rows.reshape(16, -1, 2, head_dim) if head_dim else rows.reshape(16, 6, 1, 32)
    want[:, :, -1] = add.reference(want[:, :, -1], added.reshape(6, 32))
    assert slots[0].tobytes() == want.tobytes()


def product_bound(x: np.ndarray, weight: np.ndarray, want: np.ndarray) -> np.ndarray:
    """f32 sums of n products in any order differ by at most n * 2^-23 of the sum of magnitudes."""
    return ULP * magnitude(want) + weight.shape[1] * F32 * (magnitude(x) @ magnitude(weight).T)


def run_gemm(tiling: gemm.Tiling, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    width = tiling.out_width * (2 if tiling.head_dim else 1)
    packed = bfp16.FORMAT.pack(weight, "pairs") if tiling.bfp16 else to_blocks(weight)
    out = empty(tiling.rows, width)
    got = execute(gemm.build(tiling), x, packed, out)
    if tiling.head_dim is None:
        return got
    halves = got.reshape(tiling.rows, -1, 2, tiling.head_dim)
    assert np.isnan(halves[:, :, 0].astype(np.float32)).all(), "the product wrote where K goes"
    return halves[:, :, 1].reshape(tiling.rows, -1)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "rows, cols, out_cols, options, x_chunk",
    [
        (128, 256, 256, {}, None),
        (128, 256, 512, {}, 256),
        (64, 64, 32, {}, None),
        (128, 576, 192, {}, None),
        (128, 224, 176, {}, None),
        (128, 256, 128, {"head_dim": 64}, None),
        (64, 64, 64, {"head_dim": 32}, None),
        (128, 768, 256, {}, 256),
        (64, 192, 96, {}, 96),
        (64, 67 * 64, 32, {}, None),  # of a long chunk's loops, the compiler cannot split one
    ],
    ids=str,
)
def test_gemm(rows: int, cols: int, out_cols: int, options: dict, x_chunk: int | None) -> None:
    """Also with other chunks of `x` than `tile` chooses, all of it at once too."""
    tiling = gemm.tile(rows, cols, out_cols, **options)
    tiling = replace(tiling, x_chunk=x_chunk, tile_k=min(tiling.tile_k, 32)) if x_chunk else tiling
    x, weight = random(rows, cols, seed=9), random(out_cols, cols, seed=10)
    got, want = run_gemm(tiling, x, weight), gemm.reference(x, weight)
    assert_close(got, want, product_bound(x, weight, want))


@pytest.mark.parametrize(
    "rows, out_cols, options, rest",
    [
        pytest.param(128, 2144, {}, 3, id="bf16"),
        pytest.param(64, 1376, {"swiglu": True, "bfp16": True}, 3, id="SwiGLU"),
        pytest.param(64, 2144, {"head_dim": 32, "bfp16": True}, 3, id="halves of heads"),
    ],
)
def test_a_second_launch_computes_the_columns_that_blocks_leave(
    rows: int, out_cols: int, options: dict, rest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the bits of one launch."""
    monkeypatch.setattr(gemm, "_LAUNCH_BYTES", -1 << 40)
    tiling = gemm.tile(rows, 64, out_cols, **options)
    assert tiling.rest_rows == rest
    x, weight = random(rows, 64, seed=9), random(out_cols, 64, seed=10)
    alone = replace(tiling, herd_rows=1, rest_rows=0)
    np.testing.assert_array_equal(run_gemm(tiling, x, weight), run_gemm(alone, x, weight))


class _FewerSums(gemm.Tiling):
    @property
    def variant(self) -> Variant:
        return Variant.of("gemm", **dict(super().variant.defines), FEWER_ACCUMULATORS=1)


def test_fewer_sums_at_a_time_are_the_same_bits() -> None:
    """As a core has them where registers would run out."""
    tiling = gemm.tile(64, 96, 64, bfp16=True)
    fewer = _FewerSums(**{each.name: getattr(tiling, each.name) for each in fields(tiling)})
    x, weight = random(64, 96, seed=9), random(64, 96, seed=10)
    np.testing.assert_array_equal(run_gemm(fewer, x, weight), run_gemm(tiling, x, weight))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "kernel, sizes",
    [
        ("gemm_bias", {"rows": 128, "cols": 256, "out_cols": 176}),
        ("gemm_kv_bias", {"rows": 64, "cols": 64, "out_cols": 96, "head_dim": 32}),
        ("bfp16_gemm_bias", {"rows": 64, "cols": 64, "out_cols": 48}),
        ("bfp16_gemm_kv_bias", {"rows": 128, "cols": 48, "out_cols": 64, "head_dim": 64}),
        ("gemv_bias", {"cols": 256, "out_cols": 192}),
        ("gemv_bias", {"cols": 64, "out_cols": 64}),
    ],
    ids=str,
)
def test_products_with_bias(kernel: str, sizes: dict[str, int]) -> None:
    """To the bit what product and sum make one after the other, each output with a bias of its own."""
    made, plain = (kernels()[name] for name in (kernel, kernel.removesuffix("_bias")))
    rows, cols, out_cols = sizes.get("rows", 1), sizes["cols"], sizes["out_cols"]
    x, weight, bias = random(rows, cols, seed=31), random(out_cols, cols, seed=32), random(out_cols, seed=33, scale=9)
    packed = bfp16.FORMAT.pack(weight, "pairs") if "bfp16" in kernel else to_blocks(weight)
    given = (x, packed) if "rows" in sizes else (packed, x[0])
    out = empty(rows, out_cols * (2 if "head_dim" in sizes else 1))
    out = out if "rows" in sizes else out[0]

    def computed(kernel: Kernel, *more: np.ndarray) -> np.ndarray:
        assert kernel.tiling and kernel.program
        module = kernel.program(kernel.tiling(sizes))
        names = [str(arg.name_hint) for arg in module.function.body.block.args]
        arrays = dict(zip([arg.name for arg in kernel.args], (*given, *more, out), strict=True))
        slots, _ = run(module.module, [arrays[name] for name in names])
        return slots[names.index("out")]

    got, product = computed(made, bias), computed(plain)
    if "head_dim" in sizes:
        got, product = (each.reshape(rows, -1, 2, sizes["head_dim"]) for each in (got, product))
        assert np.isnan(got[:, :, 0].astype(np.float32)).all(), "the sum wrote where K goes"
        got, product = (each[:, :, 1].reshape(rows, -1) for each in (got, product))
    np.testing.assert_array_equal(got, add.reference(product, bias))


def in_block_float(values: np.ndarray) -> np.ndarray:
    return bfp16.dequantise(bfp16.quantise(values), values.shape[1]).astype(bfloat16)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "rows, cols, out_cols, options",
    [
        (64, 64, 32, {}),
        (128, 256, 256, {}),
        (192, 720, 176, {}),
        (64, 48, 64, {"head_dim": 32}),
        (64, 67 * 64, 32, {}),
    ],
    ids=str,
)
def test_gemm_in_block_floating_point(rows: int, cols: int, out_cols: int, options: dict) -> None:
    """The core makes of `x` what the host makes of the weight. Also where streams of the weight end inside lines."""
    x, weight = random(rows, cols, seed=11), random(out_cols, cols, seed=12)
    got = run_gemm(gemm.tile(rows, cols, out_cols, **options, bfp16=True), x, weight)
    block_x, block_weight = in_block_float(x), in_block_float(weight)
    want = gemm.reference(block_x, block_weight)
    assert_close(got, want, product_bound(block_x, block_weight, want))
    assert (want != gemm.reference(x, weight)).mean() > 0.3


@pytest.mark.sampled(1)
@pytest.mark.parametrize("bfp16", [False, True])
@pytest.mark.parametrize("rows, cols, out_cols", [(64, 64, 32), (128, 240, 144)])
def test_gemm_swiglu(rows: int, cols: int, out_cols: int, bfp16: bool) -> None:
    """The bits of two products and their activation, SwiGLU's or the other one's, each a launch of its own."""
    activation = int(cols > 64)
    x, weight = random(rows, cols, seed=21), random(2 * out_cols, cols, seed=22, scale=0.2)
    weight[:8] *= 20
    gate, up = (part.reshape(out_cols, cols) for part in weight.reshape(-1, 2, 8, cols).transpose(1, 0, 2, 3))
    tiling = replace(gemm.tile(rows, cols, 2 * out_cols, bfp16=bfp16, swiglu=True), activation=activation)
    got = run_gemm(tiling, x, weight)
    alone = [run_gemm(gemm.tile(rows, cols, out_cols, bfp16=bfp16), x, each) for each in (gate, up)]
    made = by_element("silu_and_mul", rows, out_cols, activation)
    assert got.tobytes() == execute(made, *alone, empty(rows, out_cols)).tobytes()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "out_cols, cols, dtype, blocked",
    [
        (256, 256, "bf16", True),
        (256, 768, "bf16", True),
        (192, 576, "bf16", True),
        (2000, 256, "f32", False),
        (500, 192, "bf16", False),
    ],
)
def test_gemv(out_cols: int, cols: int, dtype: str, blocked: bool) -> None:
    tiling = gemv.tile(out_cols, cols, dtype, blocked)
    weight, x = random(out_cols, cols, seed=13), random(cols, seed=14)
    kind, reference = {"bf16": (bfloat16, gemv.reference), "f32": (np.float32, gemv.reference_f32)}[dtype]
    packed = to_blocks(weight) if blocked else pad_rows(weight)
    got = execute(gemv.build(tiling), packed, x, empty(tiling.padded, dtype=kind))
    assert (got[out_cols:] == 0).all(), "padded rows have logits"
    want = reference(weight, x)
    bound = product_bound(x[None], weight, want[None])[0]
    assert_close(got[:out_cols], want, bound if dtype == "bf16" else bound - ULP * magnitude(want))


ATTENTION = [
    (128, 128, 4, 2, 64, 0, 1.0),
    (96, 96, 9, 3, 64, 0, 2.0),
    (32, 128, 32, 8, 64, 96, 1.0),
    (64, 256, 6, 2, 128, 37, 1.0),
    (16, 64, 2, 2, 32, 0, 5.0),
    (64, 128, 6, 2, 96, 1, 1.0),
    (128, 256, 2, 1, 64, 128, 12.0),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seq, window, heads, kv_heads, dim, pos, scale", ATTENTION)
def test_flash_attention(seq: int, window: int, heads: int, kv_heads: int, dim: int, pos: int, scale: float) -> None:
    """From any position on."""
    attend(seq, window, heads, kv_heads, dim, pos, scale)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("sees, pos", [(1, 0), (17, 90), (63, 0), (64, 37), (65, 128), (130, 0)])
def test_flash_attention_over_the_last_positions(sees: int, pos: int) -> None:
    """Windows that end inside tiles of keys, at their ends and behind them."""
    attend(128, 256, 3, 1, 32, pos, 3.0, sees=sees, scalar=20.0)


@pytest.mark.parametrize(
    "shape, pos, herd",
    [
        pytest.param((512, 512, 4, 1, 64), 0, (8, 4), id="row tiles"),
        pytest.param((256, 512, 2, 1, 256), 9, (8, 4), id="row tiles in rows as well"),
        pytest.param((256, 512, 12, 2, 128), 100, (8, 3), id="row tiles, a group in two passes"),
        pytest.param((96, 192, 14, 2, 64), 37, (7, 2), id="heads of a group"),
        pytest.param((128, 256, 16, 1, 32), 5, (8, 4), id="heads of a group in rows as well"),
    ],
)
def test_attention_of_few_kv_heads_takes_all_columns(
    shape: tuple[int, int, int, int, int], pos: int, herd: tuple[int, int]
) -> None:
    """Columns take row tiles, or query heads of a group, of one KV head."""
    seq, window, *heads = shape
    assert flash_attention.tile(seq, *heads, window).herd == herd
    attend(*shape, pos, 1.0)


def attend(seq: int, window: int, heads: int, kv_heads: int, dim: int, pos: int, scale: float, **scores: Any) -> None:
    """Compare attention with its reference."""
    q, k, v, kv = attention_case(seq, window, heads, kv_heads, dim, pos, scale)
    tiling = replace(flash_attention.tile(seq, heads, kv_heads, dim, window), scores=flash_attention.Scores(**scores))
    got = execute(flash_attention.build(tiling), q, kv, empty(seq, heads * dim))
    want = flash_attention.reference_placed(q, k, v, pos, heads, kv_heads, **scores)
    # Weights carry an error of half a unit (2^-8) in numerator and sum alike, and what the sums of a score are rounded
    # by, up to 2^-16 of the largest (times ln 2).
    own = q.reshape(seq, heads, -1)[..., :dim]
    weight_error = 2.0**-8 + 2.0**-12 + score_bound(own, k, dim, scores.get("scalar", dim)) * 2.0**-16
    spread = flash_attention.reference_placed(q, k, np.abs(v), pos, heads, kv_heads, **scores)
    assert_close(got, want, ULP * magnitude(want) + 2 * weight_error * magnitude(spread))
    # Three independent roundings of at most 2^-9 in the root mean square: weights, result, reference.
    error = np.linalg.norm(got.astype(np.float64) - want.astype(np.float64))
    assert error < 2.0**-8 * np.linalg.norm(want.astype(np.float64))


def score_bound(q: np.ndarray, k: np.ndarray, dim: int, scalar: float) -> float:
    """No scaled score is larger (Cauchy-Schwarz)."""
    longest = [np.linalg.norm(t.astype(np.float64).reshape(-1, dim), axis=1).max() for t in (q, k)]
    return float(longest[0] * longest[1] / np.sqrt(scalar))


def test_attention_reads_nothing_past_a_position() -> None:
    """Changing later keys and values leaves earlier rows alone, to the byte."""
    tiling = flash_attention.tile(128, 4, 2, 64)
    q, _, _, kv = attention_case(128, 128, 4, 2, 64, 0, 1.0)
    changed = kv.copy()
    changed[77:] = random(51, kv.shape[1], seed=99, scale=100)
    out = [execute(flash_attention.build(tiling), q, t, empty(128, 256)) for t in (kv, changed)]
    assert out[0][:77].tobytes() == out[1][:77].tobytes()
    assert out[0][77:].tobytes() != out[1][77:].tobytes()


def test_a_query_that_is_no_number_has_no_result() -> None:
    """And takes no other's."""
    tiling = flash_attention.tile(128, 4, 2, 64)
    q, _, _, kv = attention_case(128, 128, 4, 2, 64, 0, 1.0)
    bad = q.copy()
    bad[50, 3] = np.nan
    good, out = (execute(flash_attention.build(tiling), t, kv, empty(128, 256)) for t in (q, bad))
    assert not np.isfinite(out[50, :64].astype(np.float32)).any()
    out[50, :64] = good[50, :64]
    assert out.tobytes() == good.tobytes()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("sees", [None, 50])
def test_attention_gives_the_same_bytes_through_every_window(sees: int | None) -> None:
    """Also for fewer rows at a time, from any position on."""

    def program(rows: int, window: int) -> AirModule:
        tiling = flash_attention.tile(rows, 3, 1, 64, window)
        return flash_attention.build(replace(tiling, scores=flash_attention.Scores(sees=sees)))

    q, _, _, kv = attention_case(128, 512, 3, 1, 64, 0, 1.0)
    whole = execute(program(128, 128), q, kv[:128].copy(), empty(128, 192))
    for first, rows, window in ((0, 128, 512), (64, 64, 128), (37, 64, 256)):
        made = program(rows, window)
        got = execute(made, q[first : first + rows], kv[:window].copy(), empty(rows, 192))
        assert got.tobytes() == whole[first : first + rows].tobytes()
