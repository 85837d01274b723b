"""The same bits for any number of threads, any chunks of a prompt, and a row of a prompt computed as a token: random
cases of the host kernels, in every instruction set this machine has, and models from prompt to logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from ml_dtypes import bfloat16

from llama_npu2 import load
from llama_npu2.artifact.dtypes import DTYPES
from stages.kernels import ACTIVATIONS, KV_FORMATS, format_kernel
from stages.kernels.grouped import GROUPED
from stages.weights.constants import KV_BLOCK_POSITIONS, PANEL_ROWS
from stages.weights.formats import formats
from tests.conftest import ODD_WIDTHS, build, write_checkpoint
from tests.support.cpu_kernels_util import (
    BF16,
    HOST,
    Kernels,
    Library,
    guarded,
    in_sets,
    in_usual_sets,
    machine_isas,
    output,
)

THREADS = (1, 2, 3, 4)
CASES = 30
"""This many cases of each kind run in each instruction set, and three times as many more before a release."""


from_seed = pytest.mark.parametrize(
    "seeds", [range(CASES), pytest.param(range(CASES, 4 * CASES), marks=pytest.mark.thorough)], ids=["", "more"]
)
in_each_set = pytest.mark.parametrize("teams", machine_isas(), indirect=True)


class Case:
    """A random case: one whole prompt by one team, its rows in random pieces by others."""

    def __init__(self, teams: Sequence[Kernels], seed: int) -> None:
        self.teams, self.rng = teams, np.random.default_rng(seed)

    def __call__(self, kernel: str, *arguments: object) -> None:
        self.teams[int(self.rng.integers(len(self.teams)))](kernel, *arguments)

    def size(self, most: int) -> int:
        """1 to `most`, small ones more often."""
        return int(most ** self.rng.random())

    def normal(self, *shape: int) -> np.ndarray:
        """bf16 of magnitudes that differ from row to row."""
        values = self.rng.standard_normal(shape, np.float32)
        return guarded((values * 2.0 ** self.rng.integers(-3, 4, (*shape[:-1], 1))).astype(BF16))

    def table(self, positions: int) -> np.ndarray:
        """A table of a cache's blocks for so many positions, in any order and with blocks that it does not name."""
        count = -(-positions // KV_BLOCK_POSITIONS)
        return guarded(self.rng.permutation(count + self.size(4))[:count].astype(np.int32))

    def pieces(self, rows: int) -> Iterator[slice]:
        at = 0
        while at < rows:
            count = min(self.size(rows), rows - at)
            yield slice(at, at + count)
            at += count


@pytest.fixture(scope="module")
def teams(request: pytest.FixtureRequest, library: Library) -> Iterator[list[Kernels]]:
    made = [Kernels(library, request.param, threads) for threads in THREADS]
    yield made
    for team in made:
        team.close()


def assert_same(one: np.ndarray, other: np.ndarray) -> None:
    assert one.tobytes() == other.tobytes()


def halves(values: np.ndarray, sign: int) -> np.ndarray:
    """With a second half like the first: products of rows with both signs cancel, and what is left of them is what
    another order of the sum would change."""
    half = values.shape[-1] // 2
    values[..., half : 2 * half] = values[..., :half] * values.dtype.type(sign)
    return values


def compare_products(case: Case, name: str, epilogue: str) -> None:
    rows, cols, out_cols = case.size(60), case.size(2500), case.size(200)
    x, residual = halves(case.normal(rows, cols), 1), case.normal(rows, out_cols)
    values = [halves(case.normal(out_cols, cols), -1) for _ in range(1 + (epilogue == "_silu"))]
    matrix, vector = (format_kernel(kernel + epilogue, name) for kernel in ("gemm", "gemv"))
    weights = [guarded(formats()[HOST[matrix].stored].pack(each, "panels")) for each in values]

    def product(part: slice, out: np.ndarray, one: bool) -> None:
        rest = [guarded(residual[part])] if epilogue == "_add" else []
        if one:
            case(vector, *weights, guarded(x[part]), *rest, out, out_cols, cols)
        else:
            case(matrix, guarded(x[part]), *weights, *rest, out, len(out), cols, out_cols)

    whole = output((rows, out_cols))
    product(slice(0, rows), whole, False)
    for part in case.pieces(rows):
        out = output((part.stop - part.start, out_cols))
        product(part, out, len(out) == 1)
        assert_same(out, whole[part])


in_each_format = in_sets(
    ["bf16", "w8a8", *(stored.name + taken for stored in GROUPED for taken in ACTIVATIONS.values())]
)


@in_each_format
@from_seed
def test_products(teams: list[Kernels], name: str, seeds: range) -> None:
    for seed in seeds[::2]:
        compare_products(Case(teams, seed), name, ("", "_add", "_silu")[seed % 3])


def compare_q_k_and_v(case: Case, name: str, biased: bool) -> None:
    cols, q_cols, kv_cols = case.size(2500), case.size(300), case.size(200)
    kernel, joined = (format_kernel(f"{kernel}_bias" if biased else kernel, name) for kernel in ("gemv", "gemv_qkv"))
    x, widths, stored = case.normal(cols), (q_cols, kv_cols, kv_cols), formats()[HOST[kernel].stored]
    weights = [guarded(stored.pack(case.normal(width, cols), "panels")) for width in widths]
    biases = [case.normal(width) for width in widths] if biased else []
    results = [output(width) for width in widths]
    case(joined, *weights, x, *biases, *results, q_cols, kv_cols, cols)
    for i, width in enumerate(widths):
        one = output(width)
        case(kernel, weights[i], x, *biases[i : i + 1], one, width, cols)
        assert_same(results[i], one)


def compare_rows_of_q_k_and_v(case: Case, name: str, biased: bool) -> None:
    rows, cols, q_cols, kv_cols = case.size(20), case.size(1500), case.size(300), case.size(200)
    kernel, joined = (format_kernel(f"{kernel}_bias" if biased else kernel, name) for kernel in ("gemm", "gemm_qkv"))
    x, widths, stored = guarded(case.normal(rows, cols)), (q_cols, kv_cols, kv_cols), formats()[HOST[kernel].stored]
    weights = [guarded(stored.pack(case.normal(width, cols), "panels")) for width in widths]
    biases = [case.normal(width) for width in widths] if biased else []
    results = [output((rows, width)) for width in widths]
    case(joined, x, *weights, *biases, *results, rows, cols, q_cols, kv_cols)
    for i, width in enumerate(widths):
        one = output((rows, width))
        case(kernel, x, weights[i], *biases[i : i + 1], one, rows, cols, width)
        assert_same(results[i], one)


@in_each_format
@from_seed
def test_q_k_and_v_of_one_product_are_those_of_three(teams: list[Kernels], name: str, seeds: range) -> None:
    for seed in seeds[::3]:
        compare_q_k_and_v(Case(teams, seed), name, seed % 2 == 1)
        compare_rows_of_q_k_and_v(Case(teams, seed), name, seed % 2 == 1)


CALLED = ("append_kv_panels", "flash_attention_panels", "decode_attention_panels")


def attended(
    case: Case,
    stored: str,
    tensors: Sequence[np.ndarray],
    head_dim: int,
    first: int,
    pieces: Iterator[slice],
    table: np.ndarray,
) -> bytes:
    """Q, K, V bf16 `[positions, heads * head_dim]`: rows from `first` on, in pieces; a piece of one row is a token.

    `table` says which blocks of the cache hold the positions.
    """
    q, k, v = tensors
    heads, kv_heads = (tensor.shape[1] // head_dim for tensor in (q, k))
    append, attend, decode = (format_kernel(name, stored) for name in CALLED)
    form, blocks = formats()[stored], int(table.max()) + 1
    widths = (head_dim, -(-head_dim // PANEL_ROWS) * PANEL_ROWS)
    shapes = [form.stored_shape((blocks * kv_heads, KV_BLOCK_POSITIONS, width)) for width in widths]
    cache = [guarded(np.full(shape, -1, DTYPES[form.dtype])) for shape in shapes]
    made = []
    for part in (slice(0, first), *(slice(first + p.start, first + p.stop) for p in pieces)):
        count, pos = part.stop - part.start, part.start
        case(append, guarded(k[part]), guarded(v[part]), *cache, count, pos, kv_heads, head_dim, table)
        made.append(output((count, heads * head_dim)))
        name, seq = (decode, ()) if count == 1 else (attend, (count,))
        case(name, guarded(q[part]), *cache, made[-1], *seq, pos, heads, kv_heads, head_dim, table)
    return np.concatenate(made[1:]).tobytes()


def compare_attention(case: Case, stored: str) -> None:
    kv_heads, group, head_dim = case.size(4), case.size(9), 2 * case.size(64)
    first, rows = case.size(700), 1 + case.size(299)
    tensors = [case.normal(first + rows, n * head_dim) for n in (kv_heads * group, kv_heads, kv_heads)]
    whole = attended(case, stored, tensors, head_dim, first, iter([slice(0, rows)]), case.table(first + rows))
    assert attended(case, stored, tensors, head_dim, first, case.pieces(rows), case.table(first + rows)) == whole


@in_usual_sets("teams", "stored", {stored: [format_kernel(CALLED[0], stored)] for stored in KV_FORMATS.values()})
@from_seed
def test_attention(teams: list[Kernels], stored: str, seeds: range) -> None:
    for seed in seeds:
        compare_attention(Case(teams, seed), stored)


def compare_rows(case: Case) -> None:
    rows, heads, half = case.size(60), case.size(8), case.size(64)
    cols = heads * 2 * half
    x, up, scale = case.normal(rows, cols), case.normal(rows, cols), case.normal(cols)
    table = guarded(case.rng.standard_normal((rows, 2 * half), np.float32))

    def results(part: slice) -> list[np.ndarray]:
        count, mine, other = part.stop - part.start, guarded(x[part]), guarded(up[part])
        made = [output((count, cols)) for _ in range(4)]
        case("rms_norm", mine, scale, made[0], count, cols, 1e-5, 0.0, 0)
        case("rope", mine, table, made[1], count, part.start, heads, 2 * half)
        case("silu_and_mul", mine, other, made[2], count, cols, 0)
        case("add", mine, other, made[3], count, cols)
        return made

    whole = results(slice(0, rows))
    for part in case.pieces(rows):
        for out, all_rows in zip(results(part), whole, strict=True):
            assert_same(out, all_rows[part])


def compare_convolutions(case: Case) -> None:
    """Pieces go on in one history. A rewind finds the rows that it needs in it."""
    rows, cols, taps = case.size(400), case.size(600), case.size(5)
    bcx, weight = case.normal(rows, 3 * cols), case.normal(taps, cols)
    history, whole = guarded(np.zeros((rows + taps - 1, cols), BF16)), output((rows, cols))
    case("short_conv", bcx, weight, history, whole, rows, 0, cols, taps)
    table = case.table(rows)
    again = guarded(np.full((taps - 1 + KV_BLOCK_POSITIONS * (int(table.max()) + 1), cols), np.nan, BF16))
    again[: taps - 1] = 0
    pieces = list(case.pieces(rows))
    for part in (*pieces, *pieces[int(case.rng.integers(len(pieces))) :]):
        count, mine = part.stop - part.start, guarded(bcx[part])
        out = output((count, cols))
        case("short_conv", mine, weight, again, out, count, part.start, cols, taps, table)
        assert_same(out, whole[part])
    positions = np.arange(rows)
    kept = table[positions // KV_BLOCK_POSITIONS] * KV_BLOCK_POSITIONS + positions % KV_BLOCK_POSITIONS
    assert_same(history[taps - 1 :], again[taps - 1 + kept])


@in_each_set
@from_seed
def test_rows_of_norm_rotation_activation_and_convolution(teams: list[Kernels], seeds: range) -> None:
    for seed in seeds:
        compare_rows(Case(teams, seed))
        compare_convolutions(Case(teams, seed))


MODELS = {
    "": {"head_dim": 32, "max_position_embeddings": 700},
    "odd": ODD_WIDTHS | {"max_position_embeddings": 700},
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model", "weights", "kv", "activations"),
    [
        *((model, "bf16", kv, "bf16") for model in MODELS for kv in KV_FORMATS),
        ("", "int4", "bf16", "bf16"),
        ("odd", "w8a8", "bf16", "bf16"),
        ("odd", "int4", "int8", "int8"),
    ],
)
def test_logits(tmp_path: Path, artifacts: Path, model: str, weights: str, kv: str, activations: str) -> None:
    """A prompt at once, in chunks, and token by token, with 1 to 4 threads."""
    checkpoint = tmp_path / f"same_bits{model}{weights}{activations}"
    config = write_checkpoint(checkpoint, dtype=bfloat16, **MODELS[model])
    directory = build(checkpoint, artifacts, weights=weights, kv=kv, activations=activations)
    rng = np.random.default_rng(3)
    ids = rng.integers(0, config.vocab, 600).tolist()
    seen = set()
    for threads in THREADS:
        llm = load(directory, threads)
        llm.prefill(ids[:-1])
        for start, *ends in ([0, 600], [0, 1, 257, 600], [599, 600], [300, *range(301, 601)], [0, 255, 256, 599, 600]):
            llm.rewind(start)
            for begin, end in zip([start, *ends], ends, strict=False):
                logits = llm.decode(ids[begin]) if end == begin + 1 else llm.prefill(ids[begin:end])
            seen.add(logits.tobytes())
        llm.close()
    assert len(seen) == 1
