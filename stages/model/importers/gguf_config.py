"""What the metadata of a GGUF file say of a model, as the fields of a `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stages.model.config import ConfigFields
from stages.model.families import families
from stages.model.families.gguf import Gguf
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
    "rope.scaling.finetuned",
    "tensor_data_layout",
    "pooling_type",
)
"""Keys of every architecture that are read here, or that do not change what is computed."""


def architecture(meta: ConfigFields) -> Gguf:
    """Return how files of the architecture that the metadata name hold models. Raises UserError."""
    known = {family.gguf.architecture: family.gguf for family in families().values() if family.gguf}
    name = meta.values.get("general.architecture")
    if not isinstance(name, str) or name not in known:
        raise meta.fail("general.architecture", f"only {', '.join(sorted(known))} are supported")
    return known[name]


def config_fields(meta: ConfigFields, kind: Gguf, places: Mapping[str, Place]) -> dict[str, Any]:
    """Return the fields of a `config.json` but for the scaling of the rotary embedding. Raises UserError."""
    prefix = f"{kind.architecture}."
    own = {key.removeprefix(prefix): value for key, value in meta.values.items() if key.startswith(prefix)}
    heads = _same(meta, f"{prefix}attention.head_count")
    emb = meta.integer(f"{prefix}embedding_length")
    head_dim = meta.integer(f"{prefix}attention.key_length", max(emb // heads, 1))
    kv_heads = "attention.head_count_kv"
    lengths = ("attention.value_length", "rope.dimension_count", "attention.key_length_swa")
    more = ("attention.value_length_swa", "rope.dimension_count_swa")
    meta.require({prefix + name: (head_dim,) for name in (*lengths, *more)})
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
        **kind.fields,
        **{field: own[key] for field, key in kind.keys.items() if key in own},
    }
    _check_others(meta, kind, own)
    return {**fields, **kind.complete(fields, own)}


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
