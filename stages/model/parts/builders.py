"""The parts of a decoder, built from the description of a layer (`stages.model.decoder`).

Names of parts and slots and their order follow mlir-air's example for Llama-3.2-1B (MIT licence,
https://github.com/Xilinx/mlir-air/tree/e972f2942d41123f161276b27f991ef10da2a2e6/programming_examples/llms/llama32_1b),
so that its figures can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from llama_npu2.artifact.plan import FROM_POSITION, LAST_ROW, WHOLE, View
from llama_npu2.frozen import frozen
from stages.kernels.token_attention import of_sequences, together
from stages.kernels.tokens import COUNTS, of_sequence
from stages.kernels.tokens import PREFIX as BATCHED
from stages.model import families
from stages.model.buffers import JOIN
from stages.model.config import ANGLES, PLACED_ANGLES, Config
from stages.model.decoder import (
    BIASES,
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    LAYER_SLOTS,
    OF_QUERIES,
    QK_NORMS,
    ROW_NORMS,
    SANDWICH_NORMS,
    VOCABULARY,
    WIDE_SLOTS,
    Attention,
    Experts,
    Layer,
    Norm,
    ShortConv,
)
from stages.model.part import HISTORY, KV, KV_ROW, Dim, Joined, PartBuilder, Shape, Slot
from stages.weights.scalars import ACTIVATIONS


@frozen
class _Rows:
    """The rows that a part computes: those of a prompt, as matrices, a token's, as a vector, or several tokens'."""

    rows: Dim
    product: str
    """The kernel of its products."""

    def act(self, *width: Dim) -> Shape:
        """Return the shape of an activation."""
        return (self.rows, *width) if self.rows != 1 else width

    @property
    def sizes(self) -> dict[str, Any]:
        """The scalars of its products besides those of the weight."""
        return {"rows": self.rows} if self.rows != 1 else {}

    def kernel(self, of_token: str) -> str:
        """Return the name of the kernel that computes for these tokens what another one does for one."""
        return of_token if self.rows == 1 else f"{BATCHED}{of_token}"

    def project(self, b: PartBuilder, x: str, weight: str, out: str, cols: Dim, out_cols: Dim, **bias: str) -> None:
        """Launch a product. `bias`: the slot of the bias, if there is one."""
        kernel = f"{self.product}_bias" if bias else self.product
        b.launch(kernel, {"x": x, "weight": weight, "out": out, **bias}, cols=cols, out_cols=out_cols, **self.sizes)


_MIXED = "attn_out.{turn}"
"""The buffer of what a device program mixes. One program reads that of a layer and writes that of the next."""

_PROMPT = _Rows("seq", "gemm")
_TOKEN = _Rows(1, "gemv")
_TOKENS = _Rows("seq", f"{BATCHED}gemv")


@frozen
class Described:
    """What a part is built from."""

    config: Config
    layer: Layer
    """The layer; for a part outside of the layers any one."""

    def weight(self, b: PartBuilder, name: str) -> str:
        """Add the slot of a layer's weight."""
        form = "f32" if name in WIDE_SLOTS else "bf16"
        return b.slot(name, LAYER_SLOTS[name], "weight", format=form, buffer=families.tensor(self.config, name))

    def joined_norms(self, b: PartBuilder, name: str, size: Dim, norms: tuple[str, ...]) -> str:
        """Add a slot of weights of norms that lie one after the other, because a channel queues few transfers."""
        return b.slot(name, (size,), "weight", buffer=self.tensors(norms), joins=norms)

    def joined(self) -> tuple[Joined, Joined]:
        """Return the weights that parts may have as one slot: Q, K and V; gate and up."""
        return (
            self._joined("w_qkv", "qkv_dim", {"wq": 0, "wk": "q_dim", "wv": "qk_dim"}),
            self._joined("w_gate_up", "ffn_pair_dim", {"w_gate": 0, "w_up": 1}, paired=True),
        )

    def _joined(self, name: str, rows: str, parts: dict[str, Dim], paired: bool = False) -> Joined:
        slot = Slot(name, (rows, "emb"), "weight", buffer=self.tensors(parts), joins=tuple(parts))
        return Joined(slot, parts, paired)

    def tensors(self, slots: Iterable[str]) -> str:
        """Return the name of the buffer with the rows of several weights of a layer."""
        return JOIN.join(families.tensor(self.config, slot) for slot in slots)

    @property
    def mixer(self) -> Attention:
        """The layer's attention."""
        assert isinstance(self.layer.mixer, Attention)
        return self.layer.mixer

    def mixed(self, buffer: str = "attn_out") -> tuple[str, str, str]:
        """Return the slot of the mixer's last projection, and width and buffer of what that takes.

        `buffer`: that of attention.
        """
        return ("wo", "q_dim", buffer) if isinstance(self.layer.mixer, Attention) else ("w_out", "emb", _MIXED)

    @property
    def attention(self) -> dict[str, Dim | float]:
        """The scalars of attention."""
        sizes: dict[str, Dim | float] = {"heads": "heads", "kv_heads": "kv_heads", "head_dim": "head_dim"}
        return {**sizes, "scalar": "score_scalar", "sees": self.mixer.sees}

    @property
    def activation(self) -> dict[str, Dim | float]:
        """The scalar of a gated activation."""
        return {"activation": ACTIVATIONS.index(self.layer.feed_forward.activation)}


def _interleaved(b: PartBuilder, role: str, view: View = WHOLE) -> str:
    """Add the NPU's KV cache: a row per position, K and V of a head together, so that attention needs one stream."""
    name = of_sequence("kv", view.sequence)
    return b.slot(name, ("max_seq", *KV_ROW), role, buffer="kv_cache.{layer}", view=view, keeps=KV)


def _attend(d: Described, b: PartBuilder, kernel: str, args: dict[str, str], **scalars: Dim) -> None:
    """Launch attention, with sinks where the layer has some."""
    sinks = {"sinks": d.weight(b, "sinks")} if d.mixer.sinks else {}
    b.launch(f"{kernel}_sinks" if sinks else kernel, args | sinks, pos="pos", **d.attention, **scalars)


def _window(b: PartBuilder, sequence: int = 0) -> str:
    """Add the first rows of the NPU's KV cache: those of a context bucket."""
    name, view = of_sequence("kv_window", sequence), View(sequence=sequence)
    return b.slot(name, ("window", *KV_ROW), "input", buffer="kv_cache.{layer}", view=view, keeps=KV)


def _norm_qkv_rope(
    d: Described, rows: _Rows, interleave: bool = False, quantises: bool = False, role: str = "output"
) -> PartBuilder:
    """Build the RMS norm, the Q/K/V projections and the rotary embedding of Q and K.

    Args:
        role: that of the slots of the results.
        interleave: Whether K and V are written to rows of the interleaved cache. Then each query has its position,
            which comes with its angles.
        quantises: Whether these rows have scales, so that V's product cannot write them.
    """
    b = PartBuilder()
    x = b.slot("x_in", rows.act("emb"), "input", buffer="x.{turn}")
    norm_w, normed = _normed_input(d, b, rows, "norm_w", "normed", x)
    direct = interleave and not quantises
    products = {which: _projection(d, b, rows, which, direct, role) for which in _WIDTHS}
    names = ROW_NORMS if d.mixer.norms_rows else QK_NORMS
    norms = {name[0]: d.weight(b, name) for name in names} if d.mixer.qk_norm else {}
    tables = _angles(d, b, interleave)
    v = products["v"]["out"]
    kv = _interleaved(b, "output", FROM_POSITION) if quantises else v
    q_roped = b.slot("q_roped", rows.act("placed_heads_dim" if interleave else "q_dim"), role)
    k_roped = kv if interleave else b.slot("k_roped", rows.act("kv_dim"), role)
    _norm_input(d, b, rows, x, norm_w, normed)
    for which, args in products.items():
        if which == "v" and direct:
            product, sizes = "gemm_kv_bias" if d.mixer.biased else "gemm_kv", {"cols": "emb", "out_cols": "kv_dim"}
            b.launch(product, {"x": normed, **args}, rows=rows.rows, pos="pos", head_dim="head_dim", **sizes)
        else:
            rows.project(b, normed, cols="emb", out_cols=_WIDTHS[which], **args)
    for which, out in (("q", q_roped), ("k", k_roped)):
        args = {"x": products[which]["out"], "table": tables[which], "out": out}
        _rotate(d, b, rows, which, args, norms.get(which, ""), interleave)
    if quantises:
        sizes = {"heads": "kv_heads", "head_dim": "head_dim"}
        b.launch("append_v", {"x": v, "out": kv}, rows=rows.rows, pos="pos", **sizes)
    return b


_WIDTHS = {"q": "q_dim", "k": "kv_dim", "v": "kv_dim"}


def _projection(d: Described, b: PartBuilder, rows: _Rows, which: str, direct: bool, role: str) -> dict[str, str]:
    """Add the slots of the projection of Q, K or V. Return its product's arguments besides the input.

    `direct`: whether V goes straight into the cache. `role`: that of V, which is final.
    """
    weight = d.weight(b, f"w{which}")
    bias = {"bias": d.weight(b, f"b{which}")} if d.mixer.biased else {}
    if which == "v" and direct:
        out = _interleaved(b, "output", FROM_POSITION)
    else:
        out = b.slot(which, rows.act(_WIDTHS[which]), role if which == "v" else "scratch")
    return {"weight": weight, "out": out, **bias}


def _angles(d: Described, b: PartBuilder, interleave: bool) -> dict[str, str]:
    """Add the tables of angles of Q and K. Return their slots."""
    buffer = f"{PLACED_ANGLES if interleave else ANGLES}{{rope}}"
    buffers = {"q": f"{buffer}{OF_QUERIES if d.mixer.rope.q_scale else ''}", "k": buffer}
    shape = ("max_seq", "placed_head_dim" if interleave else "head_dim")
    return {which: b.slot(f"lut_{which}", shape, "table", format="f32", buffer=buffers[which]) for which in buffers}


def _rotate(
    d: Described, b: PartBuilder, rows: _Rows, which: str, args: dict[str, str], norm_w: str, interleave: bool
) -> None:
    """Launch the rotary embedding of Q or K, after or with the norm if there is one.

    Args:
        args: the rotary embedding's, as they are without a norm.
        norm_w: the slot of the norm's weight, if there is a norm.
    """
    kernel, norm = {"q": "rope_q", "k": "rope_kv"}[which] if interleave else "rope", d.mixer.qk_norm
    scalars: dict[str, Dim | float] = {}
    if norm and d.mixer.norms_rows:
        args |= {"x": _normed_row(b, rows, norm, which, args["x"], norm_w)}
    elif norm:
        kernel, args, scalars = f"norm_{kernel}", args | {"weight": norm_w}, norm.scalars_of_results
    heads = {"q": "heads", "k": "kv_heads"}[which]
    b.launch(kernel, args, rows=rows.rows, pos="pos", heads=heads, head_dim="head_dim", **scalars)


def _normed_input(d: Described, b: PartBuilder, rows: _Rows, weight: str, name: str, x: str) -> tuple[str, str]:
    """Add the slots of the norm of an input. Return that of its weight and its own; without a norm nothing and `x`."""
    if not d.layer.entering:
        return "", x
    return d.weight(b, weight), b.slot(name, rows.act("emb"), "scratch")


def _norm_input(d: Described, b: PartBuilder, rows: _Rows, x: str, weight: str, normed: str) -> None:
    """Launch the norm of an input, if it has one. `weight`, `normed`: from `_normed_input`."""
    if weight:
        args = {"x": x, "weight": weight, "out": normed}
        b.launch("rms_norm", args, rows=rows.rows, cols="emb", **d.layer.norm.scalars)


def _normed_row(b: PartBuilder, rows: _Rows, norm: Norm, which: str, x: str, weight: str) -> str:
    """Add the norm of all heads of Q or K together. Return its slot."""
    normed = b.slot(f"{which}_normed", rows.act(_WIDTHS[which]), "scratch")
    args = {"x": x, "weight": weight, "out": normed}
    b.launch("rms_norm", args, rows=rows.rows, cols=_WIDTHS[which], **norm.scalars_of_results)
    return normed


def _norm_conv(d: Described, rows: _Rows) -> PartBuilder:
    """Build the RMS norm, the product with B, C and x, and the convolution."""
    b = PartBuilder()
    x = b.slot("x_in", rows.act("emb"), "input", buffer="x.{turn}")
    norm_w, normed = _normed_input(d, b, rows, "norm_w", "normed", x)
    w_in = d.weight(b, "w_in")
    bcx = b.slot("bcx", rows.act("conv_dim"), "scratch")
    _norm_input(d, b, rows, x, norm_w, normed)
    rows.project(b, normed, w_in, bcx, "emb", "conv_dim")
    _convolve(d, b, rows, bcx)
    return b


def _convolve(d: Described, b: PartBuilder, rows: _Rows, bcx: str) -> None:
    """Add the convolution of rows of B, C and x, with its history."""
    taps = d.weight(b, "w_taps")
    history = b.slot("history", ("history", "emb"), "output", buffer="history.{layer}", keeps=HISTORY)
    out = b.slot("mixed", rows.act("emb"), "output", buffer=_MIXED)
    args = {"bcx": bcx, "weight": taps, "history": history, "out": out}
    b.launch("short_conv", args, rows=rows.rows, pos="pos", cols="emb", taps="taps")


def _o_ffn(d: Described, rows: _Rows, paired: bool = False) -> PartBuilder:
    """Build output projection, residual, RMS norm, gated feed-forward network and residual.

    Args:
        paired: Whether gate and up are one product that includes the activation.
    """
    b = PartBuilder()
    res1 = _project_attended(d, b, rows, "scratch")
    if isinstance(d.layer.feed_forward, Experts):
        _experts(d, b, rows, res1, d.layer.feed_forward)
    else:
        swiglu = _normed_swiglu(d, b, rows, res1, "scratch", paired)
        _project_down(d, b, rows, swiglu, res1)
    return b


def _experts(d: Described, b: PartBuilder, rows: _Rows, residual: str, experts: Experts) -> None:
    """Add RMS norm, router, the experts of each row, and the residual."""
    norm_w, normed = _normed_input(d, b, rows, "ffn_norm_w", "normed2", residual)
    _norm_input(d, b, rows, residual, norm_w, normed)
    chosen = b.slot("chosen", rows.act("top"), "scratch", format="i32")
    shares = b.slot("shares", rows.act("top"), "scratch", format="f32")
    router = {"x": normed, "weight": d.weight(b, "w_router"), "chosen": chosen, "shares": shares}
    kernel = "route_sigmoid" if experts.by_sigmoid else "route_bias" if experts.router_biased else "route"
    if kernel != "route":
        router["bias"] = d.weight(b, "b_choice" if experts.by_sigmoid else "b_router")
    b.launch(kernel, router, rows=rows.rows, cols="emb", experts="experts", top="top", normed=int(experts.normed))
    end, sizes = "_bias" if experts.biased else "", rows.sizes | {"experts": "experts", "top": "top"}
    both = {name: d.weight(b, f"w_{name}_exps") for name in ("gate", "up")}
    biases = {f"{name}_bias": d.weight(b, f"b_{name}_exps") for name in both if experts.biased}
    gated = b.slot("gated", rows.act("top_ffn"), "scratch")
    args = {"x": normed, "chosen": chosen, **both, **biases, "out": gated}
    b.launch(f"moe_{rows.product}_silu{end}", args, cols="emb", out_cols="expert_ffn", **sizes, **d.activation)
    args = {"x": gated, "chosen": chosen, "shares": shares, "weight": d.weight(b, "w_down_exps")}
    args |= {"bias": d.weight(b, "b_down_exps")} if experts.biased else {}
    down = b.slot("down", rows.act("emb"), "scratch")
    norm = d.weight(b, "down_norm_w") if d.layer.sandwich else ""
    output = b.slot("output", rows.act("emb"), "output", buffer="x.{next}")
    b.launch(f"moe_{rows.product}{end}", args | {"out": down}, cols="expert_ffn", out_cols="emb", **sizes)
    _add(d, b, rows, residual, down, output, norm)


def _add(d: Described, b: PartBuilder, rows: _Rows, residual: str, product: str, out: str, norm: str) -> None:
    """Add a product, or its norm, to the residual stream. `norm`: the slot of the norm's weight, or nothing."""
    if norm:
        args = {"x": product, "residual": residual, "weight": norm, "out": out}
        b.launch("norm_add", args, rows=rows.rows, cols="emb", **d.layer.norm.scalars_of_results)
    else:
        b.launch("add", {"a": residual, "b": product, "out": out}, rows=rows.rows, cols="emb")


def _project_attended(d: Described, b: PartBuilder, rows: _Rows, role: str) -> str:
    """Add the output projection of the mixer, and the residual. Return the slot of the sum, which has this role."""
    weight, width, buffer = d.mixed()
    attn_out = b.slot("attn_out", rows.act(width), "input", buffer=buffer)
    wo = d.weight(b, weight)
    proj = b.slot("proj", rows.act("emb"), "scratch")
    norm = d.weight(b, "attn_norm_w") if d.layer.sandwich else ""
    x_residual = b.slot("x_residual", rows.act("emb"), "input", buffer="x.{turn}")
    res1 = b.slot("res1", rows.act("emb"), role)
    biased = isinstance(d.layer.mixer, Attention) and d.layer.mixer.output_biased
    rows.project(b, attn_out, wo, proj, width, "emb", **({"bias": d.weight(b, "bo")} if biased else {}))
    _add(d, b, rows, x_residual, proj, res1, norm)
    return res1


def _normed_swiglu(d: Described, b: PartBuilder, rows: _Rows, x: str, role: str, paired: bool) -> str:
    """Add RMS norm, gate, up and the activation. Return the result's slot, which has this role.

    `paired`: as in `_o_ffn`.
    """
    norm_w, normed = _normed_input(d, b, rows, "ffn_norm_w", "normed2", x)
    _, gate_up = d.joined()
    if paired:
        b.slots.append(gate_up.slot)
    else:
        w_gate = d.weight(b, "w_gate")
        gate = b.slot("gate", rows.act("ffn"), "scratch")
        w_up = d.weight(b, "w_up")
        up = b.slot("up", rows.act("ffn"), "scratch")
    swiglu = b.slot("swiglu", rows.act("ffn"), role)
    _norm_input(d, b, rows, x, norm_w, normed)
    if paired:
        args = {"x": normed, "weight": gate_up.slot.name, "out": swiglu}
        b.launch("gemm_swiglu", args, rows=rows.rows, cols="emb", out_cols="ffn", **d.activation)
    else:
        rows.project(b, normed, w_gate, gate, "emb", "ffn")
        rows.project(b, normed, w_up, up, "emb", "ffn")
        args = {"gate": gate, "up": up, "out": swiglu}
        b.launch("silu_and_mul", args, rows=rows.rows, cols="ffn", **d.activation)
    return swiglu


def _project_down(d: Described, b: PartBuilder, rows: _Rows, swiglu: str, residual: str) -> None:
    """Add the down projection and the residual."""
    w_down = d.weight(b, "w_down")
    down = b.slot("down", rows.act("emb"), "scratch")
    norm = d.weight(b, "down_norm_w") if d.layer.sandwich else ""
    output = b.slot("output", rows.act("emb"), "output", buffer="x.{next}")
    rows.project(b, swiglu, w_down, down, "ffn", "emb")
    _add(d, b, rows, residual, down, output, norm)


def _o_add(d: Described) -> PartBuilder:
    """Build the first third of a prompt's `o_ffn`."""
    b = PartBuilder()
    _project_attended(d, b, _PROMPT, "output")
    return b


def _gate_up(d: Described, paired: bool = False) -> PartBuilder:
    """Build the second third of a prompt's `o_ffn`."""
    b = PartBuilder()
    x = b.slot("res1", _PROMPT.act("emb"), "input")
    _normed_swiglu(d, b, _PROMPT, x, "output", paired)
    return b


def _down_add(d: Described) -> PartBuilder:
    """Build the last third of a prompt's `o_ffn`."""
    b = PartBuilder()
    swiglu = b.slot("swiglu", _PROMPT.act("ffn"), "input")
    residual = b.slot("res1", _PROMPT.act("emb"), "input")
    _project_down(d, b, _PROMPT, swiglu, residual)
    return b


def _residual_rows(b: PartBuilder, rows: _Rows, name: str = "x_in") -> str:
    """Add tokens' rows between layers."""
    return b.slot(name, rows.act("emb"), "input", buffer="x.{turn}")


def _norm_qkv_gemv(d: Described, rows: _Rows) -> PartBuilder:
    """Build the RMS norm of tokens' rows with Q, K and V, as one product."""
    b = PartBuilder()
    x, norm_w = _residual_rows(b, rows), d.weight(b, "norm_w")
    joined, _ = d.joined()
    b.slots.append(joined.slot)
    args = {"x": x, "norm": norm_w, "weight": joined.slot.name}
    if d.mixer.biased:
        args["bias"] = b.slot("b_qkv", ("qkv_dim",), "weight", buffer=d.tensors(BIASES), joins=BIASES)
    args["out"] = b.slot("qkv", rows.act("qkv_dim"), "output")
    kernel = rows.kernel("norm_gemv_bias" if d.mixer.biased else "norm_gemv")
    b.launch(kernel, args, cols="emb", out_cols="qkv_dim", **rows.sizes, **d.layer.norm.scalars)
    return b


def _norm_conv_gemv(d: Described, rows: _Rows) -> PartBuilder:
    """Build the RMS norm of tokens' rows with the product that makes B, C and x, and the convolution."""
    b = PartBuilder()
    x, norm_w, w_in = _residual_rows(b, rows), d.weight(b, "norm_w"), d.weight(b, "w_in")
    bcx = b.slot("bcx", rows.act("conv_dim"), "scratch")
    args = {"x": x, "norm": norm_w, "weight": w_in, "out": bcx}
    sizes = {"cols": "emb", "out_cols": "conv_dim", **rows.sizes}
    b.launch(rows.kernel("norm_gemv"), args, **sizes, **d.layer.norm.scalars)
    _convolve(d, b, rows, bcx)
    return b


def _o_ffn_gemvs(d: Described, rows: _Rows, fused: bool = False, split: bool = False) -> PartBuilder:
    """Build what follows tokens' attention, as three products.

    They are output projection and residual; RMS norm, gate, up and activation; down and residual.

    Args:
        fused: Whether everything from the norm on is one launch.
        split: Whether it is two instead, of the weights for one launch; not in a sandwich.
    """
    b = PartBuilder()
    weight, width, buffer = d.mixed(_MIXED)
    attn_out = b.slot("attn_out", rows.act(width), "input", buffer=buffer)
    wo, x = d.weight(b, weight), _residual_rows(b, rows, "x_residual")
    if fused and d.layer.sandwich:
        proj = b.slot("proj", rows.act("emb"), "scratch")
        rows.project(b, attn_out, wo, proj, width, "emb")
        _feed_forward(d, b, rows, "sandwich_feed_forward", x=proj, residual=x)
        return b
    res1 = b.slot("res1", rows.act("emb"), "scratch")
    _add_product(d, b, rows, attn_out, wo, x, res1, width, norm="attn_norm_w", product="proj")
    if fused and not split:
        _feed_forward(d, b, rows, "feed_forward", x=res1)
        return b
    norm_w = d.weight(b, "ffn_norm_w")
    _, gate_up = d.joined()
    b.slots.append(gate_up.slot)
    swiglu = b.slot("swiglu", rows.act("ffn"), "scratch")
    w_down = d.weight(b, "w_down")
    output = b.slot("output", rows.act("emb"), "output", buffer="x.{next}")
    args = {"x": res1, "norm": norm_w, "weight": gate_up.slot.name, "out": swiglu}
    sizes = {"cols": "emb", "out_cols": "ffn", **rows.sizes}
    kernel = rows.kernel("norm_shared_swiglu" if split else "norm_gemv_swiglu")
    b.launch(kernel, args, **sizes, **d.layer.norm.scalars, **d.activation)
    if split:
        args = {"x": swiglu, "weight": w_down, "residual": res1, "out": output}
        b.launch(rows.kernel("shared_gemv_add"), args, cols="ffn", out_cols="emb", **rows.sizes)
        return b
    _add_product(d, b, rows, swiglu, w_down, res1, output, "ffn", norm="down_norm_w", product="down")
    return b


def _add_product(
    d: Described,
    b: PartBuilder,
    rows: _Rows,
    x: str,
    weight: str,
    residual: str,
    out: str,
    cols: Dim,
    norm: str,
    product: str,
) -> None:
    """Add a product, or its norm, to the residual stream. `norm`, `product`: slots that are added for the latter."""
    if d.layer.sandwich:
        norm_w, between = d.weight(b, norm), b.slot(product, rows.act("emb"), "scratch")
        rows.project(b, x, weight, between, cols, "emb")
        _add(d, b, rows, residual, between, out, norm_w)
    else:
        args = {"x": x, "weight": weight, "residual": residual, "out": out}
        b.launch(rows.kernel("gemv_add"), args, cols=cols, out_cols="emb", **rows.sizes)


def _feed_forward(d: Described, b: PartBuilder, rows: _Rows, kernel: str, **read: str) -> None:
    """Add a feed-forward network as one launch. `read`: the slots of activations that it reads."""
    if d.layer.sandwich:
        args = {"norms": d.joined_norms(b, "ffn_norms_w", "ffn_norms_dim", SANDWICH_NORMS)}
    else:
        args = {"norm": d.weight(b, "ffn_norm_w")}
    _, gate_up = d.joined()
    b.slots.append(gate_up.slot)
    args |= {"gate_up": gate_up.slot.name, "down": d.weight(b, "w_down")}
    args["out"] = b.slot("output", rows.act("emb"), "output", buffer="x.{next}")
    sizes = {"cols": "emb", "ffn": "ffn", **rows.sizes}
    b.launch(rows.kernel(kernel), args | read, **sizes, **d.layer.norm.scalars, **d.activation)


def _flash_attn(d: Described) -> PartBuilder:
    """Build causal attention of a prompt's rows over the first positions of the interleaved cache.

    The cache has their K and V already.
    """
    b = PartBuilder()
    q = b.slot("q", ("seq", "placed_heads_dim"), "input", buffer="q_roped")
    kv = _window(b)
    out = b.slot("attn_out", ("seq", "q_dim"), "output")
    _attend(d, b, "flash_attention", {"q": q, "kv": kv, "out": out}, seq="seq", window="window")
    return b


def _new_rows(b: PartBuilder, rows: _Rows) -> tuple[str, dict[str, str]]:
    """Add the slots of new queries, and of the keys and values that are appended to a cache."""
    q = b.slot("q", rows.act("q_dim"), "input", buffer="q_roped")
    k = b.slot("k", rows.act("kv_dim"), "input", buffer="k_roped")
    return q, {"k": k, "v": b.slot("v", rows.act("kv_dim"), "input")}


def _flash_attn_panels(d: Described) -> PartBuilder:
    """Build a part that appends a prompt's rows of K and V to a cache in panels, then attends over it."""
    b = PartBuilder()
    q, new = _new_rows(b, _PROMPT)
    _attend_panels(d, b, _PROMPT, "flash_attention_panels", q, new, seq="seq")
    return b


def _norm_attn_panels(d: Described) -> PartBuilder:
    """Build all of a token's attention but the output projection, over a cache in panels."""
    b = _norm_qkv_rope(d, _TOKEN, role="scratch")
    _attend_panels(d, b, _TOKEN, "decode_attention_panels", "q_roped", {"k": "k_roped", "v": "v"})
    return b


def _attend_panels(
    d: Described, b: PartBuilder, rows: _Rows, kernel: str, q: str, new: dict[str, str], **scalars: Dim
) -> None:
    """Append new rows of K and V to a cache in panels, which the host's attention streams, then attend over it."""
    block = ("kv_blocks", "kv_heads", "kv_block_positions")
    cache = {
        f"{which}_panels": b.slot(
            f"{which}_cache", (*block, width), "output", buffer=f"{which}_cache.{{layer}}", keeps=KV
        )
        for which, width in (("k", "head_dim"), ("v", "padded_head_dim"))
    }
    out = b.slot("attn_out", rows.act("q_dim"), "output")
    b.launch("append_kv_panels", new | cache, rows=rows.rows, pos="pos", kv_heads="kv_heads", head_dim="head_dim")
    _attend(d, b, kernel, {"q": q, **cache, "out": out}, **scalars)


def _decode_attn_kv(d: Described) -> PartBuilder:
    """Build a part that appends a token's K and V to the interleaved cache, then attends over it."""
    b = PartBuilder()
    q, new = _new_rows(b, _TOKEN)
    kv = _interleaved(b, "output")
    out = b.slot("attn_out", ("q_dim",), "output")
    b.launch("append_kv", {**new, "kv": kv}, pos="pos", kv_heads="kv_heads", head_dim="head_dim")
    _attend(d, b, "decode_attention_kv", {"q": q, "kv": kv, "out": out})
    return b


def _token_attn(d: Described, rows: _Rows, sequences: int = 1) -> PartBuilder:
    """Build a part that rotates tokens' Q and K, stores K and V, and attends, as one launch.

    It writes K and V to the interleaved cache, and attends over the cache's first positions and them. The position
    comes with the rotation's angles.

    Args:
        sequences: how many sequences the tokens are of, if each has a token, a cache and a position of its own. A
            launch attends for some of them.
    """
    b = PartBuilder()
    args = {"x": b.slot("qkv", rows.act("qkv_dim"), "input")}
    kernel, scalars, norms = "token_attention", d.attention, dict[str, str]()
    if norm := d.mixer.qk_norm:
        kernel, scalars = f"norm_{kernel}", scalars | norm.scalars_of_results
    own = [_of_own_sequence(b, sequence) for sequence in range(sequences)]
    args["out"] = b.slot("attended", rows.act("q_dim"), "output", buffer=_MIXED)
    if norm and (rows.rows == 1 or sequences > 1):
        norms = {f"{which}_norm": d.weight(b, f"{which}_norm_w") for which in ("q", "k")}
    elif norm:
        norms = {"qk_norm": d.joined_norms(b, "qk_norm_w", "qk_norms_dim", QK_NORMS)}
    places = {"window": "window", "pos": "pos"}
    if sequences == 1:
        b.launch(rows.kernel(kernel), args | norms | own[0], **places, **rows.sizes, **scalars)
        return b
    count = together(sequences)
    for first in range(0, sequences, count):
        of_launch = enumerate(own[first : first + count])
        of_each = {of_sequence(arg, number): slot for number, slots in of_launch for arg, slot in slots.items()}
        which = {"sequences": sequences, "sequence": first}
        b.launch(f"{of_sequences(count)}{kernel}", args | norms | of_each, **places, **which, **scalars)
    return b


def _of_own_sequence(b: PartBuilder, sequence: int) -> dict[str, str]:
    """Add what a token's attention has of its sequence alone, and return its arguments (`token_attention.OF_EACH`)."""
    view = FROM_POSITION._replace(sequence=sequence)
    angles = {"format": "f32", "buffer": f"{PLACED_ANGLES}{{rope}}", "view": View(sequence=sequence)}
    table = b.slot(of_sequence("lut", sequence), ("max_seq", "placed_head_dim"), "table", **angles)
    return {"table": table, "kv": _window(b, sequence), "row": _interleaved(b, "output", view)}


def _embed(d: Described, kernel: str) -> PartBuilder:
    b = PartBuilder()
    args = {
        "tokens": b.slot("tokens", ("seq",), "input", format="i32"),
        "weight": b.slot(EMBEDDING, VOCABULARY, "weight", buffer=families.tensor(d.config, EMBEDDING)),
        "out": b.slot("x", ("seq", "emb"), "output", buffer="x.{turn}"),
    }
    b.launch(kernel, args, rows="seq", cols="emb", vocab="vocab", scale=d.config.decoder.entry_scale)
    return b


def _final_norm(d: Described) -> PartBuilder:
    """Build the last RMS norm, of the row whose logits are computed."""
    b = PartBuilder()
    args = {
        "x": b.slot("x", ("emb",), "input", buffer="x.{turn}", view=LAST_ROW),
        "weight": _last_norm(d, b),
        "out": b.slot("normed", ("emb",), "output", buffer="final_normed"),
    }
    b.launch("rms_norm", args, rows=1, cols="emb", **d.config.decoder.norm.scalars)
    return b


def _final_norm_rows(d: Described) -> PartBuilder:
    """Build the last RMS norm of the rows whose logits are computed, which are the first of the layers' output."""
    b = PartBuilder()
    args = {
        "x": b.slot("x", ("seq", "emb"), "input", buffer="x.{turn}"),
        "weight": _last_norm(d, b),
        "out": b.slot("normed", ("seq", "emb"), "output", buffer=_NORMED_ROWS),
    }
    b.launch("rms_norm", args, rows="seq", cols="emb", **d.config.decoder.norm.scalars)
    return b


_NORMED_ROWS = "final_normed_rows"


def _last_norm(d: Described, b: PartBuilder) -> str:
    return b.slot(FINAL_NORM, ("emb",), "weight", buffer=families.tensor(d.config, FINAL_NORM))


def _vocabulary(d: Described, b: PartBuilder, x: str, rows: str = "") -> dict[str, str]:
    """Add the slots of the LM head, and return its arguments. Logits stay f32: rounding them to bf16 makes ties.

    Args:
        x: the slot of what is multiplied.
        rows: its number of rows, if it is no single one.
    """
    weight = b.slot(HEAD, VOCABULARY, "weight", buffer=families.tensor(d.config, HEAD))
    out = _logits(b, "logits", "output", rows, scaled=d.config.decoder.logits_scale == 1)
    return {"x": x, "weight": weight, "out": out}


def _logits(b: PartBuilder, name: str, role: str, rows: str, scaled: bool) -> str:
    """Add a slot of logits, of a row or of `rows`, as they are or before they are scaled; return its name."""
    shape, buffer = ((rows, "vocab"), "row_logits") if rows else (("vocab",), "logits")
    return b.slot(name, shape, role, format="f32", buffer=buffer if scaled else f"unscaled_{buffer}")


def _scale_logits(d: Described, rows: str = "") -> PartBuilder:
    """Build the factor of logits, of a row or of `rows`."""
    b = PartBuilder()
    args = {
        "x": _logits(b, "unscaled", "input", rows, scaled=False),
        "out": _logits(b, "logits", "output", rows, scaled=True),
    }
    b.launch("scale", args, rows=rows or 1, cols="vocab", scale=d.config.decoder.logits_scale)
    return b


def _lm_head(d: Described, kernel: str) -> PartBuilder:
    """Build the LM head of one normed row."""
    b = PartBuilder()
    x = b.slot("x", ("emb",), "input", buffer="final_normed")
    b.launch(kernel, _vocabulary(d, b, x), out_cols="vocab", cols="emb")
    return b


def _lm_head_gemm(d: Described) -> PartBuilder:
    """Build the LM head of several normed rows."""
    b = PartBuilder()
    x = b.slot("x", ("seq", "emb"), "input", buffer=_NORMED_ROWS)
    b.launch("gemm_f32", _vocabulary(d, b, x, rows="seq"), rows="seq", cols="emb", out_cols="vocab")
    return b


def _norm_lm_head(d: Described, rows: _Rows) -> PartBuilder:
    """Build the last RMS norm and the LM head of tokens' rows, as one launch."""
    b = PartBuilder()
    x, norm = _residual_rows(b, rows), _last_norm(d, b)
    args = {"norm": norm, **_vocabulary(d, b, x, "" if rows.rows == 1 else str(rows.rows))}
    sizes = {"out_cols": "vocab", "cols": "emb", **rows.sizes}
    b.launch(rows.kernel("norm_gemv_f32"), args, **sizes, **d.config.decoder.norm.scalars)
    return b


Build = Callable[[Described], PartBuilder]

SCALE_LOGITS, SCALE_LOGITS_ROWS = "scale_logits", "scale_logits_rows"
"""The last part of models whose logits have a factor: for a row, and for several."""


def _of_tokens(name: str, build: Callable[..., PartBuilder], **more: bool) -> dict[str, Build]:
    """Return the entries of a part of a token, and of the same of several."""

    def of(rows: _Rows) -> Build:
        return lambda d: build(d, rows, **more)

    return {name: of(_TOKEN), f"{BATCHED}{name}": of(_TOKENS)}


def attention_of(sequences: int) -> str:
    """Return the name of the part that attends for a token of each of so many sequences."""
    return f"sequences_{sequences}_token_attn"


WIDE = f"{BATCHED}wide_o_ffn_gemvs"
"""What `o_ffn_gemvs` is for more tokens than the array has rows of cores."""

BUILDERS: dict[str, Build] = {
    "embed_tokens": lambda d: _embed(d, "embed"),
    "embed_token_rows": lambda d: _embed(d, "embed_rows"),
    "rms_gemms_rope": lambda d: _norm_qkv_rope(d, _PROMPT),
    "rms_gemms_rope_kv": lambda d: _norm_qkv_rope(d, _PROMPT, interleave=True),
    "rms_gemv_rope": lambda d: _norm_qkv_rope(d, _TOKEN),
    "rms_gemm_conv": lambda d: _norm_conv(d, _PROMPT),
    "rms_gemv_conv": lambda d: _norm_conv(d, _TOKEN),
    **_of_tokens("norm_gemv_conv", _norm_conv_gemv),
    "flash_attn": _flash_attn,
    "flash_attn_panels": _flash_attn_panels,
    "rms_gemv_attn_panels": _norm_attn_panels,
    "decode_attn_kv": _decode_attn_kv,
    **_of_tokens("norm_qkv_gemv", _norm_qkv_gemv),
    **_of_tokens("token_attn", _token_attn),
    **{attention_of(count): partial(_token_attn, rows=_TOKENS, sequences=count) for count in COUNTS},
    **_of_tokens("o_ffn_gemvs", _o_ffn_gemvs),
    WIDE: lambda d: _o_ffn_gemvs(d, _TOKENS),
    "o_ffn": lambda d: _o_ffn(d, _PROMPT),
    "o_add": _o_add,
    "gate_up": _gate_up,
    "down_add": _down_add,
    "o_gemv_ffn": lambda d: _o_ffn(d, _TOKEN),
    "final_norm": _final_norm,
    "lm_head_gemv": lambda d: _lm_head(d, "gemv_f32"),
    **_of_tokens("norm_lm_head", _norm_lm_head),
    SCALE_LOGITS: _scale_logits,
    "final_norm_rows": _final_norm_rows,
    "lm_head_gemm": _lm_head_gemm,
    SCALE_LOGITS_ROWS: lambda d: _scale_logits(d, rows="seq"),
    # On the host, if the vocabulary matrix is in the layout for the array.
    "lm_head_rows": lambda d: _lm_head(d, "gemv_rows_f32"),
}

PAIRED: dict[str, Build] = {
    "o_ffn": lambda d: _o_ffn(d, _PROMPT, paired=True),
    "gate_up": lambda d: _gate_up(d, paired=True),
}
"""Parts of a prompt in place of those of `BUILDERS` if the host unpacks gate and up for it into one matrix, in which
eight rows of each alternate."""

SHARED = ("w_gate", "w_up", "w_down")
"""Slots of all weights of the feed-forward network."""

FUSED: dict[str, Build] = {
    **_of_tokens("o_ffn_gemvs", _o_ffn_gemvs, fused=True),
    WIDE: lambda d: _o_ffn_gemvs(d, _TOKENS, fused=True),
}
"""Parts of tokens in place of those of `BUILDERS` if the cores of a launch can share the weights of `SHARED`."""

SPLIT: dict[str, Build] = {WIDE: lambda d: _o_ffn_gemvs(d, _TOKENS, fused=True, split=True)}
"""Parts in place of those of `FUSED` if the cores' shares of these weights divide evenly."""

QUANTISED: dict[str, Build] = {
    "rms_gemms_rope_kv": lambda d: _norm_qkv_rope(d, _PROMPT, interleave=True, quantises=True),
}
"""Parts of a prompt in place of those of `BUILDERS` if rows of a KV cache have scales."""

MIXES: dict[str, str] = {
    **dict.fromkeys(("rms_gemms_rope", "rms_gemms_rope_kv", "rms_gemv_rope", "norm_qkv_gemv"), Attention.kind),
    **dict.fromkeys(("flash_attn", "flash_attn_panels"), Attention.kind),
    **dict.fromkeys(("rms_gemv_attn_panels", "decode_attn_kv", "token_attn"), Attention.kind),
    **dict.fromkeys(("rms_gemm_conv", "rms_gemv_conv", "norm_gemv_conv"), ShortConv.kind),
    **dict.fromkeys((f"{BATCHED}norm_qkv_gemv", f"{BATCHED}token_attn"), Attention.kind),
    **dict.fromkeys(map(attention_of, COUNTS), Attention.kind),
    f"{BATCHED}norm_gemv_conv": ShortConv.kind,
}
"""Parts that only layers with one kind of mixer have -> that kind."""
