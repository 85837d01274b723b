"""Qwen 3 (Yang et al. 2025): Llama with a norm of each head of Q and K before the rotation."""

from __future__ import annotations

from typing import Any

from stages.model.config import Config, ConfigFields
from stages.model.decoder import Attention, Norm
from stages.model.families import Family
from stages.model.families.gguf import Gguf
from stages.model.families.llama import IGNORED, TENSORS, of_layer
from stages.model.families.qwen2 import layers

REQUIRED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "partial_rotary_factor": (1, None),
}


def parse(fields: ConfigFields) -> Config:
    """Return the configuration of a `Qwen3ForCausalLM`. Raises UserError that names field and value."""
    fields.require(REQUIRED)
    heads = fields.heads(head_dim=128)
    max_seq = fields.positions(heads.head_dim, 32768)
    rope = fields.rope(max_seq, heads.head_dim)
    attention = Attention(*heads, rope, scalar=float(heads.head_dim), qk_norm=Norm())
    return fields.config("qwen3", layers(fields, attention, max_seq), max_seq, tied=False)


_NORMS = {slot: of_layer(f"self_attn.{slot[0]}_norm.weight") for slot in ("q_norm_w", "k_norm_w")}

FAMILY = Family(
    "qwen3",
    ("Qwen3ForCausalLM", "Qwen3Model"),
    parse,
    TENSORS | _NORMS,
    (*IGNORED, "*visual.*"),
    wrapped=("Qwen3VLForConditionalGeneration",),
    title="Qwen 3, text of Qwen 3 VL",
    gguf=Gguf("qwen3", {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}),
)
