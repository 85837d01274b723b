"""Weights in other formats: how they are chosen, and whole models with them."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from ml_dtypes import bfloat16

from llama_npu2 import load
from llama_npu2.errors import UserError
from stages.graph import Build
from stages.graph.options import parse_options
from stages.model.artifact_weights import ArtifactWeights
from stages.model.checkpoint import Checkpoint
from stages.model.families import parse_config
from stages.model.grouping import programs
from stages.model.part import PartKey
from stages.model.parts import layer_part, part
from stages.model.plan import make_plan
from stages.model.policy import BF16, Policy, held_policy, parse_policy
from stages.model.unpacking import keyed_part
from stages.proof.comparison import divergence
from stages.targets import targets
from stages.targets.cpu.fusion import fuse
from tests.conftest import A_LLAMA, CONFIG, ODD_WIDTHS, build, doit, write_checkpoint

CHOSEN = ["int8", "int6", "int4", "w8a8", "int4,vocab=bf16,w_down=int8", "int4,w_down.1=int8,wk.0=bf16"]

SHAPES: dict[str, dict] = {
    "gqa": {},
    "untied": {"tie_word_embeddings": False, "vocab_size": 257},
    "odd_hidden": ODD_WIDTHS,
}


# choosing


def test_bf16_is_what_nothing_says() -> None:
    assert parse_policy("") == parse_policy("bf16") == BF16
    assert BF16.suffix == "" and BF16.formats == ("bf16",)


@pytest.mark.parametrize(
    "text", ["int8", "int4", "int4,vocab=bf16", "int4,w_down=int8,wq=int6", "int4,wq=int8,wq.0.2.11=int6,wq.3=bf16"]
)
def test_a_policy_is_its_text(text: str) -> None:
    policy = parse_policy(text)
    assert parse_policy(policy.text) == policy
    assert policy.suffix == "-" + policy.text.replace(",", "_").replace("=", "-")


def test_the_vocabulary_is_wider_than_four_bits() -> None:
    policy = parse_policy("int4")
    assert (policy.of("wq", ("q_dim", "emb"), "bf16"), policy.of("w_vocab", ("vocab", "emb"), "bf16")) == (
        "int4",
        "int6",
    )
    assert policy.of("norm_w", ("emb",), "bf16") == "bf16" and policy.of("lut", ("max_seq", "head_dim"), "f32") == "f32"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int5", "weights: int5 is unknown: one of bf16, int4"),
        ("int4,w_dwon=int8", "weights=int4,w_dwon=int8: w_dwon is unknown: did you mean w_down"),
        ("int4,vocab=", "nothing is unknown: one of bf16"),
        ("int4,", "nothing is unknown"),
        ("f32", "weights: f32 is unknown"),
        ("int4,w_down.x=int8", "w_down.x: weights of layers are named as in w_down.0.1"),
        ("int4,w_down.=int8", "w_down.: weights of layers"),
        ("int4,w_down.99999999=int8", "w_down.99999999: weights of layers"),
        ("int4,vocab.0=int8", "vocab.0: weights of layers"),
    ],
)
def test_what_cannot_be_chosen_is_refused(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_policy(text)


def test_parts_call_the_kernels_of_their_formats() -> None:
    made = part(A_LLAMA, PartKey("o_ffn"), parse_policy("int4,w_down=int8"))
    names = [launch.kernel.name for launch in made.launches]
    assert names[0] == names[3] == "int4_gemm" and names[6] == "int8_gemm" and names[1] == "add"
    assert {slot.name: slot.format for slot in made.slots if slot.role == "weight"} == {
        "wo": "int4",
        "ffn_norm_w": "bf16",
        "w_gate": "int4",
        "w_up": "int4",
        "w_down": "int8",
    }


def test_products_take_activations_as_the_policy_says() -> None:
    policy = parse_policy("int4,w_down=bf16", activations="int8")
    made = part(A_LLAMA, PartKey("o_ffn"), policy)
    names = [launch.kernel.name for launch in made.launches]
    assert names[0] == names[3] == "int4_a8_gemm" and names[6] == "gemm", "bf16 weights have products in 16 bits alone"
    fused = [launch.kernel.name for launch in fuse(made)]
    assert {"int4_a8_gemm_add", "int4_a8_gemm_silu"} <= {*fused}
    embed = part(A_LLAMA, PartKey("embed_tokens"), policy).launches[0].kernel
    assert (embed.name, embed.activations) == ("int6_embed", "bf16")
    assert parse_policy(**policy.recorded) == policy and policy.suffix == "-int4_w_down-bf16-activations-int8"


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (
            ("target=npu2-sim", "weights=int4"),
            "target npu2-sim multiplies in 16 bits: leave it out, or choose target=cpu",
        ),
        (("target=cpu",), "products with weights=bf16 take 16 bits: choose weights=int4, or leave it out"),
    ],
)
def test_activations_that_no_product_takes_are_refused(chosen: tuple[str, ...], message: str) -> None:
    run = doit("compile", "activations=int8", *chosen)
    assert run.returncode != 0 and run.stderr.splitlines()[-1].endswith(f"activations=int8: {message}")


def test_layers_of_other_formats_have_programs_of_their_own() -> None:
    policy = parse_policy("int4,w_down.1=int8,wo.1=bf16,wv.4=int6")
    others = layer_part(A_LLAMA, "o_ffn", 1, policy)
    assert others.name == "o_ffn__wo__bf16__w_down__int8" and keyed_part(A_LLAMA, others.key, policy) == others
    assert [launch.kernel.name for launch in others.launches][::6] == ["gemm", "int8_gemm"]
    assert layer_part(A_LLAMA, "o_ffn", 4, policy) == part(A_LLAMA, PartKey("o_ffn"), policy)
    grouping = targets()["cpu"].grouping("separate")
    names = {program.name for program in programs(A_LLAMA, grouping, policy=policy)}
    assert {"o_gemv_ffn", "o_gemv_ffn__wo__bf16__w_down__int8", "rms_gemv_attn_panels__wv__int6"} <= names
    assert len(names) == 10 + 2 + 2
    first = programs(A_LLAMA, grouping, policy=parse_policy("int4,wo.0.1.2=int6"))
    assert {"o_ffn", "o_ffn__wo__int6"} <= {program.name for program in first}, "the fourth layer is as all others"


@pytest.mark.parametrize(
    ("text", "message"),
    [("int4,w_down.2=int8", "the model has no layer 2, 1 is its last"), ("int4,w_embed=int8", "LM head of this model")],
)
def test_what_a_model_does_not_have_is_refused(text: str, message: str) -> None:
    config, grouping = parse_config(CONFIG, "test"), targets()["cpu"].grouping("separate")
    with pytest.raises(UserError, match=message):
        make_plan(config, grouping, "cpu", policy=parse_policy(text))


def test_targets_without_kernels_refuse() -> None:
    assert targets()["cpu"].runs("w8a8") and not targets()["npu2"].runs("w8a8") and targets()["npu2"].runs("int4")
    for target in ("npu2", "npu2-sim"):
        said = f"weights=int4,w_down=w8a8: target {target} has no kernels for w8a8: choose target=cpu"
        with pytest.raises(UserError, match=f"^{said}"):
            _ = Build(parse_options({"weights": "int4,w_down=w8a8", "target": target})).steps
    with pytest.raises(UserError, match="target npu2-sim has one program for all layers: leave out"):
        _ = Build(parse_options({"weights": "int4,w_down.0=int8", "target": "npu2-sim"})).steps


def test_a_text_is_cut_into_windows() -> None:
    assert [len(window) for window in divergence.windows(range(350), 16, 100)] == [100, 100, 100]
    assert [len(window) for window in divergence.windows(range(600), 16, 4096)] == [256, 256]
    assert divergence.windows(range(6), 2, 2) == [[0, 1], [2, 3]]
    assert divergence.windows(range(3), 4, 100) == [[0, 1, 2]]
    with pytest.raises(UserError, match="text=: 1 tokens are too few to compare"):
        divergence.windows([7], 4, 100)


def test_divergence_is_that_of_the_definition() -> None:
    """Of two made-up distributions, by hand."""
    p, q = np.log(np.array([[0.5, 0.25, 0.25]])), np.log(np.array([[0.25, 0.5, 0.25]]))
    loss, same, surprise, wanted = divergence._compare(np.repeat(p, 2, 0) + 3, np.repeat(q, 2, 0) - 7, [0, 2])
    assert loss == pytest.approx([0.25 * np.log(2)] * 2) and not same.any()
    assert (surprise, wanted) == (pytest.approx([np.log(4)]), pytest.approx([np.log(4)]))


# whole models


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of each shape."""
    directory = tmp_path_factory.mktemp("weights")
    for name, changes in SHAPES.items():
        write_checkpoint(directory / name, **({"dtype": bfloat16} | changes))
    return directory


ALWAYS = [
    *(("odd_hidden", chosen) for chosen in CHOSEN),
    *(("untied", chosen) for chosen in ("int8", "int4,vocab=bf16,w_down=int8")),
    *(("gqa", chosen) for chosen in ("w8a8", "int4,w_down.1=int8,wk.0=bf16")),
]
"""Each choice over odd widths, each shape with two choices. The other pairs are slow."""


@pytest.mark.sampled(1)
@pytest.mark.verify
@pytest.mark.parametrize(
    ("shape", "chosen"),
    [
        pytest.param(*pair, marks=[] if pair in ALWAYS else pytest.mark.slow)
        for pair in itertools.product(SHAPES, CHOSEN)
    ],
)
def test_logits_are_those_of_the_weights_it_holds(checkpoints: Path, artifacts: Path, shape: str, chosen: str) -> None:
    """Against transformers in float32 with the artifact's own weights: no further off than its run in bf16 is."""
    pytest.importorskip("torch", reason="needs the verify extra: pip install -e '.[verify]'")
    pytest.importorskip("transformers", reason="needs the verify extra: pip install -e '.[verify]'")
    from stages.proof.comparison.verification import Clock, compare

    checkpoint = checkpoints / shape
    directory = build(checkpoint, artifacts, weights=chosen)
    weights = ArtifactWeights(directory)
    assert weights.formats == {*parse_policy(chosen).formats, "bf16"}
    llm = load(directory)
    ids = np.random.default_rng(1).integers(0, llm.manifest.model["vocab"], 60).tolist()
    tensors, found, _ = compare(llm, Checkpoint.open(checkpoint), weights, [ids], [], Clock())
    llm.close()
    assert all(each.passed for each in tensors), tensors
    assert found.passed and found.ours < 0.2, found


def test_what_is_rounded_is_said(tmp_path: Path, artifacts: Path) -> None:
    directory = tmp_path / "said"
    write_checkpoint(directory, dtype=bfloat16)
    run = doit("weights", f"model={directory}", f"artifacts={artifacts}", "weights=int4")
    assert run.returncode == 0, run.stderr
    assert "14 matrices that the checkpoint holds as bf16 are rounded to int4" in run.stderr
    assert "1 matrices that the checkpoint holds as bf16 are rounded to int6" in run.stderr
    assert (artifacts / "said/cpu-int4/weights").is_dir() and not (artifacts / "said/cpu").exists()


@pytest.mark.thorough
def test_what_a_file_holds_is_kept(tmp_path: Path, artifacts: Path) -> None:
    """A GGUF file in Q8_0 and F16: the values that its library reads, though nobody says weights=."""
    pytest.importorskip("gguf", reason="not installed: pip install -e '.[test]'")
    from tests.support.quantised_files import MATRICES, write_file

    path = tmp_path / "kept.gguf"
    expected = write_file(path, dict.fromkeys(MATRICES, "Q8_0"))
    assert held_policy(Checkpoint.open(path), targets()["cpu"].runs) == Policy("int8", {"vocab": "int8"})
    weights = ArtifactWeights(build(path, artifacts))
    for name in MATRICES:
        assert weights.manifest.buffers[name]["format"] == "int8"
        np.testing.assert_array_equal(weights.values(name), expected[name])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda buffer: buffer.update(format="int5"), "as int5 in panels, which is unknown here"),
        (lambda buffer: buffer.update(layout="rows"), "as bf16 in rows, which is unknown here"),
    ],
)
def test_what_a_newer_version_stored_is_named(
    change: Callable[[dict], None], said: str, demo: Path, tmp_path: Path
) -> None:
    content = json.loads((demo / "manifest.json").read_text())
    change(content["buffers"]["model.layers.0.mlp.up_proj.weight"])
    shutil.copytree(demo, tmp_path / "cpu", copy_function=os.link)
    (tmp_path / "cpu/manifest.json").unlink()
    (tmp_path / "cpu/manifest.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=said):
        ArtifactWeights(tmp_path / "cpu")
