"""LFM2 with experts (Liquid AI 2025): LFM2 whose layers, but for the first ones, have a mixture of experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from stages.model.config import Config, ConfigFields
from stages.model.decoder import FeedForward
from stages.model.families import Family, lfm2
from stages.model.families.gguf import expert_keys, of_block
from stages.model.families.llama import IGNORED, of_experts, of_layer

_SIGMOID = 2
"""llama.cpp's number for routers that choose experts by sigmoids."""

_REQUIRED: dict[str, tuple[Any, ...]] = {
    "use_expert_bias": (True,),
    "routed_scaling_factor": (1, None),
    "expert_gating_func": (_SIGMOID,),
}

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 65_536,
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "moe_intermediate_size": 1792,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "num_dense_layers": 2,
    "max_position_embeddings": 128_000,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}
"""Fields of transformers' class."""


def parse(fields: ConfigFields) -> Config:
    """Return the configuration of a `Lfm2MoeForCausalLM`. Raises UserError that names field and value."""
    fields.require(_REQUIRED)
    fields = lfm2.completed(fields, _DEFAULTS)
    normed = fields.boolean("norm_topk_prob", True)
    experts = fields.experts("num_experts", "moe_intermediate_size", normed=normed, by_sigmoid=True)
    dense, first = FeedForward(fields.integer("intermediate_size")), fields.whole("num_dense_layers", 2)
    return lfm2.described(fields, "lfm2_moe", lambda layer: dense if layer < first else experts)


_EXPERTS = {
    "w_router": of_layer("feed_forward.gate.weight"),
    "b_choice": of_layer("feed_forward.expert_bias"),
    **of_experts("feed_forward.experts", "w1", "w3", "w2"),
}

_GGUF = replace(
    lfm2.GGUF,
    architecture="lfm2moe",
    fields={"architectures": ["Lfm2MoeForCausalLM"], "model_type": "lfm2_moe"},
    keys={
        **lfm2.GGUF.keys,
        **expert_keys("num_experts", "num_experts_per_tok", "moe_intermediate_size"),
        "num_dense_layers": "leading_dense_block_count",
        "expert_gating_func": "expert_gating_func",
    },
    tensors={**lfm2.GGUF.tensors, "b_choice": of_block("exp_probs_b.bias")},
)

FAMILY = Family(
    "lfm2_moe",
    ("Lfm2MoeForCausalLM",),
    parse,
    lfm2.NAMES | _EXPERTS,
    IGNORED,
    title="LFM2 with experts",
    alone=lambda layer: {"num_dense_layers": int(isinstance(layer.feed_forward, FeedForward))},
    gguf=_GGUF,
)
