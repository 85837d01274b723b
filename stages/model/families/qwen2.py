"""Qwen 2 and 2.5 (Yang et al. 2024): Llama with biases of Q, K and V."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from stages.model.config import FULL, MOST_LAYERS, SLIDING, Config, ConfigFields
from stages.model.decoder import BIASES, Attention, FeedForward, Layer
from stages.model.families import Family
from stages.model.families.gguf import Gguf
from stages.model.families.llama import IGNORED, TENSORS, of_layer

_REQUIRED: dict[str, tuple[Any, ...]] = {"hidden_act": ("silu",), "partial_rotary_factor": (1, None)}


def parse(fields: ConfigFields) -> Config:
    """Return the configuration of a `Qwen2ForCausalLM`. Raises UserError that names field and value."""
    fields.require(_REQUIRED)
    heads = fields.heads()
    max_seq = fields.positions(heads.head_dim, 32768)
    attention = Attention(*heads, fields.rope(max_seq, heads.head_dim), scalar=float(heads.head_dim), biased=True)
    return fields.config("qwen2", layers(fields, attention, max_seq), max_seq, tied=False)


def layers(fields: ConfigFields, attention: Attention, max_seq: int) -> list[Layer]:
    """Return the layers, of which the last ones may have a sliding window. Raises UserError."""
    count = fields.integer("num_hidden_layers", most=MOST_LAYERS)
    window = fields.window(max_seq) if fields.boolean("use_sliding_window", False) else None
    first = fields.whole("max_window_layers", 28)
    kinds = fields.kinds([SLIDING if window and layer >= first else FULL for layer in range(count)])
    feed_forward = FeedForward(fields.integer("intermediate_size"))
    seeing = {FULL: attention, SLIDING: replace(attention, window=window)}
    return [Layer(seeing[kind], feed_forward) for kind in kinds]


_BIASES = {slot: of_layer(f"self_attn.{slot[1]}_proj.bias") for slot in BIASES}

FAMILY = Family(
    "qwen2",
    ("Qwen2ForCausalLM",),
    parse,
    TENSORS | _BIASES,
    IGNORED,
    title="Qwen 2, 2.5",
    gguf=Gguf("qwen2", {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}),
)
