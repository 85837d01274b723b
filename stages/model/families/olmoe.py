"""OLMoE (Muennighoff et al. 2024): a mixture of experts in every layer, and norms of whole rows of Q and K."""

from __future__ import annotations

from typing import Any

from stages.model.config import MOST_LAYERS, Config, ConfigFields
from stages.model.decoder import ROW_NORMS, Attention, Layer, Norm
from stages.model.families import Family
from stages.model.families.gguf import EXPERTS, Gguf, expert_keys
from stages.model.families.llama import IGNORED, of_layer
from stages.model.families.qwen3_moe import FAMILY as QWEN3_MOE

_REQUIRED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "clip_qkv": (None,),
    "sliding_window": (None,),
    "partial_rotary_factor": (1, None),
}


def parse(fields: ConfigFields) -> Config:
    """Return the configuration of an `OlmoeForCausalLM`. Raises UserError that names field and value."""
    fields.require(_REQUIRED)
    heads = fields.heads()
    max_seq = fields.positions(heads.head_dim, 4096)
    rope = fields.rope(max_seq, heads.head_dim)
    attention = Attention(*heads, rope, scalar=float(heads.head_dim), qk_norm=Norm(), norms_rows=True)
    normed = fields.boolean("norm_topk_prob", False)
    experts = fields.experts("num_experts", "intermediate_size", (64, 8, 2048), normed=normed)
    count = fields.integer("num_hidden_layers", most=MOST_LAYERS)
    return fields.config("olmoe", [Layer(attention, experts)] * count, max_seq, tied=False, eos=(50_279,), eps=1e-5)


_NORMS = {slot: of_layer(f"self_attn.{slot[0]}_norm.weight") for slot in ROW_NORMS}

_GGUF = Gguf(
    "olmoe",
    {"architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "norm_topk_prob": False},
    expert_keys("num_experts", "num_experts_per_tok"),
    given=EXPERTS,
)

FAMILY = Family(
    "olmoe", ("OlmoeForCausalLM",), parse, {**QWEN3_MOE.tensors, **_NORMS}, IGNORED, title="OLMoE", gguf=_GGUF
)
