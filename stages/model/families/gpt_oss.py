"""gpt-oss (OpenAI 2025): experts in all layers, sinks, biases, windows in every second layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stages.model.config import FULL, MOST_LAYERS, SLIDING, Config, ConfigFields, sliding_kinds
from stages.model.decoder import BIASES, SWIGLU_OAI, Attention, Layer, Norm
from stages.model.families import Family
from stages.model.families.gguf import TENSORS as GGUF_TENSORS
from stages.model.families.gguf import Gguf, expert_keys, of_block
from stages.model.families.llama import IGNORED, TENSORS, of_layer
from stages.model.families.place import Place

_REQUIRED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (True,),
    "swiglu_alpha": (1.702,),
    "swiglu_limit": (7.0,),
}

_DEFAULTS: dict[str, Any] = {
    "num_hidden_layers": 36,
    "num_local_experts": 128,
    "vocab_size": 201_088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "head_dim": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "sliding_window": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "num_experts_per_tok": 4,
}
"""Fields of transformers' class."""

_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def parse(fields: ConfigFields) -> Config:
    """Return the configuration of a `GptOssForCausalLM`. Raises UserError that names field and value."""
    fields.require(_REQUIRED)
    scaled = fields.values.get("rope_parameters") or fields.values.get("rope_scaling")
    fields = ConfigFields({**_DEFAULTS, **({} if scaled else {"rope_scaling": _ROPE}), **fields.values}, fields.where)
    heads = fields.heads()
    max_seq = fields.positions(heads.head_dim)
    rope = fields.rope(max_seq, heads.head_dim, 150_000.0)
    count = fields.integer("num_hidden_layers", most=MOST_LAYERS)
    kinds = fields.kinds(sliding_kinds(count, 2))
    windows = {FULL: None, SLIDING: fields.window(max_seq)}
    norm = Norm(once=True)
    experts = fields.experts(
        "num_local_experts",
        "intermediate_size",
        activation=SWIGLU_OAI,
        normed=True,
        router_biased=True,
        biased=True,
    )
    layers = {
        kind: Layer(
            Attention(
                *heads,
                rope,
                scalar=float(heads.head_dim),
                window=window,
                biased=True,
                output_biased=True,
                sinks=True,
            ),
            experts,
            norm=norm,
        )
        for kind, window in windows.items()
    }
    return fields.config("gpt_oss", [layers[kind] for kind in kinds], max_seq, tied=False, norm=norm)


def _pairs(tensor: str, gate: str, up: str, transposed: bool = False) -> dict[str, Place]:
    """Return the places of rows that take turns in one tensor."""
    place = Place(of_layer(tensor).tensor, (gate, up), alternate=True, transposed=transposed)
    return {gate: place, up: place}


_OWN = {
    **{slot: of_layer(f"self_attn.{slot[1]}_proj.bias") for slot in (*BIASES, "bo")},
    "sinks": of_layer("self_attn.sinks"),
    "w_router": of_layer("mlp.router.weight"),
    "b_router": of_layer("mlp.router.bias"),
    **_pairs("mlp.experts.gate_up_proj", "w_gate_exps", "w_up_exps", transposed=True),
    **_pairs("mlp.experts.gate_up_proj_bias", "b_gate_exps", "b_up_exps"),
    "w_down_exps": Place(of_layer("mlp.experts.down_proj").tensor, transposed=True),
    "b_down_exps": of_layer("mlp.experts.down_proj_bias"),
}


def _of_gguf(fields: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scaling of the rotation, whose pairs llama.cpp's files do not say to be cut to whole numbers."""
    return {"rope_scaling": {**(fields["rope_scaling"] or {"rope_type": "default"}), "truncate": False}}


_GGUF = Gguf(
    "gpt-oss",
    {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"},
    {
        "sliding_window": "attention.sliding_window",
        **expert_keys("num_local_experts", "num_experts_per_tok", "intermediate_size"),
    },
    given=("expert_gating_func",),
    windows=True,
    tensors=GGUF_TENSORS | {"ffn_norm_w": of_block("post_attention_norm.weight")},
    complete=_of_gguf,
)

FAMILY = Family("gpt_oss", ("GptOssForCausalLM",), parse, {**TENSORS, **_OWN}, IGNORED, title="gpt-oss", gguf=_GGUF)
