"""`config.json` of a Llama checkpoint, read strictly: what this project cannot run is refused by field and value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from runtime.errors import UserError
from stages.layouts import KV_BLOCK_POSITIONS, PANEL_ROWS

ROPE_TYPES = ("default", "linear", "llama3")

# Fields that would change the arithmetic if they had any other value.
_REQUIRED_VALUES: dict[str, tuple[Any, ...]] = {
    "model_type": ("llama",),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "quantization_config": (None,),
    "partial_rotary_factor": (1, None),
    "sliding_window": (None,),
}


@dataclass(frozen=True)
class RopeScaling:
    """Frequency scaling of the rotary embedding. `llama3`: section "RoPE scaling" of the Llama 3.1 model code."""

    type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True)
class LlamaConfig:
    """Shapes and constants of a `LlamaForCausalLM`, in the field's short names."""

    vocab: int
    emb: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_seq: int
    eps: float
    rope_theta: float
    rope_scaling: RopeScaling
    tied: bool
    eos: tuple[int, ...]

    def dimensions(self) -> dict[str, int | float]:
        """Values of the dimension names that the ELF descriptions use."""
        return {
            "vocab": self.vocab,
            "emb": self.emb,
            "ffn": self.ffn,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "q_dim": self.heads * self.head_dim,
            "kv_dim": self.kv_heads * self.head_dim,
            "max_seq": self.max_seq,
            "kv_blocks": -(-self.max_seq // KV_BLOCK_POSITIONS),
            "kv_block_positions": KV_BLOCK_POSITIONS,
            "padded_head_dim": -(-self.head_dim // PANEL_ROWS) * PANEL_ROWS,
            "eps": self.eps,
        }

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that a checkpoint of this configuration must hold, in model order."""
        q_dim, kv_dim = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, self.emb)}
        for i in range(self.layers):
            layer = {
                "input_layernorm": (self.emb,),
                "self_attn.q_proj": (q_dim, self.emb),
                "self_attn.k_proj": (kv_dim, self.emb),
                "self_attn.v_proj": (kv_dim, self.emb),
                "self_attn.o_proj": (self.emb, q_dim),
                "post_attention_layernorm": (self.emb,),
                "mlp.gate_proj": (self.ffn, self.emb),
                "mlp.up_proj": (self.ffn, self.emb),
                "mlp.down_proj": (self.emb, self.ffn),
            }
            shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
        shapes["model.norm.weight"] = (self.emb,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab, self.emb)
        return shapes


def read_config(path: Path) -> LlamaConfig:
    """Read and check a `config.json`. Raises UserError naming the file, the field and the value."""
    return parse_config(read_json(path), str(path))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object. Raises UserError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is missing: the checkpoint directory is incomplete, download it again") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{path} is not valid JSON ({error}): download it again") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold a JSON object, it holds a {type(value).__name__}")
    return value


class _Fields:
    """Typed access to a JSON object; complaints name the file and the field."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def fail(self, name: str, want: str) -> UserError:
        return UserError(f"{self.where}: {name} = {json.dumps(self.values.get(name))}: {want}")

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.fail(name, "must be a positive integer")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise self.fail(name, "must be a positive number")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            raise self.fail(name, "must be true or false")
        return value


def parse_config(values: Mapping[str, Any], where: str) -> LlamaConfig:
    """Turn the fields of a `config.json` into a LlamaConfig. `where` names the file in complaints."""
    fields = _Fields(values, where)
    architectures = values.get("architectures") or []
    if architectures != ["LlamaForCausalLM"]:
        raise fails(where, "architectures", architectures, "only LlamaForCausalLM is supported")
    for name, allowed in _REQUIRED_VALUES.items():
        if name in values and values[name] not in allowed:
            raise fails(where, name, values[name], f"only {json.dumps(allowed[0])} is supported")
    emb, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", heads)
    head_dim = fields.integer("head_dim", max(emb // heads, 1))
    if heads % kv_heads:
        raise fields.fail("num_key_value_heads", f"must divide num_attention_heads = {heads}")
    if head_dim % 2:
        raise UserError(f"{where}: head_dim = {head_dim}: must be even, rotary embedding pairs its halves")
    max_seq = fields.integer("max_position_embeddings", 2048)
    theta, scaling = _rope(fields, max_seq)
    vocab = fields.integer("vocab_size")
    return LlamaConfig(
        vocab=vocab,
        emb=emb,
        ffn=fields.integer("intermediate_size"),
        layers=fields.integer("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_seq=max_seq,
        eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tied=fields.boolean("tie_word_embeddings", False),
        eos=token_ids(values.get("eos_token_id"), vocab, f"{where}: eos_token_id"),
    )


def fails(where: str, name: str, value: Any, want: str) -> UserError:
    return UserError(f"{where}: {name} = {json.dumps(value)[:120]}: {want}")


def token_ids(value: Any, vocab: int, where: str) -> tuple[int, ...]:
    """One token id, a list of them, or null, as a tuple. Raises UserError for anything else."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < vocab for i in ids):
        raise UserError(f"{where} = {json.dumps(value)}: must be token ids below the vocabulary size {vocab}")
    return tuple(ids)


def _rope(fields: _Fields, max_seq: int) -> tuple[float, RopeScaling]:
    """`rope_theta` and `rope_scaling`, or transformers 5's `rope_parameters`, which holds both."""
    values = fields.values
    nested = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(nested, dict):
        raise fields.fail("rope_scaling", "must be an object or null")
    inner = _Fields(nested, f"{fields.where}: rope scaling")
    theta = inner.number("rope_theta", fields.number("rope_theta", 10000.0))
    kind = nested.get("rope_type", nested.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise fails(fields.where, "rope_scaling.rope_type", kind, f"only {', '.join(ROPE_TYPES)} are supported")
    if kind == "default":
        return theta, RopeScaling()
    if kind == "linear":
        return theta, RopeScaling("linear", inner.number("factor"))
    scaling = RopeScaling(
        "llama3",
        inner.number("factor"),
        inner.number("low_freq_factor"),
        inner.number("high_freq_factor"),
        inner.integer("original_max_position_embeddings", max_seq),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise inner.fail("high_freq_factor", "must be greater than low_freq_factor")
    return theta, scaling


def inverse_frequencies(config: LlamaConfig) -> np.ndarray:
    """Rotation per position of each pair, float64 `[head_dim / 2]`, with the configuration's scaling applied."""
    exponent = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    inverse: np.ndarray = config.rope_theta**-exponent
    scaling = config.rope_scaling
    if scaling.type == "linear":
        return inverse / scaling.factor
    if scaling.type == "llama3":
        # Wavelengths beyond the original context are stretched by `factor`, short ones kept, those between blended.
        turns = scaling.original_max_position * inverse / (2 * np.pi)
        blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        keep = np.clip(blend, 0.0, 1.0)
        return inverse * keep + inverse / scaling.factor * (1 - keep)
    return inverse


def rope_table(config: LlamaConfig, positions: int) -> np.ndarray:
    """Float32 `[positions, head_dim]`; row `p` holds the cosines, then the sines, of position `p`'s angles."""
    angles = np.arange(positions, dtype=np.float64)[:, None] * inverse_frequencies(config)
    table = np.empty((positions, config.head_dim), np.float32)
    table[:, : config.head_dim // 2] = np.cos(angles)
    table[:, config.head_dim // 2 :] = np.sin(angles)
    return table
