"""Mixtral (Jiang et al. 2024): Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from typing import Any

from stages.model.config import MOST_LAYERS, Config, ConfigFields
from stages.model.decoder import Attention, Experts, FeedForward, Layer
from stages.model.families import Family
from stages.model.families.llama import GGUF, IGNORED, TENSORS, of_layer

_REQUIRED: dict[str, tuple[Any, ...]] = {"hidden_act": ("silu",), "partial_rotary_factor": (1, None)}


def parse(fields: ConfigFields) -> Config:
    """Return the configuration of a `MixtralForCausalLM`. Raises UserError that names field and value."""
    fields.require(_REQUIRED)
    heads = fields.heads(kv_heads=8)
    max_seq = fields.positions(heads.head_dim, 131_072)
    rope, window = fields.rope(max_seq, heads.head_dim, 1e6), fields.window(max_seq, None)
    layer = Layer(Attention(*heads, rope, scalar=float(heads.head_dim), window=window), experts(fields, 8, 2))
    count = fields.integer("num_hidden_layers", most=MOST_LAYERS)
    return fields.config("mixtral", [layer] * count, max_seq, tied=False, eos=(2,), eps=1e-5)


def experts(fields: ConfigFields, count: int, top: int) -> Experts:
    """Return experts whose shares are the softmax of the chosen ones' logits. Raises UserError.

    `count`, `top`: the defaults of how many there are, and of how many a row takes.
    """
    count = fields.integer("num_local_experts", count)
    inner = FeedForward(fields.integer("intermediate_size"))
    return Experts(count, fields.integer("num_experts_per_tok", top, most=count), inner, normed=True)


_EXPERTS = {
    "w_router": of_layer("block_sparse_moe.gate.weight"),
    **{
        f"w_{name}_exps": of_layer(f"block_sparse_moe.experts.{{expert}}.{tensor}.weight")
        for name, tensor in {"gate": "w1", "up": "w3", "down": "w2"}.items()
    },
}

FAMILY = Family("mixtral", ("MixtralForCausalLM",), parse, TENSORS | _EXPERTS, IGNORED, title="Mixtral", gguf=GGUF)
"""In GGUF files it is a Llama with experts."""
