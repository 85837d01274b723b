"""Seed-OSS (ByteDance 2025): Llama with biases of Q, K and V."""

from __future__ import annotations

from typing import Any

from stages.model.config import MOST_LAYERS, Config, ConfigFields
from stages.model.decoder import BIASES, Attention, FeedForward, Layer
from stages.model.families import Family
from stages.model.families.gguf import TENSORS as GGUF_TENSORS
from stages.model.families.gguf import Gguf, of_block
from stages.model.families.llama import IGNORED, TENSORS, of_layer

_REQUIRED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "mlp_bias": (False,),
    "attention_out_bias": (False,),
    "partial_rotary_factor": (1, None),
}


def parse(fields: ConfigFields) -> Config:
    """Return the configuration of a `SeedOssForCausalLM`. Raises UserError that names field and value."""
    fields.require(_REQUIRED)
    heads = fields.heads(head_dim=128, kv_heads=8)
    max_seq = fields.positions(heads.head_dim, 524_288)
    rope, biased = fields.rope(max_seq, heads.head_dim), fields.boolean("attention_bias", True)
    attention = Attention(*heads, rope, scalar=float(heads.head_dim), biased=biased)
    layer = Layer(attention, FeedForward(fields.integer("intermediate_size")))
    count = fields.integer("num_hidden_layers", most=MOST_LAYERS)
    return fields.config("seed_oss", [layer] * count, max_seq, tied=False, eos=(2,))


_NAMES = {slot: of_layer(f"self_attn.{slot[1]}_proj.bias") for slot in BIASES}

_GGUF = Gguf(
    "seed_oss",
    {"architectures": ["SeedOssForCausalLM"], "model_type": "seed_oss"},
    tensors=GGUF_TENSORS | {"ffn_norm_w": of_block("post_attention_norm.weight")},
)

FAMILY = Family("seed_oss", ("SeedOssForCausalLM",), parse, TENSORS | _NAMES, IGNORED, title="Seed-OSS", gguf=_GGUF)
