"""KV caches in 8 bits: which kernels attend over them, how large they are, and logits against transformers."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16

from llama_npu2 import load
from llama_npu2.cli.bench import Bench, Ours
from llama_npu2.errors import UserError
from stages.model.artifact_weights import ArtifactWeights
from stages.model.checkpoint import Checkpoint
from stages.model.families import parse_config
from stages.model.part import PartKey
from stages.model.parts import part
from stages.model.plan import make_plan
from stages.model.policy import parse_policy
from stages.targets import targets
from stages.weights.formats import formats
from tests.conftest import CONFIG, build, write_checkpoint

INT8 = parse_policy("int4", "int8")
GROUPING = targets()["cpu"].grouping("separate")


def test_a_directory_says_what_its_cache_holds() -> None:
    assert (parse_policy("", "int8").suffix, INT8.suffix) == ("-kv-int8", "-int4-kv-int8")


@pytest.mark.parametrize("name", ["flash_attn_panels", "rms_gemv_attn_panels"])
def test_parts_call_the_kernels_of_the_cache(name: str) -> None:
    config = parse_config(CONFIG, "test")
    made = part(config, PartKey(name), parse_policy("", "int8"))
    *before, append, attend = [launch.kernel.name for launch in part(config, PartKey(name)).launches]
    of_cache = [f"int8_rows_{append}", f"int8_rows_{attend}"]
    assert [launch.kernel.name for launch in made.launches] == [*before, *of_cache]
    assert {slot.format for slot in made.slots if slot.keeps} == {"int8_rows"}
    assert {slot.format for slot in made.slots if not slot.keeps and slot.role != "table"} == {"bf16"}


def test_a_position_has_a_scale_for_each_head() -> None:
    config = parse_config(CONFIG | {"head_dim": 34, "max_position_embeddings": 300}, "test")
    buffers = make_plan(config, GROUPING, "cpu", policy=INT8).buffers
    assert [buffers[f"{which}_cache.1"].shape for which in "kv"] == [(3, 2, 128, 34 + 4), (3, 2, 128, 48 + 4)]


def test_heads_that_sums_do_not_hold_are_refused() -> None:
    config = parse_config(CONFIG | {"head_dim": 1026}, "test")
    with pytest.raises(UserError, match="kv=int8: heads of 1026 are too long"):
        make_plan(config, GROUPING, "cpu", policy=INT8)


@pytest.mark.verify
def test_the_reference_rounds_as_the_format_does() -> None:
    torch = pytest.importorskip("torch", reason="needs the verify extra: pip install -e '.[verify]'")
    pytest.importorskip("transformers", reason="needs the verify extra: pip install -e '.[verify]'")
    from stages.proof.comparison.transformers_model import rounding_cache

    cache, form = rounding_cache("int8"), formats()["int8_rows"]
    states = np.random.default_rng(1).standard_normal((2, 1, 3, 5, 34), np.float32)
    for first, last in ((0, 4), (4, 5)):
        found = cache.update(*torch.from_numpy(states[..., first:last, :]), 0)
    for ours, given in zip(found, states, strict=True):
        np.testing.assert_array_equal(ours.numpy(), form.dequantise(form.quantise(given), 34))


SHAPES = {
    "mqa_head_80": {"head_dim": 80, "num_key_value_heads": 1},
    "mha_head_96": {"head_dim": 96, "num_key_value_heads": 4},
    "odd": {"head_dim": 10, "hidden_size": 63, "num_key_value_heads": 3, "num_attention_heads": 9},
}


@pytest.mark.sampled(1)
@pytest.mark.verify
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_those_of_the_cache_it_holds(shape: str, tmp_path: Path, artifacts: Path) -> None:
    """Against transformers in float32 with K and V rounded like ours: no further off than its run in bf16 is."""
    pytest.importorskip("torch", reason="needs the verify extra: pip install -e '.[verify]'")
    pytest.importorskip("transformers", reason="needs the verify extra: pip install -e '.[verify]'")
    from stages.proof.comparison.verification import Clock, compare

    checkpoint = tmp_path / f"kv_{shape}"
    config = write_checkpoint(checkpoint, dtype=bfloat16, **SHAPES[shape])
    directory = build(checkpoint, artifacts, kv="int8")
    llm = load(directory)
    assert "bf16 weights, int8 KV cache, " in llm.description
    ids = np.random.default_rng(1).integers(0, config.vocab, 100).tolist()
    _, found, _ = compare(llm, Checkpoint.open(checkpoint), ArtifactWeights(directory), [ids], [], Clock())
    llm.close()
    assert found.passed and found.ours < 0.05, found


@pytest.mark.thorough
@pytest.mark.verify
def test_verify_passes_on_the_demo(artifacts: Path) -> None:
    pytest.importorskip("torch", reason="needs the verify extra: pip install -e '.[verify]'")
    pytest.importorskip("transformers", reason="needs the verify extra: pip install -e '.[verify]'")
    from stages.commands.verify import shipped
    from stages.proof.comparison.verification import VERIFIED, verify

    directory = build("demo", artifacts, kv="int8")
    assert directory.name == "cpu-kv-int8"
    assert verify(directory, Path("models/demo"), shipped(full=False)).passed
    quality = json.loads((directory / VERIFIED).read_text())["results"][0]
    assert quality["divergence"] < 0.0002, "a tenth of what weights in 4 bits cost"


WINDOW = 16
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": WINDOW}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "changes, seen",
    [({}, {1: 1, 100: 100}), (MISTRAL, {1: 1, WINDOW - 1: WINDOW - 1, 100: WINDOW - 1})],
    ids=["all", "windows"],
)
def test_bench_counts_what_a_token_reads_of_the_cache(
    changes: dict[str, Any], seen: dict[int, int], tmp_path: Path, artifacts: Path
) -> None:
    """Our cache counts as it is stored, a peer's in 16 bits. Of a window, the positions that a token sees count."""
    checkpoint = tmp_path / f"counted-{len(changes)}"
    write_checkpoint(checkpoint, dtype=bfloat16, **changes)
    heads = prod(CONFIG[name] for name in ("num_hidden_layers", "num_key_value_heads"))
    for kv, stored in (("bf16", 2 * heads * 16 * 2), ("int8", 2 * heads * (16 + 4))):
        llm = load(build(checkpoint, artifacts, kv=kv), 1)
        bench = Bench(llm, 1, [])
        for depth, positions in seen.items():
            assert bench._cache_bytes(Ours.name, depth) == positions * stored
            assert bench._cache_bytes("another", depth) == positions * 2 * heads * 16 * 2
        llm.close()
