"""Several tokens at once on the array, of one or of several sequences: each has the bits that it has alone."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16

from llama_npu2 import Llama, load
from llama_npu2.artifact.plan import TOKENS
from llama_npu2.artifact.validation import check_manifest
from llama_npu2.cli import bench
from llama_npu2.cli import profile as cli_profile
from llama_npu2.engine.completion import Completion
from llama_npu2.engine.serving import Serving
from llama_npu2.errors import UserError
from stages.air import AirModule
from stages.air.access import Coverage, accesses
from stages.engine.places import CONFIG
from stages.graph import Build
from stages.graph.options import parse_options
from stages.kernels import feed_forward, flash_attention, kernels, rms_norm, shared_down, token_attention
from stages.kernels.tokens import ACTIVATIONS, COUNTS, Tokens, of_sequence
from stages.model.presets import PRESETS
from stages.targets.npu2.modules import write_module
from stages.weights.formats import formats
from tests.npu.test_sim_kernels import token_table
from tests.support.npu_shapes import FAMILIES, JUDGED
from tests.support.several import CONTEXT, SEQUENCES, build_several
from tests.support.several import TOKENS as COUNT
from tests.support.sim_kernels import empty, execute, random
from tests.support.sim_support import run

COLS, OUT = 256, 512
NORM = {"eps": 1e-5}


def weight(form: str, rows: int, cols: int, layout: str) -> np.ndarray:
    values = np.random.default_rng([rows, cols]).normal(size=(rows, cols)).astype(np.float32)
    packed: np.ndarray = formats()[form].arrange(formats()[form].quantise(values), layout)
    return packed


def outputs(made: AirModule) -> np.ndarray:
    """Nothing, in the shape of the last argument."""
    kind = list(made.function.function_type.inputs)[-1]
    return empty(*kind.get_shape(), dtype=np.float32 if str(kind.element_type) == "f32" else bfloat16)  # type: ignore[attr-defined]


@pytest.mark.parametrize("count", [4, 8])
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "form, operation, scalars, rows",
    [
        ("int4", "gemv", {"out_cols": OUT}, {}),
        ("int8", "gemv_add", {"out_cols": OUT}, {"residual": OUT}),
        ("int6", "norm_gemv", {"out_cols": OUT, **NORM}, {"norm": COLS}),
        ("int4", "norm_gemv_bias", {"out_cols": OUT, **NORM}, {"norm": COLS, "bias": OUT}),
        ("int4", "norm_gemv_swiglu", {"out_cols": OUT, **NORM, "activation": 1}, {"norm": COLS}),
        ("int6", "norm_gemv_f32", {"out_cols": 1000, **NORM}, {"norm": COLS}),
        ("int4", "feed_forward", {"ffn": 720, **NORM}, {"norm": COLS}),
        (
            "int8",
            "sandwich_feed_forward",
            {"ffn": 512, "eps": 1e-6, "offset": 1.0, "once": 1, "activation": 1},
            {"residual": COLS, "norms": 3 * COLS},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_row_is_that_of_the_token_alone(
    form: str, operation: str, scalars: dict[str, Any], rows: dict[str, int], count: int
) -> None:
    sizes = {"cols": COLS, **scalars}
    one, several = kernels()[f"{form}_{operation}"], kernels()[f"{form}_batched_{operation}"]
    given = {"x": random(count, COLS, seed=1)}
    for seed, (name, size) in enumerate(rows.items()):
        given[name] = random(*((count, size) if name in ACTIVATIONS else (size,)), seed=seed + 2)
    shapes = {
        "weight": (sizes.get("out_cols", 0) * (2 if "swiglu" in operation else 1), COLS),
        "gate_up": (2 * sizes.get("ffn", 0), COLS),
        "down": (COLS, sizes.get("ffn", 0)),
    }
    given |= {arg.name: weight(form, *shapes[arg.name], arg.layout("aie2p")) for arg in one.args if arg.matrix}

    def computed(kernel: Any, sizes: dict[str, Any], token: int | None) -> np.ndarray:
        made = kernel.program(kernel.tiling(sizes))
        values = {
            name: value if token is None or name not in ACTIVATIONS else value[token] for name, value in given.items()
        }
        values["out"] = outputs(made)
        return execute(made, *(values[arg.name_hint] for arg in made.function.body.block.args))

    got = computed(several, {**sizes, "rows": count}, None)
    for token in range(count):
        assert got[token].tobytes() == computed(one, sizes, token).tobytes(), token


@pytest.mark.parametrize(
    "form, cols, ffn, pieces", [("int4", 256, 1024, 2), ("int8", 192, 768, 1), ("int6", 128, 512, 1)]
)
@pytest.mark.sampled(1)
def test_a_network_in_two_launches_is_that_of_the_token_alone(form: str, cols: int, ffn: int, pieces: int) -> None:
    """The second one adds the shares in the order of the one launch that a token takes."""
    count, sizes = 8, {"cols": cols, "ffn": ffn, **NORM}
    first = kernels()[f"{form}_batched_norm_shared_swiglu"], {"cols": cols, "out_cols": ffn, **NORM, "rows": count}
    second = kernels()[f"{form}_batched_shared_gemv_add"], {"cols": ffn, "out_cols": cols, "rows": count}
    one = kernels()[f"{form}_feed_forward"]
    gate_up, down = weight(form, 2 * ffn, cols, "shared_pairs"), weight(form, cols, ffn, "shared_lanes")
    x, norm = random(count, cols, seed=1), random(cols, seed=2)

    def computed(kernel: Any, tiling: Any, **given: np.ndarray) -> np.ndarray:
        made = kernel.program(tiling)
        given["out"] = outputs(made)
        return execute(made, *(given[argument.name_hint] for argument in made.function.body.block.args))

    inner = computed(first[0], first[0].tiling(first[1]), x=x, norm=norm, weight=gate_up)
    tiling = replace(second[0].tiling(second[1]), pieces=pieces, together=1)
    got = computed(second[0], tiling, x=inner, residual=x, weight=down)
    for token in range(count):
        alone = computed(one, one.tiling(sizes), x=x[token], norm=norm, gate_up=gate_up, down=down)
        assert got[token].tobytes() == alone.tobytes(), token


@pytest.mark.parametrize("rows", COUNTS)
@pytest.mark.parametrize("out_cols", [512, 576, 768, 960])
def test_products_take_herds_that_the_compiler_gets_right(out_cols: int, rows: int) -> None:
    tiling: Any = kernels()["int4_batched_gemv"].tiling({"cols": COLS, "out_cols": out_cols, "rows": rows})  # type: ignore[misc]
    assert tiling.herd[0] > 3, "a core of fewer columns never gets its panels"


def test_logits_of_several_tokens_lie_without_gaps() -> None:
    """All launches keep as many of each token, so that a transfer has no dimension that is longer than one can be."""
    sizes = {"cols": 2560, "out_cols": 151936, "eps": 1e-6, "rows": 8}
    kernel: Any = kernels()["int6_batched_norm_gemv_f32"]
    tiling = kernel.tiling(sizes)
    assert len(tiling.launches) > 1 and sum(tiling.launches) > tiling.steps
    assert {steps * tiling.cut.lanes for steps in tiling.launches} == {tiling.kept}
    launches = kernel.program(tiling).launches
    written = [access.runs for launch in launches for access in accesses(launch, "") if access.written]
    covered, count = Coverage.of(written), 8 * tiling.cut.panels * tiling.cut.lanes
    assert {covered.at(element) for element in range(0, count, tiling.cut.lanes)} == {1, 2}


@pytest.mark.parametrize("name", sorted(JUDGED | FAMILIES))
def test_steps_of_a_feed_forward_network_take_turns_in_l2(name: str) -> None:
    """One buffer is filled while another is read. Steps are an even number: of an odd one there would be three."""
    config, norm = (JUDGED | FAMILIES)[name], rms_norm.Norm(1e-5)
    for form, count in itertools.product((formats()[bits] for bits in ("int4", "int6", "int8")), (1, *COUNTS)):
        assert feed_forward.tile(form, config.emb, config.ffn, norm, tokens=Tokens(count)).staging.buffers == 2
        if count > 1 and config.ffn != 13696:  # whose shares are padded, so it takes no second launch
            assert shared_down.tile(form, config.emb, config.ffn, Tokens(count)).staging.buffers == 2


@pytest.mark.parametrize("heads, kv_heads, together", [(2, 1, True), (4, 2, True), (9, 3, False), (32, 8, False)])
def test_a_channel_fills_buffers_once_where_keys_have_one_of_their_own(
    heads: int, kv_heads: int, together: bool
) -> None:
    """A buffer that it fills again and again would have one place in its ring: cores would wait for ever."""
    several = token_attention.several(token_attention.tile(128, heads, kv_heads, 64), Tokens(4))
    gets = [op for op in token_attention.build(several).module.walk() if op.name == "air.channel.get"]
    assert len(gets) == several.passes * several.tokens.launches * (1 + (1 if together else 4))


NORMED = rms_norm.Norm(1e-6, 1.0, 1)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "count, heads, kv_heads, head_dim, norm, sees, slides, position",
    [
        (8, 4, 2, 64, None, None, False, 61),
        (4, 8, 8, 64, None, None, False, 0),
        (4, 6, 2, 96, None, 100, False, 124),
        (4, 4, 2, 64, None, 70, True, 131),
        (2, 4, 1, 64, None, 70, True, 200),
        (4, 24, 8, 128, None, None, False, 30),
        (8, 16, 8, 128, NORMED, None, False, 119),
        (8, 16, 4, 128, None, None, False, 63),
        (2, 4, 1, 256, NORMED, None, False, 126),
    ],
)
def test_attention_of_a_token_sees_those_before_it(
    count: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    norm: rms_norm.Norm | None,
    sees: int | None,
    slides: bool,
    position: int,
) -> None:
    """The cache has other rows where theirs belong. Across tiles of keys, and where windows begin at other tiles.

    Tokens of a second launch find in the cache what the first one wrote there.
    """
    window, width = 256 if slides else 128, 2 * kv_heads * head_dim
    scores = flash_attention.Scores(sees=sees)
    if slides:
        one = token_attention.tile_sliding(heads, kv_heads, head_dim, scores, norm)
    else:
        one = replace(token_attention.tile(window, heads, kv_heads, head_dim, norm), scores=scores)
    several = token_attention.several(one, Tokens(count))
    norms = [random(head_dim, seed=seed) for seed in (14, 15)] if norm else []
    joined = [np.concatenate(norms)] if norm else []
    x, cache = random(count, heads * head_dim + width, seed=12), random(window, width, seed=13)
    cache[position:] = 1000
    tables = np.stack([token_table(position + token, head_dim)[0] for token in range(count)])

    def seen(tiling: token_attention.Tiling, first: int) -> np.ndarray:
        """The view of a call whose first token is at this position."""
        start = tiling.view.row(1, first)
        view = np.zeros((tiling.window, width), bfloat16)
        view[: window - start] = cache[start : start + tiling.window]
        return view

    given = x, *joined, tables, seen(several, position), empty(count, heads * head_dim), empty(count, width)
    views = {len(given) - 1: (len(given) - 3, position)} if several.tokens.launches > 1 else {}
    *_, out, rows = run(token_attention.build(several).module, given, views=views)[0]
    for token in range(count):
        alone = x[token], *norms, tables[token], seen(one, position + token), empty(heads * head_dim), empty(width)
        *_, want, row = run(token_attention.build(one).module, alone)[0]
        assert out[token].tobytes() == want.tobytes(), token
        assert rows[token].tobytes() == row.tobytes(), token
        cache[position + token] = row


@pytest.fixture(scope="module")
def directory(artifacts: Path) -> Path:
    return build_several(artifacts)


REPEATED = "one two three four five one two three four five one two three"


def test_logits_are_those_of_tokens_one_by_one(directory: Path) -> None:
    """Also of fewer tokens than the programs take, and of tokens that come afterwards."""
    with closing(load(directory, 2)) as llm:
        ids = llm.encode(REPEATED, raw=True)
        llm.prefill(ids)
        tokens = [5, 9, 300, 12, 7, 44, 5, 9]
        one_by_one = [llm.decode(token).tobytes() for token in tokens]
        phase = llm._chunks.tokens_phase(len(ids), COUNT)
        assert phase and phase.kind == TOKENS
        for count in (COUNT, COUNT - 1):
            llm.rewind(len(ids))
            rows = llm._run_tokens(phase, tokens[:count], len(ids))
            assert [row.tobytes() for row in rows] == one_by_one[:count]
        llm._cached += tokens[: COUNT - 1]
        assert llm.decode(tokens[-1]).tobytes() == one_by_one[-1]
        end = llm.context_length
        assert llm._chunks.tokens_phase(end - COUNT, COUNT) and not llm._chunks.tokens_phase(end - COUNT + 1, 2)


CAPITALS = "The capital of France is Paris. The capital of Spain is Madrid."


def reply(llm: Llama, **options: Any) -> tuple[str, int]:
    """The text of a reply, and how many submissions of the device it took."""
    ran = 0
    process = llm._run_at

    def counted(*given: Any) -> None:
        nonlocal ran
        ran += 1
        process(*given)

    llm._run_at = counted  # type: ignore[method-assign]
    text = "".join(llm.generate(f"{CAPITALS} The capital of", raw=True, max_tokens=7, **options))
    llm._run_at = process  # type: ignore[method-assign]
    return text, ran


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"temperature": 1.0, "seed": 3}, marks=pytest.mark.thorough)],
    ids=["greedy", "sampled"],
)
def test_drafts_change_no_token_and_save_submissions(directory: Path, options: dict[str, Any]) -> None:
    with closing(load(directory, 2)) as llm:
        # Steps take as long whatever their rows, so that drafts pay: the simulator's times say nothing of the NPU's.
        note = llm._pace.note
        llm._pace.note = lambda rows, wanted, seconds: note(rows, wanted, 1.0)  # type: ignore[method-assign]
        llm.speculate = False
        plain, ran = reply(llm, **options)
        llm.speculate = True
        drafted, ran_with_drafts = reply(llm, **options)
        assert drafted == plain
        if not options:
            assert ran_with_drafts < ran


@pytest.mark.parametrize(
    ("heads", "kv_heads", "norm", "window"),
    [(4, 2, rms_norm.Norm(1e-6), None), (6, 2, None, 70)],
    ids=["norm", "window"],
)
def test_attention_of_sequences_is_that_of_each_token_alone(
    heads: int, kv_heads: int, norm: rms_norm.Norm | None, window: int | None
) -> None:
    """A launch takes its rows of many, and writes none of the others."""
    dim, count, first, pos = 64, 2, 1, (77, 18)
    sizes = {
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": dim,
        "window": 128,
        "scalar": dim,
        "sees": window or flash_attention.ALL,
    }
    sizes |= {"eps": 1e-6} if norm else {}
    name = "norm_token_attention" if norm else "token_attention"
    of = [kernels()[name], kernels()[f"{token_attention.of_sequences(count)}{name}"]]
    tiled = [kernel.sliding if window else kernel.tiling for kernel in of]
    more: list[dict[str, int]] = [{}, {"sequences": 4, "sequence": first}]
    alone, among = (tile(sizes | each) for tile, each in zip(tiled, more, strict=True))  # type: ignore[misc]
    x = random(4, (heads + 2 * kv_heads) * dim, seed=3)
    norms = [random(dim, seed=seed) for seed in (4, 5)] if norm else []
    tables = [token_table(at, dim)[0] for at in pos]
    caches = [random(alone.window, 2 * kv_heads * dim, seed=seed) for seed in (6, 8)]  # type: ignore[attr-defined]
    out, rows = random(4, heads * dim, seed=7), [empty(2 * kv_heads * dim) for _ in pos]
    made = of[1].program(among)  # type: ignore[misc]
    values = [x, *tables, *norms, *caches, out, *rows]
    given = {arg.name: value for arg, value in zip(of[1].args, values, strict=True)}
    names = [str(argument.name_hint) for argument in made.function.body.block.args]
    results = dict(zip(names, run(made.module, [given[argument] for argument in names])[0], strict=True))
    expected = out.copy()
    for number, (table, cache, row) in enumerate(zip(tables, caches, rows, strict=True)):
        own = *norms, table, cache, empty(heads * dim), row.copy()
        *_, one, one_row = run(of[0].program(alone).module, (x[first + number], *own))[0]  # type: ignore[misc]
        expected[first + number] = one
        assert results[of_sequence("row", number)].tobytes() == one_row.tobytes()
    assert results["out"].tobytes() == expected.tobytes()


TEXTS = ["one two three four", "The capital of France", "Once upon a time there was", "a"]


def test_sequences_at_once_are_what_each_is_alone(directory: Path) -> None:
    """With places that are left, too, and a prompt that comes while others get their tokens."""
    with closing(load(directory, 2)) as llm:
        assert f"sequences take turns, {SEQUENCES} at once" in llm.description
        asked = [{"max_tokens": most, "logprobs": 1} for most in (6, 3, 9, 2)]
        alone = [next(llm.complete(text, raw=True, **each)) for text, each in zip(TEXTS, asked, strict=True)]

        async def together(engine: Serving) -> list[Completion]:
            streams = [engine.submit(text, raw=True, **each) for text, each in zip(TEXTS, asked, strict=True)]
            return [await stream.whole() for stream in streams]

        with llm.engine(speculate=False) as engine:
            found = asyncio.run(together(engine))
            assert engine.counts.joined
    assert [(each.tokens, each.logprobs) for each in found] == [(each.tokens, each.logprobs) for each in alone]


@pytest.mark.parametrize(("count", "joined"), [(4, 4), (2, None)])
def test_joined_steps_are_measured(
    directory: Path, count: int, joined: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All steps of four sequences are. Two of this model take less time one after the other, by the estimate."""
    monkeypatch.setattr(bench, "GENERATED", 5)
    monkeypatch.setattr(cli_profile, "GENERATED", 5)
    with closing(load(directory, 2)) as llm:
        found = list(bench.Bench(llm, 1).decode_streams(count))
        (step,) = cli_profile.profile(llm, "a", True, 5, 1, [count])["phases"][2:]
        said = cli_profile.described({"machine": bench.machine(llm), "phases": [step], "peaks": {}})
    rate, share, *each = found
    assert rate.test == f"tg5 x {count}" and rate.share and 0 < rate.share < 1
    assert (share.test, share.values) == (f"joined x {count}", [100 if joined else 0])
    assert [(more.test, more.values) for more in each] == ([(f"in joined x {count}", [joined])] if joined else [])
    assert step["name"] == f"step of {count} sequences" and step["rows"] == (joined or 1)
    steps = 5 if joined else 5 * count
    assert (step["steps"], step["joined"], step["joined_tokens"]) == (steps, *((5, 20) if joined else (0, 0)))
    parts = {part["name"]: part["calls"] for part in step["parts"]}
    assert parts["copy from places"] == (joined or 1)
    assert (f"sequences@{SEQUENCES}@128" in parts) == bool(joined) != ("decode@128" in parts)
    assert ("5 of 5 steps were joined, 4.0 sequences each" if joined else "none of 10 steps was joined") in said


BAD = {
    (f"kv_cache.0@pos+1x{CONTEXT}", f"kv_cache.0@pos+1x{CONTEXT - 1}"): "binds another sequence's rows to slot",
    (
        f"kv_cache.0@pos+1x{CONTEXT}",
        f"kv_cache.0@pos+{SEQUENCES}x{CONTEXT}",
    ): f"sees another sequence than its {SEQUENCES}",
    ("token_table@pos+1x0", "token_table@pos+1x1"): "binds another sequence's rows to slot",
    ("x.0", "x.0@pos+1x0"): "binds another sequence's rows to slot",
}


@pytest.mark.parametrize(("reference", "changed"), BAD)
def test_places_of_sequences_are_checked(reference: str, changed: str, directory: Path) -> None:
    content = json.loads((directory / "manifest.json").read_text())
    check_manifest(content)
    calls = content["plans"][f"sequences@{SEQUENCES}@{CONTEXT}"]
    buffers = next(call["buffers"] for call in calls if reference in call["buffers"])
    buffers[buffers.index(reference)] = changed
    with pytest.raises(ValueError, match=re.escape(BAD[reference, changed])):
        check_manifest(content)


def test_a_place_ends_where_the_next_begins(directory: Path) -> None:
    """A prompt's programs, and those of a single token, have the first one alone."""
    content = json.loads((directory / "manifest.json").read_text())
    cache = content["buffers"]["kv_cache.0"]
    assert cache["sequences"] == SEQUENCES and cache["shape"][0] == SEQUENCES * CONTEXT
    cache["shape"][0] = SEQUENCES * (CONTEXT - 1)
    with pytest.raises(ValueError, match="binds 65024 bytes to slot kv_window, which needs 65536"):
        check_manifest(content)
    cache["sequences"] = 7
    with pytest.raises(ValueError, match=r"buffers\.kv_cache\.0 is no cache of 7 sequences"):
        check_manifest(content)
    content["plans"][f"decode@{CONTEXT}"][1]["buffers"][-2] = f"kv_cache.0@pos+1x{CONTEXT}"
    cache |= {"shape": [SEQUENCES * CONTEXT, cache["shape"][1]], "sequences": SEQUENCES}
    with pytest.raises(ValueError, match="sees another sequence than its 1"):
        check_manifest(content)


def test_what_has_no_such_programs_is_refused(artifacts: Path) -> None:
    with pytest.raises(UserError, match=r"npu\.tokens=4: several tokens at once take the weights of all layers alike"):
        _ = Build(parse_options({"target": "npu2-sim", "npu.tokens": "4"})).grouping
    for name in ("tokens", "sequences"):
        with pytest.raises(UserError, match=rf"npu\.{name}=3: must be 2 or 4 or 8"):
            parse_options({f"npu.{name}": "3"})
    given = {"target": "npu2-sim", "npu.sequences": "4", "weights": "int4"}
    with pytest.raises(UserError, match=r"npu\.sequences=4: convolutions of lfm2 look back at one sequence's rows"):
        _ = Build(parse_options({**given, "model": "random:lfm2-350m", "artifacts": str(artifacts)})).grouping


def test_models_with_convolutions_have_programs_of_several_tokens(tmp_path: Path) -> None:
    """They have none of several sequences, which are not asked for then."""
    (tmp_path / CONFIG).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / CONFIG).write_text(json.dumps(PRESETS["lfm2-350m"]))
    for entry, window in (("tokens_first_conv", None), ("tokens_layer_conv", None)):
        write_module(tmp_path, entry, tmp_path / "work", "fused", entry, 4, window, "int4", "bf16", several=True)
        assert (tmp_path / f"work/build/modules/{entry}.mlir").exists()
        shutil.rmtree(tmp_path / "work")
