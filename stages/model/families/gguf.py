"""How GGUF files hold models, as llama.cpp's converter writes them: what most architectures share.

A family's file says what is different in its own (`Family.gguf`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any

from llama_npu2.frozen import frozen
from stages.model.config import FULL, MOST_LAYERS, SLIDING, sliding_kinds
from stages.model.decoder import EMBEDDING, FINAL_NORM, HEAD, QK_NORMS, ROW_NORMS
from stages.model.families.place import Place

FACTORS = "rope_freqs.weight"
LONG_FACTORS = ("rope_factors_long.weight", "rope_factors_short.weight")


def of_block(tensor: str, *among: str) -> Place:
    """Return the place of a slot in a layer's tensor. `among`: the slots that it holds if there are several."""
    return Place(f"blk.{{layer}}.{tensor}", among)


TENSORS: dict[str, Place] = {
    EMBEDDING: Place("token_embd.weight"),
    "norm_w": of_block("attn_norm.weight"),
    "wq": of_block("attn_q.weight"),
    "wk": of_block("attn_k.weight"),
    "wv": of_block("attn_v.weight"),
    "bq": of_block("attn_q.bias"),
    "bk": of_block("attn_k.bias"),
    "bv": of_block("attn_v.bias"),
    **{slot: of_block(f"attn_{slot[0]}_norm.weight") for slot in (*QK_NORMS, *ROW_NORMS)},
    "sinks": of_block("attn_sinks.weight"),
    "wo": of_block("attn_output.weight"),
    "bo": of_block("attn_output.bias"),
    "attn_norm_w": of_block("post_attention_norm.weight"),
    "ffn_norm_w": of_block("ffn_norm.weight"),
    "w_gate": of_block("ffn_gate.weight"),
    "w_up": of_block("ffn_up.weight"),
    "w_down": of_block("ffn_down.weight"),
    "w_router": of_block("ffn_gate_inp.weight"),
    "b_router": of_block("ffn_gate_inp.bias"),
    **{f"w_{name}_exps": of_block(f"ffn_{name}_exps.weight") for name in ("gate", "up", "down")},
    **{f"b_{name}_exps": of_block(f"ffn_{name}_exps.bias") for name in ("gate", "up", "down")},
    "down_norm_w": of_block("post_ffw_norm.weight"),
    FINAL_NORM: Place("output_norm.weight"),
    HEAD: Place("output.weight"),
}
"""Where each slot of weights is."""


def _nothing(fields: Mapping[str, Any], metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    return {}


SLIDES = "attention.sliding_window_pattern"
"""The key of which layers have windows: for each layer whether it has one, or the period in which the last is full."""


def layer_kinds(fields: Mapping[str, Any], metadata: Mapping[str, Any], period: int) -> list[str]:
    """Return the kind of each layer of a model with windows. `period`: that of `sliding_kinds`, if a file has none."""
    slides = metadata.get(SLIDES, period)
    if not isinstance(slides, list):
        return sliding_kinds(min(fields["num_hidden_layers"], MOST_LAYERS), slides)
    return [SLIDING if slide else FULL for slide in slides]


def expert_keys(*names: str) -> dict[str, str]:
    """Return the keys of fields with these names, which are those of `EXPERTS` in their order."""
    return dict(zip(names, EXPERTS, strict=False))


EXPERTS = ("expert_count", "expert_used_count", "expert_feed_forward_length")
"""The keys of the number of experts, of those that a row takes, and of their inner width."""


@frozen
class Gguf:
    """How GGUF files hold a family's models. Norms that have an offset are stored with it added."""

    architecture: str
    """Its `general.architecture`."""
    fields: Mapping[str, Any]
    """Fields of a `config.json` that hold for all of its models, as `architectures`."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Fields of a `config.json` besides those that all families have -> the keys of metadata that have their values,
    without the architecture's name before them."""
    given: tuple[str, ...] = ()
    """More keys that `complete` reads. Sizes of layers among them may be 0 where a layer has no such thing."""
    tensors: Mapping[str, Place] = field(default_factory=lambda: TENSORS)
    """Where each slot of weights is."""
    neighbours: bool = False
    """Whether neighbouring rows (2 d, 2 d + 1) of a head turn together. Rows of Q and K are in that order then, and
    not in a checkpoint's, where rows (d, d + head_dim / 2) do."""
    windows: bool = False
    """Whether llama.cpp attends to windows where a file says it."""
    factors: tuple[str, ...] = ()
    """The tensors of what each frequency of a scaled rotation is divided by: one, or for long and for short texts."""
    complete: Callable[[Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]] = _nothing
    """Returns the fields that the metadata imply: those found so far and the metadata, by key without the
    architecture's name -> more fields, or others instead."""
