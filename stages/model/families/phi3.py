"""Phi 3, 3.5 and 4-mini (Abdin et al. 2024): Llama with fused tensors, partial rotation and LongRoPE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stages.model.config import MOST_LAYERS, Config, ConfigFields
from stages.model.decoder import Attention, FeedForward, Layer
from stages.model.families import Family
from stages.model.families.gguf import LONG_FACTORS, Gguf, of_block
from stages.model.families.gguf import TENSORS as GGUF_TENSORS
from stages.model.families.llama import IGNORED, TENSORS, of_layer

_REQUIRED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "lm_head_bias": (False, None),
    "layer_types": (None,),
}

_OLD_NAMES = ("su", "yarn")
"""What older configurations call `longrope`."""


def parse(fields: ConfigFields) -> Config:
    """Return the configuration of a `Phi3ForCausalLM`. Raises UserError that names field and value."""
    fields.require(_REQUIRED)
    heads = fields.heads()
    max_seq = fields.positions(heads.head_dim, 4096)
    rope = _spelled(fields).rope(max_seq, heads.head_dim, partial=True)
    window = fields.window(max_seq, None)
    attention = Attention(*heads, rope, scalar=float(heads.head_dim), window=window)
    layer = Layer(attention, FeedForward(fields.integer("intermediate_size")))
    count = fields.integer("num_hidden_layers", most=MOST_LAYERS)
    return fields.config("phi3", [layer] * count, max_seq, tied=False, eos=(32_000,), eps=1e-5)


def _spelled(fields: ConfigFields) -> ConfigFields:
    """Return the fields with the rotary embedding as other families write it. Raises UserError."""
    rope = dict(fields.rope_fields().values)
    kind = rope.get("rope_type", rope.get("type", "default"))
    rope["rope_type"] = "longrope" if kind in _OLD_NAMES else kind
    # The field outside of the embedding's own counts, also where only the class has it.
    rope["original_max_position_embeddings"] = fields.integer("original_max_position_embeddings", 4096)
    return ConfigFields({**fields.values, "rope_parameters": rope}, fields.where)


_QKV, _GATE_UP = ("wq", "wk", "wv"), ("w_gate", "w_up")

_NAMES = {
    **dict.fromkeys(_QKV, of_layer("self_attn.qkv_proj.weight", *_QKV)),
    **dict.fromkeys(_GATE_UP, of_layer("mlp.gate_up_proj.weight", *_GATE_UP)),
}


def _of_gguf(fields: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the window, which is 0 where there is none, and the original context."""
    original = metadata.get("rope.scaling.original_context_length", fields["max_position_embeddings"])
    return {"sliding_window": fields.get("sliding_window") or None, "original_max_position_embeddings": original}


_GGUF = Gguf(
    "phi3",
    {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"},
    {"sliding_window": "attention.sliding_window"},
    tensors=GGUF_TENSORS
    | dict.fromkeys(_QKV, of_block("attn_qkv.weight", *_QKV))
    | dict.fromkeys(_GATE_UP, of_block("ffn_up.weight", *_GATE_UP)),
    factors=LONG_FACTORS,
    complete=_of_gguf,
)


FAMILY = Family("phi3", ("Phi3ForCausalLM",), parse, TENSORS | _NAMES, IGNORED, title="Phi 3, 3.5, 4-mini", gguf=_GGUF)
