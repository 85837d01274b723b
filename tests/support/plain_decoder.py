"""A decoder in plain numpy, written from what the fields of a description mean (`stages.model.decoder`).

It shares no code with parts, kernels or their references, so that a mistake of theirs is not its own. All positions of
a text are computed at once, in float64, or rounded to bf16 where a model in bf16 rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from ml_dtypes import bfloat16

from stages.model.decoder import Attention, Decoder, Experts, FeedForward, Layer, Norm, Rope, ShortConv

Array = np.ndarray


def in_bf16(x: Array) -> Array:
    return x.astype(np.float32).astype(bfloat16).astype(np.float64)


@dataclass(frozen=True)
class Plain:
    """A model of a description."""

    decoder: Decoder
    tensors: Mapping[str, Array]
    """As a checkpoint has them: `layers.N.SLOT`, and by slot outside of the layers."""
    room: int
    """The positions that its KV cache has room for."""
    rounded: Callable[[Array], Array] = lambda x: x

    def logits(self, ids: list[int]) -> Array:
        """Return the logits `[len(ids), vocab]` of every position."""
        described = self.decoder
        x = self.rounded(self.tensor("w_embed")[ids] * described.embed_scale)
        for number, layer in enumerate(described.layers):
            x = self.layer(layer, f"layers.{number}", x)
        x = self.norm(described.norm, self.tensor("final_norm_w"), x)
        return x @ self.tensor("w_embed" if described.tied else "w_vocab").T * described.logits_scale

    def tensor(self, name: str) -> Array:
        return self.tensors[name].astype(np.float64)

    def norm(self, norm: Norm, weight: Array, x: Array) -> Array:
        """Return the norm of the last axis."""
        unit = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.decoder.eps)
        if not norm.once:
            unit = self.rounded(unit)
        return self.rounded(unit * (weight + norm.offset))

    def product(self, x: Array, weight: str, bias: str = "") -> Array:
        out = x @ self.tensor(weight).T
        return self.rounded(out + self.tensor(bias) if bias else out)

    def layer(self, layer: Layer, name: str, x: Array) -> Array:
        def normed(slot: str, values: Array) -> Array:
            return self.norm(layer.norm, self.tensor(f"{name}.{slot}"), values)

        mixer, network = layer.mixer, layer.feed_forward
        inner = normed("norm_w", x) if layer.entering else x
        mixed = self.attention(mixer, name, inner) if isinstance(mixer, Attention) else self.conv(mixer, name, inner)
        scale = self.decoder.residual_scale
        x = self.rounded(x + scale * (normed("attn_norm_w", mixed) if layer.sandwich else mixed))
        inner = normed("ffn_norm_w", x) if layer.entering else x
        run = self.experts if isinstance(network, Experts) else self.network
        added = run(network, name, inner)  # type: ignore[arg-type]
        return self.rounded(x + scale * (normed("down_norm_w", added) if layer.sandwich else added))

    def network(self, network: FeedForward, name: str, x: Array) -> Array:
        gate, up = self.product(x, f"{name}.w_gate"), self.product(x, f"{name}.w_up")
        return self.product(self.active(network.activation, gate, up), f"{name}.w_down")

    def active(self, activation: str, gate: Array, up: Array) -> Array:
        """Return a gated activation."""
        if activation == "swiglu_oai":
            gate, up = np.minimum(gate, 7), np.clip(up, -7, 7) + 1
            return self.rounded(up * self.rounded(gate / (1 + np.exp(-1.702 * gate))))
        if activation == "silu":
            return self.rounded(self.rounded(gate / (1 + np.exp(-gate))) * up)
        assert activation == "gelu_tanh"
        active = gate / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
        return self.rounded(self.rounded(active) * up)

    def experts(self, experts: Experts, name: str, x: Array) -> Array:
        """Return the sum of what the experts with the largest scores make of each row, each times its share."""
        logits = x @ self.tensor(f"{name}.w_router").T
        if experts.router_biased:
            logits = logits + self.tensor(f"{name}.b_router")
        if experts.by_sigmoid:
            powers = 1 / (1 + np.exp(-logits))
            scores, least = powers + self.tensor(f"{name}.b_choice"), 1e-6
        else:
            powers, scores, least = np.exp(logits - logits.max(axis=-1, keepdims=True)), logits, 0.0
        taken = np.argsort(-scores, axis=-1, kind="stable")[:, : experts.top]
        shares = np.take_along_axis(powers, taken, axis=-1)
        if experts.normed or not experts.by_sigmoid:
            shares = shares / ((shares if experts.normed else powers).sum(axis=-1, keepdims=True) + least)

        def weight(which: str, expert: int) -> tuple[Array, Array | float]:
            matrix = self.tensor(f"{name}.w_{which}_exps")[expert]
            bias = self.tensor(f"{name}.b_{which}_exps").reshape(experts.count, -1)[expert] if experts.biased else 0.0
            return matrix, bias

        out = np.zeros_like(x)
        for row, number in np.ndindex(taken.shape):
            (gate, of_gate), (up, of_up), (down, of_down) = (
                weight(which, int(taken[row, number])) for which in ("gate", "up", "down")
            )
            halves = self.rounded(gate @ x[row] + of_gate), self.rounded(up @ x[row] + of_up)
            made = self.rounded(down @ self.active(experts.activation, *halves) + of_down)
            out[row] += shares[row, number] * made
        return self.rounded(out)

    def conv(self, conv: ShortConv, name: str, x: Array) -> Array:
        before, after, x = np.split(self.product(x, f"{name}.w_in"), 3, axis=-1)
        values, taps, out = self.rounded(before * x), self.tensor(f"{name}.w_taps")[:, 0], np.zeros_like(x)
        for back in range(conv.taps):
            out[back:] += values[: len(values) - back] * taps[:, conv.taps - 1 - back]
        return self.product(self.rounded(after * self.rounded(out)), f"{name}.w_out")

    def attention(self, mixer: Attention, name: str, x: Array) -> Array:
        def heads(which: str, count: int) -> Array:
            rows = self.product(x, f"{name}.w{which}", f"{name}.b{which}" if mixer.biased else "")
            return rows.reshape(len(x), count, mixer.head_dim)

        q, k, v = heads("q", mixer.heads), heads("k", mixer.kv_heads), heads("v", mixer.kv_heads)
        if mixer.qk_norm and mixer.norms_rows:
            for which, rows in (("q", q), ("k", k)):
                whole = rows.reshape(len(x), -1)
                whole[:] = self.norm(mixer.qk_norm, self.tensor(f"{name}.{which}_row_norm_w"), whole)
        elif mixer.qk_norm:
            q, k = (self.norm(mixer.qk_norm, self.tensor(f"{name}.{n}_norm_w"), h) for n, h in (("q", q), ("k", k)))
        q, k = (self.rounded(turned(mixer.rope, each, self.room)) for each in (q, k))
        if scale := mixer.rope.q_scale:
            grown = [1 + scale.beta * math.log(1 + position // scale.every) for position in range(len(x))]
            q = self.rounded(q * np.array(grown)[:, None, None])
        group, out = mixer.heads // mixer.kv_heads, np.empty_like(q)
        behind = np.arange(len(x))[:, None] - np.arange(len(x))
        hidden = (behind < 0) | (behind >= (mixer.window or len(x)))
        for head in range(mixer.heads):
            scores = q[:, head] @ k[:, head // group].T / math.sqrt(mixer.scalar)
            scores[hidden] = -np.inf
            # A sink takes a share of the weights, and has no value.
            sink = self.tensor(f"{name}.sinks")[head] if mixer.sinks else -np.inf
            most = np.maximum(scores.max(axis=-1, keepdims=True), sink)
            weights = np.exp(scores - most)
            weights = self.rounded(weights / (weights.sum(axis=-1, keepdims=True) + np.exp(sink - most)))
            out[:, head] = weights @ v[:, head // group]
        bias = f"{name}.bo" if mixer.output_biased else ""
        return self.product(self.rounded(out).reshape(len(x), -1), f"{name}.wo", bias)


def turned(rope: Rope, heads: Array, room: int) -> Array:
    """Return heads `[positions, heads, head_dim]`, in a checkpoint's order, with their pairs turned."""
    width = heads.shape[-1] if rope.turned is None else rope.turned
    angles = np.arange(len(heads))[:, None, None] * frequencies(rope, width, room)
    factor = rope.scaling.attention_factor
    out, cos, sin = heads.copy(), factor * np.cos(angles), factor * np.sin(angles)
    first, second = (
        (slice(0, width, 2), slice(1, width, 2))
        if rope.interleaved
        else (
            slice(0, width // 2),
            slice(width // 2, width),
        )
    )
    out[..., first] = heads[..., first] * cos - heads[..., second] * sin
    out[..., second] = heads[..., second] * cos + heads[..., first] * sin
    return out


def frequencies(rope: Rope, width: int, room: int) -> Array:
    """Return what a position turns each pair by."""
    scaling, each = rope.scaling, [rope.theta ** (-2 * pair / width) for pair in range(width // 2)]
    if scaling.type == "linear":
        return np.array([f / scaling.factor for f in each])
    if scaling.type == "longrope":
        long = scaling.long_factors and room > scaling.original_max_position
        factors = scaling.long_factors if long else scaling.factors
        return np.array([f / by for f, by in zip(each, factors, strict=True)])
    if scaling.type == "yarn":
        return np.array([shared(rope, pair, width) for pair in range(width // 2)])
    if scaling.type == "llama3":

        def stretched(f: float) -> float:
            length = 2 * math.pi / f
            if length < scaling.original_max_position / scaling.high_freq_factor:
                return f
            if length > scaling.original_max_position / scaling.low_freq_factor:
                return f / scaling.factor
            smooth = (scaling.original_max_position / length - scaling.low_freq_factor) / (
                scaling.high_freq_factor - scaling.low_freq_factor
            )
            return (1 - smooth) * f / scaling.factor + smooth * f

        return np.array(list(map(stretched, each)))
    assert scaling.type == "default"
    return np.array(each)


def shared(rope: Rope, pair: int, width: int) -> float:
    """Return the frequency of a pair with YaRN (Peng et al. 2023, section 3.2), between its own and the divided one."""
    scaling, own = rope.scaling, rope.theta ** (-2 * pair / width)
    # The pairs that turn `beta` times in the original context: original f / (2 pi) = beta.
    ends = [
        width * math.log(scaling.original_max_position / (2 * math.pi * beta)) / (2 * math.log(rope.theta))
        for beta in (scaling.beta_fast, scaling.beta_slow)
    ]
    if scaling.truncate:
        ends = [math.floor(ends[0]), math.ceil(ends[1])]
    low, high = max(ends[0], 0), min(ends[1], width - 1)
    divided = min(max((pair - low) / (high - low if high != low else 0.001), 0), 1)
    return divided * own / scaling.factor + (1 - divided) * own
