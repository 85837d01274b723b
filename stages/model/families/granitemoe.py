"""Granite 3 with experts (IBM 2024): Granite 3 with a mixture of experts in every layer."""

from __future__ import annotations

from stages.model.config import Config, ConfigFields
from stages.model.families import Family
from stages.model.families.gguf import EXPERTS, Gguf, expert_keys
from stages.model.families.granite import SCALES, alone, described, of_gguf
from stages.model.families.llama import IGNORED, REQUIRED, TENSORS, of_layer


def parse(fields: ConfigFields) -> Config:
    """Return the configuration of a `GraniteMoeForCausalLM`. Raises UserError that names field and value."""
    fields.require(REQUIRED)
    head_dim = fields.heads().head_dim
    rope = fields.rope(fields.positions(head_dim), head_dim)
    experts = fields.experts("num_local_experts", "intermediate_size", (8, 2, None), normed=True)
    return described(fields, "granitemoe", rope, experts)


_GATE_UP = ("w_gate_exps", "w_up_exps")

_EXPERTS = {
    "w_router": of_layer("block_sparse_moe.router.layer.weight"),
    **dict.fromkeys(_GATE_UP, of_layer("block_sparse_moe.input_linear.weight", *_GATE_UP)),
    "w_down_exps": of_layer("block_sparse_moe.output_linear.weight"),
}

_GGUF = Gguf(
    "granitemoe",
    {"architectures": ["GraniteMoeForCausalLM"], "model_type": "granitemoe"},
    SCALES | expert_keys("num_local_experts", "num_experts_per_tok"),
    given=EXPERTS,
    neighbours=True,
    complete=of_gguf,
)

FAMILY = Family(
    "granitemoe",
    ("GraniteMoeForCausalLM",),
    parse,
    TENSORS | _EXPERTS,
    IGNORED,
    title="Granite 3 with experts",
    alone=alone,
    gguf=_GGUF,
)
