"""The parts of Llama (Touvron et al. 2023, Grattafiori et al. 2024).

Names of parts and slots and their order follow mlir-air's example for Llama-3.2-1B (MIT licence,
https://github.com/Xilinx/mlir-air/tree/e972f2942d41123f161276b27f991ef10da2a2e6/programming_examples/llms/llama32_1b),
so that its figures can be compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llama_npu2.artifact.plan import FROM_POSITION, LAST_ROW, WHOLE
from stages.model.buffers import JOIN
from stages.model.families.llama import EMBED, FINAL_NORM, VOCABULARY, WEIGHTS
from stages.model.part import Dim, Joined, Part, PartBuilder, Shape, Slot
from stages.model.policy import EMBEDDING


@dataclass(frozen=True)
class _Rows:
    """The rows that a part computes: those of a prompt, as matrices, or a token's, as a vector."""

    rows: Dim
    product: str
    """The kernel of its products."""

    def act(self, *width: Dim) -> Shape:
        """Return the shape of an activation."""
        return (self.rows, *width) if self.rows != 1 else width

    def project(self, b: PartBuilder, x: str, weight: str, out: str, cols: Dim, out_cols: Dim) -> None:
        """Launch a product."""
        rows: dict[str, Any] = {"rows": self.rows} if self.product == "gemm" else {}
        b.launch(self.product, {"x": x, "weight": weight, "out": out}, cols=cols, out_cols=out_cols, **rows)


_PROMPT = _Rows("seq", "gemm")
_TOKEN = _Rows(1, "gemv")


def _weight(b: PartBuilder, name: str) -> str:
    tensor, shape = WEIGHTS[name]
    return b.slot(name, shape, "weight", buffer=tensor)


def _joined(name: str, rows: str, parts: dict[str, Dim], paired: bool = False) -> Joined:
    tensors = JOIN.join(WEIGHTS[part][0] for part in parts)
    return Joined(Slot(name, (rows, "emb"), "weight", buffer=tensors, joins=tuple(parts)), parts, paired)


JOINED = (
    _joined("w_qkv", "qkv_dim", {"wq": 0, "wk": "q_dim", "wv": "qk_dim"}),
    _joined("w_gate_up", "ffn_pair_dim", {"w_gate": 0, "w_up": 1}, paired=True),
)
_QKV, _GATE_UP = (joined.slot for joined in JOINED)


def _interleaved(b: PartBuilder, role: str, view: str = WHOLE) -> str:
    """Add the NPU's KV cache: a row per position, K and V of a head together, so that attention needs one stream."""
    return b.slot("kv", ("max_seq", "kv_pair_dim"), role, buffer="kv_cache.{layer}", view=view, keeps=True)


def _window(b: PartBuilder) -> str:
    """Add the first rows of the NPU's KV cache: those of a context bucket."""
    return b.slot("kv_window", ("window", "kv_pair_dim"), "input", buffer="kv_cache.{layer}", keeps=True)


def _norm_qkv_rope(name: str, rows: _Rows, interleave: bool = False) -> Part:
    """Build the RMS norm, the Q/K/V projections and the rotary embedding of Q and K.

    Args:
        interleave: Whether K and V are written to rows of the interleaved cache. Then each query has its position,
            which comes with its angles.
    """
    b = PartBuilder()
    x = b.slot("x_in", rows.act("emb"), "input", buffer="x.{turn}")
    norm_w = _weight(b, "norm_w")
    normed = b.slot("normed", rows.act("emb"), "scratch")
    wq = _weight(b, "wq")
    q = b.slot("q", rows.act("q_dim"), "scratch")
    wk = _weight(b, "wk")
    k = b.slot("k", rows.act("kv_dim"), "scratch")
    wv = _weight(b, "wv")
    v = _interleaved(b, "output", FROM_POSITION) if interleave else b.slot("v", rows.act("kv_dim"), "output")
    table: dict[str, Any] = {"format": "f32", "buffer": "token_table" if interleave else "rope_table"}
    angles = ("max_seq", "placed_head_dim" if interleave else "head_dim")
    lut_q, lut_k = (b.slot(lut, angles, "table", **table) for lut in ("lut_q", "lut_k"))
    q_roped = b.slot("q_roped", rows.act("placed_heads_dim" if interleave else "q_dim"), "output")
    k_roped = v if interleave else b.slot("k_roped", rows.act("kv_dim"), "output")
    b.launch("rms_norm", {"x": x, "weight": norm_w, "out": normed}, rows=rows.rows, cols="emb", eps="eps")
    rows.project(b, normed, wq, q, "emb", "q_dim")
    rows.project(b, normed, wk, k, "emb", "kv_dim")
    if interleave:
        args, sizes = {"x": normed, "weight": wv, "out": v}, {"cols": "emb", "out_cols": "kv_dim"}
        b.launch("gemm_kv", args, rows=rows.rows, pos="pos", head_dim="head_dim", **sizes)
    else:
        rows.project(b, normed, wv, v, "emb", "kv_dim")
    rotate_q, rotate_k = ("rope_q", "rope_kv") if interleave else ("rope", "rope")
    for rope, source, lut, out, heads in (
        (rotate_q, q, lut_q, q_roped, "heads"),
        (rotate_k, k, lut_k, k_roped, "kv_heads"),
    ):
        args = {"x": source, "table": lut, "out": out}
        b.launch(rope, args, rows=rows.rows, pos="pos", heads=heads, head_dim="head_dim")
    return b.build(name)


def _o_ffn(name: str, rows: _Rows, paired: bool = False) -> Part:
    """Build output projection, residual, RMS norm, SwiGLU feed-forward network and residual.

    Args:
        paired: Whether gate and up are one product that includes SwiGLU.
    """
    b = PartBuilder()
    res1 = _project_attended(b, rows, "scratch")
    swiglu = _normed_swiglu(b, rows, res1, "scratch", paired)
    _project_down(b, rows, swiglu, res1)
    return b.build(name)


def _project_attended(b: PartBuilder, rows: _Rows, role: str) -> str:
    """Add the output projection of attention, and the residual. Return the slot of the sum, which has this role."""
    attn_out = b.slot("attn_out", rows.act("q_dim"), "input")
    wo = _weight(b, "wo")
    proj = b.slot("proj", rows.act("emb"), "scratch")
    x_residual = b.slot("x_residual", rows.act("emb"), "input", buffer="x.{turn}")
    res1 = b.slot("res1", rows.act("emb"), role)
    rows.project(b, attn_out, wo, proj, "q_dim", "emb")
    b.launch("add", {"a": x_residual, "b": proj, "out": res1}, rows=rows.rows, cols="emb")
    return res1


def _normed_swiglu(b: PartBuilder, rows: _Rows, x: str, role: str, paired: bool) -> str:
    """Add RMS norm, gate, up and SwiGLU; `paired` as in `_o_ffn`. Return the result's slot, which has this role."""
    norm_w = _weight(b, "ffn_norm_w")
    normed = b.slot("normed2", rows.act("emb"), "scratch")
    if paired:
        b.slots.append(_GATE_UP)
    else:
        w_gate = _weight(b, "w_gate")
        gate = b.slot("gate", rows.act("ffn"), "scratch")
        w_up = _weight(b, "w_up")
        up = b.slot("up", rows.act("ffn"), "scratch")
    swiglu = b.slot("swiglu", rows.act("ffn"), role)
    b.launch("rms_norm", {"x": x, "weight": norm_w, "out": normed}, rows=rows.rows, cols="emb", eps="eps")
    if paired:
        args = {"x": normed, "weight": _GATE_UP.name, "out": swiglu}
        b.launch("gemm_swiglu", args, rows=rows.rows, cols="emb", out_cols="ffn")
    else:
        rows.project(b, normed, w_gate, gate, "emb", "ffn")
        rows.project(b, normed, w_up, up, "emb", "ffn")
        b.launch("silu_and_mul", {"gate": gate, "up": up, "out": swiglu}, rows=rows.rows, cols="ffn")
    return swiglu


def _project_down(b: PartBuilder, rows: _Rows, swiglu: str, residual: str) -> None:
    """Add the down projection and the residual."""
    w_down = _weight(b, "w_down")
    down = b.slot("down", rows.act("emb"), "scratch")
    output = b.slot("output", rows.act("emb"), "output", buffer="x.{next}")
    rows.project(b, swiglu, w_down, down, "ffn", "emb")
    b.launch("add", {"a": residual, "b": down, "out": output}, rows=rows.rows, cols="emb")


def _o_add() -> Part:
    """Build the first third of a prompt's `o_ffn`."""
    b = PartBuilder()
    _project_attended(b, _PROMPT, "output")
    return b.build("o_add")


def _gate_up(paired: bool = False) -> Part:
    """Build the second third of a prompt's `o_ffn`."""
    b = PartBuilder()
    x = b.slot("res1", _PROMPT.act("emb"), "input")
    _normed_swiglu(b, _PROMPT, x, "output", paired)
    return b.build("gate_up")


def _down_add() -> Part:
    """Build the last third of a prompt's `o_ffn`."""
    b = PartBuilder()
    swiglu = b.slot("swiglu", _PROMPT.act("ffn"), "input")
    residual = b.slot("res1", _PROMPT.act("emb"), "input")
    _project_down(b, _PROMPT, swiglu, residual)
    return b.build("down_add")


_ATTENDED = "attn_out.{turn}"
"""The buffer of a token's attention. One program reads that of a layer and writes that of the next."""


def _residual_row(b: PartBuilder, name: str = "x_in") -> str:
    """Add a token's row between layers."""
    return b.slot(name, ("emb",), "input", buffer="x.{turn}")


def _norm_qkv_gemv() -> Part:
    """Build the RMS norm of a token's row with Q, K and V, as one product."""
    b = PartBuilder()
    x, norm_w = _residual_row(b), _weight(b, "norm_w")
    b.slots.append(_QKV)
    qkv = b.slot("qkv", ("qkv_dim",), "output")
    _normed_product(b, "norm_gemv", x, norm_w, _QKV.name, qkv, "qkv_dim")
    return b.build("norm_qkv_gemv")


def _normed_product(b: PartBuilder, kernel: str, x: str, norm: str, weight: str, out: str, out_cols: Dim) -> None:
    b.launch(kernel, {"x": x, "norm": norm, "weight": weight, "out": out}, cols="emb", out_cols=out_cols, eps="eps")


def _o_ffn_gemvs(fused: bool = False) -> Part:
    """Build what follows a token's attention, as three products.

    They are output projection and residual; RMS norm, gate, up and SwiGLU; down and residual.

    Args:
        fused: Whether everything from the norm on is one launch.
    """
    b = PartBuilder()
    attn_out = b.slot("attn_out", ("q_dim",), "input", buffer=_ATTENDED)
    wo, x = _weight(b, "wo"), _residual_row(b, "x_residual")
    res1 = b.slot("res1", ("emb",), "scratch")
    norm_w = _weight(b, "ffn_norm_w")
    b.slots.append(_GATE_UP)
    swiglu = "" if fused else b.slot("swiglu", ("ffn",), "scratch")
    w_down = _weight(b, "w_down")
    output = b.slot("output", ("emb",), "output", buffer="x.{next}")
    _added_product(b, attn_out, wo, x, res1, "q_dim")
    if fused:
        args = {"x": res1, "norm": norm_w, "gate_up": _GATE_UP.name, "down": w_down, "out": output}
        b.launch("feed_forward", args, cols="emb", ffn="ffn", eps="eps")
    else:
        _normed_product(b, "norm_gemv_swiglu", res1, norm_w, _GATE_UP.name, swiglu, "ffn")
        _added_product(b, swiglu, w_down, res1, output, "ffn")
    return b.build("o_ffn_gemvs")


def _added_product(b: PartBuilder, x: str, weight: str, residual: str, out: str, cols: Dim) -> None:
    b.launch("gemv_add", {"x": x, "weight": weight, "residual": residual, "out": out}, cols=cols, out_cols="emb")


_HEADS = {"heads": "heads", "kv_heads": "kv_heads", "head_dim": "head_dim"}


def _flash_attn() -> Part:
    """Build causal attention of a prompt's rows over the first positions of the interleaved cache.

    The cache has their K and V already.
    """
    b = PartBuilder()
    q = b.slot("q", ("seq", "placed_heads_dim"), "input", buffer="q_roped")
    kv = _window(b)
    out = b.slot("attn_out", ("seq", "q_dim"), "output")
    b.launch("flash_attention", {"q": q, "kv": kv, "out": out}, seq="seq", window="window", pos="pos", **_HEADS)
    return b.build("flash_attn")


def _new_rows(b: PartBuilder, rows: _Rows) -> tuple[str, dict[str, str]]:
    """Add the slots of new queries, and of the keys and values that are appended to a cache."""
    q = b.slot("q", rows.act("q_dim"), "input", buffer="q_roped")
    k = b.slot("k", rows.act("kv_dim"), "input", buffer="k_roped")
    return q, {"k": k, "v": b.slot("v", rows.act("kv_dim"), "input")}


def _attend_panels(name: str, rows: _Rows, kernel: str, **scalars: Dim) -> Part:
    """Build a part that appends new rows of K and V to a cache in panels, then attends over it.

    The host's attention streams the panels.
    """
    b = PartBuilder()
    q, new = _new_rows(b, rows)
    block = ("kv_blocks", "kv_heads", "kv_block_positions")
    cache = {
        f"{which}_panels": b.slot(
            f"{which}_cache", (*block, width), "output", buffer=f"{which}_cache.{{layer}}", keeps=True
        )
        for which, width in (("k", "head_dim"), ("v", "padded_head_dim"))
    }
    out = b.slot("attn_out", rows.act("q_dim"), "output")
    b.launch("append_kv_panels", new | cache, rows=rows.rows, pos="pos", kv_heads="kv_heads", head_dim="head_dim")
    b.launch(kernel, {"q": q, **cache, "out": out}, pos="pos", **_HEADS, **scalars)
    return b.build(name)


def _decode_attn_kv() -> Part:
    """Build a part that appends a token's K and V to the interleaved cache, then attends over it."""
    b = PartBuilder()
    q, new = _new_rows(b, _TOKEN)
    kv = _interleaved(b, "output")
    out = b.slot("attn_out", ("q_dim",), "output")
    b.launch("append_kv", {**new, "kv": kv}, pos="pos", kv_heads="kv_heads", head_dim="head_dim")
    b.launch("decode_attention_kv", {"q": q, "kv": kv, "out": out}, pos="pos", **_HEADS)
    return b.build("decode_attn_kv")


def _token_attn() -> Part:
    """Build a part that rotates a token's Q and K, stores K and V, and attends, as one launch.

    It writes K and V to the interleaved cache, and attends over the cache's first positions and them. The position
    comes with the rotation's angles.
    """
    b = PartBuilder()
    qkv = b.slot("qkv", ("qkv_dim",), "input")
    table = b.slot("lut", ("max_seq", "placed_head_dim"), "table", format="f32", buffer="token_table")
    kv, row = _window(b), _interleaved(b, "output", FROM_POSITION)
    out = b.slot("attended", ("q_dim",), "output", buffer=_ATTENDED)
    args = {"x": qkv, "table": table, "kv": kv, "out": out, "row": row}
    b.launch("token_attention", args, window="window", pos="pos", **_HEADS)
    return b.build("token_attn")


def _embed(name: str, kernel: str) -> Part:
    b = PartBuilder()
    args = {
        "tokens": b.slot("tokens", ("seq",), "input", format="i32"),
        "weight": b.slot(EMBEDDING, VOCABULARY, "weight", buffer=EMBED),
        "out": b.slot("x", ("seq", "emb"), "output", buffer="x.{turn}"),
    }
    b.launch(kernel, args, rows="seq", cols="emb", vocab="vocab")
    return b.build(name)


def _final_norm() -> Part:
    """Build the last RMS norm, of the row whose logits are computed."""
    b = PartBuilder()
    args = {
        "x": b.slot("x", ("emb",), "input", buffer="x.{turn}", view=LAST_ROW),
        "weight": b.slot("final_norm_w", ("emb",), "weight", buffer=FINAL_NORM),
        "out": b.slot("normed", ("emb",), "output", buffer="final_normed"),
    }
    b.launch("rms_norm", args, rows=1, cols="emb", eps="eps")
    return b.build("final_norm")


def _vocabulary(b: PartBuilder, x: str) -> dict[str, str]:
    """Add the slots of the LM head, and return its arguments. Logits stay f32: rounding them to bf16 makes ties."""
    weight = b.slot("w_vocab", VOCABULARY, "weight", buffer="{head}")
    return {"x": x, "weight": weight, "out": b.slot("logits", ("vocab",), "output", format="f32")}


def _lm_head(name: str, kernel: str) -> Part:
    """Build the LM head of one normed row."""
    b = PartBuilder()
    x = b.slot("x", ("emb",), "input", buffer="final_normed")
    b.launch(kernel, _vocabulary(b, x), out_cols="vocab", cols="emb")
    return b.build(name)


def _norm_lm_head() -> Part:
    """Build the last RMS norm and the LM head of a token's row, as one launch."""
    b = PartBuilder()
    x, norm = _residual_row(b), b.slot("final_norm_w", ("emb",), "weight", buffer=FINAL_NORM)
    args = {"norm": norm, **_vocabulary(b, x)}
    b.launch("norm_gemv_f32", args, out_cols="vocab", cols="emb", eps="eps")
    return b.build("norm_lm_head")


PARTS: dict[str, Callable[[], Part]] = {
    "embed_tokens": lambda: _embed("embed_tokens", "embed"),
    "embed_token_rows": lambda: _embed("embed_token_rows", "embed_rows"),
    "rms_gemms_rope": lambda: _norm_qkv_rope("rms_gemms_rope", _PROMPT),
    "rms_gemms_rope_kv": lambda: _norm_qkv_rope("rms_gemms_rope_kv", _PROMPT, interleave=True),
    "rms_gemv_rope": lambda: _norm_qkv_rope("rms_gemv_rope", _TOKEN),
    "flash_attn": _flash_attn,
    "flash_attn_panels": lambda: _attend_panels("flash_attn_panels", _PROMPT, "flash_attention_panels", seq="seq"),
    "decode_attn_panels": lambda: _attend_panels("decode_attn_panels", _TOKEN, "decode_attention_panels"),
    "decode_attn_kv": _decode_attn_kv,
    "norm_qkv_gemv": _norm_qkv_gemv,
    "token_attn": _token_attn,
    "o_ffn_gemvs": _o_ffn_gemvs,
    "o_ffn": lambda: _o_ffn("o_ffn", _PROMPT),
    "o_add": _o_add,
    "gate_up": _gate_up,
    "down_add": _down_add,
    "o_gemv_ffn": lambda: _o_ffn("o_gemv_ffn", _TOKEN),
    "final_norm": _final_norm,
    "lm_head_gemv": lambda: _lm_head("lm_head_gemv", "gemv_f32"),
    "norm_lm_head": _norm_lm_head,
    # On the host, if the vocabulary matrix is in the layout for the array.
    "lm_head_rows": lambda: _lm_head("lm_head_rows", "gemv_rows_f32"),
}

PAIRED: dict[str, Callable[[], Part]] = {
    "o_ffn": lambda: _o_ffn("o_ffn", _PROMPT, paired=True),
    "gate_up": lambda: _gate_up(paired=True),
}
"""Parts of a prompt in place of those of `PARTS` if the host unpacks gate and up for it into one matrix, in which eight
rows of each alternate."""

SHARED = ("w_gate", "w_up", "w_down")
"""Slots of all weights of the feed-forward network."""

FUSED: dict[str, Callable[[], Part]] = {"o_ffn_gemvs": lambda: _o_ffn_gemvs(fused=True)}
"""Parts of a token in place of those of `PARTS` if the cores of a launch can share the weights of `SHARED`."""
