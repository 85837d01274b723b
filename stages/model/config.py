"""A model's configuration, and the fields of a `config.json`, read strictly: messages name field and value."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llama_npu2.errors import UserError
from stages.engine.lazy import np
from stages.weights.constants import HEAD_POSITION, KV_BLOCK_POSITIONS, PANEL_ROWS, POSITION

_TOO_LARGE = 1 << 31
"""Sizes and positions are below this."""
MOST_LAYERS = 1 << 12
MOST_TOKENS = 1 << 24
"""The most entries of a vocabulary."""
LARGEST_TABLE = 4 << 30
"""Bytes of the table of rotations: 8 million positions of heads of 128."""
_TABLE_ROWS = 1 << 13
"""Rows of that table that are computed at a time, in double precision."""


@dataclass(frozen=True)
class RopeScaling:
    """Frequency scaling of the rotary embedding.

    `llama3` is section "RoPE scaling" of the Llama 3.1 model code. `longrope` divides each frequency by one of
    `factors`, whatever the position.
    """

    type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    factors: tuple[float, ...] = ()


@dataclass(frozen=True)
class Config:
    """Shapes and constants of a model."""

    vocab: int
    emb: int
    """The hidden size."""
    ffn: int
    """The intermediate size: the inner width of the feed-forward network."""
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_seq: int
    """The longest context, in tokens."""
    eps: float
    """The epsilon of RMS norms."""
    rope_theta: float
    rope_scaling: RopeScaling
    tied: bool
    """Whether the embedding is the LM head, too."""
    eos: tuple[int, ...]
    """The token ids that end a text."""
    family: str
    """The name of its family in `stages.model.families`."""

    def dimensions(self) -> dict[str, int | float]:
        """Return the values of the dimension names that parts use."""
        return {
            "vocab": self.vocab,
            "emb": self.emb,
            "ffn": self.ffn,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "q_dim": self.heads * self.head_dim,
            "kv_dim": self.kv_heads * self.head_dim,
            "kv_pair_dim": 2 * self.kv_heads * self.head_dim,
            "qk_dim": (self.heads + self.kv_heads) * self.head_dim,
            "qkv_dim": (self.heads + 2 * self.kv_heads) * self.head_dim,
            "ffn_pair_dim": 2 * self.ffn,
            "placed_heads_dim": self.heads * (self.head_dim + HEAD_POSITION),
            "placed_head_dim": self.head_dim + POSITION // 2,
            "max_seq": self.max_seq,
            "kv_blocks": -(-self.max_seq // KV_BLOCK_POSITIONS),
            "kv_block_positions": KV_BLOCK_POSITIONS,
            "padded_head_dim": -(-self.head_dim // PANEL_ROWS) * PANEL_ROWS,
            "eps": self.eps,
        }


class ConfigFields:
    """Typed access to a JSON object; errors name the file and the field."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def fails(self, name: str, value: Any, want: str) -> UserError:
        return UserError(f"{self.where}: {name} = {json.dumps(value)[:120]}: {want}")

    def fail(self, name: str, want: str) -> UserError:
        return self.fails(name, self.values.get(name), want)

    def require(self, allowed: Mapping[str, tuple[Any, ...]]) -> None:
        """Raise UserError for a field that is there with another value than those allowed."""
        for name, values in allowed.items():
            if name in self.values and self.values[name] not in values:
                raise self.fail(name, f"only {json.dumps(values[0])} is supported")

    def integer(self, name: str, default: int | None = None, most: int = _TOO_LARGE - 1) -> int:
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
            limit = "below 2^31" if most == _TOO_LARGE - 1 else f"at most {most}"
            raise self.fail(name, f"must be a positive integer, and {limit}")
        return value

    def positions(self, head_dim: int) -> int:
        """Return `max_position_embeddings`, which the size of the table of rotations bounds. Raises UserError."""
        positions = self.integer("max_position_embeddings", 2048)
        most = LARGEST_TABLE // (head_dim * np.dtype(np.float32).itemsize)
        if positions > most:
            raise self.fail(
                "max_position_embeddings", f"must be at most {most}, or the table of rotations is too large"
            )
        return positions

    def group_size(self, name: str) -> int | None:
        """Return how many values share a scale; None, which files also write as -1, for a whole row."""
        return None if self.values.get(name) in (None, -1) else self.integer(name)

    def number(self, name: str, default: float | None = None) -> float:
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
            raise self.fail(name, "must be a positive number")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            raise self.fail(name, "must be true or false")
        return value

    def token_ids(self, name: str, vocab: int) -> tuple[int, ...]:
        """Return a field of one token id, a list of them, or null, as a tuple. Raises UserError."""
        value = self.values.get(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if any(not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < vocab for i in ids):
            raise self.fail(name, f"must be token ids below the vocabulary size {vocab}")
        return tuple(ids)

    def rope(self, max_seq: int, kinds: Sequence[str]) -> tuple[float, RopeScaling]:
        """Return base and scaling of the rotary embedding. Raises UserError.

        They are `rope_theta` and `rope_scaling`, or transformers 5's `rope_parameters`, which holds both.
        """
        nested = self.values.get("rope_parameters") or self.values.get("rope_scaling") or {}
        if not isinstance(nested, dict):
            raise self.fail("rope_scaling", "must be an object or null")
        inner = ConfigFields(nested, f"{self.where}: rope scaling")
        theta = inner.number("rope_theta", self.number("rope_theta", 10000.0))
        kind = nested.get("rope_type", nested.get("type", "default"))
        if kind not in kinds:
            raise self.fails("rope_scaling.rope_type", kind, f"only {', '.join(kinds)} are supported")
        if kind == "default":
            return theta, RopeScaling()
        if kind == "linear":
            return theta, RopeScaling("linear", inner.number("factor"))
        if kind == "longrope":
            return theta, RopeScaling("longrope", factors=inner._same_factors())
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

    def _same_factors(self) -> tuple[float, ...]:
        """Return the factors of a `longrope` that is equal for long and short texts and leaves attention as it is."""
        factors = self.values.get("short_factor")
        if not isinstance(factors, list) or not all(isinstance(f, float) and 0 < f < float("inf") for f in factors):
            raise self.fail("short_factor", "must be a list of positive numbers")
        if self.values.get("long_factor") != factors:
            raise self.fail("long_factor", "only what short_factor is is supported")
        if self.values.get("attention_factor") != 1.0:
            raise self.fail("attention_factor", "only 1.0 is supported")
        return tuple(factors)


def inverse_frequencies(config: Config) -> np.ndarray:
    """Return the rotation per position of each pair, float64 `[head_dim / 2]`, with the scaling applied."""
    exponent = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    inverse: np.ndarray = config.rope_theta**-exponent
    scaling = config.rope_scaling
    if scaling.type == "linear":
        return inverse / scaling.factor
    if scaling.type == "longrope":
        return inverse / np.array(scaling.factors)
    if scaling.type == "llama3":
        # Wavelengths beyond the original context are stretched by `factor`, short ones kept, those between blended.
        turns = scaling.original_max_position * inverse / (2 * np.pi)
        blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        keep = np.clip(blend, 0.0, 1.0)
        return inverse * keep + inverse / scaling.factor * (1 - keep)
    return inverse


def token_table(config: Config, positions: int) -> np.ndarray:
    """Return `rope_table` with each row's position after it: float32 `[positions, head_dim + POSITION / 2]`."""
    return np.concatenate([rope_table(config, positions), position_rows(0, positions)], axis=1)


def position_rows(first: int, count: int) -> np.ndarray:
    """Return positions from `first` on: float32 `[count, POSITION / 2]`, each row the bits of an int32, then zeros."""
    rows = np.zeros((count, POSITION // 2), np.int32)
    rows[:, 0] = np.arange(first, first + count)
    return rows.view(np.float32)


def rope_table(config: Config, positions: int) -> np.ndarray:
    """Return float32 `[positions, head_dim]`; row `p` has the cosines, then the sines, of position `p`'s angles."""
    inverse, half = inverse_frequencies(config), config.head_dim // 2
    table = np.empty((positions, config.head_dim), np.float32)
    for first in range(0, positions, _TABLE_ROWS):
        rows = table[first : first + _TABLE_ROWS]
        angles = np.arange(first, first + len(rows), dtype=np.float64)[:, None] * inverse
        rows[:, :half] = np.cos(angles)
        rows[:, half:] = np.sin(angles)
    return table


TABLES: Mapping[str, Callable[[Config, int], np.ndarray]] = {"rope_table": rope_table, "token_table": token_table}
"""Tables that programs read rows of, by buffer; each is a function of configuration and number of positions."""
