"""Mixtral (Jiang et al. 2024): Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from typing import Any

from stages.model.config import MOST_LAYERS, Config, ConfigFields
from stages.model.decoder import Attention, Layer
from stages.model.families import Family
from stages.model.families.llama import GGUF, IGNORED, TENSORS, of_experts, of_layer

_REQUIRED: dict[str, tuple[Any, ...]] = {"hidden_act": ("silu",), "partial_rotary_factor": (1, None)}


def parse(fields: ConfigFields) -> Config:
    """Return the configuration of a `MixtralForCausalLM`. Raises UserError that names field and value."""
    fields.require(_REQUIRED)
    heads = fields.heads(kv_heads=8)
    max_seq = fields.positions(heads.head_dim, 131_072)
    rope, window = fields.rope(max_seq, heads.head_dim, 1e6), fields.window(max_seq, None)
    experts = fields.experts("num_local_experts", "intermediate_size", (8, 2, None), normed=True)
    layer = Layer(Attention(*heads, rope, scalar=float(heads.head_dim), window=window), experts)
    count = fields.integer("num_hidden_layers", most=MOST_LAYERS)
    return fields.config("mixtral", [layer] * count, max_seq, tied=False, eos=(2,), eps=1e-5)


_EXPERTS = {
    "w_router": of_layer("block_sparse_moe.gate.weight"),
    **of_experts("block_sparse_moe.experts", "w1", "w3", "w2"),
}

FAMILY = Family("mixtral", ("MixtralForCausalLM",), parse, TENSORS | _EXPERTS, IGNORED, title="Mixtral", gguf=GGUF)
"""In GGUF files it is a Llama with experts."""
