"""Ministral 3 (Mistral AI 2025): Mistral with YaRN, and queries that grow with the position."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from stages.model.config import MOST_LAYERS, Config, ConfigFields
from stages.model.decoder import Attention, FeedForward, Layer, PositionScale, Rope
from stages.model.families import Family
from stages.model.families.gguf import Gguf
from stages.model.families.llama import IGNORED, SEEING, TENSORS
from stages.model.families.mistral import WRAPPED

_REQUIRED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "partial_rotary_factor": (1, None),
    "layer_types": (None,),
}

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 131_072,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 34,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 262_144,
    "rope_parameters": {
        "type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": 16_384,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}
"""Fields of transformers' class. Configurations of text within others leave many out."""


def parse(fields: ConfigFields) -> Config:
    """Return the configuration of a `Ministral3ForCausalLM`. Raises UserError that names field and value."""
    fields.require(_REQUIRED)
    values = {**_DEFAULTS, **fields.values}
    if fields.values.get("rope_scaling"):
        del values["rope_parameters"]
    fields = ConfigFields(values, fields.where)
    # Null is not the default here.
    heads = fields.heads(None if "head_dim" in fields.values else 128)
    max_seq = fields.positions(heads.head_dim)
    rope, window = _rope(fields, max_seq, heads.head_dim), fields.window(max_seq, None)
    attention = Attention(*heads, rope, scalar=float(heads.head_dim), window=window)
    layer = Layer(attention, FeedForward(fields.integer("intermediate_size")))
    count = fields.integer("num_hidden_layers", most=MOST_LAYERS)
    return fields.config("ministral3", [layer] * count, max_seq, tied=False, eos=(2,), eps=1e-5)


def _rope(fields: ConfigFields, max_seq: int, head_dim: int) -> Rope:
    rope, nested = fields.rope(max_seq, head_dim), fields.rope_fields()
    if nested.values.get("llama_4_scaling_beta") is None:
        return rope
    every = nested.integer("original_max_position_embeddings", max_seq)
    scale = PositionScale(nested.number("llama_4_scaling_beta"), every)
    return rope if every >= max_seq else replace(rope, q_scale=scale)


def _of_gguf(fields: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary embedding with the factor of queries, which is 0 where there is none."""
    scaling = {"rope_type": "default", **(fields["rope_scaling"] or {}), "rope_theta": fields["rope_theta"]}
    return {"rope_scaling": scaling | {"llama_4_scaling_beta": metadata.get("attention.temperature_scale") or None}}


_GGUF = Gguf(
    "mistral3",
    {"architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3"},
    given=("attention.temperature_scale", "attention.temperature_length"),
    neighbours=True,
    complete=_of_gguf,
)


FAMILY = Family(
    "ministral3",
    ("Ministral3ForCausalLM",),
    parse,
    TENSORS,
    (*IGNORED, *SEEING),
    wrapped=WRAPPED,
    title="Ministral 3",
    gguf=_GGUF,
)
