"""ERNIE 4.5, dense (Baidu 2025): Llama whose neighbouring rows of a head turn together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from stages.model.config import MOST_LAYERS, Config, ConfigFields
from stages.model.decoder import Attention, FeedForward, Layer
from stages.model.families import Family
from stages.model.families.gguf import Gguf
from stages.model.families.llama import IGNORED, TENSORS

_REQUIRED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "use_bias": (False, None),
    "partial_rotary_factor": (1, None),
}


def parse(fields: ConfigFields) -> Config:
    """Return the configuration of an `Ernie4_5ForCausalLM`. Raises UserError that names field and value."""
    fields.require(_REQUIRED)
    heads = fields.heads(head_dim=128, kv_heads=2)
    max_seq = fields.positions(heads.head_dim, 131_072)
    rope = replace(fields.rope(max_seq, heads.head_dim, 5e5), interleaved=True)
    attention = Attention(*heads, rope, scalar=float(heads.head_dim))
    layer = Layer(attention, FeedForward(fields.integer("intermediate_size", 3072)))
    count = fields.integer("num_hidden_layers", 18, most=MOST_LAYERS)
    return fields.config("ernie4_5", [layer] * count, max_seq, tied=True, eos=(2,), eps=1e-5)


FAMILY = Family(
    "ernie4_5",
    ("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"),
    parse,
    TENSORS,
    IGNORED,
    title="ERNIE 4.5, dense",
    gguf=Gguf("ernie4_5", {"architectures": ["Ernie4_5ForCausalLM"], "model_type": "ernie4_5"}, neighbours=True),
)
