"""Gemma, CodeGemma (Gemma Team 2024): Llama with a factor of the embedding, GELU, and weights of norms less one."""

from __future__ import annotations

import math
from typing import Any

from stages.engine.lazy import ml_dtypes
from stages.model.config import MOST_LAYERS, Config, ConfigFields
from stages.model.decoder import GELU_TANH, Attention, FeedForward, Layer, Norm
from stages.model.families import Family
from stages.model.families.gguf import Gguf
from stages.model.families.llama import IGNORED, TENSORS

_REQUIRED: dict[str, tuple[Any, ...]] = {
    # The first releases say "gelu" and mean the approximation by tanh, as transformers takes it.
    "hidden_act": ("gelu_pytorch_tanh", "gelu", None),
    "hidden_activation": ("gelu_pytorch_tanh", None),
    "attention_bias": (False,),
    "use_bidirectional_attention": (False, None),
    "partial_rotary_factor": (1, None),
}

_NORM = Norm(offset=1.0, once=True)


def parse(fields: ConfigFields) -> Config:
    """Return the configuration of a `GemmaForCausalLM`. Raises UserError that names field and value."""
    fields.require(_REQUIRED)
    heads = fields.heads(head_dim=256, kv_heads=16)
    max_seq = fields.positions(heads.head_dim, 8192)
    attention = Attention(*heads, fields.rope(max_seq, heads.head_dim), scalar=float(heads.head_dim))
    layer = Layer(attention, FeedForward(fields.integer("intermediate_size"), GELU_TANH), _NORM)
    count = fields.integer("num_hidden_layers", most=MOST_LAYERS)
    scale = embed_scale(fields)
    return fields.config("gemma", [layer] * count, max_seq, tied=True, eos=(1,), norm=_NORM, embed_scale=scale)


def embed_scale(fields: ConfigFields) -> float:
    """Return the factor of the embedding's rows, as transformers rounds it for a model in bf16. Raises UserError."""
    return float(ml_dtypes.bfloat16(math.sqrt(fields.integer("hidden_size"))))


FAMILY = Family(
    "gemma",
    ("GemmaForCausalLM",),
    parse,
    TENSORS,
    IGNORED,
    title="Gemma, CodeGemma",
    gguf=Gguf("gemma", {"architectures": ["GemmaForCausalLM"], "model_type": "gemma"}),
)
