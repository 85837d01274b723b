"""A GGUF file of a Llama as llama.cpp's converter writes it, with configuration and tokenizer in it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import Any

from llama_npu2.errors import UserError
from stages.engine.lazy import ml_dtypes, np
from stages.model.config import ConfigFields
from stages.model.importers import Held
from stages.model.importers.gguf_blocks import REFUSED, TYPES, BlockType, finite
from stages.model.importers.gguf_header import Header, Place
from stages.model.importers.gguf_tokenizer import end_tokens, tokenizer_files
from stages.weights.format import Shape
from stages.weights.formats import formats

ROPE_FACTORS = "rope_freqs.weight"
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_CHUNK = 1 << 20
"""Values that are rearranged at a time, so that temporaries stay in the CPU's cache."""


def tensor_name(name: str) -> str:
    """Return the name of a Llama's tensor in a GGUF file."""
    if name in _NAMES:
        return _NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_LAYER_NAMES[rest.removesuffix('.weight')]}.weight"


def rotary_order(name: str, rows: int, head_dim: int) -> np.ndarray | None:
    """Return the checkpoint's row that is in each row of the file; None where all are in their places.

    llama.cpp rotates neighbouring rows (2 d, 2 d + 1) of Q and K, a checkpoint rows (d, d + head_dim / 2).
    """
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return None
    return np.arange(rows).reshape(-1, 2, head_dim // 2).swapaxes(1, 2).reshape(-1)


class GgufFile:
    """A container: see `stages.model.importers`."""

    def __init__(self, path: Path) -> None:
        self.path, self.where = path, str(path)
        self._header = Header(path)
        self._metadata, self._places = self._header.metadata, self._header.tensors
        self.names = frozenset(self._places) - {ROPE_FACTORS}

    @cached_property
    def fields(self) -> dict[str, Any]:
        meta = ConfigFields(self._metadata, self.where)
        if meta.values.get("general.architecture") != "llama":
            raise meta.fail("general.architecture", "only llama is supported")
        if meta.values.get("split.count", 0) > 1:
            raise meta.fail("split.count", "join the parts with llama-gguf-split --merge")
        meta.require({"llama.expert_count": (0,)})
        emb, heads = meta.integer("llama.embedding_length"), meta.integer("llama.attention.head_count")
        head_dim = meta.integer("llama.attention.key_length", max(emb // heads, 1))
        same = dict.fromkeys(("llama.attention.value_length", "llama.rope.dimension_count"), (head_dim,))
        meta.require(same)
        embedding = self._places.get("token_embd.weight")
        vocab = meta.integer("llama.vocab_size", embedding.shape[0] if embedding else None)
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": emb,
            "intermediate_size": meta.integer("llama.feed_forward_length"),
            "num_hidden_layers": meta.integer("llama.block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": meta.integer("llama.attention.head_count_kv", heads),
            "head_dim": head_dim,
            "vocab_size": vocab,
            "max_position_embeddings": meta.integer("llama.context_length"),
            "rms_norm_eps": meta.number("llama.attention.layer_norm_rms_epsilon"),
            "rope_theta": meta.number("llama.rope.freq_base", 10000.0),
            "rope_scaling": self._rope_scaling(meta, head_dim),
            "tie_word_embeddings": "output.weight" not in self._places,
            "bos_token_id": self._metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": end_tokens(meta, vocab),
        }

    def _rope_scaling(self, meta: ConfigFields, head_dim: int) -> dict[str, Any] | None:
        """Return the scaling of the rotary embedding. A GGUF file has Llama 3's as the resulting factors."""
        kind = self._metadata.get("llama.rope.scaling.type", "none")
        if kind not in ("none", "linear"):
            raise meta.fail("llama.rope.scaling.type", "only none, linear are supported")
        if ROPE_FACTORS in self._places:
            place = self._place(ROPE_FACTORS, (head_dim // 2,))
            factors = self._read(ROPE_FACTORS, place, None)
            if factors.dtype != np.float32 or not (np.isfinite(factors) & (factors > 0)).all():
                raise UserError(f"{self.path}: tensor {ROPE_FACTORS} must be F32 and hold positive numbers")
            same = factors.astype(np.float64).tolist()
            return {"rope_type": "longrope", "short_factor": same, "long_factor": same, "attention_factor": 1.0}
        if kind == "linear":
            return {"rope_type": "linear", "factor": meta.number("llama.rope.scaling.factor")}
        return None

    def files(self) -> list[Path]:
        return [self.path]

    def where_is(self, name: str) -> str:
        return self.where

    def held(self, name: str, shape: Shape) -> Held | None:
        inside = tensor_name(name)
        if inside not in self._places:
            return None
        place = self._place(inside, shape)
        order = rotary_order(name, shape[0], self.fields["head_dim"])
        return self._held(inside, place, None if order is None else np.argsort(order))

    def _place(self, name: str, shape: Shape) -> Place:
        """Return where a tensor is. Raise UserError for another shape, an unknown type or a file that ends early."""
        place, where = self._places[name], f"{self.path}: tensor {name}"
        if place.type not in TYPES:
            readable = ", ".join(kind.name for kind in TYPES.values())
            raise UserError(f"{where} is {REFUSED.get(place.type, f'of type {place.type}')}: only {readable} are read")
        kind = TYPES[place.type]
        if place.shape != shape:
            raise UserError(f"{where} has shape {list(place.shape)}, the metadata imply {list(shape)}")
        if shape[-1] % kind.values:
            raise UserError(f"{where} has rows of {shape[-1]} values, {kind.name} has blocks of {kind.values}")
        if place.offset + prod(shape) // kind.values * kind.bytes > self.path.stat().st_size:
            raise UserError(f"{where} is not all in the file: it is truncated, download it again")
        return place

    def _held(self, name: str, place: Place, rows: np.ndarray | None) -> Held:
        """Return a tensor. `rows`: the file's rows in the order of the checkpoint's; None: the same order."""
        return Held(place.shape, TYPES[place.type].format, partial(self._read, name, place, rows), (name,))

    def _read(self, name: str, place: Place, rows: np.ndarray | None) -> np.ndarray:
        kind, (*outer, length) = TYPES[place.type], place.shape
        blocks = length // kind.values
        raw = np.memmap(self.path, np.uint8, "r", place.offset, (prod(outer), blocks, kind.bytes))
        if kind.stored is None:
            dtypes = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
            plain = raw.reshape(len(raw), -1).view(dtypes[kind.format])
            return (np.array(plain) if rows is None else plain[rows]).reshape(place.shape)
        return self._stored(name, kind, raw, rows).reshape(*outer, -1)

    def _stored(self, name: str, kind: BlockType, raw: np.ndarray, rows: np.ndarray | None) -> np.ndarray:
        """Return blocks as rows of the format, converted some rows at a time. Raises UserError."""
        assert kind.stored
        order = np.arange(len(raw)) if rows is None else rows
        length = raw.shape[1] * kind.values
        stored = np.empty(formats()[kind.format].stored_shape((len(raw), length)), np.int8)
        step = max(1, _CHUNK // length)
        for first in range(0, len(order), step):
            chunk = raw[order[first : first + step]]
            if not finite(kind, chunk):
                raise UserError(
                    f"{self.path}: tensor {name} holds a scale that is not a finite number: the file is damaged"
                )
            stored[first : first + step] = kind.stored(chunk)
        return stored

    def tokenizer(self) -> Mapping[str, bytes]:
        return tokenizer_files(ConfigFields(self._metadata, self.where))
