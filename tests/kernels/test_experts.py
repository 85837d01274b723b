"""The kernels of experts in every instruction set: against numpy, and a prompt's rows against those of tokens, bit for
bit, for any threads."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from stages.kernels import experts as reference
from stages.kernels import format_kernel
from stages.kernels.grouped import GROUPED, byte_product, integer_product
from stages.weights.formats import formats
from tests.support.cpu_kernels_util import (
    BF16,
    HOST,
    U32,
    Kernels,
    Teams,
    U,
    format_of,
    guarded,
    in_sets,
    in_usual_sets,
    output,
)

NAMES = ["bf16", "w8a8", *(stored.name for stored in GROUPED), *(f"{stored.name}_a8" for stored in GROUPED)]
# cols, inner width, experts, experts of a row. Panels and groups that are not whole; one expert; all of them.
# Whether products have biases.
SHAPES = [(33, 17, 5, 2, True), (64, 48, 8, 8, False), (1100, 40, 3, 2, False), (70, 150, 40, 4, True)]


@pytest.fixture(scope="module")
def teams(request, library):
    """Each call is done by every team of an instruction set, with equal bits."""
    teams = Teams(library, request.param, (1, 3))
    yield teams
    teams.close()


def activations(rng, *shape):
    return guarded(rng.standard_normal(shape, np.float32).astype(BF16))


def rounds(name):
    """Whether products round what they multiply to 8 bits."""
    return name == "w8a8" or (name != "bf16" and HOST[f"{name}_gemm"].activations == "int8")


def stacked(rng, name, *shape):
    """Panels of stacked matrices, and what the reference multiplies with."""
    form = formats()[name] if name == "bf16" else format_of(name)
    stored = form.quantise((rng.standard_normal(shape, np.float32) / np.sqrt(shape[-1])).astype(BF16))
    panels = guarded(form.arrange(stored, "panels"))
    assert panels.shape == form.packed_shape(shape, "panels")
    return panels, stored if rounds(name) else form.dequantise(stored, shape[-1])


def choices(rng, rows, count, top):
    """Experts of rows: random ones, and in the middle the last ones, so that some have most rows and some have none."""
    chosen = np.array([np.sort(rng.permutation(count)[:top]) for _ in range(rows)], np.int32)
    chosen[rows // 4 : -1] = np.arange(count - top, count)
    shares = rng.random((rows, top), np.float32)
    return guarded(chosen), guarded(shares)


def products(x, chosen, gate, up, biases, product):
    """The products of all choices with gate and up, f32."""
    rows = np.repeat(x, chosen.shape[1], axis=0)
    gate_bias, up_bias, *_ = biases or (None, None)
    return [reference._of_choices(rows, chosen, w, b, product) for w, b in ((gate, gate_bias), (up, up_bias))]


def assert_gated(act, order, gate, up):
    """Each is what products make that are rounded to a number next to them, or are off as inputs of 15 bits are."""
    near = [[v - 1.01 * U * np.abs(v) - 2.0**-10, v, v + 1.01 * U * np.abs(v) + 2.0**-10] for v in (gate, up)]
    exact = np.array([swiglu_oai(g, u) for g in near[0] for u in near[1]])[:, order]
    slack = U * np.abs(exact).max(axis=0)
    assert ((exact.min(axis=0) - slack <= act) & (act <= exact.max(axis=0) + slack)).all()


def swiglu_oai(gate, up):
    gate = np.minimum(gate.astype(np.float64), 7)
    return gate / (1 + np.exp(-1.702 * gate)) * (np.clip(up.astype(np.float64), -7, 7) + 1)


def assert_close(out, exact, size, cols):
    limit = 2 * U * np.abs(exact) + (16 * (8 + cols**0.5) * U32 + 2.0**-14) * size
    assert (np.abs(np.asarray(out, np.float64) - exact) <= limit).all()


@in_sets(NAMES, "moe_gemm")
@pytest.mark.parametrize("cols, inner, count, top, biased", SHAPES)
def test_experts(teams, name, cols, inner, count, top, biased):
    rng = np.random.default_rng(cols * inner)
    product = reference.f32_product
    if rounds(name):
        product = integer_product if name == "w8a8" else partial(byte_product, stored=format_of(name))
    gate, up, down = (stacked(rng, name, count, *shape) for shape in ((inner, cols), (inner, cols), (cols, inner)))
    biases = [activations(rng, count * width) for width in (inner, inner, cols)] if biased else []
    end = "_bias" if biased else ""
    for rows in (1, 13, 30):
        x, (chosen, shares) = activations(rng, rows, cols), choices(rng, rows, count, top)
        residual, act = activations(rng, rows, cols), output((rows * top, inner))
        out, added = output((rows, cols)), output((rows, cols))
        sizes = (rows, cols, inner, count, top)
        for kernel in ("moe_gemm_silu", "moe_gemm"):
            kernel = format_kernel(kernel + end, name)
            if "silu" in kernel:
                teams(kernel, x, chosen, gate[0], up[0], *biases[:2], act, *sizes, 2)
            else:
                teams(kernel, act, chosen, shares, down[0], *biases[2:], out, rows, inner, cols, count, top)
                args = (act, chosen, shares, down[0], *biases[2:], residual, added)
                teams(f"{kernel}_add", *args, rows, inner, cols, count, top)
        # Each is compared on what the kernel before it really made.
        assert_gated(act, reference.by_expert(chosen), *products(x, chosen, gate[1], up[1], biases, product))
        exact = reference.summed(act, chosen, shares, down[1], *biases[2:], product=product).astype(np.float64)
        assert_close(out, exact, np.abs(act.astype(np.float64)).max() * 8 * top, inner)
        np.testing.assert_array_equal(added, (out.astype(np.float32) + residual.astype(np.float32)).astype(BF16))
        tokens(teams, name, end, x, chosen, shares, gate, up, down, biases, residual, act, out, added)


def tokens(teams, name, end, x, chosen, shares, gate, up, down, biases, residual, act, out, added):
    """What a prompt's rows are as tokens, one by one."""
    (rows, cols), top, inner, count = x.shape, chosen.shape[1], act.shape[1], len(gate[0])
    places = np.argsort(reference.by_expert(chosen)).reshape(rows, top)
    for r in range(rows):
        one, mine, share = output((top, inner)), guarded(chosen[r]), guarded(shares[r])
        kernel = format_kernel(f"moe_gemv_silu{end}", name)
        teams(kernel, guarded(x[r]), mine, gate[0], up[0], *biases[:2], one, inner, cols, count, top, 2)
        np.testing.assert_array_equal(one.view(np.uint16), act[places[r]].view(np.uint16))
        for more, residuals, want in (("", (), out), ("_add", (guarded(residual[r]),), added)):
            kernel, result = format_kernel(f"moe_gemv{end}{more}", name), output(cols)
            args = (one, mine, share, down[0], *biases[2:], *residuals, result)
            teams(kernel, *args, cols, inner, count, top)
            np.testing.assert_array_equal(result.view(np.uint16), want[r].view(np.uint16))


@in_sets(["bf16", "int4", "w8a8"], "moe_gemm")
def test_more_rows_than_a_task(teams, name):
    """All to one expert of three; rows of several tasks and of several parts of totals."""
    rng, cols, inner, count = np.random.default_rng(5), 48, 33, 3
    gate, up, down = (stacked(rng, name, count, *s)[0] for s in ((inner, cols), (inner, cols), (cols, inner)))
    rows = 1100
    x, chosen, shares = (
        activations(rng, rows, cols),
        guarded(np.ones((rows, 1), np.int32)),
        np.ones((rows, 1), "f4"),
    )
    act, out = output((rows, inner)), output((rows, cols))
    teams(format_kernel("moe_gemm_silu", name), x, chosen, gate, up, act, rows, cols, inner, count, 1, 0)
    teams(format_kernel("moe_gemm", name), act, chosen, shares, down, out, rows, inner, cols, count, 1)
    one, act_one = output((rows, cols)), output((rows, inner))
    plain = [guarded(w[1]) for w in (gate, up, down)]
    teams(format_kernel("gemm_silu", name), x, *plain[:2], act_one, rows, cols, inner, 0)
    teams(format_kernel("gemm", name), act_one, plain[2], one, rows, inner, cols)
    np.testing.assert_array_equal(act.view(np.uint16), act_one.view(np.uint16))
    np.testing.assert_array_equal(out.view(np.uint16), one.view(np.uint16))


@in_sets(["bf16", "int4", "int8_a8"], "moe_gemm")
def test_late_threads_find_nothing_left(teams, library, name):
    """Calls with other choices follow each other in one run of more threads than there are CPUs.

    A thread that comes late to one finds what the next one has chosen."""
    rng, cols, inner, count, top, rows = np.random.default_rng(6), 48, 40, 9, 2, 7
    gate, up, down = (stacked(rng, name, count, *s)[0] for s in ((inner, cols), (inner, cols), (cols, inner)))
    router = guarded(formats()["bf16"].pack(rng.standard_normal((count, cols), np.float32).astype(BF16), "panels"))
    texts = [activations(rng, rows, cols) for _ in range(20)]
    outs, alone = [output((rows, cols)) for _ in texts], [output((rows, cols)) for _ in texts]
    chosen, shares, act = output((rows, top), np.int32), output((rows, top), np.float32), output((rows * top, inner))
    for threads, results in ((1, alone), (9, outs)):
        team = Kernels(library, teams.isa, threads)
        calls = []
        for x, out in zip(texts, results, strict=True):
            calls.append(team.call("route", x, router, chosen, shares, rows, cols, count, top, 1))
            sizes = (rows, cols, inner, count, top)
            calls.append(team.call(format_kernel("moe_gemm_silu", name), x, chosen, gate, up, act, *sizes, 0))
            calls.append(
                team.call(
                    format_kernel("moe_gemm", name), act, chosen, shares, down, out, rows, inner, cols, count, top
                )
            )
        for _ in range(20):
            team.run(*calls)
        team.close()
    np.testing.assert_array_equal(np.array(outs).view(np.uint16), np.array(alone).view(np.uint16))


@in_usual_sets("teams", "biased", {False: ["route"], True: ["route_bias"]})
@pytest.mark.parametrize("cols, count, top", [(33, 1, 1), (64, 4, 4), (577, 40, 3), (100, 130, 8)])
@pytest.mark.parametrize("normed", [0, 1])
def test_route(teams, cols, count, top, normed, biased):
    rng = np.random.default_rng(cols + count)
    weight = (rng.standard_normal((count, cols), np.float32) * 4 / np.sqrt(cols)).astype(BF16)
    weight[count // 2 :: 3] = weight[count // 2]  # equal logits
    panels, bias = guarded(formats()["bf16"].pack(weight, "panels")), [activations(rng, count)] if biased else []
    if biased:
        bias[0][count // 2 :: 3] = bias[0][count // 2]
    kernel = "route_bias" if biased else "route"
    for rows in (1, 2, 19):
        x, chosen, shares = activations(rng, rows, cols), output((rows, top), np.int32), output((rows, top), np.float32)
        teams(kernel, x, panels, *bias, chosen, shares, rows, cols, count, top, normed)
        logits = x.astype(np.float64) @ weight.astype(np.float64).T + (bias[0].astype(np.float64) if biased else 0)
        largest = -np.sort(-logits, axis=-1)[:, :top]
        taken = np.take_along_axis(logits, chosen, axis=-1)
        assert (np.diff(chosen, axis=-1) > 0).all() and ((chosen >= 0) & (chosen < count)).all()
        np.testing.assert_allclose(-np.sort(-taken, axis=-1), largest, atol=1e-4)
        for row, mine in zip(logits, chosen, strict=True):
            # Of equal ones the first: whoever is left out is smaller, or equal and behind.
            left = np.setdiff1d(np.arange(count), mine)
            assert all(row[e] < row[mine].max() or top < count for e in left)
            least = min(row[mine])
            assert all(e > max(mine[np.isclose(row[mine], least)]) for e in left if row[e] == least)
        powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
        wanted = np.take_along_axis(powers, chosen, axis=-1)
        wanted /= (wanted if normed else powers).sum(axis=-1, keepdims=True)
        np.testing.assert_allclose(shares, wanted, rtol=1e-4)
        for r in range(rows):
            one, share = output(top, np.int32), output(top, np.float32)
            teams(kernel, guarded(x[r]), panels, *bias, one, share, 1, cols, count, top, normed)
            np.testing.assert_array_equal(one, chosen[r])
            np.testing.assert_array_equal(share.view(np.uint32), shares[r].view(np.uint32))


@in_usual_sets("teams", "normed", {False: ["route_sigmoid"], True: ["route_sigmoid"]})
@pytest.mark.parametrize("cols, count, top", [(33, 1, 1), (64, 4, 4), (577, 40, 3), (100, 130, 8)])
def test_route_by_sigmoids(teams, cols, count, top, normed):
    """The bias decides whom a row takes, and is no part of the shares."""
    rng = np.random.default_rng(cols + count)
    weight = (rng.standard_normal((count, cols), np.float32) / np.sqrt(cols)).astype(BF16)
    panels, bias = guarded(formats()["bf16"].pack(weight, "panels")), guarded(rng.standard_normal(count, np.float32))
    sizes = cols, count, top, int(normed)
    for rows in (1, 2, 19):
        x, chosen, shares = activations(rng, rows, cols), output((rows, top), np.int32), output((rows, top), np.float32)
        teams("route_sigmoid", x, panels, bias, chosen, shares, rows, *sizes)
        scores = 1 / (1 + np.exp(-(x.astype(np.float64) @ weight.astype(np.float64).T)))
        wanted = np.sort(np.argsort(-(scores + bias), axis=-1)[:, :top], axis=-1)
        np.testing.assert_array_equal(chosen, wanted)
        taken = np.take_along_axis(scores, wanted, axis=-1)
        np.testing.assert_allclose(
            shares, taken / (taken.sum(axis=-1, keepdims=True) + 1e-6 if normed else 1), rtol=1e-5
        )
        for r in range(rows):
            one, share = output(top, np.int32), output(top, np.float32)
            teams("route_sigmoid", guarded(x[r]), panels, bias, one, share, 1, *sizes)
            np.testing.assert_array_equal(one, chosen[r])
            np.testing.assert_array_equal(share.view(np.uint32), shares[r].view(np.uint32))
    x[0, 0] = np.inf
    x[0, 1] = -np.inf
    teams("route_sigmoid", x, panels, bias, chosen, shares, rows, *sizes)
    assert ((chosen >= 0) & (chosen < count)).all() and (np.diff(chosen, axis=-1) > 0).all()
