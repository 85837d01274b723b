"""Joined launches: which are joined, and that no bit of a result changes."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from llama_npu2 import load
from stages.model.part import PartKey
from stages.model.parts import part
from stages.targets.cpu.fusion import fuse
from stages.targets.cpu.modules import cpu_source
from tests.conftest import A_LLAMA, doit, ran


def names(name: str) -> list[str]:
    return [launch.kernel.name for launch in fuse(part(A_LLAMA, PartKey(name)))]


def test_what_is_joined() -> None:
    assert names("o_ffn") == ["gemm_add", "rms_norm", "gemm_silu", "gemm_add"]
    assert names("o_gemv_ffn") == ["gemv_add", "rms_norm", "gemv_silu", "gemv_add"]
    assert names("rms_gemms_rope") == ["rms_norm", "gemm_qkv", "rope", "rope"]
    attention = ["append_kv_panels", "decode_attention_panels"]
    assert names("rms_gemv_attn_panels") == ["rms_norm", "gemv_qkv", "rope", "rope", *attention]


def test_bound_as_the_separate_launches_were() -> None:
    product = fuse(part(A_LLAMA, PartKey("rms_gemv_attn_panels")))[1]
    assert product.args == {"x": "normed", "wq": "wq", "wk": "wk", "wv": "wv", "q": "q", "k": "k", "v": "v"}
    assert product.scalars == {"q_cols": "q_dim", "kv_cols": "kv_dim", "cols": "emb"}
    rows = fuse(part(A_LLAMA, PartKey("rms_gemms_rope")))[1]
    assert (rows.args, rows.scalars) == (product.args, {"rows": "seq"} | product.scalars)
    first, _, swiglu, last = fuse(part(A_LLAMA, PartKey("o_ffn")))
    assert first.args == {"x": "attn_out", "weight": "wo", "residual": "x_residual", "out": "res1"}
    assert swiglu.args == {"x": "normed2", "gate": "w_gate", "up": "w_up", "out": "swiglu"}
    assert last.args == {"x": "swiglu", "weight": "w_down", "residual": "res1", "out": "output"}


LINE = re.compile(r"worker->(ask)\((\S+),|worker->(barrier)|&\] { (Worker alone; )?.*?(\w+)\(static_cast")


def program(name: str) -> list[str]:
    """Return what a program does: `ask` and a slot, `barrier`, or a kernel, `own` where every thread computes it."""
    source = cpu_source([part(A_LLAMA, PartKey(name))], A_LLAMA.dimensions(), ["portable"])
    body = source[source.index(f'extern "C" void {name}(') :].partition("\n}")[0]
    found = [LINE.search(line) for line in body.splitlines()]
    return [" ".join(filter(None, (*m.group(1, 2, 3), m[4] and "own", m[5]))) for m in found if m]


def test_threads_ask_for_weights_before_they_wait_and_norm_and_rotate_one_row_each_for_itself() -> None:
    assert program("o_gemv_ffn") == [
        *["ask slots[1]", "barrier", "gemv_add"],
        *["ask slots[7]", "ask slots[9]", "barrier", "own rms_norm", "gemv_silu"],
        *["ask slots[12]", "barrier", "gemv_add"],
    ]
    assert program("rms_gemv_attn_panels") == [
        *["ask slots[3]", "ask slots[5]", "ask slots[7]", "barrier", "own rms_norm", "gemv_qkv"],
        *["barrier", "own rope", "own rope", "append_kv_panels", "barrier", "decode_attention_panels"],
    ]
    # Threads share the rows of a prompt, and a table is looked up.
    assert program("o_ffn")[3:5] == ["barrier", "rms_norm"]
    assert program("embed_tokens") == ["barrier", "embed"]


@pytest.mark.thorough
def test_results_are_bit_identical(built: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 300, 40).tolist()

    def logits() -> np.ndarray:
        llm = load(built / "artifacts/model/cpu")
        rows = np.array([llm.prefill(ids), llm.decode(7)])
        llm.close()
        return rows

    fused = logits()
    fusion = built / "stages/targets/cpu/fusion.py"
    text = fusion.read_text()
    fusion.write_text(text.replace("launches, joined = list(part.launches), []", "return part.launches"))
    assert fusion.read_text() != text
    assert {"elf:o_ffn", "elf:o_gemv_ffn"} <= ran(doit("compile", "model=model", cwd=built))
    np.testing.assert_array_equal(logits().view(np.uint32), fused.view(np.uint32))
