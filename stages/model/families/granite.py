"""Granite 3 (IBM 2024): Llama with factors of embedding, residuals, scores and logits."""

from __future__ import annotations

from typing import Any

from stages.model.config import MOST_LAYERS, Config, ConfigFields
from stages.model.decoder import Attention, FeedForward, Layer, Rope
from stages.model.families import Family
from stages.model.families.llama import IGNORED, REQUIRED, TENSORS

ALONE = {"embedding_multiplier": 1.0}
"""Transformers multiplies whatever enters the first layer."""


def parse(fields: ConfigFields) -> Config:
    """Return the configuration of a `GraniteForCausalLM`. Raises UserError that names field and value."""
    fields.require(REQUIRED)
    heads = fields.heads()
    rope = fields.rope(fields.positions(heads.head_dim), heads.head_dim)
    return described(fields, "granite", rope, fields.integer("intermediate_size"))


def described(fields: ConfigFields, family: str, rope: Rope, inner: int) -> Config:
    """Return the configuration of a model whose layers are alike. Raises UserError.

    `inner`: the width of its feed-forward network.
    """
    heads = fields.heads()
    attention = Attention(*heads, rope, scalar=fields.number("attention_multiplier", 1.0) ** -2)
    count = fields.integer("num_hidden_layers", most=MOST_LAYERS)
    scales: dict[str, Any] = {
        "embed_scale": fields.number("embedding_multiplier", 1.0),
        "residual_scale": fields.number("residual_multiplier", 1.0),
        "logits_scale": 1 / fields.number("logits_scaling", 1.0),
    }
    layers, max_seq = [Layer(attention, FeedForward(inner))] * count, fields.positions(heads.head_dim)
    return fields.config(family, layers, max_seq, tied=False, eos=(2,), **scales)


FAMILY = Family("granite", ("GraniteForCausalLM",), parse, TENSORS, IGNORED, title="Granite 3", alone=ALONE)
