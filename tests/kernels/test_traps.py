"""Mistakes that Gemma, gpt-oss and windows invite: each moves logits further than other tests' bounds allow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16
from safetensors.numpy import load_file, save_file

from llama_npu2 import load
from stages.kernels import silu_and_mul
from stages.model import families
from stages.model.checkpoint import Checkpoint
from stages.model.config import Config
from stages.model.decoder import Attention, FeedForward, Layer, Norm
from stages.model.families import parse_config
from tests.conftest import build
from tests.kernels.test_families import error, numpy_logits, theirs, write

pytestmark = pytest.mark.verify

GEMMA: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 300,
    "max_position_embeddings": 400,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 8,
    "sliding_window": 17,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}
"""Layer 5 is the first global one."""


def of_layers(change: Callable[[Layer, Attention], Layer]) -> Callable[[Config], Config]:
    """A description with other layers."""

    def changed(config: Config) -> Config:
        made = []
        for layer in config.decoder.layers:
            assert isinstance(layer.mixer, Attention)
            made.append(change(layer, layer.mixer))
        return replace(config, decoder=replace(config.decoder, layers=tuple(made)))

    return changed


def of_mixers(change: Callable[[Attention], dict[str, Any]]) -> Callable[[Config], Config]:
    return of_layers(lambda layer, mixer: replace(layer, mixer=replace(mixer, **change(mixer))))


def first_global(at: int) -> Callable[[Config], Config]:
    def changed(config: Config) -> Config:
        layers = list(config.decoder.layers)
        layers.insert(at, layers.pop(5))
        return replace(config, decoder=replace(config.decoder, layers=tuple(layers)))

    return changed


def swapped(mixer: Attention) -> dict[str, Any]:
    return {"rope": replace(mixer.rope, theta=1e6 if mixer.rope.kind else 1e4)}


def scaled_locally(mixer: Attention) -> dict[str, Any]:
    scaling = replace(mixer.rope.scaling, type="linear", factor=8.0)
    return {"rope": replace(mixer.rope, scaling=scaling)} if mixer.rope.kind else {}


MISTAKES: dict[str, Callable[[Config], Config]] = {
    "thetas swapped": of_mixers(swapped),
    "linear scaling of local layers": of_mixers(scaled_locally),
    "the first global layer is 4": first_global(4),
    "the first global layer is 6": first_global(6),
    "scores are scaled by heads": of_mixers(lambda mixer: {"scalar": float(mixer.head_dim)}),
    "a window is one longer": of_mixers(lambda mixer: {"window": mixer.window and mixer.window + 1}),
    "a window is one shorter": of_mixers(lambda mixer: {"window": mixer.window and mixer.window - 1}),
    "no offset of heads' norms": of_mixers(lambda mixer: {"qk_norm": replace(mixer.qk_norm, offset=0.0)}),  # type: ignore[type-var]
    "no offset of layers' norms": of_layers(lambda layer, _: replace(layer, norm=Norm(once=True))),
    "no offset of the last norm": lambda config: replace(config, decoder=replace(config.decoder, norm=Norm(once=True))),
    "no scale of the embedding": lambda config: replace(config, decoder=replace(config.decoder, embed_scale=1.0)),
}


def test_mistakes_in_gemma(tmp_path: Path) -> None:
    """What is described is right within the usual bound; each mistake is not."""
    write(tmp_path / "gemma", "gemma3_text", GEMMA, 3)
    ids = np.random.default_rng(3).integers(0, 300, 60).tolist()
    exact, rounded = (logits[[57, 58, 59]] for logits in theirs(tmp_path / "gemma", ids)[:2])
    most = 1.5 * error(rounded, exact)
    right = Checkpoint.open(tmp_path / "gemma")
    assert error(numpy_logits(right, ids, 2), exact) <= most
    wrong = {name: replace(right, config=mistake(right.config)) for name, mistake in MISTAKES.items()}
    found = {name: error(numpy_logits(checkpoint, ids, 2), exact) for name, checkpoint in wrong.items()}
    assert all(off > most for off in found.values()), (found, most)


GPT_OSS: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 300,
    "max_position_embeddings": 400,
    "eos_token_id": 2,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": 17,
    "rope_theta": 150000.0,
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 100},
    "tie_word_embeddings": False,
}

Wrong = Callable[[Checkpoint], Checkpoint]


def of_config(mistake: Callable[[Config], Config]) -> Wrong:
    return lambda checkpoint: replace(checkpoint, config=mistake(checkpoint.config))


def of_experts(**changes: Any) -> Wrong:
    def changed(layer: Layer, _: Attention) -> Layer:
        return replace(layer, feed_forward=replace(layer.feed_forward, **changes))

    return of_config(of_layers(changed))


def of_rotation(**changes: Any) -> Wrong:
    return of_config(
        of_mixers(lambda mixer: {"rope": replace(mixer.rope, scaling=replace(mixer.rope.scaling, **changes))})
    )


def other_windows(config: Config) -> Config:
    first, second, *_ = config.decoder.layers
    return replace(config, decoder=replace(config.decoder, layers=(second, first, second)))


def of_tensors(change: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]], *slots: str) -> Wrong:
    """Returns a mistake that replaces some slots' tensors in each layer by what `change` makes of them."""

    def changed(checkpoint: Checkpoint) -> Checkpoint:
        held = dict(checkpoint.held)
        for number in range(checkpoint.config.layers):
            of_layer = {w.slot: w.name for w in families.weights(checkpoint.config) if w.layer == number}
            values = change({slot: checkpoint.tensor(of_layer[slot]) for slot in slots})
            for slot, other in values.items():
                held[of_layer[slot]] = replace(held[of_layer[slot]], read=partial(np.copy, other))
        return replace(checkpoint, held=held)

    return changed


def halves(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns gate and up as they are read when the first half of an expert's rows is taken for gate."""
    gate, up = tensors.values()
    rows = np.stack([gate, up], axis=2).reshape(len(gate), -1, gate.shape[-1])
    return dict(zip(tensors, np.split(rows, 2, axis=1), strict=True))


def exchanged(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return dict(zip(tensors, reversed(tensors.values()), strict=True))


GATE_AND_UP = ("w_gate_exps", "w_up_exps")

MISTAKES_OF_EXPERTS: dict[str, Wrong] = {
    "no sinks": of_config(of_mixers(lambda _: {"sinks": False})),
    "sinks of other heads": of_tensors(lambda t: {slot: np.roll(values, 1) for slot, values in t.items()}, "sinks"),
    "windows in the other layers": of_config(other_windows),
    "a window is one longer": of_config(of_mixers(lambda mixer: {"window": mixer.window and mixer.window + 1})),
    "whole numbers of YaRN": of_rotation(truncate=True),
    "no factor of attention": of_rotation(attention_factor=1.0),
    "no bias of the output": of_config(of_mixers(lambda _: {"output_biased": False})),
    "no bias of Q, K and V": of_config(of_mixers(lambda _: {"biased": False})),
    "no bias of the router": of_experts(router_biased=False),
    "no biases of experts": of_experts(biased=False),
    "shares are of all experts": of_experts(normed=False),
    "another activation": of_experts(expert=FeedForward(64)),
    "gate and up do not take turns": of_tensors(halves, *GATE_AND_UP),
    "up before gate": of_tensors(exchanged, *GATE_AND_UP),
}


def activation(limit_gate: float = 7, limit_up: float = 7, alpha: float = 1.702, more: float = 1) -> Any:
    def gated(gate: np.ndarray, up: np.ndarray, _: int) -> np.ndarray:
        gate, up = (values.astype(np.float32) for values in (gate, up))
        gate = np.minimum(gate, limit_gate)
        made: np.ndarray = gate / (1 + np.exp(-alpha * gate)) * (np.clip(up, -limit_up, limit_up) + more)
        return made.astype(bfloat16)

    return gated


WRONG_ACTIVATIONS = {
    "no limit of gates": activation(limit_gate=np.inf),
    "no limit of up": activation(limit_up=np.inf),
    "sigmoid without its factor": activation(alpha=1),
    "not one more": activation(more=0),
}


@pytest.mark.thorough
def test_mistakes_in_gpt_oss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mistake moves logits further than bf16 does. Some sinks exceed all scores, and some gates their limit."""
    write(tmp_path / "gpt-oss", "gpt_oss", GPT_OSS, 4)
    # Of far logits of a router two experts have nearly all shares.
    file, sizes = tmp_path / "gpt-oss/model.safetensors", {"router.weight": 0.25, "sinks": 6, "gate_up_proj": 5}
    tensors = load_file(file)
    for name in tensors:
        factor = next((size for end, size in sizes.items() if name.endswith(end)), 1)
        tensors[name] = (factor * tensors[name].astype(np.float32)).astype(bfloat16)
    save_file(tensors, file, {"format": "pt"})
    ids = np.random.default_rng(4).integers(0, 300, 60).tolist()
    exact, rounded, sure = theirs(tmp_path / "gpt-oss", ids)
    last = [57, 58, 59]
    assert sure[last].all()
    most, right = 1.5 * error(rounded[last], exact[last]), Checkpoint.open(tmp_path / "gpt-oss")

    def off(checkpoint: Checkpoint) -> float:
        return error(numpy_logits(checkpoint, ids, 2), exact[last])

    assert off(right) <= most
    found = {name: off(mistake(right)) for name, mistake in MISTAKES_OF_EXPERTS.items()}
    monkeypatch.setattr(silu_and_mul, "reference", activation())
    assert off(right) <= most
    for name, wrong in WRONG_ACTIVATIONS.items():
        monkeypatch.setattr(silu_and_mul, "reference", wrong)
        found[name] = off(right)
    assert not {name: distance for name, distance in found.items() if distance <= most}


@pytest.mark.parametrize("normed", [False, True])
def test_shares_of_qwens_experts(normed: bool, tmp_path: Path) -> None:
    """The softmax is of all experts, and is divided by the sum of those taken where the configuration says so."""
    raw = {name: value for name, value in GPT_OSS.items() if name not in ("num_local_experts", "rope_scaling")}
    raw |= {"num_experts": 5, "moe_intermediate_size": 48, "norm_topk_prob": normed, "rope_theta": 1e6}
    write(tmp_path / "qwen", "qwen3_moe", raw, 5)
    ids = np.random.default_rng(5).integers(0, 300, 60).tolist()
    exact, rounded, sure = theirs(tmp_path / "qwen", ids)
    last = [57, 58, 59]
    assert sure[last].all()
    most, right = 1.5 * error(rounded[last], exact[last]), Checkpoint.open(tmp_path / "qwen")
    assert error(numpy_logits(right, ids, 2), exact[last]) <= most
    assert error(numpy_logits(of_experts(normed=not normed)(right), ids, 2), exact[last]) > most


def test_spellings_of_gemma() -> None:
    """Kinds of layers and rotations are said in several ways. The embedding's scale is rounded to bf16."""
    config = parse_config(GEMMA, "test")
    assert [layer.mixer.window for layer in config.decoder.layers] == [17] * 5 + [None, 17]  # type: ignore[union-attr]
    kinds = ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
    nested = {
        "full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
    }
    flat = ("rope_theta", "rope_local_base_freq", "rope_scaling")
    newer = {name: value for name, value in GEMMA.items() if name not in flat}
    for spelled in (
        GEMMA | {"sliding_window_pattern": 6},
        GEMMA | {"layer_types": kinds},
        newer | {"rope_parameters": nested},
    ):
        assert parse_config(spelled, "test").decoder == config.decoder
    assert parse_config(GEMMA | {"hidden_size": 1152}, "test").decoder.embed_scale == 34.0


@pytest.mark.thorough
@pytest.mark.parametrize("kv, most", [("bf16", 1.5), ("int8", 3)])
@pytest.mark.parametrize("width", [17, 130])
def test_edges_of_a_window(width: int, kv: str, most: float, tmp_path: Path, artifacts: Path) -> None:
    """A row attends to as many positions as the window has, itself included: no more and no less, at every edge.

    The bits are the same in prompts that end or are cut around the window's edge and blocks, and after a rewind to
    before the window.
    """
    raw = {name: GEMMA[name] for name in ("hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings")}
    raw |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1, "head_dim": 32}
    ids = np.random.default_rng(width).integers(0, 300, 150).tolist()
    exact, rounded = dict[int, np.ndarray](), dict[int, np.ndarray]()
    for sees in (width, width - 1, width + 1):
        write(tmp_path / str(sees), "mistral", raw | {"sliding_window": sees, "eos_token_id": 2}, 5)
        exact[sees], rounded[sees], _ = theirs(tmp_path / str(sees), ids)
    llm = load(build(tmp_path / str(width), artifacts, kv=kv))
    tokens = [llm.decode(token) for token in ids]
    bound = most * error(rounded[width], exact[width])
    assert error(tokens, exact[width]) <= bound
    off = {sees: np.sqrt(np.mean((np.asarray(tokens) - exact[sees]) ** 2, axis=-1)) for sees in exact}
    # The first row that another window changes, and all behind it. One key of 130 is within the bound.
    for sees, first in ((width - 1, width - 1), (width + 1, width)):
        np.testing.assert_allclose(exact[sees][:first], exact[width][:first], atol=1e-4)
        assert width > 17 or off[sees][first] > 1.5 * off[width][first]
        assert width > 17 or (off[sees][first:] > off[width][first:]).mean() > 0.95
    for end in (width - 1, width, width + 1, 127, 128, 129, 144):
        llm.reset()
        assert (llm.prefill(ids[:end]) == tokens[end - 1]).all(), end
        llm.rewind(min(5, end - 2))
        assert (llm.prefill(ids[min(5, end - 2) : end]) == tokens[end - 1]).all(), end
        assert (llm.decode(ids[end]) == tokens[end]).all()
