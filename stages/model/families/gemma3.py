"""Gemma 3 (Gemma Team 2025), its text part: norms around both halves of a layer, windows in most layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stages.model.config import MOST_LAYERS, Config, ConfigFields, sliding_kinds
from stages.model.decoder import GELU_TANH, Attention, FeedForward, Layer, Norm
from stages.model.families import Family
from stages.model.families.gemma import embed_scale
from stages.model.families.gguf import SLIDES, Gguf, layer_kinds
from stages.model.families.llama import IGNORED, SEEING, TENSORS, of_layer

_REQUIRED: dict[str, tuple[Any, ...]] = {
    "hidden_activation": ("gelu_pytorch_tanh",),
    "attention_bias": (False,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "use_bidirectional_attention": (False, None),
    "partial_rotary_factor": (1, None),
}

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "eos_token_id": 1,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
}
"""Fields of transformers' class. Configurations of text within others leave many out."""

_NORM = Norm(offset=1.0, once=True)
"""Weights are stored less one."""


def parse(fields: ConfigFields) -> Config:
    """Return the configuration of a `Gemma3ForCausalLM`. Raises UserError that names field and value."""
    fields.require(_REQUIRED)
    fields = ConfigFields({**_DEFAULTS, **fields.values}, fields.where)
    heads = fields.heads()
    max_seq = fields.positions(heads.head_dim)
    count = fields.integer("num_hidden_layers", most=MOST_LAYERS)
    pattern = fields.integer("sliding_window_pattern")
    kinds = fields.kinds(sliding_kinds(count, pattern))
    scalar = fields.number("query_pre_attn_scalar")
    feed_forward = FeedForward(fields.integer("intermediate_size"), GELU_TANH)
    windows = fields.windows(kinds, max_seq)
    thetas = fields.number("rope_theta", 1e6), fields.number("rope_local_base_freq", 1e4)
    layers = {
        kind: Layer(
            Attention(*heads, rope, scalar=scalar, window=windows[kind], qk_norm=_NORM),
            feed_forward,
            norm=_NORM,
            sandwich=True,
        )
        for kind, rope in fields.ropes(max_seq, heads.head_dim, *thetas).items()
    }
    return fields.config(
        "gemma3_text",
        [layers[kind] for kind in kinds],
        max_seq,
        tied=True,
        norm=_NORM,
        embed_scale=embed_scale(fields),
    )


_NAMES = {
    "q_norm_w": of_layer("self_attn.q_norm.weight"),
    "k_norm_w": of_layer("self_attn.k_norm.weight"),
    "attn_norm_w": of_layer("post_attention_layernorm.weight"),
    "ffn_norm_w": of_layer("pre_feedforward_layernorm.weight"),
    "down_norm_w": of_layer("post_feedforward_layernorm.weight"),
}

_DEEPEST = 62
"""Layers of Gemma 3 27B, of which llama.cpp knows by them that its scalar is not the head size."""


def _of_gguf(fields: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return what llama.cpp takes as given."""
    own_scalar = fields["num_hidden_layers"] == _DEEPEST
    scalar = fields["hidden_size"] // fields["num_attention_heads"] if own_scalar else fields["head_dim"]
    given: dict[str, Any] = {"query_pre_attn_scalar": scalar}
    if not fields.get("sliding_window"):
        return given | {"sliding_window": None, "sliding_window_pattern": 1}
    return given | {"layer_types": layer_kinds(fields, metadata, _DEFAULTS["sliding_window_pattern"])}


_GGUF = Gguf(
    "gemma3",
    {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"},
    {
        "sliding_window": "attention.sliding_window",
        "rope_local_base_freq": "rope.freq_base_swa",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    given=(SLIDES,),
    windows=True,
    complete=_of_gguf,
)

FAMILY = Family(
    "gemma3_text",
    ("Gemma3ForCausalLM",),
    parse,
    TENSORS | _NAMES,
    (*IGNORED, *SEEING),
    wrapped=("Gemma3ForConditionalGeneration",),
    title="Gemma 3",
    gguf=_GGUF,
)
