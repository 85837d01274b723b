"""Random descriptions, of what no released model has too, against a plain decoder that shares no code with ours."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16
from safetensors.numpy import load_file, save_file

from llama_npu2 import load
from llama_npu2.artifact.plan import DECODE, PREFILL
from stages.model import decoder as described_by
from stages.model import families
from stages.model.checkpoint import Checkpoint
from stages.model.config import table
from stages.model.decoder import (
    ADDENDS,
    Attention,
    Decoder,
    Experts,
    FeedForward,
    Layer,
    Norm,
    PositionScale,
    Rope,
    RopeScaling,
    ShortConv,
)
from stages.model.families import parse_config
from stages.model.grouping import programs
from stages.model.plan import make_plan
from stages.model.random_weights import write_byte_tokenizer
from stages.model.reference import Model
from stages.targets.npu2.groupings import GROUPINGS
from stages.weights.scalars import ACTIVATIONS
from tests.conftest import build
from tests.support import described
from tests.support.plain_decoder import Plain, in_bf16

POSITIONS, ROWS, TOKENS = 96, 64, 8
RUN = 3
"""Descriptions that are built and run by default; the others go through the parts' references alone."""

MOST = 2
"""Our error in terms of that of a plain decoder that rounds to bf16. Both round alike, but of different sums. Where
softmax is sharp, one rounding can be most of the error of all positions; a mistake makes it tens of times as large."""

Draw = np.random.Generator

DRAWN = {
    Norm: {"offset", "once"},
    RopeScaling: {
        *("type", "factor", "low_freq_factor", "high_freq_factor", "original_max_position", "factors"),
        *("long_factors", "beta_fast", "beta_slow", "truncate", "attention_factor"),
    },
    PositionScale: {"beta", "every"},
    Rope: {"theta", "scaling", "kind", "turned", "interleaved", "q_scale"},
    Attention: {
        "heads",
        "kv_heads",
        "head_dim",
        "rope",
        "scalar",
        "window",
        "qk_norm",
        "biased",
        "norms_rows",
        "output_biased",
        "sinks",
    },
    ShortConv: {"taps"},
    FeedForward: {"inner", "activation"},
    Experts: {"count", "top", "expert", "normed", "router_biased", "biased", "by_sigmoid"},
    Layer: {"mixer", "feed_forward", "norm", "sandwich", "entering"},
    Decoder: {"vocab", "emb", "layers", "eps", "tied", "norm", "embed_scale", "residual_scale", "logits_scale"},
}
"""The fields of a description that differ here."""


def test_all_fields_of_descriptions_are_drawn() -> None:
    """A field that is added is drawn here, and has a meaning in the plain decoder."""
    classes = {
        each for each in vars(described_by).values() if isinstance(each, type) and hasattr(each, "__match_args__")
    }
    assert {each: {field.name for field in fields(each)} for each in classes} == DRAWN


def chance(rng: Draw, one_in: int = 2) -> bool:
    return not rng.integers(one_in)


def norm(rng: Draw) -> Norm:
    return Norm(float(rng.choice([0.0, 1.0, 0.5])), chance(rng))


def rope(rng: Draw, head_dim: int, kind: str) -> Rope:
    turned = int(rng.integers(0, head_dim // 2 + 1)) * 2 if chance(rng) else None
    width = head_dim if turned is None else turned
    original, factor = int(rng.choice([40, POSITIONS, 300])), float(rng.choice([1.0, 1.3]))
    short, long = (tuple(float(f) for f in 1 + 4 * rng.random(width // 2)) for _ in range(2))
    fast, slow = float(rng.choice([32.0, 4.0])), float(rng.choice([1.0, 0.5]))
    scaling = {
        "default": RopeScaling(),
        "linear": RopeScaling("linear", float(rng.choice([2.0, 8.0]))),
        "llama3": RopeScaling("llama3", 8.0, 1.0, 4.0, 40),
        "longrope": RopeScaling(
            "longrope",
            original_max_position=original,
            factors=short,
            long_factors=long if chance(rng) else (),
            attention_factor=factor,
        ),
        "yarn": RopeScaling(
            "yarn",
            float(rng.choice([2.0, 16.0])),
            original_max_position=original,
            beta_fast=fast,
            beta_slow=slow,
            truncate=chance(rng),
            attention_factor=factor,
        ),
    }[str(rng.choice(["default", "linear", "llama3", "longrope", "yarn"]))]
    grows = PositionScale(float(rng.choice([0.1, 1.0])), int(rng.choice([5, 30]))) if chance(rng, 3) else None
    return Rope(float(rng.choice([1e2, 1e4, 5e5])), scaling, kind, turned, chance(rng), grows)


def mixture(rng: Draw) -> Experts:
    """Experts. Where rows take some of them a bias of the router decides (`write`): near ties are no mistakes."""
    count, biased = int(rng.choice([1, 2, 4, 7])), chance(rng)
    top = int(rng.integers(1, count + 1)) if biased else count
    expert = FeedForward(int(rng.integers(10, 50)), str(rng.choice(ACTIVATIONS)))
    normed, of_products, by_sigmoid = chance(rng), chance(rng), biased and chance(rng)
    return Experts(count, top, expert, normed, biased and not by_sigmoid, of_products, by_sigmoid)


def description(rng: Draw) -> Decoder:
    """All axes independently; what has a size has it in all layers."""
    kv_heads, head_dim = int(rng.choice([1, 2, 3])), 2 * int(rng.integers(3, 25))
    heads, inner, taps = kv_heads * int(rng.choice([1, 2, 3])), int(rng.integers(20, 90)), int(rng.choice([1, 2, 3, 5]))
    emb, scalar, count = int(rng.integers(20, 90)), float(rng.choice([head_dim, 5, 40])), int(rng.choice([1, 2, 3, 5]))
    ropes = [rope(rng, head_dim, kind) for kind in ("", "local", "other")]

    def attention() -> Attention:
        window = int(rng.choice([1, 2, 15, 16, 17, 40, 64])) if chance(rng) else None
        of_heads = norm(rng) if chance(rng) else None
        turns = ropes[int(rng.integers(len(ropes)))]
        return Attention(heads, kv_heads, head_dim, turns, scalar, window, of_heads, *(chance(rng) for _ in range(4)))

    embed_scale = float(rng.choice([1.0, 6.5]))
    # The residual stream is divided by it. Rows of the embedding are, too, which is a rounding more where they have no
    # factor of their own; and what is not normed sees it.
    residual = float(rng.choice([1.0, 0.22])) if embed_scale != 1 else 1.0

    experts = mixture(rng) if chance(rng, 3) else None

    def layer(first: bool) -> Layer:
        mixer = attention() if first or chance(rng) else ShortConv(taps)
        network = experts if experts and chance(rng) else FeedForward(inner, str(rng.choice(ACTIVATIONS)))
        # Without any norm values would grow from layer to layer until they are infinite.
        sandwich = chance(rng)
        return Layer(mixer, network, norm(rng), sandwich, not sandwich or residual != 1 or not chance(rng, 3))

    kinds = [layer(first=not kind) for kind in range(3)]
    layers = [kinds[int(kind)] for kind in rng.integers(len(kinds), size=count)]
    layers[int(rng.integers(count))] = kinds[0]
    return Decoder(
        vocab=int(rng.integers(257, 400)),
        emb=emb,
        layers=tuple(layers),
        eps=float(rng.choice([1e-6, 1e-5, 0.02])),
        tied=chance(rng),
        norm=norm(rng),
        embed_scale=embed_scale,
        residual_scale=residual,
        logits_scale=float(rng.choice([1.0, 0.3])),
    )


def write(directory: Path, made: Decoder, seed: int) -> None:
    """Write a checkpoint: weights of which none is without effect."""
    raw = {"architectures": ["DescribedForCausalLM"], "model_type": "described"}
    raw |= {"decoder": described.as_json(made), "max_position_embeddings": POSITIONS}
    config = parse_config(raw, "test")
    assert config.decoder == made
    rng, tensors = np.random.default_rng(seed), {}
    for name, ((weight, at), *_) in families.locations(config).items():
        values = rng.standard_normal(at.shape, np.float32)
        if weight.slot not in ADDENDS and len(at.shape) > 1:
            values /= np.sqrt(at.shape[-1])
            if weight.slot == "w_router":
                values *= 0.03
        elif weight.slot not in ADDENDS:
            values = 1 + 0.4 * values - weight.offset
        tensors[name] = values.astype(bfloat16)
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(raw))
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    write_byte_tokenizer(config, directory)


def of_references(checkpoint: Path, ids: list[int], tokens: int) -> list[np.ndarray]:
    """Logits of the parts' references, wired as the NPU's plan says, after a prompt and after each of `tokens`."""
    opened = Checkpoint.open(checkpoint).within(POSITIONS)
    config, grouping = opened.config, GROUPINGS["separate"]

    def tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
        return opened.tensor(name) if name in opened.held else table(config, name, shape[0])

    plans, found = make_plan(config, grouping, "aie2p", [ROWS]).phases, programs(config, grouping, [ROWS])
    model, first = Model(plans, found, config.dimensions(), tensor, POSITIONS), len(ids) - tokens
    return [model.run(PREFILL._replace(rows=ROWS), ids[:first]), *(model.run(DECODE, [i]) for i in ids[first:])]


def error(logits: Any, exact: np.ndarray) -> float:
    return float(np.sqrt(np.mean((np.asarray(logits) - exact) ** 2)))


@pytest.fixture(scope="module", autouse=True)
def family() -> Iterator[None]:
    known = families.families()
    known["described"] = described.FAMILY
    yield
    del known["described"]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("seed", [pytest.param(s, marks=[pytest.mark.slow] if s >= 20 else []) for s in range(200)])
def test_descriptions(seed: int, tmp_path: Path) -> None:
    """Against the plain decoder, our error in terms of that of one that rounds to bf16."""
    rng = np.random.default_rng([seed, 36])
    made = description(rng)
    write(tmp_path / "model", made, seed)
    ids = rng.integers(0, made.vocab, ROWS + TOKENS).tolist()
    tensors = load_file(tmp_path / "model/model.safetensors")
    exact, rounded = (Plain(made, tensors, POSITIONS, *of).logits(ids) for of in ((), (in_bf16,)))
    end = int(rng.integers(1, ROWS + 1))
    places = range(end - 1, end + TOKENS)
    ours = of_references(tmp_path / "model", ids[: end + TOKENS], TOKENS)
    assert error(ours, exact[places]) <= MOST * error(rounded[places], exact[places]), made


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", [pytest.param(s, marks=[pytest.mark.slow] if s >= RUN else []) for s in range(40)])
def test_descriptions_run(seed: int, artifacts: Path, tmp_path: Path) -> None:
    """On the CPU: a prompt in pieces, tokens, rewinds."""
    rng = np.random.default_rng([seed, 36])
    made = description(rng)
    checkpoint = tmp_path / f"described-{seed}"
    write(checkpoint, made, seed)
    ids = rng.integers(0, made.vocab, ROWS + TOKENS).tolist()
    tensors = load_file(checkpoint / "model.safetensors")
    exact, rounded = (Plain(made, tensors, POSITIONS, *of).logits(ids) for of in ((), (in_bf16,)))
    context = {} if made.short_context is None else {"context": POSITIONS}
    llm = load(build(checkpoint, artifacts, **context))
    first, end = sorted(rng.choice(np.arange(1, ROWS), 2, replace=False).tolist())
    ours = [llm.prefill(ids[:first]), llm.prefill(ids[first:end]), *(llm.decode(token) for token in ids[end:])]
    places = [first - 1, end - 1, *range(end, len(ids))]
    assert error(ours, exact[places]) <= MOST * error(rounded[places], exact[places]), made
    back = int(rng.integers(1, end))
    llm.rewind(back)
    assert ([llm.decode(token) for token in ids[back:end]][-1] == ours[1]).all()
    llm.reset()
    assert (llm.prefill(ids) == ours[-1]).all()
