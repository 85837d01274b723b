"""Adapters are merged as PEFT merges them, before weights are rounded; what cannot be merged is refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16
from safetensors.numpy import load_file, save_file

from llama_npu2 import UserError, load
from stages.model.artifact_weights import ArtifactWeights
from stages.model.checkpoint import Checkpoint
from stages.model.sources import LocalSource, adapted
from tests.conftest import doit, ran, snapshot, write_checkpoint

Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
RANK = 3


def write_adapter(
    path: Path, checkpoint: Path, seed: int = 0, modules: tuple[str, ...] = (Q, DOWN), **fields: Any
) -> Path:
    """An adapter with random changes of some modules of a checkpoint."""
    rng, shapes = (
        np.random.default_rng(seed),
        {k: v.shape for k, v in load_file(checkpoint / "model.safetensors").items()},
    )
    path.mkdir(exist_ok=True)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 6, "target_modules": ["q_proj"], "lora_dropout": 0.1}
    (path / "adapter_config.json").write_text(json.dumps(config))
    tensors = {}
    for module in (Q, DOWN):
        rows, columns = shapes[f"{module}.weight"]
        for part, shape in {"lora_A": (RANK, columns), "lora_B": (rows, RANK)}.items():
            tensors[f"base_model.model.{module}.{part}.weight"] = rng.standard_normal(shape).astype(np.float32)
    save_file(tensors, path / "adapter_model.safetensors")
    return path


def opened(checkpoint: Path, lora: str, tmp_path: Path) -> Checkpoint:
    return Checkpoint.open(adapted(LocalSource("x", checkpoint), lora, tmp_path / "artifacts").fetch())


@pytest.mark.verify
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "qwen3 dora"])
def test_merges_as_peft_does(family: str, tmp_path: Path) -> None:
    """All linear modules, each with another rank and scale; fused ones in Phi 3; magnitudes of rows with DoRA."""
    torch = pytest.importorskip("torch", reason="needs the verify extra: pip install -e '.[verify]'")
    transformers = pytest.importorskip("transformers", reason="needs the verify extra: pip install -e '.[verify]'")
    peft = pytest.importorskip("peft", reason="needs the verify extra: pip install -e '.[verify]'")
    name, _, dora = family.partition(" ")
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 300, "tie_word_embeddings": False, "pad_token_id": 0}
    sizes |= {"bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(name, **sizes))
    model.save_pretrained(tmp_path / "model")
    lora = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules="all-linear",
        use_rslora=bool(dora),
        use_dora=bool(dora),
        rank_pattern={"o_proj": 7},
        alpha_pattern={r"model.layers.1.mlp.down_proj": 3, "o_proj": 9},
        init_lora_weights=False,
    )
    changed = peft.get_peft_model(model, lora)
    for key, parameter in changed.named_parameters():
        if "magnitude" in key:
            parameter.data.mul_(torch.rand_like(parameter) + 0.5)
    changed.save_pretrained(tmp_path / "adapter")
    merged = {key: value.numpy() for key, value in changed.merge_and_unload().state_dict().items()}
    before, found = Checkpoint.open(tmp_path / "model"), opened(tmp_path / "model", str(tmp_path / "adapter"), tmp_path)
    moved = 0
    for weight in found.held:
        fused = re.fullmatch(r"(.*(?:qkv|gate_up)_proj.weight)\.(\w+)", weight)
        theirs = merged[fused[1] if fused else weight]
        if fused:
            rows = {
                "wq": slice(0, 48),
                "wk": slice(48, 72),
                "wv": slice(72, 96),
                "w_gate": slice(80),
                "w_up": slice(80, 160),
            }
            theirs = theirs[rows[fused[2]]]
        np.testing.assert_allclose(found.tensor(weight), theirs, rtol=2e-5, atol=2e-6, err_msg=weight)
        moved += not np.allclose(before.tensor(weight).astype(np.float32), theirs, atol=1e-3)
    assert moved == 14, "all linear modules of both layers"


def test_several_in_order_with_weights(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model")
    one, two = (write_adapter(tmp_path / name, tmp_path / "model", seed) for seed, name in enumerate(("one", "two")))
    before = Checkpoint.open(tmp_path / "model").tensor(f"{Q}.weight").astype(np.float32)
    found = opened(tmp_path / "model", f"{one}:0.5,{two}:-1e-1", tmp_path)
    wanted = before
    for path, weight in ((one, 0.5), (two, -0.1)):
        parts = load_file(path / "adapter_model.safetensors")
        a, b = (parts[f"base_model.model.{Q}.lora_{part}.weight"] for part in "AB")
        wanted = wanted + np.float32(weight * 6 / RANK) * (b @ a)
    np.testing.assert_allclose(found.tensor(f"{Q}.weight"), wanted, rtol=1e-6, atol=1e-6)
    untouched = "model.layers.1.self_attn.q_proj.weight"
    assert found.stored_format(untouched) == "bf16" and found.stored_format(f"{Q}.weight") == "f32"


def save_bin(path: Path) -> None:
    (path / "adapter_model.safetensors").rename(path / "adapter_model.bin")


def change(**fields: Any) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        config = json.loads((path / "adapter_config.json").read_text())
        (path / "adapter_config.json").write_text(json.dumps(config | fields))

    return apply


def rename(before: str, after: str) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        tensors = load_file(path / "adapter_model.safetensors")
        save_file({k.replace(before, after): v for k, v in tensors.items()}, path / "adapter_model.safetensors")

    return apply


REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "pickle": (save_bin, "there is no adapter_model.safetensors (only safetensors are read"),
    "not lora": (change(peft_type="IA3"), "peft_type = IA3 is not supported: only LORA"),
    "bias": (change(bias="all"), "bias = all is not supported: only none"),
    "saved": (change(modules_to_save=["lm_head"]), "modules_to_save = ['lm_head'] is not supported"),
    "pissa": (change(init_lora_weights="pissa"), "init_lora_weights = pissa is not supported"),
    "unknown": (change(use_future=True), "use_future = True is not supported"),
    "transposed": (change(fan_in_fan_out=True), "fan_in_fan_out = True is not supported"),
    "rank": (change(r=4), "has shape [3, 48], this model and its rank need [4, 48]"),
    "no rank": (change(r=0), "r = 0 and lora_alpha = 6 must be numbers"),
    "module": (rename("q_proj", "x_proj"), "has no module layers.0.self_attn.x_proj: the adapter is another model's"),
    "layer": (rename("layers.0", "layers.7"), "has no module layers.7.self_attn.q_proj"),
    "shape": (rename("q_proj", "k_proj"), "has shape [48, 3], this model and its rank need [24, 3]"),
    "half": (rename(f"{Q}.lora_B", "model.layers.0.self_attn.v_proj.lora_B"), "self_attn.q_proj has no lora_B.weight"),
    "embedding": (rename(f"{Q}.lora_A.weight", "model.embed_tokens.lora_embedding_A"), "lora_embedding_A is not supp"),
    "dora": (change(use_dora=True), "has no lora_magnitude_vector"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", hidden_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=12)
    spoil, message = REFUSED[name]
    spoil(adapter := write_adapter(tmp_path / "adapter", tmp_path / "model"))
    with pytest.raises(UserError, match=re.escape(message)) as refused:
        opened(tmp_path / "model", str(adapter), tmp_path)
    assert "\n" not in str(refused.value)


def test_names_that_are_nothing(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model")
    with pytest.raises(UserError, match="lora=none: none is no directory and no hub id"):
        opened(tmp_path / "model", "none", tmp_path)


@pytest.mark.thorough
def test_a_changed_adapter_rebuilds_weights_alone(built: Path) -> None:
    adapter = write_adapter(built / "lora", built / "model")
    command = ("compile", "model=model", "lora=lora:0.5")
    assert doit(*command, cwd=built).returncode == 0
    directory = built / "artifacts/model-lora-lora-0.5/cpu"
    before, manifest = snapshot(directory), json.loads((directory / "manifest.json").read_text())
    assert manifest["model"]["adapters"] == [{"name": "lora-0.5", "weight": 0.5, "kind": "directory"}]
    provenance = json.loads((directory / "provenance.json").read_text())["predicate"]["buildDefinition"]
    assert provenance["externalParameters"]["lora"] == "lora-0.5"
    names = {each["name"] for each in provenance["resolvedDependencies"]}
    assert {"checkpoint/adapter_config.json", "checkpoint/adapter_model.safetensors"} <= names
    weights = ArtifactWeights(directory)
    merged = opened(built / "model", f"{adapter}:0.5", built / "other").tensor(f"{Q}.weight").astype(bfloat16)
    np.testing.assert_array_equal(weights.values(f"{Q}.weight").astype(bfloat16), merged)
    assert load(directory).manifest.model["name"] == "model-lora-lora-0.5"

    assert ran(doit(*command, cwd=built)) == set()
    write_adapter(adapter, built / "model", seed=1)
    assert ran(doit(*command, cwd=built)) == {"checkpoint", "tokenizer", "weights", "manifest"}
    after = snapshot(directory)
    assert {name for name in after if name.startswith("elf/") and after[name] != before[name]} == set()
    assert any(name.startswith("weights/") and after[name] != before[name] for name in after)
