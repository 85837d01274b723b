"""Random checkpoints: what is in them, and that it makes formats differ as trained weights do."""

from __future__ import annotations

from math import prod
from pathlib import Path

import numpy as np
import pytest

from stages.model import random_weights
from stages.model.families import parse_config
from stages.model.importers.directory import Tensors
from stages.model.random_weights import write_random_weights
from stages.model.sources import RandomSource
from stages.weights.formats import formats
from stages.weights.formats.w8a8 import quantise_rows
from tests.conftest import CONFIG

WIDTH = 2048
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
NORMS = [f"model.layers.{layer}.{which}_layernorm.weight" for layer in (0, 1) for which in ("input", "post_attention")]


@pytest.fixture(scope="module")
def tensors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """f32, of a model of two layers."""
    directory = tmp_path_factory.mktemp("random")
    write_random_weights(parse_config(CONFIG | {"hidden_size": WIDTH}, "test"), directory / "model.safetensors")
    held = Tensors(directory)
    return {name: held.read(name).astype(np.float32) for name in held.entries}


def test_norms_have_the_same_outliers_in_every_layer(tensors: dict[str, np.ndarray]) -> None:
    weight = tensors[NORMS[0]]
    usual = np.median(weight)
    larger = weight[weight != usual] / usual
    assert len(larger) == 2 and larger.min() >= 5 and larger.max() <= 20
    assert np.square(weight).mean() == pytest.approx(1, rel=0.01)
    for name in (*NORMS, "model.norm.weight"):
        np.testing.assert_array_equal(tensors[name], weight)


def test_matrices_have_outliers_of_their_own_and_keep_the_scale(tensors: dict[str, np.ndarray]) -> None:
    names = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"]
    squares = [np.square(tensors[f"model.layers.0.{name}.weight"]) for name in names]
    sizes = [np.sqrt(square.mean(axis=0)) for square in squares]
    outliers = [set(np.flatnonzero(size > 4 * np.median(size))) for size in sizes]
    assert all(len(found) == 2 for found in outliers) and not set.intersection(*outliers)
    of_rows = np.concatenate([square.sum(axis=1) for square in squares])
    assert of_rows.mean() == pytest.approx(1, rel=0.2) and of_rows.max() > 3 * np.median(of_rows)


def test_outliers_cost_w8a8_far_more_than_groups(tensors: dict[str, np.ndarray]) -> None:
    """Whose one scale for a row an outlier takes, of activations too; a group keeps it from all others."""
    generator = np.random.default_rng(1)
    x = generator.standard_normal((64, WIDTH)).astype(np.float32)
    weight = tensors["model.layers.0.mlp.gate_proj.weight"]
    even = generator.standard_normal(weight.shape).astype(np.float32)
    groups, rows = _lost(x * tensors[NORMS[1]], weight)
    even_groups, even_rows = _lost(x, even)
    assert rows > 4 * groups and even_rows < 2.5 * even_groups
    assert rows > 3 * even_rows and groups < 2 * even_groups


def _lost(x: np.ndarray, weight: np.ndarray) -> tuple[float, float]:
    """Errors of a product over its size: int8 in groups with x as it is, w8a8."""
    int8, exact = formats()["int8"], x @ weight.T
    (a, of_a), (b, of_b) = quantise_rows(x), quantise_rows(weight)
    found = (x @ int8.dequantise(int8.quantise(weight), WIDTH).T, (a * of_a) @ (b * of_b).T)
    groups, rows = (float(np.linalg.norm(each - exact) / np.linalg.norm(exact)) for each in found)
    return groups, rows


def test_each_expert_has_weights_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made once each: those of all, made for each expert's tensor, would take as many times as long."""
    made: list[tuple[int, ...]] = []
    matrix = random_weights._matrix
    monkeypatch.setattr(random_weights, "_matrix", lambda *given: made.append(given[1]) or matrix(*given))
    config = parse_config(CONFIG | EXPERTS, "test")
    write_random_weights(config, tmp_path / "model.safetensors")
    held = Tensors(tmp_path)
    experts = [held.read(f"model.layers.0.mlp.experts.{expert}.up_proj.weight").tobytes() for expert in range(5)]
    assert len({*experts}) == 5
    assert sum(map(prod, made)) == sum(prod(entry.shape) for entry in held.entries.values() if len(entry.shape) == 2)


def test_the_same_shapes_are_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made once; anew when they are made in another way."""
    first, second = (RandomSource("small", CONFIG, tmp_path / name / "small/checkpoint") for name in "ab")
    made = first.fetch() / "model.safetensors"
    assert made.read_bytes() == (second.fetch() / "model.safetensors").read_bytes()
    before = made.stat().st_ino
    assert first.fetch() and made.stat().st_ino == before
    monkeypatch.setattr("stages.model.sources.generated.RECIPE", 0)
    assert first.fetch() and made.stat().st_ino != before
