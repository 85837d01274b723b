"""OLMo 2 (OLMo team 2025): norms only of results, and of whole rows of Q and K."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stages.model.config import MOST_LAYERS, Config, ConfigFields
from stages.model.decoder import ROW_NORMS, Attention, FeedForward, Layer, Norm, Rope
from stages.model.families import Family
from stages.model.families.gguf import SLIDES, Gguf, layer_kinds
from stages.model.families.llama import IGNORED, TENSORS, of_layer

REQUIRED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "partial_rotary_factor": (1, None),
}

NORM = Norm(once=True)


def parse(fields: ConfigFields) -> Config:
    """Return the configuration of an `Olmo2ForCausalLM`. Raises UserError that names field and value."""
    fields.require(REQUIRED)
    head_dim = fields.heads().head_dim
    max_seq = fields.positions(head_dim)
    count = fields.integer("num_hidden_layers", most=MOST_LAYERS)
    return described(fields, "olmo2", [layer(fields, fields.rope(max_seq, head_dim))] * count, max_seq)


def layer(fields: ConfigFields, rope: Rope, window: int | None = None) -> Layer:
    """Return a layer, whose attention has this rotary embedding and window. Raises UserError."""
    heads = fields.heads()
    scalar = float(heads.head_dim)
    attention = Attention(*heads, rope, scalar=scalar, window=window, qk_norm=NORM, norms_rows=True)
    return Layer(attention, FeedForward(fields.integer("intermediate_size")), NORM, sandwich=True, entering=False)


def described(fields: ConfigFields, family: str, layers: Sequence[Layer], max_seq: int) -> Config:
    """Return the configuration of a model with these layers. Raises UserError."""
    return fields.config(family, layers, max_seq, tied=False, eos=(50_279,), eps=1e-5, norm=NORM)


NAMES = TENSORS | {
    **{slot: of_layer(f"self_attn.{slot[0]}_norm.weight") for slot in ROW_NORMS},
    "attn_norm_w": of_layer("post_attention_layernorm.weight"),
    "down_norm_w": of_layer("post_feedforward_layernorm.weight"),
}


def _of_gguf(fields: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an OLMo 3, which has the same architecture, where there are windows."""
    if not fields.get("sliding_window"):
        return {}
    names = {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3"}
    return names | {"layer_types": layer_kinds(fields, metadata, PERIOD)}


PERIOD = 4
"""The last of every four layers of an OLMo 3 is full, and the others have windows, if nothing else is said."""

GGUF = Gguf(
    "olmo2",
    {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"},
    {"sliding_window": "attention.sliding_window"},
    given=(SLIDES,),
    windows=True,
    complete=_of_gguf,
)

FAMILY = Family("olmo2", ("Olmo2ForCausalLM",), parse, NAMES, IGNORED, title="OLMo 2", gguf=GGUF)
