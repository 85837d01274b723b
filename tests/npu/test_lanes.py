"""Weights in groups as the array takes them: their order, the host's kernels that read it, and the array's products."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
from ml_dtypes import bfloat16

from llama_npu2.errors import UserError
from stages.air import limits
from stages.air.checks import check
from stages.kernels import add, gemv, grouped_gemv, rms_norm, silu_and_mul
from stages.kernels import kernels as all_kernels
from stages.kernels.bias import Biased
from stages.model.grouping import programs
from stages.model.policy import parse_policy
from stages.proof.selftest import bounds
from stages.targets.npu2.groupings import GROUPINGS
from stages.targets.npu2.modules import build_module
from stages.weights.constants import LANES
from stages.weights.cut import PADDED_ROWS, SHARES, padded_rows
from stages.weights.format import Format
from stages.weights.formats import bfp16, formats, int4, int6, int8
from tests.conftest import A_LLAMA
from tests.support.cpu_kernels_util import BF16, Kernels, U, guarded, in_usual_sets, output
from tests.support.npu_shapes import JUDGED, model
from tests.support.sim_kernels import ULP, assert_close, empty, execute

FORMATS = [form for form in formats().values() if form.cut is not None]
SHAPES = [(64, 256), (48, 576), (16, 32), (32, 720), (192, 576), (16, 14336), (64, 8192), (80, 736)]


def stored(form: Format, rows: int, cols: int, seed: int = 0) -> np.ndarray:
    return _stored(form.name, rows, cols, seed)


@functools.lru_cache(64)
def _stored(form: str, rows: int, cols: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng([seed, rows, cols])
    rounded = formats()[form].quantise(rng.standard_normal((rows, cols), np.float32) * rng.uniform(0.01, 2, (rows, 1)))
    rounded.flags.writeable = False  # tests share it
    return rounded


def test_formats_that_the_array_takes() -> None:
    assert {form.name for form in FORMATS} == {"int4", "int6", "int8"}


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("rows, cols", SHAPES)
def test_what_is_packed_comes_back(form: Format, rows: int, cols: int) -> None:
    rounded = stored(form, rows, cols)
    for layout in ("lanes", "padded_lanes"):
        packed = form.arrange(rounded, layout)
        assert packed.shape == form.packed_shape((rows, cols), layout)
        assert (form.layout(layout).unpack(packed, rounded.shape) == rounded).all()
    assert len(packed) * form.cut(padded_rows(rows), cols).lanes == PADDED_ROWS  # type: ignore[misc]


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("rows, cols", [(64, 256), (48, 576), (32, 4096)])
def test_panels_of_two_matrices_take_turns(form: Format, rows: int, cols: int) -> None:
    rounded = np.concatenate([stored(form, rows, cols, seed) for seed in (1, 2)])
    packed = form.arrange(rounded, "paired_lanes")
    assert packed.shape == form.packed_shape((2 * rows, cols), "paired_lanes")
    assert (form.layout("paired_lanes").unpack(packed, rounded.shape) == rounded).all()
    cut = form.cut(rows, cols, 2)  # type: ignore[misc]
    assert 4 * cut.panel_bytes <= limits.L2_BYTES and len(packed) == 2 * cut.panels
    assert (packed[1] == packed_alone(form, rounded[rows:], cut.lanes)[0]).all()


FEED_FORWARDS = [(256, 512), (576, 1536), (960, 2560), (64, 288), (80, 736), (2048, 5632)]
"""Widths of rows, and inside."""


@pytest.mark.sampled(6)
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("cols, inner", [*FEED_FORWARDS[:5], pytest.param(*FEED_FORWARDS[5], marks=pytest.mark.slow)])
def test_a_feed_forward_network_in_shares_comes_back(form: Format, cols: int, inner: int) -> None:
    both = np.concatenate([stored(form, inner, cols, seed) for seed in (1, 2)])
    down = stored(form, cols, inner)
    for rounded, shape, layout in ((both, (2 * inner, cols), "shared_pairs"), (down, (cols, inner), "shared_lanes")):
        packed = form.arrange(rounded, layout)
        assert packed.shape == form.packed_shape(shape, layout)
        assert (form.layout(layout).unpack(packed, rounded.shape) == rounded).all()
    made = form.feed_forward(cols, inner)  # type: ignore[misc]
    assert made.pairs.chunk_bytes == made.shares.chunk_bytes and made.shares.panels % 2 == 0
    assert SHARES * made.inner - inner < SHARES * LANES and made.shares.inputs >= made.inner


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_chunks_of_known_models_are_hardly_filled_up(form: Format) -> None:
    for name, config in JUDGED.items():
        made = form.feed_forward(config.emb, config.ffn)  # type: ignore[misc]
        weights = 3 * config.emb * config.ffn
        packed = SHARES * sum(made.chunks) * made.pairs.chunk_bytes
        least = weights * form.stored_shape((32,))[0] / 32
        assert packed < 1.12 * least, name


def packed_alone(form: Format, rounded: np.ndarray, lanes: int) -> np.ndarray:
    """The panels of rows that are all that there is, where they are as wide as in a pair."""
    assert form.cut(len(rounded), rounded.shape[1] // 32 * 32).lanes >= lanes  # type: ignore[misc]
    return form.arrange(np.concatenate([rounded, rounded]), "paired_lanes")[::2]


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("rows", [16, 576, 4096, 128256])
@pytest.mark.parametrize("cols", [32, 736, 2048, 8192, 14336])
def test_chunks_fit_and_are_few(form: Format, rows: int, cols: int) -> None:
    found = form.cut(rows, cols)  # type: ignore[misc]
    longest = rows == 128256 and cols == 14336  # of a vocabulary that has no room for a norm's weight beside it
    assert found.fits_l1(companion=not longest) and found.chunks % 2 == 0 and found.chunk_bytes % 64 == 0
    assert found.panels * found.lanes == rows and found.inputs >= cols
    assert 2 * found.panel_bytes <= limits.L2_BYTES
    if cols >= 2048:
        bits = {"int4": 4.5, "int6": 6.25, "int8": 8.5}[form.name]
        assert 8 * found.panel_bytes / found.lanes / cols <= 1.06 * bits


@pytest.mark.sampled(2)
@pytest.mark.parametrize("weights", ["int4", "int8"])
@pytest.mark.parametrize("name", ["demo", "llama-3.2-1b", "smollm2-135m", "llama-3.1-8b", "wide"])
def test_programs_of_tokens_keep_to_the_limits(name: str, weights: str) -> None:
    """Every program of a token, as the checks of the simulator have it."""
    found = programs(A_LLAMA, GROUPINGS["fused"], (128,), parse_policy(weights))
    for program in (each for each in found if not each.host and each.bucket is None):
        config = model(200064, 5120, 13824, 40, 40, 128) if name == "wide" else JUDGED[name]
        module = build_module(program, config.dimensions())
        check(module.air.module)
        products = [tiling for tiling in module.tilings if isinstance(tiling, grouped_gemv.Tiling)]
        assert products
        for tiling in products:
            cores = tiling.columns * tiling.herd_rows
            assert tiling.steps == 1 or cores == 1 or cores > 4, "the compiler makes one column of it, which hangs"
            assert sum(tiling.launches) == tiling.steps and max(tiling.launches) <= limits.RUNS


def test_few_cores_share_the_l2_of_a_column() -> None:
    """Where the compiler puts them, whatever the herd's shape (mlir-air of 2026-05-08)."""
    tiling = all_kernels()["int8_gemv_add"].tiling({"out_cols": 64, "cols": 14336})  # type: ignore[misc]
    cores = tiling.columns * tiling.herd_rows
    assert cores <= limits.ROWS and tiling.steps * cores == tiling.cut.panels
    assert limits.copies(tiling.steps) * cores * tiling.core_bytes <= limits.L2_BYTES


@pytest.mark.parametrize("rows", [8, 24])
def test_rows_that_are_no_panels_are_refused(rows: int) -> None:
    with pytest.raises(UserError, match=f"rows = {rows} is not a multiple of 16"):
        int4.FORMAT.packed_shape((rows, 256), "lanes")


# the host


@pytest.fixture
def kernels(request, library):
    team = Kernels(library, request.param, 2)
    yield team
    team.close()


on_the_host = in_usual_sets("kernels", "form", {form: [f"{form.name}_unpack"] for form in FORMATS})


def scalars(name: str, **sizes: int) -> list[int]:
    kernel = all_kernels()[name]
    return [*(sizes[param.name] for param in kernel.params), *(derive(sizes) for derive in kernel.derived.values())]


@on_the_host
@pytest.mark.parametrize("rows, cols", [(64, 256), (48, 576), (32, 720), (192, 736)])
def test_the_host_unpacks_blocks(kernels: Kernels, form: Format, rows: int, cols: int) -> None:
    rounded, out = stored(form, rows, cols), output((rows // 8, cols // 8, 8, 8))
    sizes = scalars(f"{form.name}_unpack", out_cols=rows, cols=cols, first=0, rows=rows, to=0, apart=1)
    kernels(f"{form.name}_unpack", guarded(form.arrange(rounded, "lanes")), out, *sizes)
    assert_unpacked(form, out, rounded, cols)


def assert_unpacked(form: Format, out: np.ndarray, rounded: np.ndarray, cols: int) -> None:
    got = formats()["bf16"].layout("blocks").unpack(out, (len(rounded), cols))
    want = form.dequantise(rounded, cols)
    # Compilers may round the difference of scale and minimum once or twice.
    assert_close(got, want, np.abs(want) * U + 2.0**-20)
    assert (got != want.astype(BF16)).mean() < 2.0**-8


@on_the_host
def test_the_host_unpacks_parts_of_joined_matrices(kernels: Kernels, form: Format) -> None:
    joined, cols = stored(form, 192, 576), 576
    for first, rows in ((0, 96), (96, 64), (160, 32)):
        out = output((rows // 8, cols // 8, 8, 8))
        sizes = scalars(f"{form.name}_unpack", out_cols=rows, cols=cols, first=first, rows=192, to=0, apart=1)
        kernels(f"{form.name}_unpack", guarded(form.arrange(joined, "lanes")), out, *sizes)
        assert_unpacked(form, out, joined[first : first + rows], cols)
    for which in (0, 1):
        out = output((12, cols // 8, 8, 8))
        sizes = scalars(f"{form.name}_unpack_paired", out_cols=96, cols=cols, which=which, to=0, apart=1)
        kernels(f"{form.name}_unpack_paired", guarded(form.arrange(joined, "paired_lanes")), out, *sizes)
        assert_unpacked(form, out, joined[96 * which :][:96], cols)
    with pytest.raises(UserError, match="first of a part = 8 is not a multiple of"):
        scalars(f"{form.name}_unpack", out_cols=64, cols=cols, first=8, rows=192, to=0, apart=1)


@pytest.mark.sampled(3)
@on_the_host
@pytest.mark.parametrize("emb, ffn", FEED_FORWARDS[:5])
def test_the_host_unpacks_a_feed_forward_network_in_shares(kernels: Kernels, form: Format, emb: int, ffn: int) -> None:
    both = np.concatenate([stored(form, ffn, emb, seed) for seed in (1, 2)])
    packed = guarded(form.arrange(both, "shared_pairs"))
    for which in (0, 1):
        out = output((ffn // 8, emb // 8, 8, 8))
        sizes = scalars(f"{form.name}_unpack_shared_pairs", out_cols=ffn, cols=emb, which=which, to=0, apart=1)
        kernels(f"{form.name}_unpack_shared_pairs", packed, out, *sizes)
        assert_unpacked(form, out, both[ffn * which :][:ffn], emb)
    down, out = stored(form, emb, ffn), output((emb // 8, ffn // 8, 8, 8))
    sizes = scalars(f"{form.name}_unpack_shared", out_cols=emb, cols=ffn, to=0, apart=1)
    kernels(f"{form.name}_unpack_shared", guarded(form.arrange(down, "shared_lanes")), out, *sizes)
    assert_unpacked(form, out, down, ffn)


@on_the_host
@pytest.mark.parametrize("rows, cols", [(64, 256), (48, 720)])
def test_the_host_unpacks_into_block_floating_point(kernels: Kernels, form: Format, rows: int, cols: int) -> None:
    """Bytes as the format has them of what it unpacks to bf16: of a matrix, and of each of two whose blocks take
    turns."""
    packed = guarded(form.arrange(stored(form, rows, cols), "lanes"))
    where = {"out_cols": rows, "cols": cols, "first": 0, "rows": rows}
    blocks = output((rows // 8, cols // 8, 8, 8))
    kernels(f"{form.name}_unpack", packed, blocks, *scalars(f"{form.name}_unpack", **where, to=0, apart=1))
    want = bfp16.FORMAT.pack(formats()["bf16"].layout("blocks").unpack(blocks, (rows, cols)), "pairs")
    name = f"{form.name}_unpack_bfp16"
    out = guarded(np.zeros(want.shape, np.int8))
    kernels(name, packed, out, *scalars(name, **where, to=0, apart=1))
    assert out.tobytes() == want.tobytes()
    turns = guarded(np.full((2 * want.shape[0], *want.shape[1:]), 99, np.int8))
    kernels(name, packed, turns, *scalars(name, **where, to=1, apart=2))
    of_one, of_both = (bfp16.from_pairs(each, (n * rows, cols // 8 * 9)) for n, each in ((1, want), (2, turns)))
    blocks_of_both = of_both.reshape(-1, 2, 8, of_both.shape[1])
    assert blocks_of_both[:, 1].tobytes() == of_one.tobytes()
    assert (blocks_of_both[:, 0] == 99).all(), "blocks of the other matrix were written"


@on_the_host
@pytest.mark.parametrize("vocab, cols", [(40, 256), (1100, 720), (96, 2048)])
def test_the_host_reads_a_vocabulary(kernels: Kernels, form: Format, vocab: int, cols: int) -> None:
    rng = np.random.default_rng(vocab)
    rounded = stored(form, vocab, cols)
    wide, packed = form.dequantise(rounded, cols), guarded(form.arrange(rounded, "padded_lanes"))
    tokens = guarded(np.array([0, vocab - 1, vocab, -1, 17, 33], np.int32))
    rows = output((len(tokens), cols))
    sizes = scalars(f"{form.name}_embed_rows", rows=len(tokens), cols=cols, vocab=vocab, scale=1.0)
    kernels(f"{form.name}_embed_rows", tokens, packed, rows, *sizes)
    known = np.where(((tokens >= 0) & (tokens < vocab))[:, None], wide[tokens.clip(0, vocab - 1)], 0)
    np.testing.assert_array_equal(rows, known.astype(BF16))
    x, logits = guarded(rng.standard_normal(cols).astype(BF16)), output(vocab, np.float32)
    sizes = scalars(f"{form.name}_gemv_rows_f32", out_cols=vocab, cols=cols)
    kernels(f"{form.name}_gemv_rows_f32", packed, x, logits, *sizes)
    x64, w64 = x.astype(np.float64), wide.astype(np.float64)
    assert (np.abs(logits - w64 @ x64) <= 2.0**-20 * (np.abs(w64) @ np.abs(x64))).all()


@in_usual_sets("kernels", "form", {int8.FORMAT: ["int8_unpack"]})
def test_the_host_reads_halves_of_every_size(kernels: Kernels, form: Format) -> None:
    """Scales of int8: all that are finite and not negative."""
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16)
    rounded = int8.GROUPED.scaled(halves.reshape(1024, 31, 1), np.full((1024, 31, 32), 3, np.int8))
    out = output((128, 124, 8, 8))
    sizes = scalars("int8_unpack", out_cols=1024, cols=992, first=0, rows=1024, to=0, apart=1)
    kernels("int8_unpack", guarded(int8.FORMAT.arrange(rounded, "lanes")), out, *sizes)
    got = formats()["bf16"].layout("blocks").unpack(out, (1024, 992))
    np.testing.assert_array_equal(got, int8.FORMAT.dequantise(rounded, 992).astype(BF16))


# the array


def product(
    form: Format, rounded: np.ndarray, *rows: np.ndarray, kernel: str = "gemv", scalars: Scalars | None = None
) -> np.ndarray:
    """`rows`: `x`, and what the kernel takes with it. `scalars`: of its norm and activation, if it has them."""
    made, cols = all_kernels()[f"{form.name}_{kernel}"], len(rows[0])
    layout = made.arg("weight").layout("aie2p")
    outputs = len(rounded) // 2 if layout == "paired_lanes" else len(rounded)
    tiling = made.tiling({"out_cols": outputs, "cols": cols, **(scalars or {})})  # type: ignore[misc]
    cut = (tiling.product if isinstance(tiling, Biased) else tiling).cut  # type: ignore[attr-defined]
    out = empty(cut.panels * cut.lanes, dtype=np.float32 if kernel.endswith("f32") else bfloat16)
    return execute(made.program(tiling), form.arrange(rounded, layout), *rows, out)  # type: ignore[misc]


Scalars = dict[str, float]
USUAL: Scalars = {"eps": 1e-5}
GEMMAS: Scalars = {"eps": 1e-5, "offset": 1.0, "once": 1, "activation": 1}


def normed(x: np.ndarray, weight: np.ndarray, scalars: Scalars) -> np.ndarray:
    """As the array norms a row."""
    kernel = all_kernels()["rms_norm"]
    tiling = kernel.tiling({"rows": 1, "cols": len(x), **scalars})  # type: ignore[misc]
    return execute(kernel.program(tiling), x, weight, empty(len(x)))  # type: ignore[misc]


def error(form: Format, rounded: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return how far a product in f32 may be off."""
    return bounds.grouped(x, form.dequantise(rounded, len(x)))


@pytest.mark.sampled(3)  # one of each format, each of another shape
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("rows, cols", [(48, 576), (32, 720), (1024, 256), (256, 8192), (8 * 67 * 32, 64)])
def test_products_of_the_array(form: Format, rows: int, cols: int) -> None:
    rounded, x = stored(form, rows, cols), np.random.default_rng(cols).standard_normal(cols).astype(bfloat16)
    want = form.dequantise(rounded, cols).astype(np.float64) @ x.astype(np.float64)
    assert_close(product(form, rounded, x), want, ULP / 2 * np.abs(want) + error(form, rounded, x))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize(
    "rows, cols, scalars", [(48, 576, USUAL), (96, 736, GEMMAS), (1024, 256, USUAL), (32, 4096, USUAL)]
)
def test_products_with_norm_or_residual(form: Format, rows: int, cols: int, scalars: Scalars) -> None:
    """To the bit what norm, product and sum make one after another: a core rounds in between as they do."""
    rounded, draw = stored(form, rows, cols), np.random.default_rng(cols)
    x, weight, residual = (draw.standard_normal(size).astype(bfloat16) for size in (cols, cols, rows))
    want = add.reference(residual, product(form, rounded, x))
    np.testing.assert_array_equal(product(form, rounded, x, residual, kernel="gemv_add"), want)
    row = normed(x, weight, scalars)
    for kernel in ("gemv", "gemv_f32"):
        got = product(form, rounded, x, weight, kernel=f"norm_{kernel}", scalars=scalars)
        np.testing.assert_array_equal(got, product(form, rounded, row, kernel=kernel))
    got = product(form, rounded, x, weight, residual, kernel="norm_gemv_bias", scalars=scalars)
    np.testing.assert_array_equal(got, product(form, rounded, row, residual, kernel="gemv_bias"))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("rows, cols", [(48, 576), (96, 736)])
def test_products_with_bias(form: Format, rows: int, cols: int) -> None:
    """Rounded only after the sum."""
    rounded, draw = stored(form, rows, cols), np.random.default_rng(cols)
    x, bias = (draw.standard_normal(size).astype(bfloat16) for size in (cols, rows))
    exact = product(form, rounded, x)
    bias = (-exact.astype(np.float32) * draw.choice([0, 1, 40], rows)).astype(bfloat16) + bias
    got = product(form, rounded, x, bias, kernel="gemv_bias")
    want = form.dequantise(rounded, cols).astype(np.float64) @ x.astype(np.float64) + bias.astype(np.float64)
    assert_close(got, want, ULP / 2 * np.abs(want) + error(form, rounded, x))
    assert (got != add.reference(bias, exact)).mean() > 0.05


def test_a_bias_without_room_is_added_afterwards() -> None:
    """Beside two chunks and a norm's weight: to the bit what product and sum make."""
    form, (rows, cols) = int8.FORMAT, (2048, 1536)
    rounded, draw = stored(form, rows, cols), np.random.default_rng(cols)
    x, weight, bias = (draw.standard_normal(size).astype(bfloat16) for size in (cols, cols, rows))
    kernel = all_kernels()["int8_norm_gemv_bias"]
    assert isinstance(kernel.tiling({"out_cols": rows, "cols": cols, **USUAL}), Biased)  # type: ignore[misc]
    got = product(form, rounded, x, weight, bias, kernel="norm_gemv_bias", scalars=USUAL)
    exact = product(form, rounded, x, weight, kernel="norm_gemv", scalars=USUAL)
    np.testing.assert_array_equal(got, add.reference(bias, exact))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("rows, cols, scalars", [(48, 576, USUAL), (256, 256, GEMMAS), (32, 4096, USUAL)])
def test_swiglu_of_the_array(form: Format, rows: int, cols: int, scalars: Scalars) -> None:
    """To the bit what norm, products and activation make one after another."""
    halves, draw = [stored(form, rows, cols, seed) for seed in (3, 4)], np.random.default_rng(cols)
    x, weight = (draw.standard_normal(cols).astype(bfloat16) for _ in range(2))
    got = product(form, np.concatenate(halves), x, weight, kernel="norm_gemv_swiglu", scalars=scalars)
    lanes = form.cut(rows, cols, 2).lanes  # type: ignore[misc]
    gate, up = (swiglu_part(form, half, normed(x, weight, scalars), lanes) for half in halves)
    silu = all_kernels()["silu_and_mul"]
    tiled = silu.tiling({"rows": 1, "cols": rows, **scalars})  # type: ignore[misc]
    want = execute(silu.program(tiled), gate, up, empty(rows))  # type: ignore[misc]
    np.testing.assert_array_equal(got, want)


def swiglu_part(form: Format, rounded: np.ndarray, x: np.ndarray, lanes: int) -> np.ndarray:
    """A product in panels of so many lanes, as sums depend on them."""
    cut = form.cut
    narrow = replace(form, cut=lambda rows, cols, together=1: cut(rows, cols, 2))  # type: ignore[misc]
    tiling = grouped_gemv.tile(narrow.cut, len(rounded), len(x))  # type: ignore[arg-type]
    assert tiling.cut.lanes == lanes
    packed = form.arrange(np.concatenate([rounded, rounded]), "paired_lanes")[::2]
    return execute(grouped_gemv.build(tiling), packed, x, empty(len(rounded)))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_logits_of_the_array(form: Format) -> None:
    rounded, x = stored(form, 1030, 256), np.random.default_rng(1).standard_normal(256).astype(bfloat16)
    got = product(form, rounded, x, kernel="gemv_f32")
    want = form.dequantise(rounded, 256).astype(np.float64) @ x.astype(np.float64)
    assert len(got) == 2 * PADDED_ROWS
    assert_close(got[:1030], want, error(form, rounded, x))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_groups_of_inputs_have_scales_of_their_own(form: Format) -> None:
    """Large, small and no inputs beside one another: each group is off by its own unit, and zeros are zeros."""
    rounded, x = stored(form, 64, 256), np.random.default_rng(5).standard_normal(256).astype(np.float32)
    x *= np.repeat(np.float32([1, 2.0**-20, 0, 2.0**60, 2.0**-90, 2.0**-30, 3, 0]), 32)
    for part in (slice(96, 128), slice(0, 96), slice(128, 160)):
        some = np.zeros(256, bfloat16)
        some[part] = x[part]
        want = form.dequantise(rounded, 256).astype(np.float64) @ some.astype(np.float64)
        assert_close(product(form, rounded, some), want, ULP / 2 * np.abs(want) + error(form, rounded, some))
    assert not product(form, rounded, np.zeros(256, bfloat16)).any()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_inputs_that_are_no_numbers_show(form: Format, value: float) -> None:
    rounded, x = stored(form, 64, 256), np.ones(256, bfloat16)
    x[100] = value
    assert not np.isfinite(product(form, rounded, x).astype(np.float32)).any()


def test_long_vocabularies_take_several_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    form = int6.FORMAT
    rounded, x = stored(form, 2048, 64), np.random.default_rng(2).standard_normal(64).astype(bfloat16)
    whole = product(form, rounded, x, kernel="gemv_f32")
    monkeypatch.setattr(limits, "RUNS", 3)
    tiling = all_kernels()["int6_gemv_f32"].tiling({"out_cols": 2048, "cols": 64})  # type: ignore[misc]
    assert len(tiling.launches) > 1
    np.testing.assert_array_equal(product(form, rounded, x, kernel="gemv_f32"), whole)


def test_steps_that_the_compiler_cannot_split_take_two_launches() -> None:
    """Eight cores take 107 steps each of GLM-4's gate and up, which is a prime. One core alone took 856."""
    tiling = all_kernels()["int4_norm_gemv_swiglu"].tiling({"cols": 4096, "out_cols": 13696, "eps": 1e-5})  # type: ignore[misc]
    assert not limits.cuttable(107) and tiling.launches == [54, 53] and tiling.herd == (8, 1)


def test_the_array_reads_every_number_and_scale() -> None:
    """One input at a time, so that a result is a weight: every number of every format, every scale of int8."""
    x = np.zeros(64, bfloat16)
    x[37] = 1
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16)[: 31 * 1024].reshape(-1, 1, 1)
    numbers = np.full((len(halves), 2, 32), -127, np.int8)
    rounded = int8.GROUPED.scaled(np.repeat(halves, 2, axis=1), numbers)
    want = int8.FORMAT.dequantise(rounded, 64)[:, 37]
    assert_close(product(int8.FORMAT, rounded, x), want.astype(bfloat16), np.abs(want) * ULP)
    for form, made, count in ((int8, np.int8, 256), (int6, np.uint8, 64), (int4, np.uint8, 16)):
        some = np.arange(count, dtype=np.uint8).view(made)
        groups = np.broadcast_to(some[:, None, None], (count, 2, 32))
        if form is int8:
            rounded = int8.GROUPED.scaled(np.ones((count, 2, 1), np.float16), groups)
        else:
            values = form.GROUPED.scale_values
            ones = np.ones((count, form.GROUPED.factors), np.float32)
            rounded = form.GROUPED.stored(ones, np.full((count, 2, values), 3, np.uint8), groups)
        np.testing.assert_array_equal(product(form.FORMAT, rounded, x), form.FORMAT.dequantise(rounded, 64)[:, 37])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize(
    "cols, inner, scalars", [(256, 512, USUAL), (576, 1536, USUAL), (64, 288, USUAL), (80, 736, GEMMAS)]
)
def test_a_feed_forward_network_of_the_array(form: Format, cols: int, inner: int, scalars: Scalars) -> None:
    """Each core's share of the sums and the residual are in it once."""
    both = np.concatenate([stored(form, inner, cols, seed) for seed in (1, 2)])
    down, draw = stored(form, cols, inner, seed=3), np.random.default_rng(cols)
    x, weight = (draw.standard_normal(cols).astype(bfloat16) for _ in range(2))
    got = feed_forward_product(form, both, down, x, weight, scalars=scalars)
    row, wide = normed(x, weight, scalars), form.dequantise(down, inner).astype(np.float64)
    gate, up = (form.dequantise(part, cols).astype(np.float64) @ row.astype(np.float64) for part in np.split(both, 2))
    inner_gate = 1.5957691216 * (gate + 0.044715 * gate**3) if scalars is GEMMAS else gate
    with np.errstate(over="ignore"):
        activation = gate / (1 + np.exp(-inner_gate)) * up
    # Products are rounded, and so are the activation, its factor and its exponential.
    of_gate, of_up = (
        ULP * np.abs(p) + error(form, part, row) for p, part in zip((gate, up), np.split(both, 2), strict=True)
    )
    off = 1.13 * of_gate * (np.abs(up) + of_up) + np.abs(gate) * of_up + 4 * ULP * np.abs(activation) + 2.0**-10
    want = x.astype(np.float64) + wide @ activation
    bound = np.abs(wide) @ off + error(form, down, activation) + ULP * np.abs(want)
    assert_close(got, want, bound)
    assert np.std(got - want) < 0.01 * np.std(want), "far from the bound, errors are small"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("cols, inner, scalars", [(80, 736, GEMMAS), (576, 1536, USUAL)])
def test_a_feed_forward_network_between_norms(form: Format, cols: int, inner: int, scalars: Scalars) -> None:
    """To the bit what norms and sums make around the network, which adds its row to what the last norm is taken of."""
    both = np.concatenate([stored(form, inner, cols, seed) for seed in (1, 2)])
    down, draw = stored(form, cols, inner, seed=3), np.random.default_rng(cols)
    residual, weight, x, before, after = [draw.standard_normal(cols).astype(bfloat16) for _ in range(5)]
    rows = residual, np.concatenate([before, weight, after]), x
    got = feed_forward_product(form, both, down, *rows, scalars=scalars, kernel="sandwich_feed_forward")
    mixed = add.reference(residual, normed(x, before, scalars))
    row, wide = normed(mixed, weight, scalars), form.dequantise(down, inner).astype(np.float32)
    gate, up = (gemv.reference(form.dequantise(part, cols), row) for part in np.split(both, 2))
    activation = silu_and_mul.reference(gate, up, int(scalars.get("activation", 0))).astype(np.float32)
    want = rms_norm.reference_add(
        gemv.reference(wide, activation), mixed, after, *(scalars.get(n, 0) for n in ("eps", "offset", "once"))
    )
    wrong = np.abs(got.astype(np.float64) - want)
    assert wrong.max() < 0.06 * np.abs(want.astype(np.float64)).max()
    assert np.std(wrong) < 0.01 * np.std(want.astype(np.float64))


def feed_forward_product(
    form: Format,
    both: np.ndarray,
    down: np.ndarray,
    *rows: np.ndarray,
    scalars: Scalars = USUAL,
    kernel: str = "feed_forward",
) -> np.ndarray:
    """`rows`: `x`, and what comes with it."""
    made, (cols, inner) = all_kernels()[f"{form.name}_{kernel}"], (len(down), len(both) // 2)
    tiling = made.tiling({"cols": cols, "ffn": inner, **scalars})  # type: ignore[misc]
    weights = form.arrange(both, "shared_pairs"), form.arrange(down, "shared_lanes")
    return execute(made.program(tiling), *weights, *rows, empty(cols))  # type: ignore[misc]


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_a_feed_forward_network_passes_on_what_is_no_number(wrong: float) -> None:
    form = int4.FORMAT
    both, down = stored(form, 1024, 256), stored(form, 256, 512)
    x, weight = (np.ones(256, bfloat16) for _ in range(2))
    x[3] = wrong
    assert not np.isfinite(feed_forward_product(form, both, down, x, weight).astype(np.float32)).any()
