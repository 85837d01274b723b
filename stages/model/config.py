"""A model's configuration, and the fields of a `config.json`, read strictly: messages name field and value."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from llama_npu2.errors import UserError
from llama_npu2.frozen import frozen
from stages.engine.lazy import np
from stages.model.decoder import QK_NORMS, SANDWICH_NORMS, SILU, Decoder, Experts, FeedForward, Layer, Rope, RopeScaling
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


@frozen
class Config:
    """A model: what it computes, and what a user of it must know."""

    family: str
    """The name of its family in `stages.model.families`."""
    decoder: Decoder
    max_seq: int
    """The longest context, in tokens."""
    eos: tuple[int, ...]
    """The token ids that end a text."""

    @property
    def vocab(self) -> int:
        return self.decoder.vocab

    @property
    def emb(self) -> int:
        """The hidden size."""
        return self.decoder.emb

    @property
    def ffn(self) -> int:
        """The intermediate size: the inner width of the feed-forward network."""
        return self.decoder.inner

    @property
    def layers(self) -> int:
        return len(self.decoder.layers)

    @property
    def heads(self) -> int:
        return self.decoder.attention.heads

    @property
    def kv_heads(self) -> int:
        return self.decoder.attention.kv_heads

    @property
    def head_dim(self) -> int:
        return self.decoder.attention.head_dim

    @property
    def eps(self) -> float:
        """The epsilon of RMS norms."""
        return self.decoder.eps

    @property
    def tied(self) -> bool:
        """Whether the embedding is the LM head, too."""
        return self.decoder.tied

    def within(self, context: int) -> Config:
        """Return the configuration with KV caches of at most `context` positions.

        0: as many as the model knows, or up to which it has factors of its rotary embedding for short texts.
        """
        positions = min(self.max_seq, context or self.decoder.short_context or self.max_seq)
        return replace(self, max_seq=positions, decoder=self.decoder.within(positions))

    def summary(self) -> dict[str, Any]:
        """Return what a manifest says of it."""
        names = ("family", "vocab", "emb", "ffn", "layers", "heads", "kv_heads", "head_dim", "eps", "tied")
        experts = self.decoder.experts
        windows = [mixer.window for mixer in self.decoder.attentions if mixer.window]
        return {
            **{name: getattr(self, name) for name in names},
            "attention_layers": len(self.decoder.attentions),
            **({"windows": windows} if windows else {}),
            **({"experts": experts.count, "experts_of_a_row": experts.top} if experts else {}),
        }

    def dimensions(self, positions: int = 0) -> dict[str, int | float]:
        """Return the values of the dimension names that parts use.

        `positions`: rows of what has one for each position; 0: as many as the longest context.
        """
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
            "kv_halves": 2 * self.kv_heads,
            "qk_dim": (self.heads + self.kv_heads) * self.head_dim,
            "qkv_dim": (self.heads + 2 * self.kv_heads) * self.head_dim,
            "ffn_pair_dim": 2 * self.ffn,
            "placed_heads_dim": self.heads * (self.head_dim + HEAD_POSITION),
            "qk_norms_dim": len(QK_NORMS) * self.head_dim,
            "ffn_norms_dim": len(SANDWICH_NORMS) * self.emb,
            "placed_head_dim": self.head_dim + POSITION // 2,
            "max_seq": positions or self.max_seq,
            "kv_blocks": -(-self.max_seq // KV_BLOCK_POSITIONS),
            "kv_block_positions": KV_BLOCK_POSITIONS,
            "padded_head_dim": -(-self.head_dim // PANEL_ROWS) * PANEL_ROWS,
            "eps": self.eps,
            "stream_eps": self.decoder.stream_eps,
            "score_scalar": self.decoder.attention.scalar,
            **self._expert_dimensions(),
            "taps": self.decoder.taps,
            "conv_dim": 3 * self.emb,
            "history": (positions or self.max_seq) + max(self.decoder.taps - 1, 0),
        }

    def _expert_dimensions(self) -> dict[str, int | float]:
        experts = self.decoder.experts
        if experts is None:
            return {}
        return {
            "experts": experts.count,
            "top": experts.top,
            "expert_ffn": experts.expert.inner,
            "top_ffn": experts.top * experts.expert.inner,
            "experts_ffn": experts.count * experts.expert.inner,
            "experts_emb": experts.count * self.emb,
        }


class Heads(NamedTuple):
    """Sizes of attention."""

    heads: int
    kv_heads: int
    head_dim: int


FULL, SLIDING = "full_attention", "sliding_attention"
"""Kinds of layers in `layer_types`."""


def sliding_kinds(count: int, period: int) -> list[str]:
    """Return the kinds of `count` layers of which, of every `period`, the last is full and the others have windows."""
    return [SLIDING if (layer + 1) % period else FULL for layer in range(count)]


_LOCAL = "local"
"""The end of the names of tables for layers with windows, where these turn otherwise than others."""

_RECURRENT = ("linear_attention", "mamba", "mamba2", "recurrent")
"""Kinds of layers whose state has no positions, so that a prefix of a text cannot be kept."""

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")
"""Scalings of the rotary embedding that can be run."""


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

    def whole(self, name: str, default: int) -> int:
        """Return a whole number, which may be 0. Raises UserError."""
        return 0 if self.values.get(name) == 0 else self.integer(name, default)

    def positions(self, head_dim: int, default: int = 2048) -> int:
        """Return `max_position_embeddings`, which the size of the table of rotations bounds. Raises UserError."""
        positions = self.integer("max_position_embeddings", default)
        most = LARGEST_TABLE // (head_dim * 4)  # f32
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

    def heads(self, head_dim: int | None = None, kv_heads: int | None = None) -> Heads:
        """Return the sizes of attention. Raises UserError.

        Args:
            head_dim: the default; None: the hidden size over the number of heads.
            kv_heads: the default; None: the number of heads.
        """
        heads = self.integer("num_attention_heads")
        kv_heads = self.integer("num_key_value_heads", kv_heads or heads)
        head_dim = self.integer("head_dim", head_dim or max(self.integer("hidden_size") // heads, 1))
        if heads % kv_heads:
            raise self.fail("num_key_value_heads", f"must divide num_attention_heads = {heads}")
        if head_dim % 2:
            raise self.fails("head_dim", head_dim, "must be even, rotary embedding pairs its halves")
        return Heads(heads, kv_heads, head_dim)

    def experts(
        self,
        number: str,
        width: str,
        defaults: tuple[int | None, int | None, int | None] = (None, None, None),
        activation: str = SILU,
        **more: bool,
    ) -> Experts:
        """Return a mixture of experts, of which a row takes `num_experts_per_tok`. Raises UserError.

        Args:
            number: the field that says how many experts there are.
            width: the field of an expert's inner width.
            defaults: of how many there are, how many a row takes, and the width; None: the field is needed.
            more: other attributes of `Experts`.
        """
        count, top, inner = defaults
        count = self.integer(number, count)
        expert = FeedForward(self.integer(width, inner), activation)
        return Experts(count, self.integer("num_experts_per_tok", top, most=count), expert, **more)

    def window(self, max_seq: int, default: int | None = 4096) -> int | None:
        """Return the sliding window. Raises UserError.

        It is `default` where the field is missing, None for null and for one as long as the longest context.
        """
        if self.values.get("sliding_window", default) is None:
            return None
        window = self.integer("sliding_window", default)
        return window if window < max_seq else None

    def windows(self, kinds: Iterable[str], max_seq: int) -> dict[str, int | None]:
        """Return the window of each kind of layer; None: all positions. Raises UserError where there is none."""
        if SLIDING in kinds and self.values.get("sliding_window", 0) is None:
            raise self.fail("sliding_window", f"must be a number where layer_types has {SLIDING}")
        return {FULL: None, SLIDING: self.window(max_seq)}

    def kinds(self, default: Sequence[str], known: Sequence[str] = (FULL, SLIDING)) -> list[str]:
        """Return `layer_types`, the kind of each layer, all of them `known`. Raises UserError."""
        kinds = self.values.get("layer_types")
        kinds = list(default) if kinds is None else kinds
        if not isinstance(kinds, list) or len(kinds) != len(default) or any(kind not in known for kind in kinds):
            if isinstance(kinds, list) and (states := [kind for kind in kinds if kind in _RECURRENT]):
                raise self.fails("layer_types", states[0], "layers whose state cannot be rewound are not supported")
            raise self.fail("layer_types", f"must be {len(default)} times {' or '.join(known)}")
        return kinds

    def nested(self, name: str) -> ConfigFields:
        """Return the fields of an object; none where it is missing or null. Raises UserError."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.fail(name, "must be an object or null")
        return ConfigFields(value or {}, f"{self.where}: {name}")

    def rope(self, max_seq: int, head_dim: int, theta: float = 10000.0, partial: bool = False) -> Rope:
        """Return the rotary embedding. Raises UserError.

        It is `rope_theta` and `rope_scaling`, or transformers 5's `rope_parameters`, which holds both.

        Args:
            theta: the default of `rope_theta`.
            partial: whether `partial_rotary_factor` counts. If not, it has to be 1.
        """
        nested = self.rope_fields()
        theta = nested.number("rope_theta", self.number("rope_theta", theta))
        if not partial:
            return nested.rope_of(theta, max_seq, head_dim)
        share = nested.number("partial_rotary_factor", self.number("partial_rotary_factor", 1.0))
        return nested.rope_of(theta, max_seq, head_dim, share=share)

    def ropes(self, max_seq: int, head_dim: int, theta: float, sliding_theta: float) -> dict[str, Rope]:
        """Return the rotary embedding of each kind of layer. Only that of full ones is scaled by `rope_scaling`.

        `theta`, `sliding_theta`: the defaults of `rope_theta`. Raises UserError.
        """
        own = {kind: self.nested("rope_parameters").nested(kind) for kind in (FULL, SLIDING)}
        full = ConfigFields({**own[FULL].values, **self.nested("rope_scaling").values}, f"{self.where}: rope scaling")
        sliding_theta = own[SLIDING].number("rope_theta", sliding_theta)
        return {
            FULL: full.rope_of(full.number("rope_theta", theta), max_seq, head_dim),
            SLIDING: own[SLIDING].rope_of(sliding_theta, max_seq, head_dim, _LOCAL),
        }

    def rope_fields(self) -> ConfigFields:
        """Return the fields of the rotary embedding, in either spelling. Raises UserError."""
        nested = self.nested("rope_parameters" if self.values.get("rope_parameters") else "rope_scaling")
        return ConfigFields(nested.values, f"{self.where}: rope scaling")

    def rope_of(self, theta: float, max_seq: int, head_dim: int, kind: str = "", share: float = 1.0) -> Rope:
        """Return the rotary embedding with the scaling that these fields describe. Raises UserError.

        `share`: of a head's rows, those that turn.
        """
        self.require({"partial_rotary_factor": (share, None)})
        turned = int(head_dim * share)
        if turned % 2 or not 0 < turned <= head_dim:
            raise self.fails("partial_rotary_factor", share, f"must be an even part of head_dim = {head_dim}")
        scaling = self._rope_scaling(max_seq, turned // 2)
        return Rope(theta, scaling, kind, turned if turned < head_dim else None)

    def _rope_scaling(self, max_seq: int, pairs: int) -> RopeScaling:
        kind = self.values.get("rope_type", self.values.get("type", "default"))
        if kind not in ROPE_TYPES:
            raise self.fails("rope_type", kind, f"only {', '.join(ROPE_TYPES)} are supported")
        if kind == "default":
            return RopeScaling()
        if kind == "linear":
            return RopeScaling("linear", self.number("factor"))
        original = self.integer("original_max_position_embeddings", max_seq)
        if kind == "yarn":
            return self._yarn(max_seq, original)
        if kind == "longrope":
            return self._longrope(max_seq, original, pairs)
        scaling = RopeScaling(
            "llama3",
            self.number("factor"),
            self.number("low_freq_factor"),
            self.number("high_freq_factor"),
            original,
        )
        if scaling.high_freq_factor <= scaling.low_freq_factor:
            raise self.fail("high_freq_factor", "must be greater than low_freq_factor")
        return scaling

    def config(
        self,
        family: str,
        layers: Sequence[Layer],
        max_seq: int,
        *,
        tied: bool,
        eos: tuple[int, ...] = (),
        eps: float = 1e-6,
        **fields: Any,
    ) -> Config:
        """Return the configuration of a model with these layers. Raises UserError.

        Args:
            tied: the default.
            eos: the default.
            eps: the default.
            fields: others of `Decoder`.
        """
        vocab = self.integer("vocab_size", most=MOST_TOKENS)
        decoder = Decoder(
            vocab=vocab,
            emb=self.integer("hidden_size"),
            layers=tuple(layers),
            eps=self.number("rms_norm_eps", eps),
            tied=self.boolean("tie_word_embeddings", tied),
            **fields,
        )
        if not decoder.attentions:
            raise self.fail("layer_types", "at least one layer must have attention")
        if decoder.residual_scale != 1 and not all(layer.entering for layer in decoder.layers):
            raise UserError(f"{self.where}: a factor of results is supported only where inputs are normed")
        if name := decoder.uneven:
            raise UserError(f"{self.where}: layers differ in {name}: only one for all layers is supported")
        ends = self.token_ids("eos_token_id", vocab) if "eos_token_id" in self.values else eos
        return Config(family, decoder, max_seq, ends)

    def _yarn(self, max_seq: int, original: int) -> RopeScaling:
        factor = self.number("factor", max_seq / original)

        def grown(scale: float) -> float:
            return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

        given = all(self.values.get(name) for name in ("mscale", "mscale_all_dim"))
        usual = grown(self.number("mscale")) / grown(self.number("mscale_all_dim")) if given else grown(1.0)
        return RopeScaling(
            "yarn",
            factor,
            original_max_position=original,
            beta_fast=self.number("beta_fast", 32.0),
            beta_slow=self.number("beta_slow", 1.0),
            truncate=self.boolean("truncate", True),
            attention_factor=self.number("attention_factor", usual),
        )

    def _longrope(self, max_seq: int, original: int, pairs: int) -> RopeScaling:
        short, long = (self._factors(name, pairs) for name in ("short_factor", "long_factor"))
        factor = self.number("factor", max_seq / original)
        usual = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 < original else 1.0
        return RopeScaling(
            "longrope",
            original_max_position=original,
            factors=short,
            long_factors=long if long != short and original < max_seq else (),
            attention_factor=self.number("attention_factor", usual),
        )

    def _factors(self, name: str, count: int) -> tuple[float, ...]:
        """Return what the frequency of each pair is divided by. Raises UserError."""
        factors = self.values.get(name)
        if (
            not isinstance(factors, list)
            or len(factors) != count
            or not all(type(f) in (int, float) and 0 < f < math.inf for f in factors)
        ):
            raise self.fail(name, f"must be {count} positive numbers, one for each pair that turns")
        return tuple(map(float, factors))


def inverse_frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """Return the rotation per position of each pair, float64 `[head_dim / 2]`, with the scaling applied.

    Pairs of rows that do not turn have 0.
    """
    turned = head_dim if rope.turned is None else rope.turned
    scaled = _scaled(rope.theta ** -(np.arange(0, turned, 2, dtype=np.float64) / max(turned, 1)), rope)
    return np.pad(scaled, (0, (head_dim - turned) // 2))


def _scaled(inverse: np.ndarray, rope: Rope) -> np.ndarray:
    scaling = rope.scaling
    if scaling.type == "linear":
        return inverse / scaling.factor
    if scaling.type == "longrope":
        return inverse / np.array(scaling.factors)
    if scaling.type == "yarn":
        keep = 1 - _yarn_ramp(rope, len(inverse))
        return inverse * keep + inverse / scaling.factor * (1 - keep)
    if scaling.type == "llama3":
        # Wavelengths beyond the original context are stretched by `factor`, short ones kept, those between blended.
        turns = scaling.original_max_position * inverse / (2 * np.pi)
        blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        keep = np.clip(blend, 0.0, 1.0)
        return inverse * keep + inverse / scaling.factor * (1 - keep)
    return inverse


def _yarn_ramp(rope: Rope, pairs: int) -> np.ndarray:
    """Return the share of each pair's frequency that `yarn` divides: 0 before a first pair, 1 from a last one on."""
    scaling = rope.scaling

    def pair_of(turns: float) -> float:
        """Return the pair that turns so often in the original context."""
        wavelength = scaling.original_max_position / (turns * 2 * math.pi)
        return pairs * math.log(wavelength) / math.log(rope.theta)

    first, last = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    # The last pair's number is not the limit: transformers has that of the last row here.
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    ramp: np.ndarray = (np.arange(pairs) - first) / (last - first or 0.001)
    return np.clip(ramp, 0.0, 1.0)


def position_rows(first: int, count: int) -> np.ndarray:
    """Return positions from `first` on: float32 `[count, POSITION / 2]`, each row the bits of an int32, then zeros."""
    rows = np.zeros((count, POSITION // 2), np.int32)
    rows[:, 0] = np.arange(first, first + count)
    return rows.view(np.float32)


def rope_table(rope: Rope, head_dim: int, positions: int) -> np.ndarray:
    """Return float32 `[positions, head_dim]`; row `p` has the cosines, then the sines, of position `p`'s angles.

    Both are multiplied by the factors that the embedding has.
    """
    inverse, half = inverse_frequencies(rope, head_dim), head_dim // 2
    turning = half if rope.turned is None else rope.turned // 2
    factors = np.where(np.arange(half) < turning, rope.scaling.attention_factor, 1.0)
    table = np.empty((positions, head_dim), np.float32)
    for first in range(0, positions, _TABLE_ROWS):
        rows = table[first : first + _TABLE_ROWS]
        numbers = np.arange(first, first + len(rows), dtype=np.float64)[:, None]
        scale = factors * _query_factors(rope, numbers)
        rows[:, :half] = np.cos(numbers * inverse) * scale
        rows[:, half:] = np.sin(numbers * inverse) * scale
    return table


def _query_factors(rope: Rope, positions: np.ndarray) -> np.ndarray | float:
    """Return the factor of queries at each position."""
    scale = rope.q_scale
    return 1.0 if scale is None else 1 + scale.beta * np.log1p(positions // scale.every)


ANGLES, PLACED_ANGLES = "rope_table", "token_table"
"""The beginning of the names of tables: of rotations, and of rotations with each row's position after it."""


def table(config: Config, name: str, positions: int) -> np.ndarray:
    """Return a table that programs read rows of, by the name of its buffer.

    It is float32 `[positions, head_dim]`, for
    `PLACED_ANGLES` `[positions, head_dim + POSITION / 2]`.
    """
    begin, _, kind = name.partition(".")
    rows = rope_table(config.decoder.ropes[f".{kind}" if kind else ""], config.head_dim, positions)
    return np.concatenate([rows, position_rows(0, positions)], axis=1) if begin == PLACED_ANGLES else rows


def tables(config: Config, positions: int) -> dict[str, np.ndarray]:
    """Return every table by its name."""
    names = (f"{begin}{suffix}" for suffix in config.decoder.ropes for begin in (ANGLES, PLACED_ANGLES))
    return {name: table(config, name, positions) for name in names}
