"""Granite 4 (IBM 2025) where it is dense attention (micro, 350M, 1B): Granite 3 with other names, maybe unrotated."""

from __future__ import annotations

from stages.model.config import FULL, Config, ConfigFields
from stages.model.decoder import FeedForward
from stages.model.families import Family
from stages.model.families.granite import GGUF, alone, described
from stages.model.families.llama import IGNORED, REQUIRED, TENSORS, of_layer
from stages.model.families.smollm3 import NO_ROTATION

_ATTENTION = ("attention", FULL)
"""What `layer_types` calls attention."""


def parse(fields: ConfigFields) -> Config:
    """Return the configuration of a `GraniteMoeHybridForCausalLM`. Raises UserError that names field and value."""
    fields.require(REQUIRED | {"position_embedding_type": (None, "rope", "nope")})
    if fields.values.get("num_local_experts", 8) != 0:
        raise fields.fail("num_local_experts", "only 0 is supported")
    # Without it all layers are Mamba's.
    kinds = fields.values.get("layer_types", fields.values.get("layers_block_type"))
    if not isinstance(kinds, list) or any(kind not in _ATTENTION for kind in kinds):
        raise fields.fails("layer_types", kinds, f"only {_ATTENTION[0]} is supported")
    if len(kinds) != fields.integer("num_hidden_layers"):
        raise fields.fails("layer_types", kinds, "must have an entry for each of num_hidden_layers")
    head_dim = fields.heads().head_dim
    turns = fields.values.get("position_embedding_type") == "rope"
    rope = fields.rope(fields.positions(head_dim), head_dim) if turns else NO_ROTATION
    network = FeedForward(fields.integer("shared_intermediate_size", 1024))
    return described(fields, "granitemoehybrid", rope, network)


_GATE_UP = ("w_gate", "w_up")

_NAMES = {
    **dict.fromkeys(_GATE_UP, of_layer("shared_mlp.input_linear.weight", *_GATE_UP)),
    "w_down": of_layer("shared_mlp.output_linear.weight"),
}

FAMILY = Family(
    "granitemoehybrid",
    ("GraniteMoeHybridForCausalLM",),
    parse,
    TENSORS | _NAMES,
    IGNORED,
    title="Granite 4, dense",
    alone=alone,
    gguf=GGUF,
)
"""In GGUF files it is a Granite 3."""
