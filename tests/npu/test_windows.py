"""Layers that see a window read, on the array, just the part of the KV cache that it lies in."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llama_npu2 import load
from llama_npu2.artifact.plan import WINDOW, View
from stages.kernels import flash_attention, token_attention
from stages.kernels.flash_attention import Scores
from stages.model.artifact_weights import ArtifactWeights
from stages.model.checkpoint import Checkpoint
from stages.model.config import Config
from stages.model.families import parse_config
from stages.model.grouping import programs
from stages.model.plan import Plan, make_plan
from stages.model.policy import parse_policy
from stages.model.presets import PRESETS
from stages.proof.comparison import transformers_model
from stages.targets.npu2 import KERNEL_SET
from stages.targets.npu2.groupings import GROUPINGS
from stages.targets.npu2.modules import build_module
from tests.conftest import build, write_checkpoint
from tests.npu.test_sim_kernels import empty, execute_two, random, token_table

SHAPES = [(4, 2, 64, 100), (4, 1, 256, 130), (3, 1, 32, 1), (3, 1, 32, 64)]
"""Heads, KV heads, the size of a head, and positions that a row attends to."""
POSITIONS = 512


def edges(sees: int, tile: int) -> list[int]:
    """Positions where a window begins to move, where it leaves a tile, and the last one."""
    begin = -(-sees // tile) * tile
    beside = (at + by for at in (sees, sees + tile, begin, begin + tile) for by in (-2, -1, 0, 1))
    return sorted({0, *(at for at in beside if 0 <= at < POSITIONS), POSITIONS - 1})


@pytest.mark.sampled(1)
@pytest.mark.parametrize("heads, kv_heads, dim, sees", SHAPES)
def test_a_token_sees_its_window_to_the_bit(heads: int, kv_heads: int, dim: int, sees: int) -> None:
    """A view gives the bytes that the whole cache gives. One that begins a tile beside, or a window that is one
    shorter, gives others."""
    width = kv_heads * dim
    tiling = token_attention.tile_sliding(heads, kv_heads, dim, Scores(sees=sees))
    x, kv = random(heads * dim + 2 * width, seed=1), random(POSITIONS + tiling.window, 2 * width, seed=2)
    whole = replace(token_attention.tile(POSITIONS, heads, kv_heads, dim), tile_k=tiling.tile_k, scores=tiling.scores)
    view, tile = tiling.view, tiling.tile_k

    @cache
    def program(of: token_attention.Tiling) -> Any:
        return token_attention.build(of)

    def attended(of: token_attention.Tiling, position: int, first: int) -> bytes:
        rest = kv[first : first + of.window], empty(heads * dim), empty(2 * width)
        return execute_two(program(of), x, token_table(position, dim)[0], *rest)[0].tobytes()

    for position in edges(sees, tile):
        first, want = view.row(1, position), attended(whole, position, 0)
        assert attended(tiling, position, first) == want, position
        if first and sees > 1:
            assert attended(tiling, position, first - tile) != want, "a tile early"
        # The token's own key and value do not come from the cache.
        if position >= sees > 1:
            assert attended(tiling, position, first + tile) != want, "a tile late"
            off = replace(tiling, scores=Scores(sees=sees - 1))
            assert attended(off, position, off.view.row(1, position)) != want, "a window that is off by one"


@pytest.mark.parametrize("sees", [1, 2, 15, 16, 17, 63, 64, 65, 100, 512])
@pytest.mark.parametrize("tile", [16, 32, 64])
@pytest.mark.parametrize("rows", [1, 64, 192])
def test_a_view_has_what_its_rows_see(sees: int, tile: int, rows: int) -> None:
    """A view holds all that its rows see, begins less than a tile before it, and has the least even number of tiles."""
    scores = Scores(sees=sees)
    view, length, most = scores.view(tile), scores.positions(rows, tile), 0
    for position in range(1200):
        first = view.row(rows, position)
        oldest = max(position + 1 - sees, 0)
        assert first % tile == 0 and first <= oldest < first + tile
        most = max(most, position + rows - first)
    assert length % (2 * tile) == 0 and length - 2 * tile < most <= length


def test_the_text_of_a_view() -> None:
    view = View(WINDOW, 512, 16)
    assert str(view) == "window:512:16" and View.parse(str(view)) == view


def planned(name: str, context: int, **fields: Any) -> tuple[Config, list[Any], Plan]:
    config, policy = parse_config(PRESETS[name] | fields, name).within(context), parse_policy("int4")
    buckets = (128,)
    grouping = GROUPINGS["fused"]
    made = programs(config, grouping, buckets, policy, config.max_seq)
    return config, made, make_plan(config, grouping, KERNEL_SET, buckets, policy)


def test_tokens_have_one_program_for_all_contexts_beyond_the_window() -> None:
    """Layers with a window share one program for all longer contexts; the others have one for each context bucket.

    The cache of a layer with a window ends where the last view of it does."""
    config, made, plan = planned("gemma3-1b", 4096)
    names = [program.name for program in made if program.entry.startswith("decode_layer")]
    sizes = ("128", "256", "512", "1024", "2048", "4096")
    assert names == [
        *(f"decode_layer__w512.{size}" for size in (*sizes[:3], WINDOW)),
        *(f"decode_layer.{size}" for size in sizes),
    ]
    view = View(WINDOW, 512, 16)
    for phase, calls in plan.phases.items():
        if phase.kind != "decode":
            continue
        for call in calls:
            windows = {reference.view for reference in call.buffers if reference.view.kind == WINDOW}
            slides = call.program.endswith(WINDOW)
            assert windows == ({view} if slides else set())
            assert slides == ("w512" in call.program and phase.context > 512)
    rows = {plan.buffers[f"kv_cache.{layer}"].shape[0] for layer in (0, 1)}
    assert rows == {view.row(1, 4095) + 544} and plan.buffers["kv_cache.5"].shape[0] == 4096
    assert config.decoder.layers[5].mixer.window is None  # type: ignore[union-attr]


def test_a_program_divides_its_attention_as_its_view_does() -> None:
    """The module takes the tiling that the program's view of the cache is derived from; others follow their context."""
    config, made, _ = planned("gemma3-1b", 4096)
    slides = next(program for program in made if program.sliding)
    fixed = next(program for program in made if program.entry == slides.entry and program.context == 512)
    of_slides, of_fixed = (build_module(program, config.dimensions()).tilings for program in (slides, fixed))
    assert sum(tiling == slides.sliding for tiling in of_slides) == 1
    assert not any(getattr(tiling, "slides", False) for tiling in of_fixed)


def test_a_model_of_windows_alone_has_no_more_phases_than_programs() -> None:
    """The first Mistral has a phase for each context bucket up to the view's length, and one phase for all beyond."""
    _, made, plan = planned("mistral-7b", 16384, sliding_window=4096)
    slides = next(program.sliding for program in made if program.sliding)
    assert slides is not None
    contexts = [phase.context for phase in plan.phases if phase.kind == "decode"]
    assert contexts == [*(128 << n for n in range(6)), 16384] and slides.window < 8192


def test_a_window_as_long_as_the_context_is_none() -> None:
    _, made, plan = planned("mistral-7b", 4096, sliding_window=4096)
    assert not any(program.sliding for program in made)
    assert not any(r.view.kind == WINDOW for calls in plan.phases.values() for call in calls for r in call.buffers)


SEES = 40
GEMMA: dict[str, Any] = {
    **{"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "hidden_activation": "gelu_pytorch_tanh"},
    **{"hidden_act": None, "sliding_window": SEES, "sliding_window_pattern": 2, "rope_local_base_freq": 10000.0},
    **{"query_pre_attn_scalar": 64, "rope_scaling": None, "num_hidden_layers": 3, "hidden_size": 128},
    **{"intermediate_size": 192, "head_dim": 32, "max_position_embeddings": 512},
}


def root_mean_square(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))


@pytest.mark.thorough
@pytest.mark.verify
def test_logits_where_windows_move(artifacts: Path, tmp_path: Path) -> None:
    """Tokens from before the window's edge until several tiles behind it have the errors that bf16 has.

    They lie in two context buckets. A rewind to before the edge changes no bit."""
    write_checkpoint(tmp_path / "gemma", **GEMMA)
    directory = build(tmp_path / "gemma", artifacts, target="npu2-sim", weights="int4", buckets="64", context=256)
    assert any(name.endswith(WINDOW) for name in json.loads((directory / "manifest.json").read_text())["programs"])
    ids = np.random.default_rng(3).integers(3, 300, 250).tolist()
    opened = Checkpoint.open(tmp_path / "gemma").within(256)
    exact, rounded = transformers_model.logits(opened, ArtifactWeights(directory).values, [ids], [ids])
    with closing(load(directory)) as llm:
        first = llm.prefill(ids[:30])
        ours = [first, *(llm.decode(token) for token in ids[30:])]
        llm.rewind(SEES - 5)
        again = [llm.decode(token) for token in ids[SEES - 5 : SEES + 90]]
    assert np.array(again).tobytes() == np.array(ours[SEES - 34 : SEES + 61]).tobytes()
    errors = np.array(ours) - exact[29:]
    least = root_mean_square(rounded[29:] - exact[29:])
    assert root_mean_square(errors) <= 1.5 * least
    worst = max(map(root_mean_square, rounded[29:] - exact[29:]))
    for at, error in enumerate(errors, 29):
        assert root_mean_square(error) <= 3 * worst, at


def test_sliding_keys_are_powers_of_two() -> None:
    assert all(keys & (keys - 1) == 0 for keys in flash_attention.SLIDING_KEYS)
