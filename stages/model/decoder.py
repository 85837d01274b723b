"""What a model computes, as data.

A family's file makes it from `config.json`; parts, programs, plans, weights, the
reference and what judges them are derived from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from functools import cached_property
from typing import ClassVar

from llama_npu2.frozen import frozen
from stages.weights.scalars import ACTIVATIONS, ALL

Shape = tuple[str | int, ...]

SILU, GELU_TANH, SWIGLU_OAI = ACTIVATIONS


@frozen
class Norm:
    """An RMS norm."""

    offset: float = 0.0
    """A number that is added to the stored weight."""
    once: bool = False
    """Whether only the result is rounded. If not, the normalised value is rounded before the product with the weight,
    too."""

    @property
    def scalars(self) -> dict[str, str | float]:
        """The scalars of a launch that computes it of the residual stream."""
        return {"eps": "stream_eps", "offset": self.offset, "once": int(self.once)}

    @property
    def scalars_of_results(self) -> dict[str, str | float]:
        """The scalars of a launch that computes it of what is no residual stream: heads, results."""
        return {**self.scalars, "eps": "eps"}


@frozen
class RopeScaling:
    """Frequency scaling of the rotary embedding.

    `llama3` is section "RoPE scaling" of the Llama 3.1 model code. `yarn` (Peng et al. 2023) divides by `factor` the
    frequencies that turn less than `beta_slow` times in the original context, and none that turn more than `beta_fast`
    times. `longrope` (Ding et al. 2024) divides each frequency by one of `factors`, whatever the position.
    """

    type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    """The factors where the KV cache has room for more than the original context; nothing: `factors`."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """Whether the pairs between which `yarn` blends are whole numbers."""
    attention_factor: float = 1.0
    """The factor of cosines and sines of rows that turn."""


@frozen
class PositionScale:
    """A factor of queries that grows with the position: `1 + beta ln(1 + floor(position / every))`."""

    beta: float
    every: int


LONG, OF_QUERIES = "long", ".q"
"""The ends of names of tables for long contexts, and for queries alone."""


@frozen
class Rope:
    """The angles of a rotary embedding.

    Kernels turn a row of the first half of a head with one of the second. Weights are in that order
    (`Rope.rows`), and rows that do not turn have angles of 0.
    """

    theta: float = 10000.0
    scaling: RopeScaling = RopeScaling()
    kind: str = ""
    """The end of its tables' names, which tells those of different layers apart."""
    turned: int | None = None
    """The first rows of a head, which turn; None: all."""
    interleaved: bool = False
    """Whether a checkpoint has rows that turn together next to each other."""
    q_scale: PositionScale | None = None
    """The factor of turned queries."""

    @property
    def suffix(self) -> str:
        """The end of the name of the table for keys, and for queries unless they have a factor."""
        return f".{self.kind}" if self.kind else ""

    def within(self, positions: int) -> Rope:
        """Return the embedding of a KV cache that has room for this many positions."""
        scaling = self.scaling
        if not scaling.long_factors or positions <= scaling.original_max_position:
            return self
        scaling = replace(scaling, factors=scaling.long_factors, long_factors=())
        return replace(self, scaling=scaling, kind=f"{self.kind}{LONG}")

    @property
    def tables(self) -> dict[str, Rope]:
        """The embeddings that it has tables of, by the ends of their names."""
        lengths = (self, self.within(self.scaling.original_max_position + 1))
        keys = {rope.suffix: replace(rope, q_scale=None) for rope in lengths}
        return keys | ({f"{rope.suffix}{OF_QUERIES}": rope for rope in lengths} if self.q_scale else {})

    def rows(self, head_dim: int, interleaved: bool | None = None) -> list[int] | None:
        """Return a checkpoint's row that is in each row of a head; None: all are in their places.

        Args:
            interleaved: as the field, of another kind of checkpoint; None: the field.
        """
        turned = head_dim if self.turned is None else self.turned
        pairs, still = range(turned // 2), range(turned, head_dim)
        apart = self.interleaved if interleaved is None else interleaved
        first, second = [2 * i if apart else i for i in pairs], [2 * i + 1 if apart else turned // 2 + i for i in pairs]
        rows = [*first, *still[: len(still) // 2], *second, *still[len(still) // 2 :]]
        return None if rows == [*range(head_dim)] else rows


@frozen
class Attention:
    """Grouped-query attention with a rotary embedding."""

    kind: ClassVar[str] = "attention"
    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope
    scalar: float
    """Scores are divided by its square root. It is the same in all layers, as sizes are."""
    window: int | None = None
    """The last positions that a row attends to, its own included; None: all."""
    qk_norm: Norm | None = None
    """The norm of each head of Q and K before the rotation."""
    norms_rows: bool = False
    """Whether that norm is of all heads of a row together."""
    biased: bool = False
    """Whether Q, K and V have biases."""
    output_biased: bool = False
    """Whether the output projection has one."""
    sinks: bool = False
    """Whether each head has a score besides those of positions, without a value."""

    @property
    def sees(self) -> int:
        """The positions that a row attends to."""
        return self.window or ALL

    @property
    def slots(self) -> tuple[str, ...]:
        """The slots of its weights."""
        optional = {
            **dict.fromkeys(BIASES, self.biased),
            **dict.fromkeys(ROW_NORMS if self.norms_rows else QK_NORMS, self.qk_norm),
            "bo": self.output_biased,
            "sinks": self.sinks,
        }
        return ("wq", "wk", "wv", "wo", *(slot for slot, there in optional.items() if there))


@frozen
class ShortConv:
    """A gated causal convolution of each channel over the last positions, between two projections."""

    kind: ClassVar[str] = "conv"
    taps: int
    """The positions that a row is computed from, its own included."""

    @property
    def slots(self) -> tuple[str, ...]:
        """The slots of its weights."""
        return ("w_in", "w_taps", "w_out")


Mixer = Attention | ShortConv


@frozen
class FeedForward:
    """A gated feed-forward network."""

    inner: int
    activation: str = SILU
    """One of `ACTIVATIONS`."""

    @property
    def slots(self) -> tuple[str, ...]:
        """The slots of its weights."""
        return ("w_gate", "w_up", "w_down")


@frozen
class Experts:
    """Feed-forward networks of which each row takes some, and a router that chooses them by its logits.

    What they make of a row is summed, each times its share.
    """

    count: int
    top: int
    """The experts that a row takes: those with the largest logits."""
    expert: FeedForward
    normed: bool
    """Whether shares are the softmax of the logits of the chosen experts; if not, of all."""
    router_biased: bool = False
    biased: bool = False
    """Whether the experts' products have biases."""
    by_sigmoid: bool = False
    """Whether a row takes the experts with the largest sums of a logit's sigmoid and a bias (`b_choice`). Shares are
    sigmoids then, with `normed` divided by the sum of those of the chosen."""

    @property
    def activation(self) -> str:
        """The activation of each expert."""
        return self.expert.activation

    @property
    def slots(self) -> tuple[str, ...]:
        """The slots of its weights."""
        biases = ("b_gate_exps", "b_up_exps", "b_down_exps") if self.biased else ()
        optional = {"b_router": self.router_biased, "b_choice": self.by_sigmoid}
        router = ("w_router", *(slot for slot, there in optional.items() if there))
        return (*router, "w_gate_exps", "w_up_exps", "w_down_exps", *biases)


@frozen
class Layer:
    """A mixer of positions and a feed-forward network, each added to the residual stream."""

    mixer: Mixer
    feed_forward: FeedForward | Experts
    norm: Norm = Norm()
    """All norms of the layer but those of heads."""
    sandwich: bool = False
    """Whether the results of the mixer and of the network are normed before they are added."""
    entering: bool = True
    """Whether their inputs are normed."""

    def slots(self) -> Iterator[tuple[str, Shape]]:
        """Yield the slots of its weights with their shapes, in model order."""
        norms: tuple[str, ...] = ("attn_norm_w", "down_norm_w") if self.sandwich else ()
        norms += ("norm_w", "ffn_norm_w") if self.entering else ()
        own = {*norms, *self.mixer.slots, *self.feed_forward.slots}
        yield from ((slot, shape) for slot, shape in LAYER_SLOTS.items() if slot in own)

    def within(self, positions: int) -> Layer:
        """Return the layer with KV caches that have room for this many positions."""
        if not isinstance(self.mixer, Attention):
            return self
        return replace(self, mixer=replace(self.mixer, rope=self.mixer.rope.within(positions)))

    def offset(self, slot: str) -> float:
        """Return the number that is added to the weights of a slot."""
        of_heads = self.mixer.qk_norm if isinstance(self.mixer, Attention) else None
        norms = {**dict.fromkeys(NORMS, self.norm), **dict.fromkeys((*QK_NORMS, *ROW_NORMS), of_heads)}
        norm = norms.get(slot)
        return norm.offset if norm else 0.0


LAYER_SLOTS: Mapping[str, Shape] = {
    "norm_w": ("emb",),
    "wq": ("q_dim", "emb"),
    "wk": ("kv_dim", "emb"),
    "wv": ("kv_dim", "emb"),
    "bq": ("q_dim",),
    "bk": ("kv_dim",),
    "bv": ("kv_dim",),
    "sinks": ("heads",),
    "q_norm_w": ("head_dim",),
    "k_norm_w": ("head_dim",),
    "q_row_norm_w": ("q_dim",),
    "k_row_norm_w": ("kv_dim",),
    "wo": ("emb", "q_dim"),
    "bo": ("emb",),
    "w_in": ("conv_dim", "emb"),
    "w_taps": ("emb", 1, "taps"),
    "w_out": ("emb", "emb"),
    "attn_norm_w": ("emb",),
    "ffn_norm_w": ("emb",),
    "w_gate": ("ffn", "emb"),
    "w_up": ("ffn", "emb"),
    "w_down": ("emb", "ffn"),
    "w_router": ("experts", "emb"),
    "b_router": ("experts",),
    "b_choice": ("experts",),
    "w_gate_exps": ("experts", "expert_ffn", "emb"),
    "w_up_exps": ("experts", "expert_ffn", "emb"),
    "b_gate_exps": ("experts_ffn",),
    "b_up_exps": ("experts_ffn",),
    "w_down_exps": ("experts", "emb", "expert_ffn"),
    "b_down_exps": ("experts_emb",),
    "down_norm_w": ("emb",),
}
"""The slots of a layer's weights with their shapes in dimension names, in model order."""


def is_matrix(shape: Shape) -> bool:
    """Return whether a slot of this shape is a matrix of products, or a stack of them, which may be quantised.

    A router is none: its logits decide.
    """
    return len(shape) == (3 if shape[0] == "experts" else 2)


MATRICES = tuple(slot for slot, shape in LAYER_SLOTS.items() if is_matrix(shape))
"""The slots of a layer's matrices."""

ADDED = ("wo", "w_out", "w_down", "w_down_exps")
"""The slots of matrices whose products are added to the residual stream."""

BIASES = ("bq", "bk", "bv")

WIDE_SLOTS = ("b_choice",)
"""The slots of weights that are f32: differences of scores decide."""

ADDENDS = (*BIASES, "bo", "sinks", "b_router", *WIDE_SLOTS, "b_gate_exps", "b_up_exps", "b_down_exps")
"""The slots of what is added to products, and of scores."""

STACKED = tuple(slot for slot in LAYER_SLOTS if slot.endswith("_exps"))
"""The slots that hold all experts of a layer, one after the other."""

NORMS = ("norm_w", "attn_norm_w", "ffn_norm_w", "down_norm_w")
SANDWICH_NORMS = NORMS[1:]
"""The norms around a feed-forward network, as the argument `norms` of its kernel has them."""

QK_NORMS = ("q_norm_w", "k_norm_w")
ROW_NORMS = ("q_row_norm_w", "k_row_norm_w")
TURNED = ("wq", "wk", "bq", "bk", *QK_NORMS, *ROW_NORMS)
"""The slots whose rows the rotary embedding turns, or that go with them."""

EMBEDDING, FINAL_NORM, HEAD = "w_embed", "final_norm_w", "w_vocab"
"""The slots of weights outside of the layers."""

VOCABULARY: Shape = ("vocab", "emb")


@frozen
class Decoder:
    """A decoder-only transformer."""

    vocab: int
    emb: int
    """The hidden size."""
    layers: tuple[Layer, ...]
    eps: float
    """The epsilon of RMS norms."""
    tied: bool
    """Whether the embedding is the LM head, too."""
    norm: Norm = Norm()
    """The last one."""
    embed_scale: float = 1.0
    """A factor of rows of the embedding, but not of the LM head."""
    residual_scale: float = 1.0
    """A factor of all results that are added to the residual stream."""
    logits_scale: float = 1.0
    """A factor of logits."""

    @cached_property
    def _digest(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    def __hash__(self) -> int:
        return self._digest

    @cached_property
    def attentions(self) -> tuple[Attention, ...]:
        """The attention of each layer that has it."""
        return tuple(layer.mixer for layer in self.layers if isinstance(layer.mixer, Attention))

    @property
    def attention(self) -> Attention:
        """A layer's attention: sizes are the same in all (`uneven`)."""
        return self.attentions[0]

    @cached_property
    def taps(self) -> int:
        """The taps of convolutions; 0 without any."""
        return next((layer.mixer.taps for layer in self.kinds if isinstance(layer.mixer, ShortConv)), 0)

    @cached_property
    def experts(self) -> Experts | None:
        """The experts of a layer that has some: sizes are the same in all (`uneven`)."""
        return next((layer.feed_forward for layer in self.kinds if isinstance(layer.feed_forward, Experts)), None)

    @cached_property
    def inner(self) -> int:
        """The inner width of feed-forward networks, or of an expert where all layers have experts."""
        networks = (layer.feed_forward for layer in self.kinds)
        return next(
            (network.inner for network in networks if isinstance(network, FeedForward)),
            self.experts.expert.inner if self.experts else 0,
        )

    @cached_property
    def kinds(self) -> tuple[Layer, ...]:
        """The different layers, in the order in which they come first."""
        return tuple(dict.fromkeys(self.layers))

    @cached_property
    def ropes(self) -> dict[str, Rope]:
        """The rotary embeddings by the ends of their tables' names."""
        return {suffix: rope for mixer in self.attentions for suffix, rope in mixer.rope.tables.items()}

    @property
    def entry_scale(self) -> float:
        """The factor of rows of the embedding that enter our residual stream, which is divided by `residual_scale`."""
        return self.embed_scale / self.residual_scale

    @property
    def stream_eps(self) -> float:
        """The epsilon of norms of our residual stream: with it they have the same results."""
        return self.eps / self.residual_scale**2

    @cached_property
    def short_context(self) -> int | None:
        """The positions up to which some rotary embedding has other factors than for more; None without one."""
        scalings = (mixer.rope.scaling for mixer in self.attentions)
        return min((s.original_max_position for s in scalings if s.long_factors), default=None)

    def within(self, positions: int) -> Decoder:
        """Return the decoder whose KV caches have room for this many positions."""
        if self.short_context is None:
            return self
        return replace(self, layers=tuple(layer.within(positions) for layer in self.layers))

    @property
    def uneven(self) -> str | None:
        """The name of a size that layers have several of; None where none has. Parts have one size for all layers."""
        for name in ("heads", "kv_heads", "head_dim", "scalar", "taps", "inner", "count", "top", "expert"):
            values = {getattr(half, name, None) for kind in self.kinds for half in (kind.mixer, kind.feed_forward)}
            if len(values - {None}) > 1:
                return name
        return None
