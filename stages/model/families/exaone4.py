"""EXAONE 4 (LG AI Research 2025): norms of results and of heads of Q and K; rotation only where there are windows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stages.model.config import FULL, MOST_LAYERS, SLIDING, Config, ConfigFields, sliding_kinds
from stages.model.decoder import QK_NORMS, Attention, FeedForward, Layer, Norm
from stages.model.families import Family
from stages.model.families.gguf import FACTORS, SLIDES, Gguf, layer_kinds
from stages.model.families.llama import IGNORED, TENSORS, of_layer
from stages.model.families.smollm3 import NO_ROTATION

_REQUIRED: dict[str, tuple[Any, ...]] = {"hidden_act": ("silu",), "partial_rotary_factor": (1, None)}

_PERIOD = 4
"""The last of every four layers is full, and the others have windows, if nothing else is said."""


def parse(fields: ConfigFields) -> Config:
    """Return the configuration of an `Exaone4ForCausalLM`. Raises UserError that names field and value."""
    fields.require(_REQUIRED)
    heads = fields.heads()
    max_seq = fields.positions(heads.head_dim)
    count = fields.integer("num_hidden_layers", most=MOST_LAYERS)
    rope, hybrid = fields.rope(max_seq, heads.head_dim), fields.values.get("sliding_window", 0) is not None
    kinds = _kinds(fields, count, hybrid)
    windows, ropes = fields.windows(kinds, max_seq), {FULL: NO_ROTATION if hybrid else rope, SLIDING: rope}
    feed_forward = FeedForward(fields.integer("intermediate_size"))
    layers = {
        kind: Layer(
            Attention(*heads, ropes[kind], scalar=float(heads.head_dim), window=windows[kind], qk_norm=Norm()),
            feed_forward,
            sandwich=True,
            entering=False,
        )
        for kind in {*kinds}
    }
    return fields.config("exaone4", [layers[kind] for kind in kinds], max_seq, tied=False, eos=(2,), eps=1e-5)


def _kinds(fields: ConfigFields, count: int, hybrid: bool) -> list[str]:
    """Return the kind of each layer. Raises UserError. `hybrid`: whether there are windows."""
    if not hybrid or fields.values.get("layer_types"):
        return fields.kinds([FULL] * count)
    return sliding_kinds(count, fields.integer("sliding_window_pattern", _PERIOD))


_NAMES = {
    **{slot: of_layer(f"self_attn.{slot[0]}_norm.weight") for slot in QK_NORMS},
    "attn_norm_w": of_layer("post_attention_layernorm.weight"),
    "down_norm_w": of_layer("post_feedforward_layernorm.weight"),
}


def _of_gguf(fields: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return which layers have windows, if any."""
    if not fields.get("sliding_window"):
        return {"sliding_window": None}
    return {"layer_types": layer_kinds(fields, metadata, _PERIOD)}


_GGUF = Gguf(
    "exaone4",
    {"architectures": ["Exaone4ForCausalLM"], "model_type": "exaone4"},
    {"sliding_window": "attention.sliding_window"},
    given=(SLIDES,),
    windows=True,
    factors=(FACTORS,),
    complete=_of_gguf,
)

FAMILY = Family("exaone4", ("Exaone4ForCausalLM",), parse, TENSORS | _NAMES, IGNORED, title="EXAONE 4", gguf=_GGUF)
