"""Qwen 3 with experts (Yang et al. 2025): most layers, or all, have a mixture of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stages.model.config import MOST_LAYERS, Config, ConfigFields
from stages.model.decoder import Attention, Experts, FeedForward, Layer, Norm
from stages.model.families import Family, qwen3
from stages.model.families.gguf import Gguf, expert_keys
from stages.model.families.llama import IGNORED, of_experts, of_layer


def parse(fields: ConfigFields) -> Config:
    """Return the configuration of a `Qwen3MoeForCausalLM`. Raises UserError that names field and value."""
    fields.require(qwen3.REQUIRED)
    heads = fields.heads(kv_heads=4)
    max_seq = fields.positions(heads.head_dim, 32768)
    window = fields.window(max_seq) if fields.boolean("use_sliding_window", False) else None
    rope = fields.rope(max_seq, heads.head_dim)
    attention = Attention(*heads, rope, scalar=float(heads.head_dim), window=window, qk_norm=Norm())
    dense = Layer(attention, FeedForward(fields.integer("intermediate_size", 6144)))
    normed = fields.boolean("norm_topk_prob", False)
    sparse = Layer(attention, fields.experts("num_experts", "moe_intermediate_size", (128, 8, 768), normed=normed))
    count = fields.integer("num_hidden_layers", most=MOST_LAYERS)
    step, others = fields.integer("decoder_sparse_step", 1), fields.values.get("mlp_only_layers") or []
    if not isinstance(others, list) or not all(isinstance(layer, int) for layer in others):
        raise fields.fail("mlp_only_layers", "must be a list of layers")
    layers = [dense if layer in others or (layer + 1) % step else sparse for layer in range(count)]
    return fields.config("qwen3_moe", layers, max_seq, tied=False)


_EXPERTS = {
    "w_router": of_layer("mlp.gate.weight"),
    **of_experts("mlp.experts", "gate_proj", "up_proj", "down_proj"),
}


def _of_gguf(fields: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return what llama.cpp takes as given."""
    return {"norm_topk_prob": True}


_GGUF = Gguf(
    "qwen3moe",
    {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"},
    expert_keys("num_experts", "num_experts_per_tok", "moe_intermediate_size"),
    complete=_of_gguf,
)


def _alone(layer: Layer) -> Mapping[str, Any]:
    """Return fields of a layer by itself, which say by number which layers have no experts."""
    return {"decoder_sparse_step": 1, "mlp_only_layers": [] if isinstance(layer.feed_forward, Experts) else [0]}


FAMILY = Family(
    "qwen3_moe",
    ("Qwen3MoeForCausalLM",),
    parse,
    {**qwen3.FAMILY.tensors, **_EXPERTS},
    IGNORED,
    title="Qwen 3 with experts",
    alone=_alone,
    gguf=_GGUF,
)
