"""Granite 3 (IBM 2024): Llama with factors of embedding, residuals, scores and logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stages.model.config import FULL, MOST_LAYERS, Config, ConfigFields
from stages.model.decoder import Attention, Experts, FeedForward, Layer, Rope
from stages.model.families import Family
from stages.model.families.gguf import Gguf
from stages.model.families.llama import IGNORED, REQUIRED, TENSORS


def alone(layer: Layer) -> Mapping[str, Any]:
    """Return fields of a layer by itself: transformers multiplies whatever enters the first layer."""
    return {"embedding_multiplier": 1.0}


def parse(fields: ConfigFields) -> Config:
    """Return the configuration of a `GraniteForCausalLM`. Raises UserError that names field and value."""
    fields.require(REQUIRED)
    heads = fields.heads()
    rope = fields.rope(fields.positions(heads.head_dim), heads.head_dim)
    return described(fields, "granite", rope, FeedForward(fields.integer("intermediate_size")))


def described(fields: ConfigFields, family: str, rope: Rope, feed_forward: FeedForward | Experts) -> Config:
    """Return the configuration of a model whose layers are alike. Raises UserError."""
    heads = fields.heads()
    attention = Attention(*heads, rope, scalar=fields.number("attention_multiplier", 1.0) ** -2)
    count = fields.integer("num_hidden_layers", most=MOST_LAYERS)
    scales: dict[str, Any] = {
        "embed_scale": fields.number("embedding_multiplier", 1.0),
        "residual_scale": fields.number("residual_multiplier", 1.0),
        "logits_scale": 1 / fields.number("logits_scaling", 1.0),
    }
    layers, max_seq = [Layer(attention, feed_forward)] * count, fields.positions(heads.head_dim)
    return fields.config(family, layers, max_seq, tied=False, eos=(2,), **scales)


def of_gguf(fields: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the factors, which are 0 where there are none; of a model without rotation those of Granite 4."""
    usual = dict.fromkeys(SCALES, 1.0) | {"attention_multiplier": fields["head_dim"] ** -0.5}
    scales = {name: fields.get(name) or value for name, value in usual.items()}
    if metadata.get("rope.scaling.finetuned", True):
        return scales
    return scales | {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "num_local_experts": 0,
        "layer_types": [FULL] * min(fields["num_hidden_layers"], MOST_LAYERS),
        "shared_intermediate_size": fields["intermediate_size"],
    }


SCALES = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}

_MAMBA = ("conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank")
"""Sizes of layers that dense models do not have."""

GGUF = Gguf(
    "granite",
    {"architectures": ["GraniteForCausalLM"], "model_type": "granite"},
    SCALES,
    given=("rope.scaling.finetuned", "expert_shared_feed_forward_length", *(f"ssm.{size}" for size in _MAMBA)),
    neighbours=True,
    complete=of_gguf,
)


FAMILY = Family("granite", ("GraniteForCausalLM",), parse, TENSORS, IGNORED, title="Granite 3", alone=alone, gguf=GGUF)
