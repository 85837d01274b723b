"""What the metadata of a GGUF file say of a model, as the fields of a `config.json`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from stages.model.config import ConfigFields
from stages.model.families import families
from stages.model.families.gguf import FACTORS, LONG_FACTORS, Gguf
from stages.model.importers.gguf_header import Place
from stages.model.importers.gguf_tokenizer import end_tokens

_OTHER = (
    "block_count",
    "vocab_size",
    "attention.key_length",
    "attention.value_length",
    "attention.head_count",
    "attention.head_count_kv",
    "embedding_length",
    "feed_forward_length",
    "context_length",
    "attention.layer_norm_rms_epsilon",
    "attention.key_length_swa",
    "attention.value_length_swa",
    "rope.dimension_count",
    "rope.dimension_count_swa",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.attn_factor",
    "rope.scaling.finetuned",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scaling.yarn_log_multiplier",
    "tensor_data_layout",
    "pooling_type",
)
"""Keys of every architecture that are read here, or that do not change what is computed."""

_BETAS = {"fast": 32.0, "slow": 1.0}


def architecture(meta: ConfigFields) -> Gguf:
    """Return how files of the architecture that the metadata name hold models. Raises UserError."""
    known = {family.gguf.architecture: family.gguf for family in families().values() if family.gguf}
    name = meta.values.get("general.architecture")
    if not isinstance(name, str) or name not in known:
        raise meta.fail("general.architecture", f"only {', '.join(sorted(known))} are supported")
    return known[name]


def config_fields(
    meta: ConfigFields, kind: Gguf, places: Mapping[str, Place], scaling: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the fields of a `config.json`. Raises UserError.

    `scaling`: that of the rotary embedding.
    """
    prefix = f"{kind.architecture}."
    own = {key.removeprefix(prefix): value for key, value in meta.values.items() if key.startswith(prefix)}
    heads = _same(meta, f"{prefix}attention.head_count")
    emb = meta.integer(f"{prefix}embedding_length")
    head_dim = meta.integer(f"{prefix}attention.key_length", max(emb // heads, 1))
    kv_heads = "attention.head_count_kv"
    lengths = ("attention.value_length", "attention.key_length_swa", "attention.value_length_swa")
    meta.require({prefix + name: (head_dim,) for name in lengths})
    embedding = places.get("token_embd.weight")
    vocab = meta.integer(f"{prefix}vocab_size", embedding.shape[0] if embedding and embedding.shape else None)
    fields = {
        "hidden_size": emb,
        "intermediate_size": _same(meta, f"{prefix}feed_forward_length"),
        "num_hidden_layers": meta.integer(f"{prefix}block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _same(meta, prefix + kv_heads, heads, absent=kv_heads in kind.given),
        "head_dim": head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": meta.integer(f"{prefix}context_length"),
        "rms_norm_eps": meta.number(f"{prefix}attention.layer_norm_rms_epsilon"),
        "rope_theta": meta.number(f"{prefix}rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in places,
        "bos_token_id": meta.values.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": end_tokens(meta, vocab),
        "rope_scaling": scaling,
        **_turned(meta, prefix, head_dim),
        **kind.fields,
        **{field: own[key] for field, key in kind.keys.items() if key in own},
    }
    _check_others(meta, kind, own)
    return {**fields, **kind.complete(fields, own)}


def _turned(meta: ConfigFields, prefix: str, head_dim: int) -> dict[str, Any]:
    """Return how much of a head turns, where that is not all of it. Raises UserError."""
    turned = meta.integer(f"{prefix}rope.dimension_count", head_dim, most=head_dim)
    meta.require({f"{prefix}rope.dimension_count_swa": (turned,)})
    if turned == head_dim:
        return {}
    share = turned / head_dim
    # It is multiplied again, and cut to a whole number.
    return {"partial_rotary_factor": share if int(head_dim * share) == turned else math.nextafter(share, 2.0)}


def rope_scaling(meta: ConfigFields, kind: Gguf, factors: Mapping[str, list[float]]) -> dict[str, Any] | None:
    """Return the scaling of the rotary embedding, or None. Raises UserError.

    Args:
        factors: what frequencies are divided by, by the tensors that are there. A GGUF file has Llama 3's scaling so.
    """
    prefix = f"{kind.architecture}.rope.scaling."
    name, long = meta.values.get(f"{prefix}type", "none"), [factors.get(tensor) for tensor in LONG_FACTORS]
    if name not in ("none", "linear", "yarn", "longrope"):
        raise meta.fail(f"{prefix}type", "only none, linear, yarn, longrope are supported")
    given = meta.number(f"{prefix}attn_factor", 1.0)
    original = f"{prefix}original_context_length"
    extent = {"original_max_position_embeddings": meta.integer(original)} if original in meta.values else {}
    if FACTORS in factors or all(long):
        long_factor, short_factor = long if all(long) else [factors[FACTORS]] * 2
        pairs = {"short_factor": short_factor, "long_factor": long_factor}
        return {"rope_type": "longrope", **pairs, "attention_factor": given, **extent}
    if name == "yarn":
        return {"rope_type": "yarn", **extent, **_yarn(meta, prefix, given)}
    if name == "linear" and f"{prefix}factor" in meta.values:
        return {"rope_type": "linear", "factor": meta.number(f"{prefix}factor")}
    if name == "longrope":
        raise meta.fail(f"{prefix}type", f"needs the tensors {', '.join(LONG_FACTORS)}")
    return None


def _yarn(meta: ConfigFields, prefix: str, given: float) -> dict[str, Any]:
    """Return the fields of YaRN, whose cosines llama.cpp multiplies by `given`, too. Raises UserError."""
    factor = meta.number(f"{prefix}factor")
    betas = {f"beta_{end}": meta.number(f"{prefix}yarn_beta_{end}", usual) for end, usual in _BETAS.items()}
    less = meta.number(f"{prefix}yarn_log_multiplier", 0.0) if meta.values.get(f"{prefix}yarn_log_multiplier") else 0.0
    grown = [1 + 0.1 * scale * math.log(max(factor, 1.0)) for scale in (1.0, less)]
    return {"factor": factor, **betas, "attention_factor": given * grown[0] / grown[1]}


def _check_others(meta: ConfigFields, kind: Gguf, own: Mapping[str, Any]) -> None:
    """Refuse values that may change what is computed, and that are not read. Zero says that there is no such thing."""
    known = {*_OTHER, *kind.keys.values(), *kind.given}
    for key, value in own.items():
        if key not in known and value not in (0, False, ""):
            raise meta.fail(f"{kind.architecture}.{key}", "is not supported")


def _same(meta: ConfigFields, name: str, default: int | None = None, absent: bool = False) -> int:
    """Return a size that may be said for each layer, and is the same in all. Raises UserError.

    `absent`: whether it may be 0, too.
    """
    value = meta.values.get(name)
    if not isinstance(value, list):
        return meta.integer(name, default)
    sizes = {size for size in value if size or not absent}
    if len(sizes) != 1:
        raise meta.fail(name, "only one size in all layers is supported")
    return ConfigFields({name: sizes.pop()}, meta.where).integer(name)
