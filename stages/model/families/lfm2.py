"""LFM2 (Liquid AI 2025): short convolutions in most layers, attention with norms of heads in the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from llama_npu2.errors import UserError
from stages.model.config import FULL, MOST_LAYERS, Config, ConfigFields
from stages.model.decoder import FINAL_NORM, Attention, Experts, FeedForward, Layer, Mixer, Norm, ShortConv
from stages.model.families import Family
from stages.model.families.gguf import TENSORS as GGUF_TENSORS
from stages.model.families.gguf import Gguf, of_block
from stages.model.families.llama import IGNORED, TENSORS, of_layer
from stages.model.families.place import Place

_REQUIRED: dict[str, tuple[Any, ...]] = {"conv_bias": (False,), "partial_rotary_factor": (1, None)}

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 65_536,
    "hidden_size": 2560,
    "intermediate_size": 12_288,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128_000,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}
"""Fields of transformers' class."""

_OTHER_NAMES = {"tie_embedding": "tie_word_embeddings", "norm_eps": "rms_norm_eps", "block_ff_dim": "intermediate_size"}

_CONV = "conv"


def parse(fields: ConfigFields) -> Config:
    """Return the configuration of a `Lfm2ForCausalLM`. Raises UserError that names field and value."""
    fields = completed(fields, _DEFAULTS)
    feed_forward = FeedForward(_inner(fields))
    return described(fields, "lfm2", lambda layer: feed_forward)


def completed(fields: ConfigFields, defaults: Mapping[str, Any]) -> ConfigFields:
    """Return the fields by the names that others have, with defaults. Raises UserError."""
    fields.require(_REQUIRED)
    others = {name: fields.values[own] for own, name in _OTHER_NAMES.items() if fields.values.get(own) is not None}
    return ConfigFields({**defaults, **fields.values, **others}, fields.where)


def described(fields: ConfigFields, family: str, network: Callable[[int], FeedForward | Experts]) -> Config:
    """Return the configuration of a model. Raises UserError. `network`: that of a layer, by its number."""
    heads = fields.heads()
    max_seq = fields.positions(heads.head_dim)
    rope = fields.rope(max_seq, heads.head_dim, theta=1e6)
    mixers: dict[str, Mixer] = {
        FULL: Attention(*heads, rope, scalar=float(heads.head_dim), qk_norm=Norm()),
        _CONV: ShortConv(fields.integer("conv_L_cache", 3)),
    }
    layers = [Layer(mixers[kind], network(layer)) for layer, kind in enumerate(_kinds(fields))]
    return fields.config(family, layers, max_seq, tied=True)


def _kinds(fields: ConfigFields) -> list[str]:
    """Return the kind of each layer: `layer_types`, or attention where `full_attn_idxs` says it. Raises UserError."""
    layers = range(fields.integer("num_hidden_layers", most=MOST_LAYERS))
    attending = fields.values.get("full_attn_idxs")
    attending = [*layers] if attending is None else attending
    if not isinstance(attending, list):
        raise fields.fail("full_attn_idxs", "must be a list of layers")
    return fields.kinds([FULL if layer in attending else _CONV for layer in layers], (FULL, _CONV))


def _inner(fields: ConfigFields) -> int:
    """Return the inner width: two thirds of `intermediate_size`, rounded up, unless it is taken as it is."""
    width = fields.integer("intermediate_size")
    if not fields.boolean("block_auto_adjust_ff_dim", True):
        return width
    width = int(2 * width / 3)
    if "block_ffn_dim_multiplier" in fields.values and fields.values["block_ffn_dim_multiplier"] is None:
        return width
    multiple = fields.integer("block_multiple_of", 256)
    width = -(-int(fields.number("block_ffn_dim_multiplier", 1.0) * width) // multiple) * multiple
    if not width:
        raise UserError(f"{fields.where}: intermediate_size: nothing is left of it: give a larger one")
    return width


NAMES = TENSORS | {
    FINAL_NORM: Place("model.embedding_norm.weight"),
    "norm_w": of_layer("operator_norm.weight"),
    "q_norm_w": of_layer("self_attn.q_layernorm.weight"),
    "k_norm_w": of_layer("self_attn.k_layernorm.weight"),
    "wo": of_layer("self_attn.out_proj.weight"),
    "w_in": of_layer("conv.in_proj.weight"),
    "w_taps": of_layer("conv.conv.weight"),
    "w_out": of_layer("conv.out_proj.weight"),
    "ffn_norm_w": of_layer("ffn_norm.weight"),
    "w_gate": of_layer("feed_forward.w1.weight"),
    "w_up": of_layer("feed_forward.w3.weight"),
    "w_down": of_layer("feed_forward.w2.weight"),
}


def of_gguf(fields: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the kinds of layers: those without KV heads are convolutions."""
    heads = metadata.get("attention.head_count_kv")
    kinds = {"layer_types": [FULL if count else _CONV for count in heads]} if isinstance(heads, list) else {}
    return {**kinds, "block_auto_adjust_ff_dim": False}


GGUF = Gguf(
    "lfm2",
    {"architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2"},
    {"conv_L_cache": "shortconv.l_cache"},
    given=("attention.head_count_kv",),
    tensors=GGUF_TENSORS
    | {
        FINAL_NORM: Place("token_embd_norm.weight"),
        "w_in": of_block("shortconv.in_proj.weight"),
        "w_taps": of_block("shortconv.conv.weight"),
        "w_out": of_block("shortconv.out_proj.weight"),
    },
    complete=of_gguf,
)

FAMILY = Family("lfm2", ("Lfm2ForCausalLM",), parse, NAMES, IGNORED, title="LFM2, LFM2.5", gguf=GGUF)
