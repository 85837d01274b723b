"""Mistakes that Gemma's description and windows invite: each moves logits further than other tests' bounds allow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llama_npu2 import load
from stages.model.checkpoint import Checkpoint
from stages.model.config import Config
from stages.model.decoder import Attention, Layer, Norm
from stages.model.families import parse_config
from tests.conftest import build
from tests.kernels.test_families import error, numpy_logits, theirs, torch, write

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
    exact, rounded = (
        theirs(tmp_path / "gemma", ids, dtype)[0][[57, 58, 59]] for dtype in (torch.float32, torch.bfloat16)
    )
    most = 1.5 * error(rounded, exact)
    right = Checkpoint.open(tmp_path / "gemma")
    assert error(numpy_logits(right, ids, 2), exact) <= most
    wrong = {name: replace(right, config=mistake(right.config)) for name, mistake in MISTAKES.items()}
    found = {name: error(numpy_logits(checkpoint, ids, 2), exact) for name, checkpoint in wrong.items()}
    assert all(off > most for off in found.values()), (found, most)


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


@pytest.mark.sampled(1)
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
    exact: dict[int, np.ndarray] = {}
    for sees in (width, width - 1, width + 1):
        write(tmp_path / str(sees), "mistral", raw | {"sliding_window": sees, "eos_token_id": 2}, 5)
        exact[sees], _ = theirs(tmp_path / str(sees), ids, torch.float32)
    rounded, _ = theirs(tmp_path / str(width), ids, torch.bfloat16)
    llm = load(build(tmp_path / str(width), artifacts, kv=kv))
    tokens = [llm.decode(token) for token in ids]
    bound = most * error(rounded, exact[width])
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
