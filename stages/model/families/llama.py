"""Llama (Touvron et al. 2023, Grattafiori et al. 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stages.model.config import MOST_LAYERS, Config, ConfigFields
from stages.model.decoder import EMBEDDING, FINAL_NORM, HEAD, Attention, FeedForward, Layer
from stages.model.families import Family
from stages.model.families.gguf import EXPERTS, FACTORS, Gguf, expert_keys
from stages.model.families.place import Place

REQUIRED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1, None),
    "sliding_window": (None,),
}
"""Fields that would change the arithmetic if they had any other value."""


def of_layer(tensor: str, *among: str) -> Place:
    """Return the place of a slot in a layer's tensor. `among`: the slots that it holds if there are several."""
    return Place(f"model.layers.{{layer}}.{tensor}", among)


def of_experts(tensors: str, gate: str, up: str, down: str) -> dict[str, Place]:
    """Return the places of weights of experts, of which each has a tensor for its gate, up and down."""
    own = {"w_gate_exps": gate, "w_up_exps": up, "w_down_exps": down}
    return {slot: of_layer(f"{tensors}.{{expert}}.{name}.weight") for slot, name in own.items()}


TENSORS = {
    EMBEDDING: Place("model.embed_tokens.weight"),
    "norm_w": of_layer("input_layernorm.weight"),
    "wq": of_layer("self_attn.q_proj.weight"),
    "wk": of_layer("self_attn.k_proj.weight"),
    "wv": of_layer("self_attn.v_proj.weight"),
    "wo": of_layer("self_attn.o_proj.weight"),
    "ffn_norm_w": of_layer("post_attention_layernorm.weight"),
    "w_gate": of_layer("mlp.gate_proj.weight"),
    "w_up": of_layer("mlp.up_proj.weight"),
    "w_down": of_layer("mlp.down_proj.weight"),
    FINAL_NORM: Place("model.norm.weight"),
    HEAD: Place("lm_head.weight"),
}

IGNORED = ("*.rotary_emb.inv_freq", "lm_head.weight")
"""Old exporters wrote frequencies, and an embedding that is tied may be stored twice."""

SEEING = ("*vision_tower.*", "*multi_modal_projector.*")
"""Tensors of the part of a model that sees, next to its text part."""


def parse(fields: ConfigFields) -> Config:
    """Return the configuration of a `LlamaForCausalLM`. Raises UserError that names field and value."""
    fields.require(REQUIRED)
    heads = fields.heads()
    max_seq = fields.positions(heads.head_dim)
    attention = Attention(*heads, fields.rope(max_seq, heads.head_dim), scalar=float(heads.head_dim))
    layer = Layer(attention, FeedForward(fields.integer("intermediate_size")))
    count = fields.integer("num_hidden_layers", most=MOST_LAYERS)
    return fields.config("llama", [layer] * count, max_seq, tied=False)


def _of_gguf(fields: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a Mixtral, which has the same architecture, where there are experts."""
    experts = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    return experts if fields.get("num_local_experts") else {}


GGUF = Gguf(
    "llama",
    {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    expert_keys("num_local_experts", "num_experts_per_tok"),
    given=EXPERTS,
    neighbours=True,
    factors=(FACTORS,),
    complete=_of_gguf,
)

FAMILY = Family("llama", ("LlamaForCausalLM",), parse, TENSORS, IGNORED, title="Llama 2, 3, SmolLM2", gguf=GGUF)
