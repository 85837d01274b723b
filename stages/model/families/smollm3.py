"""SmolLM 3 (Bakouch et al. 2025): Llama of which some layers have no rotation."""

from __future__ import annotations

from typing import Any

from stages.model.config import FULL, MOST_LAYERS, SLIDING, Config, ConfigFields
from stages.model.decoder import Attention, FeedForward, Layer, Rope
from stages.model.families import Family
from stages.model.families.gguf import Gguf
from stages.model.families.llama import IGNORED, REQUIRED, TENSORS

_REQUIRED = {name: values for name, values in REQUIRED.items() if name != "sliding_window"}

NO_ROTATION = Rope(kind="still", turned=0)


def parse(fields: ConfigFields) -> Config:
    """Return the configuration of a `SmolLM3ForCausalLM`. Raises UserError that names field and value."""
    fields.require(_REQUIRED)
    heads = fields.heads(kv_heads=4)
    max_seq = fields.positions(heads.head_dim, 32_768)
    turning = _turning(fields, fields.integer("num_hidden_layers", most=MOST_LAYERS))
    window = fields.window(max_seq, None) if fields.boolean("use_sliding_window", False) else None
    kinds = fields.kinds([FULL if turns or not window else SLIDING for turns in turning])
    if SLIDING in kinds and not fields.values.get("use_sliding_window"):
        raise fields.fail("use_sliding_window", f"must be true where layer_types has {SLIDING}")
    ropes = {True: fields.rope(max_seq, heads.head_dim, 2e6), False: NO_ROTATION}
    feed_forward = FeedForward(fields.integer("intermediate_size"))
    windows = {FULL: None, SLIDING: window}
    layers = [
        Layer(Attention(*heads, ropes[turns], scalar=float(heads.head_dim), window=windows[kind]), feed_forward)
        for turns, kind in zip(turning, kinds, strict=True)
    ]
    return fields.config("smollm3", layers, max_seq, tied=True, eos=(128_001,))


def _turning(fields: ConfigFields, count: int) -> list[bool]:
    """Return whether each layer turns Q and K. Raises UserError."""
    given: Any = fields.values.get("no_rope_layers")
    if given is None:
        every = fields.integer("no_rope_layer_interval", 4)
        return [bool((layer + 1) % every) for layer in range(count)]
    if not isinstance(given, list) or len(given) < count or any(turns not in (0, 1) for turns in given):
        raise fields.fail("no_rope_layers", f"must be {count} times 0 or 1")
    return [bool(turns) for turns in given[:count]]


FAMILY = Family(
    "smollm3",
    ("SmolLM3ForCausalLM",),
    parse,
    TENSORS,
    IGNORED,
    title="SmolLM 3",
    of_layers=("layer_types", "no_rope_layers"),
    gguf=Gguf("smollm3", {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3"}, neighbours=True),
)
