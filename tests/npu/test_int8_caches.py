"""KV caches in 8 bits on the array: kernels against references over what the cache holds, and a model with them.

The reference attends over the values of the cache's numbers, so that only what a core rounds is off: weights to bf16,
in sums and products alike; weights times V's scales to 15 bits of a tile's largest; queries to 15 bits.
"""

from __future__ import annotations

import itertools
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16

from llama_npu2 import Llama, load
from llama_npu2.artifact.plan import TOKENS, Phase
from llama_npu2.engine.chunks import Chunk
from llama_npu2.engine.memory import CacheRows
from stages.air import AirModule
from stages.estimate.constants import Machine
from stages.kernels import append_v, flash_attention, kv_rows, rms_norm, rope, token_attention
from stages.kernels.tokens import Tokens
from stages.model.artifact_weights import ArtifactWeights
from stages.model.checkpoint import Checkpoint
from stages.model.config import position_rows
from stages.model.policy import parse_policy
from stages.reports.estimated import Estimate
from tests.conftest import build, write_checkpoint
from tests.npu.test_sim_kernels import NORMS, execute_two, head_weights, in_heads, magnitude, token_table
from tests.npu.test_windows import GEMMA
from tests.pipeline.test_diagnose import built, found
from tests.support.model_schedules import schedule
from tests.support.npu_shapes import FEW, MODELS
from tests.support.sim_kernels import ULP, assert_close, attention_case, empty, execute, random
from tests.support.sim_support import run

INT8 = "int8_rows"
COUNT = 4
MACHINE = Machine()


def nothing(*shape: int) -> np.ndarray:
    """Bytes that were never written."""
    return np.full(shape, -1, np.int8)


def score_bound(q: np.ndarray, k: np.ndarray, dim: int, scalar: float) -> float:
    """What a score is off by: half a unit of each number of the largest query, and of their sum in 22 bits."""
    most, longest = np.abs(q.astype(np.float64)).max(), np.abs(k).reshape(-1, dim)
    unit = most * 2.0**-14
    sums = unit / 2 * longest.sum(axis=1).max() + dim / 2 * unit * longest.max() / 127
    return float(sums / np.sqrt(scalar))


def assert_attended(
    got: np.ndarray, want: np.ndarray, spread: np.ndarray, v: np.ndarray, score_error: float, keys: int
) -> None:
    weight_error = 2.0**-8 + score_error
    # A tile's weights times V's scales are off by half a unit of 14 bits below four times its largest, for each key.
    tiles = keys * 2.0**-13 * np.abs(v).max()
    bound = ULP * magnitude(want) + 2 * weight_error * magnitude(spread) + tiles
    assert_close(got, want, bound)
    # Independent roundings of at most 2^-9 in the root mean square: weights, result, reference.
    error = np.linalg.norm(got.astype(np.float64) - want.astype(np.float64))
    assert error < 2.0**-8 * np.linalg.norm(want.astype(np.float64))


def cached(kv: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A cache of bf16 `[positions, kv_heads, 2, head_dim]` in 8 bits, and K and V as it holds them."""
    rows = kv_rows.rows(kv[:, :, 0], kv[:, :, 1], INT8)
    k, v = (half.reshape(len(kv), -1) for half in kv_rows.values(rows, INT8))
    return rows.reshape(len(kv), -1), k, v


def test_rows_have_scales_side_by_side() -> None:
    """K's numbers and scale, then V's scale and numbers: eight bytes are numbers of one key, or its two scales."""
    k, v = random(5, 2, 64, seed=1), random(5, 2, 64, seed=2, scale=40)
    rows = kv_rows.rows(k, v, INT8)
    assert rows.shape == (5, 2, 2, 68) and kv_rows.head_elements(64, INT8) == 136
    scales = np.ascontiguousarray(rows.reshape(5, 2, 136)[..., 64:72]).view(np.float32)
    np.testing.assert_array_equal(scales[..., 0], np.abs(k.astype(np.float32)).max(axis=-1) / np.float32(127))
    np.testing.assert_array_equal(scales[..., 1], np.abs(v.astype(np.float32)).max(axis=-1) / np.float32(127))
    for values, given, scale in zip(kv_rows.values(rows, INT8), (k, v), scales.transpose(2, 0, 1), strict=True):
        assert (np.abs(values - given.astype(np.float32)) <= 0.5001 * scale[..., None]).all()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rows, heads, dim", [(16, 3, 96), (128, 2, 64), (24, 8, 128)])
def test_a_prompts_rows_are_those_of_the_format(rows: int, heads: int, dim: int) -> None:
    """V to the bit, also where nothing has a scale; K too, after the rotation that bf16 caches hold."""
    x, angles = random(rows, heads * dim, seed=7), np.random.default_rng(8).normal(size=(rows, dim // 2)) * 50
    x[1], x[2] = 0, x[2] * bfloat16(2.0**100)
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    table = np.concatenate([table, position_rows(70000, rows)], axis=1)
    plain = execute(rope.build(rope.tile(rows, heads, dim, rope.KEYS)), x, table, empty(rows, 2 * heads * dim))
    rotated = plain.reshape(rows, heads, 2, dim)[:, :, 0]
    tiling = rope.tile(rows, heads, dim, rope.KEYS, stored=INT8)
    got = execute(rope.build(tiling), x, table, nothing(rows, tiling.out_width)).reshape(rows, heads, 2, -1)
    assert got[:, :, 0].tobytes() == kv_rows.halves(rotated, kv_rows.KEYS, INT8).tobytes()
    assert (got[:, :, 1] == -1).all(), "K wrote where V goes"
    made = append_v.build(append_v.tile(rows, heads, dim, INT8))
    got = execute(made, x, nothing(rows, tiling.out_width)).reshape(rows, heads, 2, -1)
    assert got[:, :, 1].tobytes() == append_v.reference(x, dim, INT8).tobytes()
    assert (got[:, :, 0] == -1).all(), "V wrote where K goes"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "window, heads, kv_heads, head_dim, scores, norm",
    [
        (128, 4, 2, 64, {}, None),
        (256, 9, 3, 64, {"sees": 65, "scalar": 24.0}, NORMS[1]),
        (256, 10, 1, 32, {"sees": 1}, None),
        (128, 10, 2, 128, {}, NORMS[0]),
        (128, 6, 2, 96, {"sees": 100}, None),
        (256, 3, 1, 256, {"sees": 200}, None),
    ],
    ids=str,
)
def test_token_attention(
    window: int, heads: int, kv_heads: int, head_dim: int, scores: dict[str, Any], norm: rms_norm.Norm | None
) -> None:
    """At the first position, inside a tile of keys, at its end and at the window's; what lies behind is not seen, nor
    what the cache has at the position itself. V's scales differ by more than weights do."""
    width = kv_heads * head_dim
    x, kv = random(heads * head_dim + 2 * width, seed=12), random(window, kv_heads, 2, head_dim, seed=13)
    kv[::3, :, 1] *= bfloat16(2.0**-6)
    kv[7, :, 1] = 0
    tiling = token_attention.tile(window, heads, kv_heads, head_dim, norm, INT8)
    tiling = replace(tiling, scores=flash_attention.Scores(**scores))
    weights = head_weights(head_dim, 2, norm)
    normed = in_heads(x, ((heads, weights[0]), (kv_heads, weights[1])), norm) if norm else x
    cache, k, v = cached(kv)
    edge = scores.get("sees", 63)
    for position in sorted({0, 37, edge, edge + 1, window - 1}):
        table = token_table(position, head_dim)
        seen = cache.copy()
        seen[position:] = -1
        rest = seen, empty(heads * head_dim), nothing(cache.shape[1])
        got, row = execute_two(token_attention.build(replace(tiling, norm=None)), normed, table[0], *rest)
        if norm:
            of_norm = execute_two(token_attention.build(tiling), x, *weights, table[0], *rest)
            assert [each.tobytes() for each in of_norm] == [got.tobytes(), row.tobytes()]
        given = normed[None], np.repeat(table, position + 1, axis=0), position
        want, want_row = token_attention.reference(*given, k, v, heads, kv_heads, **scores, stored=INT8)
        # The own row is taken as the cache has it afterwards, whose K may have been rotated a bit further.
        own = row.reshape(want_row.shape)
        assert own[:, 1].tobytes() == want_row[:, 1].tobytes(), "V is rounded as the format says"
        assert (np.abs(own[:, 0, :-4].astype(int) - want_row[:, 0, :-4]) <= 1).mean() > 0.99
        spread, _ = token_attention.reference(*given, k, np.abs(v), heads, kv_heads, **scores, stored=INT8)
        q, new = rope.reference_qkv(*given, heads, kv_heads, head_dim)
        keys = np.concatenate([k[:position].reshape(-1, head_dim), new[:, 0].astype(np.float32)])
        error = score_bound(q, keys, head_dim, scores.get("scalar", head_dim))
        values = np.concatenate([v[:position].ravel(), new[:, 1].astype(np.float32).ravel()])
        sizes = np.abs(spread.astype(np.float32)) + np.abs(want.astype(np.float32))
        assert_attended(got, want, sizes, values, error, tiling.tile_k)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "heads, kv_heads, head_dim, sees, slides, position",
    [(4, 2, 64, None, False, 61), (6, 2, 96, 70, True, 131), (24, 8, 128, None, False, 30)],
)
def test_tokens_at_once_have_the_bits_of_each_alone(
    heads: int, kv_heads: int, head_dim: int, sees: int | None, slides: bool, position: int
) -> None:
    """Results and rows, across tiles of keys, and where windows begin at other tiles."""
    window, width = 256 if slides else 128, 2 * kv_heads * head_dim
    scores = flash_attention.Scores(sees=sees)
    if slides:
        one = token_attention.tile_sliding(heads, kv_heads, head_dim, scores, stored=INT8)
    else:
        one = replace(token_attention.tile(window, heads, kv_heads, head_dim, stored=INT8), scores=scores)
    several = token_attention.several(one, Tokens(COUNT))
    cache, _, _ = cached(random(window, kv_heads, 2, head_dim, seed=13))
    x, cache[position:] = random(COUNT, heads * head_dim + width, seed=12), 99
    tables = np.stack([token_table(position + token, head_dim)[0] for token in range(COUNT)])

    def seen(tiling: token_attention.Tiling, first: int) -> np.ndarray:
        """The view of a call whose first token is at this position."""
        start = tiling.view.row(1, first)
        view = np.zeros((tiling.window, cache.shape[1]), np.int8)
        view[: window - start] = cache[start : start + tiling.window]
        return view

    given = x, tables, seen(several, position), empty(COUNT, heads * head_dim), nothing(COUNT, cache.shape[1])
    *_, out, rows = run(token_attention.build(several).module, given)[0]
    for token in range(COUNT):
        alone = x[token], tables[token], seen(one, position + token), empty(heads * head_dim), nothing(cache.shape[1])
        *_, want, row = run(token_attention.build(one).module, alone)[0]
        assert out[token].tobytes() == want.tobytes(), token
        assert rows[token].tobytes() == row.tobytes(), token
        cache[position + token] = row


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "seq, window, heads, kv_heads, dim, pos, scale, scores",
    [
        (64, 128, 6, 2, 96, 1, 1.0, {}),
        (128, 256, 3, 1, 32, 90, 3.0, {"sees": 17, "scalar": 20.0}),
        (128, 256, 2, 1, 64, 128, 12.0, {}),
        (16, 128, 5, 1, 128, 70, 1.0, {"sees": 64}),
    ],
)
def test_flash_attention(
    seq: int, window: int, heads: int, kv_heads: int, dim: int, pos: int, scale: float, scores: dict[str, Any]
) -> None:
    """From any position on."""
    q, _, _, kv = attention_case(seq, window, heads, kv_heads, dim, pos, scale)
    cache, *halves = cached(kv.reshape(window, kv_heads, 2, dim))
    k, v = (half[: pos + seq] for half in halves)
    tiling = flash_attention.tile(seq, heads, kv_heads, dim, window, INT8)
    tiling = replace(tiling, scores=flash_attention.Scores(**scores))
    cache[pos + seq :] = -1
    got = execute(flash_attention.build(tiling), q, cache, empty(seq, heads * dim))
    given = pos, heads, kv_heads
    want = flash_attention.reference_placed(q, k, v, *given, **scores, stored=INT8)
    spread = flash_attention.reference_placed(q, k, np.abs(v), *given, **scores, stored=INT8)
    own = q.reshape(seq, heads, -1)[..., :dim]
    error = score_bound(own, k, dim, scores.get("scalar", dim))
    assert_attended(got, want, spread, v, error, tiling.tile_k)


@pytest.mark.parametrize("sees", [pytest.param(None, marks=pytest.mark.thorough), 50])
def test_attention_gives_the_same_bytes_through_every_window(sees: int | None) -> None:
    """Also for fewer rows at a time, from any position on: no query depends on the others."""

    def program(rows: int, window: int) -> AirModule:
        tiling = flash_attention.tile(rows, 3, 1, 64, window, INT8)
        return flash_attention.build(replace(tiling, scores=flash_attention.Scores(sees=sees)))

    q, _, _, kv = attention_case(128, 512, 3, 1, 64, 0, 1.0)
    q.reshape(128, 3, -1)[40, :, :64] *= bfloat16(2.0**5)
    cache, *_ = cached(kv.reshape(512, 1, 2, 64))
    whole = execute(program(128, 128), q, cache[:128].copy(), empty(128, 192))
    assert execute(program(128, 512), q, cache, empty(128, 192)).tobytes() == whole.tobytes()
    for first, window in ((0, 64), (16, 128), (64, 256)):
        rows = q[first : first + 64].copy()
        part = execute(program(64, window), rows, cache[:window].copy(), empty(64, 192))
        assert part.tobytes() == whole[first : first + 64].tobytes()


def test_what_is_no_number_stays_where_it_is() -> None:
    """A query has no result and takes no other's; a key or value makes none what sees it, and nothing else."""
    tiling = flash_attention.tile(128, 4, 2, 64, stored=INT8)
    q, _, _, kv = attention_case(128, 128, 4, 2, 64, 0, 1.0)
    cache, *_ = cached(kv.reshape(128, 2, 2, 64))
    made = flash_attention.build(tiling)
    bad = q.copy()
    bad[50, 3] = np.nan
    good, out = (execute(made, t, cache, empty(128, 256)) for t in (q, bad))
    assert not np.isfinite(out[50, :64].astype(np.float32)).any()
    out[50, :64] = good[50, :64]
    assert out.tobytes() == good.tobytes()
    for scale, largest in itertools.product((64, 68), (np.nan, np.inf)):
        broken = cache.copy()
        broken[77, scale : scale + 4] = np.array([largest], np.float32).view(np.int8)
        out = execute(made, q, broken, empty(128, 256))
        assert out[:77].tobytes() == good[:77].tobytes() and out[:, 128:].tobytes() == good[:, 128:].tobytes()
        assert not np.isfinite(out[77:, :128].astype(np.float32)).any()


def test_a_token_reads_half_the_bytes_of_the_cache() -> None:
    """The estimate counts 8 bits and a scale where it counts 16 bits, and says less time behind long contexts."""
    positions = 16384
    config = MODELS["llama-3.2-1b"].within(positions)
    by_format = [
        Estimate(config, "fused", [64], MACHINE, parse_policy("int4", kv), depth=positions - 1)
        for kv in ("bf16", "int8")
    ]
    less, dim = np.subtract(*(estimate.traffic()[0] for estimate in by_format)), config.head_dim
    rows = config.layers * config.kv_heads * (positions + 1)
    assert less == rows * (4 * dim - (2 * dim + 8)), "of all that are read, and the one that is written"
    bf16, int8 = (estimate.token().milliseconds for estimate in by_format)
    assert int8 < 0.9 * bf16


CONTEXT = 128
TINY: dict[str, Any] = {
    **{"head_dim": 64, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512},
}
OPTIONS: dict[str, Any] = {**FEW, "target": "npu2-sim", "weights": "int4", "kv": "int8", "context": CONTEXT}


def caches(llm: Llama, positions: int) -> bytes:
    names = sorted(name for name in llm.manifest.buffers if name.startswith("kv_cache"))
    assert {llm.manifest.buffers[name]["dtype"] for name in names} == {"i8"}
    return b"".join(llm.memory.array(name)[:positions].tobytes() for name in names)


def test_a_model_goes_on_from_anywhere(artifacts: Path, tmp_path: Path) -> None:
    """A prompt in chunks is the prompt at once, and what is rewound comes again. Tokens are the CPU's, whose cache
    holds the same numbers in another order: no further off than bf16 activations explain."""
    write_checkpoint(tmp_path / "kv_tiny", dtype=bfloat16, **TINY)
    first, later = (Phase.parse(name) for name in ("prefill@64", f"prefill@64@{CONTEXT}"))
    ids, logits = np.random.default_rng(5).integers(3, 300, 80).tolist(), []
    with closing(load(build(tmp_path / "kv_tiny", artifacts, **OPTIONS), 2)) as llm:
        made = []
        for ends in ([64], [41, 43, 64]):
            llm.reset()
            parts = itertools.pairwise([0, *ends])
            chunks = [Chunk(later if start else first, start, end) for start, end in parts]
            made.append((llm.prefill(ids[:64], chunks).tobytes(), caches(llm, 64)))
        assert made[0] == made[1]
        tokens = [llm.decode(token).tobytes() for token in ids[64:]]
        held = caches(llm, len(ids))
        llm.rewind(61)
        assert llm.prefill(ids[61:64], [Chunk(later, 61, 64)]).tobytes() == made[0][0]
        assert [llm.decode(token).tobytes() for token in ids[64:]] == tokens and caches(llm, len(ids)) == held
        llm.reset()
        llm.prefill(ids[:1])
        logits.append(np.array([llm.decode(token).copy() for token in ids[1:40]]))
    with closing(load(build(tmp_path / "kv_tiny", artifacts, weights="int4", kv="int8"), 2)) as llm:
        llm.prefill(ids[:1])
        logits.append(np.array([llm.decode(token).copy() for token in ids[1:40]]))
    assert relative(*logits) < 0.05


@pytest.fixture(scope="module")
def directory(artifacts: Path) -> Path:
    return build("demo", artifacts, **OPTIONS, tokens=str(COUNT))


@pytest.mark.thorough
def test_logits_are_those_of_tokens_one_by_one(directory: Path) -> None:
    """And so is what the cache holds."""
    with closing(load(directory, 2)) as llm:
        ids, tokens = list(range(5, 66)), [5, 9, 300, 12]
        llm.prefill(ids)
        one_by_one = [llm.decode(token).tobytes() for token in tokens]
        held = caches(llm, len(ids) + COUNT)
        phase = llm._chunks.tokens_phase(len(ids), COUNT)
        assert phase and phase.kind == TOKENS
        llm.rewind(len(ids))
        assert [row.tobytes() for row in llm._run_tokens(phase, tokens, len(ids))] == one_by_one
        assert caches(llm, len(ids) + COUNT) == held


@pytest.mark.thorough
def test_sequences_take_turns_in_the_cache(directory: Path) -> None:
    """Blocks of the host hold what the device's cache held, half the bytes of bf16, and no bit of a reply changes."""
    with closing(load(directory, 2)) as llm:
        layers, heads = llm.manifest.model["layers"], 2
        assert sum(rows.row for rows in CacheRows.of(llm.manifest).values()) == layers * heads * 2 * (64 + 4)
        counts = schedule(llm, 0, most=3, longest=60)
    assert counts.evicted, "others took the blocks of a sequence"


@pytest.mark.thorough
@pytest.mark.parametrize("weights", ["int4", "bf16"])
def test_no_fault_is_found_where_there_is_none(weights: str, artifacts: Path) -> None:
    """With attention of tokens on the array, and on the host."""
    options = {**OPTIONS, "weights": weights}
    report = found(built("demo", artifacts, **options))
    assert report.passed, report.verdict


def relative(values: np.ndarray, exact: np.ndarray) -> float:
    return float(np.linalg.norm(values - exact) / np.linalg.norm(exact))


SHAPES: dict[str, dict[str, Any]] = {
    "host attention": {"weights": "bf16"},
    "windows and norms": {"weights": "int4", "fields": GEMMA},
    "wide heads": {"weights": "int8", "fields": {"head_dim": 128, "num_key_value_heads": 1}},
}


@pytest.mark.thorough
@pytest.mark.verify
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_those_of_the_cache_it_holds(shape: str, tmp_path: Path, artifacts: Path) -> None:
    """Against transformers in float32 with K and V rounded like ours, as on the CPU."""
    pytest.importorskip("torch", reason="needs the verify extra: pip install -e '.[verify]'")
    pytest.importorskip("transformers", reason="needs the verify extra: pip install -e '.[verify]'")
    from stages.proof.comparison.verification import Clock, compare

    checkpoint = tmp_path / f"kv_{shape.replace(' ', '_')}"
    config = write_checkpoint(checkpoint, dtype=bfloat16, **{**TINY, **SHAPES[shape].get("fields", {})})
    options = {"weights": SHAPES[shape]["weights"], "kv": "int8", "matmul": "bf16", **FEW}
    built = build(checkpoint, artifacts, target="npu2-sim", **options)
    with closing(load(built)) as llm:
        assert "int8 KV cache, " in llm.description
        ids = np.random.default_rng(1).integers(0, config.vocab, 150).tolist()
        opened = Checkpoint.open(checkpoint).within(256)
        _, found, _ = compare(llm, opened, ArtifactWeights(built), [ids], [], Clock())
        assert found.passed and found.ours < 0.05, found
        # As a prompt, and token by token.
        llm.reset()
        whole = llm.prefill(ids[:100]).copy()
        llm.reset()
        llm.prefill(ids[:20])
        tokens = [llm.decode(token).copy() for token in ids[20:100]]
        assert relative(tokens[-1], whole) < 0.1
