"""OLMo 2 (OLMo team 2025): norms only of results, and of whole rows of Q and K."""

from __future__ import annotations

from typing import Any

from stages.model.config import MOST_LAYERS, Config, ConfigFields
from stages.model.decoder import ROW_NORMS, Attention, FeedForward, Layer, Norm
from stages.model.families import Family
from stages.model.families.gguf import Gguf
from stages.model.families.llama import IGNORED, TENSORS, of_layer

_REQUIRED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "partial_rotary_factor": (1, None),
}

_NORM = Norm(once=True)


def parse(fields: ConfigFields) -> Config:
    """Return the configuration of an `Olmo2ForCausalLM`. Raises UserError that names field and value."""
    fields.require(_REQUIRED)
    heads = fields.heads()
    max_seq = fields.positions(heads.head_dim)
    rope = fields.rope(max_seq, heads.head_dim)
    attention = Attention(*heads, rope, scalar=float(heads.head_dim), qk_norm=_NORM, norms_rows=True)
    feed_forward = FeedForward(fields.integer("intermediate_size"))
    layer = Layer(attention, feed_forward, _NORM, sandwich=True, entering=False)
    count = fields.integer("num_hidden_layers", most=MOST_LAYERS)
    return fields.config("olmo2", [layer] * count, max_seq, tied=False, eos=(50_279,), eps=1e-5, norm=_NORM)


_NAMES = {
    **{slot: of_layer(f"self_attn.{slot[0]}_norm.weight") for slot in ROW_NORMS},
    "attn_norm_w": of_layer("post_attention_layernorm.weight"),
    "down_norm_w": of_layer("post_feedforward_layernorm.weight"),
}

_GGUF = Gguf("olmo2", {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"})

FAMILY = Family("olmo2", ("Olmo2ForCausalLM",), parse, TENSORS | _NAMES, IGNORED, title="OLMo 2", gguf=_GGUF)
