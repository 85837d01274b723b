"""GLM-4 of April 2025 (GLM team 2024): norms around both halves of a layer, and half of each head's rows turn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from stages.model.config import MOST_LAYERS, Config, ConfigFields
from stages.model.decoder import BIASES, Attention, FeedForward, Layer
from stages.model.families import Family
from stages.model.families.llama import IGNORED, TENSORS, of_layer

_REQUIRED: dict[str, tuple[Any, ...]] = {"hidden_act": ("silu",)}

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 151_552,
    "hidden_size": 4096,
    "intermediate_size": 13_696,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1.5625e-7,
    "partial_rotary_factor": 0.5,
    "eos_token_id": [151_329, 151_336, 151_338],
}
"""Fields of transformers' class."""


def parse(fields: ConfigFields) -> Config:
    """Return the configuration of a `Glm4ForCausalLM`. Raises UserError that names field and value."""
    return described(fields, "glm4", sandwich=True)


def described(fields: ConfigFields, family: str, sandwich: bool) -> Config:
    """Return the configuration of a model of a family. Raises UserError that names field and value.

    `sandwich`: whether results of both halves of a layer are normed before they are added.
    """
    fields.require(_REQUIRED)
    fields = ConfigFields({**_DEFAULTS, **fields.values}, fields.where)
    heads = fields.heads()
    max_seq = fields.positions(heads.head_dim)
    rope = replace(fields.rope(max_seq, heads.head_dim, partial=True), interleaved=True)
    biased = fields.boolean("attention_bias", True)
    attention = Attention(*heads, rope, scalar=float(heads.head_dim), biased=biased)
    layer = Layer(attention, FeedForward(fields.integer("intermediate_size")), sandwich=sandwich)
    count = fields.integer("num_hidden_layers", most=MOST_LAYERS)
    return fields.config(family, [layer] * count, max_seq, tied=False)


_GATE_UP = ("w_gate", "w_up")

NAMES = TENSORS | {
    **{slot: of_layer(f"self_attn.{slot[1]}_proj.bias") for slot in BIASES},
    **dict.fromkeys(_GATE_UP, of_layer("mlp.gate_up_proj.weight", *_GATE_UP)),
}

_NORMS = {
    "attn_norm_w": of_layer("post_self_attn_layernorm.weight"),
    "down_norm_w": of_layer("post_mlp_layernorm.weight"),
}

FAMILY = Family("glm4", ("Glm4ForCausalLM",), parse, NAMES | _NORMS, IGNORED, title="GLM-4-0414")
