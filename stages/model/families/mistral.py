"""Mistral (Jiang et al. 2023), whose first release has a sliding window in every layer."""

from __future__ import annotations

from typing import Any

from stages.model.config import MOST_LAYERS, Config, ConfigFields
from stages.model.decoder import Attention, FeedForward, Layer
from stages.model.families import Family
from stages.model.families.llama import GGUF, IGNORED, SEEING, TENSORS

_REQUIRED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "partial_rotary_factor": (1, None),
    "layer_types": (None,),
}


def parse(fields: ConfigFields) -> Config:
    """Return the configuration of a `MistralForCausalLM`. Raises UserError that names field and value."""
    fields.require(_REQUIRED)
    heads = fields.heads(kv_heads=8)
    max_seq = fields.positions(heads.head_dim, 4096 * 32)
    attention = Attention(
        *heads,
        fields.rope(max_seq, heads.head_dim),
        scalar=float(heads.head_dim),
        # Without the field transformers has 4096; later releases say null.
        window=fields.window(max_seq),
    )
    layer = Layer(attention, FeedForward(fields.integer("intermediate_size")))
    count = fields.integer("num_hidden_layers", most=MOST_LAYERS)
    return fields.config("mistral", [layer] * count, max_seq, tied=False, eos=(2,))


WRAPPED = ("Mistral3ForConditionalGeneration",)
"""The architecture that has Mistral or Ministral 3 as its text part."""

FAMILY = Family(
    "mistral",
    ("MistralForCausalLM",),
    parse,
    TENSORS,
    (*IGNORED, *SEEING),
    wrapped=WRAPPED,
    title="Mistral 7B, Nemo, Small",
    gguf=GGUF,
)
"""In GGUF files it is a Llama, without windows."""
