"""The ELF descriptions: slots, launches, and which slot each kernel argument is bound to.

The one place where this is said. Signatures, glue, MLIR, plans, syncs and the manifest are derived from it.
Shapes and scalars are dimension names (`LlamaConfig.dimensions`, or the run-time values `seq` and `pos`), resolved by
whoever needs numbers.
Slot order follows the system the project was specified from, so that its figures can be compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from stages.kernels import Kernel, kernel

RUNTIME_SCALARS = ("seq", "pos")

Dim = str | int


@dataclass(frozen=True)
class Slot:
    """One argument of an ELF. `role`: input | output | weight | table | scratch."""

    name: str
    shape: tuple[Dim, ...]
    role: str
    dtype: str = "bf16"


@dataclass(frozen=True)
class Launch:
    """One kernel call: `args` maps kernel argument -> slot, `scalars` kernel parameter -> value or dimension name."""

    kernel: Kernel
    args: dict[str, str]
    scalars: dict[str, Dim | float]

    def reads(self) -> set[str]:
        return {self.args[a.name] for a in self.kernel.args if not a.written}

    def writes(self) -> set[str]:
        return {self.args[a.name] for a in self.kernel.args if a.written}


@dataclass(frozen=True)
class Elf:
    """A function with slots that runs launches in order. `host` ones run on the host CPU on every target."""

    name: str
    slots: tuple[Slot, ...]
    launches: tuple[Launch, ...]
    host: bool = False

    def slot(self, name: str) -> Slot:
        return next(s for s in self.slots if s.name == name)

    def layout_of(self, slot: str, target: str) -> str:
        """The byte arrangement in which this ELF's kernels read a weight slot."""
        found = {
            arg.layout(target)
            for launch in self.launches
            for arg in launch.kernel.args
            if launch.args[arg.name] == slot
        }
        if len(found) != 1:
            raise ValueError(f"ELF {self.name}: slot {slot} is read in layouts {sorted(found)}")
        return found.pop()


@dataclass
class _Builder:
    slots: list[Slot] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)

    def slot(self, name: str, shape: tuple[Dim, ...], role: str, dtype: str = "bf16") -> str:
        self.slots.append(Slot(name, shape, role, dtype))
        return name

    def launch(self, name: str, args: dict[str, str], **scalars: Dim | float) -> None:
        spec = kernel(name)
        if set(args) != {a.name for a in spec.args} or set(scalars) != set(spec.params):
            raise TypeError(f"launch of {name}: expected {spec.args} {spec.params}, got {args} {scalars}")
        known = {s.name: s for s in self.slots}
        for arg in spec.args:
            if known[args[arg.name]].dtype != arg.dtype:
                raise TypeError(f"launch of {name}: {arg.name} is {arg.dtype}, slot {args[arg.name]} is not")
        self.launches.append(Launch(spec, args, scalars))

    def build(self, name: str, host: bool = False) -> Elf:
        return Elf(name, tuple(self.slots), tuple(self.launches), host)


@dataclass(frozen=True)
class _Phase:
    """What differs between prefill (matrices of `seq` rows) and decode (vectors)."""

    rows: Dim
    gemm: str

    def act(self, *width: Dim) -> tuple[Dim, ...]:
        return (self.rows, *width) if self.rows != 1 else width

    def project(self, b: _Builder, x: str, weight: str, out: str, cols: Dim, out_cols: Dim) -> None:
        rows: dict[str, Any] = {"rows": self.rows} if self.gemm == "gemm" else {}
        b.launch(self.gemm, {"x": x, "weight": weight, "out": out}, cols=cols, out_cols=out_cols, **rows)


PREFILL = _Phase("seq", "gemm")
DECODE = _Phase(1, "gemv")


def _norm_qkv_rope(name: str, phase: _Phase) -> Elf:
    """RMS norm, Q/K/V projections, rotary embedding of Q and K: 13 slots, 6 launches."""
    b = _Builder()
    x = b.slot("x_in", phase.act("emb"), "input")
    norm_w = b.slot("norm_w", ("emb",), "weight")
    normed = b.slot("normed", phase.act("emb"), "scratch")
    wq = b.slot("wq", ("q_dim", "emb"), "weight")
    q = b.slot("q", phase.act("q_dim"), "scratch")
    wk = b.slot("wk", ("kv_dim", "emb"), "weight")
    k = b.slot("k", phase.act("kv_dim"), "scratch")
    wv = b.slot("wv", ("kv_dim", "emb"), "weight")
    v = b.slot("v", phase.act("kv_dim"), "output")
    lut_q = b.slot("lut_q", ("max_seq", "head_dim"), "table", "f32")
    lut_k = b.slot("lut_k", ("max_seq", "head_dim"), "table", "f32")
    q_roped = b.slot("q_roped", phase.act("q_dim"), "output")
    k_roped = b.slot("k_roped", phase.act("kv_dim"), "output")
    b.launch("rms_norm", {"x": x, "weight": norm_w, "out": normed}, rows=phase.rows, cols="emb", eps="eps")
    phase.project(b, normed, wq, q, "emb", "q_dim")
    phase.project(b, normed, wk, k, "emb", "kv_dim")
    phase.project(b, normed, wv, v, "emb", "kv_dim")
    for source, table, out, heads in ((q, lut_q, q_roped, "heads"), (k, lut_k, k_roped, "kv_heads")):
        b.launch(
            "rope",
            {"x": source, "table": table, "out": out},
            rows=phase.rows,
            pos="pos",
            heads=heads,
            head_dim="head_dim",
        )
    return b.build(name)


def _o_ffn(name: str, phase: _Phase) -> Elf:
    """Output projection, residual, RMS norm, SwiGLU feed-forward, residual: 15 slots, 8 launches."""
    b = _Builder()
    attn_out = b.slot("attn_out", phase.act("q_dim"), "input")
    wo = b.slot("wo", ("emb", "q_dim"), "weight")
    proj = b.slot("proj", phase.act("emb"), "scratch")
    x_residual = b.slot("x_residual", phase.act("emb"), "input")
    res1 = b.slot("res1", phase.act("emb"), "scratch")
    norm_w = b.slot("ffn_norm_w", ("emb",), "weight")
    normed = b.slot("normed2", phase.act("emb"), "scratch")
    w_gate = b.slot("w_gate", ("ffn", "emb"), "weight")
    gate = b.slot("gate", phase.act("ffn"), "scratch")
    w_up = b.slot("w_up", ("ffn", "emb"), "weight")
    up = b.slot("up", phase.act("ffn"), "scratch")
    swiglu = b.slot("swiglu", phase.act("ffn"), "scratch")
    w_down = b.slot("w_down", ("emb", "ffn"), "weight")
    down = b.slot("down", phase.act("emb"), "scratch")
    output = b.slot("output", phase.act("emb"), "output")
    rows = phase.rows
    phase.project(b, attn_out, wo, proj, "q_dim", "emb")
    b.launch("add", {"a": x_residual, "b": proj, "out": res1}, rows=rows, cols="emb")
    b.launch("rms_norm", {"x": res1, "weight": norm_w, "out": normed}, rows=rows, cols="emb", eps="eps")
    phase.project(b, normed, w_gate, gate, "emb", "ffn")
    phase.project(b, normed, w_up, up, "emb", "ffn")
    b.launch("silu_and_mul", {"gate": gate, "up": up, "out": swiglu}, rows=rows, cols="ffn")
    phase.project(b, swiglu, w_down, down, "ffn", "emb")
    b.launch("add", {"a": res1, "b": down, "out": output}, rows=rows, cols="emb")
    return b.build(name)


def rms_gemms_rope() -> Elf:
    return _norm_qkv_rope("rms_gemms_rope", PREFILL)


def rms_gemv_rope() -> Elf:
    return _norm_qkv_rope("rms_gemv_rope", DECODE)


def o_ffn() -> Elf:
    return _o_ffn("o_ffn", PREFILL)


def o_gemv_ffn() -> Elf:
    return _o_ffn("o_gemv_ffn", DECODE)


def flash_attn() -> Elf:
    """Causal attention of `seq` new rows over the KV cache: 4 slots, 1 launch."""
    b = _Builder()
    args = {
        "q": b.slot("q", ("seq", "q_dim"), "input"),
        "k": b.slot("k", ("max_seq", "kv_dim"), "input"),
        "v": b.slot("v", ("max_seq", "kv_dim"), "input"),
        "out": b.slot("attn_out", ("seq", "q_dim"), "output"),
    }
    b.launch("flash_attention", args, seq="seq", pos="pos", heads="heads", kv_heads="kv_heads", head_dim="head_dim")
    return b.build("flash_attn")


def _attend_panels(name: str, phase: _Phase, kernel_name: str, host: bool = False, **scalars: Dim) -> Elf:
    """Append new rows of K and V to a cache in panels, which the host's attention streams, then attend over it."""
    b = _Builder()
    q = b.slot("q", phase.act("q_dim"), "input")
    new = {"k": b.slot("k", phase.act("kv_dim"), "input"), "v": b.slot("v", phase.act("kv_dim"), "input")}
    block = ("kv_blocks", "kv_heads", "kv_block_positions")
    cache = {
        "k_panels": b.slot("k_cache", (*block, "head_dim"), "output"),
        "v_panels": b.slot("v_cache", (*block, "padded_head_dim"), "output"),
    }
    out = b.slot("attn_out", phase.act("q_dim"), "output")
    heads = {"kv_heads": "kv_heads", "head_dim": "head_dim"}
    b.launch("append_kv_panels", new | cache, rows=phase.rows, pos="pos", **heads)
    b.launch(kernel_name, {"q": q, **cache, "out": out}, pos="pos", heads="heads", **heads, **scalars)
    return b.build(name, host)


def flash_attn_panels() -> Elf:
    return _attend_panels("flash_attn_panels", PREFILL, "flash_attention_panels", seq="seq")


def decode_attn_panels() -> Elf:
    return _attend_panels("decode_attn_panels", DECODE, "decode_attention_panels", host=True)


def _lm_head(name: str, kernel_name: str, host: bool = False) -> Elf:
    """Vocabulary projection of one normed row. Logits stay f32: rounding them to bf16 makes ties."""
    b = _Builder()
    args = {
        "x": b.slot("x", ("emb",), "input"),
        "weight": b.slot("w_vocab", ("vocab", "emb"), "weight"),
        "out": b.slot("logits", ("vocab",), "output", "f32"),
    }
    b.launch(kernel_name, args, out_cols="vocab", cols="emb")
    return b.build(name, host)


def lm_head_gemv() -> Elf:
    return _lm_head("lm_head_gemv", "gemv_f32")


def lm_head_rows() -> Elf:
    """For the end of a prompt on targets whose vocabulary matrix is row-major: spares a second submission."""
    return _lm_head("lm_head_rows", "gemv_rows_f32", host=True)


def _embed(name: str, kernel_name: str) -> Elf:
    b = _Builder()
    args = {
        "tokens": b.slot("tokens", ("seq",), "input", "i32"),
        "weight": b.slot("w_embed", ("vocab", "emb"), "weight"),
        "out": b.slot("x", ("seq", "emb"), "output"),
    }
    b.launch(kernel_name, args, rows="seq", cols="emb", vocab="vocab")
    return b.build(name, host=True)


def embed_tokens() -> Elf:
    return _embed("embed_tokens", "embed")


def embed_token_rows() -> Elf:
    """For targets whose vocabulary matrix is row-major."""
    return _embed("embed_token_rows", "embed_rows")


def decode_attn_kv() -> Elf:
    """Append the newest K and V to a cache that interleaves them by head, then attend over it."""
    b = _Builder()
    q = b.slot("q", ("q_dim",), "input")
    k = b.slot("k", ("kv_dim",), "input")
    v = b.slot("v", ("kv_dim",), "input")
    kv = b.slot("kv", ("max_seq", "kv_dim", 2), "output")
    out = b.slot("attn_out", ("q_dim",), "output")
    b.launch("append_kv", {"k": k, "v": v, "kv": kv}, pos="pos", kv_heads="kv_heads", head_dim="head_dim")
    args = {"q": q, "kv": kv, "out": out}
    b.launch("decode_attention_kv", args, pos="pos", heads="heads", kv_heads="kv_heads", head_dim="head_dim")
    return b.build("decode_attn_kv", host=True)


def final_norm() -> Elf:
    """The last RMS norm, of the one row whose logits are wanted."""
    b = _Builder()
    args = {
        "x": b.slot("x", ("emb",), "input"),
        "weight": b.slot("final_norm_w", ("emb",), "weight"),
        "out": b.slot("normed", ("emb",), "output"),
    }
    b.launch("rms_norm", args, rows=1, cols="emb", eps="eps")
    return b.build("final_norm", host=True)


_DEVICE_ELFS: dict[str, tuple[Callable[[], Elf], ...]] = {
    "cpu": (rms_gemms_rope, flash_attn_panels, o_ffn, rms_gemv_rope, o_gemv_ffn, lm_head_gemv),
    "npu": (rms_gemms_rope, flash_attn, o_ffn, rms_gemv_rope, o_gemv_ffn, lm_head_gemv),
}
_HOST_ELFS: dict[str, tuple[Callable[[], Elf], ...]] = {
    "cpu": (embed_tokens, decode_attn_panels, final_norm),
    "npu": (embed_token_rows, decode_attn_kv, final_norm, lm_head_rows),
}


def device_elfs(family: str) -> list[Elf]:
    """What runs on the device of a family of targets: `cpu` or `npu`."""
    return [build() for build in _DEVICE_ELFS[family]]


def host_elfs(family: str) -> list[Elf]:
    """What runs on the host on targets of a family: `cpu` or `npu`."""
    return [build() for build in _HOST_ELFS[family]]


def all_elfs() -> dict[str, Elf]:
    """Every ELF by name, device ones first."""
    return {elf.name: elf for of in (device_elfs, host_elfs) for family in _DEVICE_ELFS for elf in of(family)}
