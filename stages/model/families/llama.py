"""Llama (Touvron et al. 2023, Grattafiori et al. 2024): its configuration and its tensors."""

from __future__ import annotations

from typing import Any

from stages.model.config import MOST_LAYERS, MOST_TOKENS, Config, ConfigFields
from stages.model.families import Family

ROPE_TYPES = ("default", "linear", "llama3", "longrope")

# Fields that would change the arithmetic if they had any other value.
_REQUIRED_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1, None),
    "sliding_window": (None,),
}

EMBED = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"


def _layer(tensor: str) -> str:
    return f"model.layers.{{layer}}.{tensor}.weight"


WEIGHTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "norm_w": (_layer("input_layernorm"), ("emb",)),
    "wq": (_layer("self_attn.q_proj"), ("q_dim", "emb")),
    "wk": (_layer("self_attn.k_proj"), ("kv_dim", "emb")),
    "wv": (_layer("self_attn.v_proj"), ("kv_dim", "emb")),
    "wo": (_layer("self_attn.o_proj"), ("emb", "q_dim")),
    "ffn_norm_w": (_layer("post_attention_layernorm"), ("emb",)),
    "w_gate": (_layer("mlp.gate_proj"), ("ffn", "emb")),
    "w_up": (_layer("mlp.up_proj"), ("ffn", "emb")),
    "w_down": (_layer("mlp.down_proj"), ("emb", "ffn")),
}
"""For each weight slot of a part, the checkpoint's tensor that is bound to it and its shape in dimension names."""

VOCABULARY = ("vocab", "emb")


def tensors(config: Config) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor that a checkpoint must hold, in model order."""
    named: dict[str, tuple[str, ...]] = {EMBED: VOCABULARY}
    for layer in range(config.layers):
        named |= {name.format(layer=layer): shape for name, shape in WEIGHTS.values()}
    named[FINAL_NORM] = ("emb",)
    if not config.tied:
        named[head(config)] = VOCABULARY
    sizes = config.dimensions()
    return {name: tuple(int(sizes[dim]) for dim in shape) for name, shape in named.items()}


def head(config: Config) -> str:
    """Return the tensor of the LM head."""
    return EMBED if config.tied else "lm_head.weight"


def parse(fields: ConfigFields) -> Config:
    """Return the configuration of a `LlamaForCausalLM`. Raises UserError that names field and value."""
    fields.require(_REQUIRED_VALUES)
    emb, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", heads)
    head_dim = fields.integer("head_dim", max(emb // heads, 1))
    if heads % kv_heads:
        raise fields.fail("num_key_value_heads", f"must divide num_attention_heads = {heads}")
    if head_dim % 2:
        raise fields.fails("head_dim", head_dim, "must be even, rotary embedding pairs its halves")
    max_seq = fields.positions(head_dim)
    theta, scaling = fields.rope(max_seq, ROPE_TYPES)
    if scaling.factors and len(scaling.factors) != head_dim // 2:
        raise fields.fail("rope_scaling", f"must have {head_dim // 2} factors, one for each pair of head_dim")
    vocab = fields.integer("vocab_size", most=MOST_TOKENS)
    return Config(
        vocab=vocab,
        emb=emb,
        ffn=fields.integer("intermediate_size"),
        layers=fields.integer("num_hidden_layers", most=MOST_LAYERS),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_seq=max_seq,
        eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tied=fields.boolean("tie_word_embeddings", False),
        eos=fields.token_ids("eos_token_id", vocab),
        family="llama",
    )


FAMILY = Family(
    "llama",
    ("LlamaForCausalLM",),
    parse,
    tensors,
    EMBED,
    head,
    # An embedding that is tied may be stored twice.
    ignored=("*.rotary_emb.inv_freq", "lm_head.weight"),
    residual=("*.o_proj.weight", "*.down_proj.weight"),
    matrices={slot: tensor for slot, (tensor, shape) in WEIGHTS.items() if len(shape) == 2},
)
