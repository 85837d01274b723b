"""Joined launches: which are joined, and that no bit of a result changes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llama_npu2 import load
from stages.model.part import PartKey
from stages.model.parts import part
from stages.targets.cpu.fusion import fuse
from tests.conftest import A_LLAMA, doit, ran


def names(name: str) -> list[str]:
    return [launch.kernel.name for launch in fuse(part(A_LLAMA, PartKey(name)))]


def test_what_is_joined() -> None:
    assert names("o_ffn") == ["gemm_add", "rms_norm", "gemm_silu", "gemm_add"]
    assert names("o_gemv_ffn") == ["gemv_add", "rms_norm", "gemv_silu", "gemv_add"]
    assert names("rms_gemms_rope") == ["rms_norm", "gemm", "gemm", "gemm", "rope", "rope"]


def test_bound_as_the_separate_launches_were() -> None:
    first, _, swiglu, last = fuse(part(A_LLAMA, PartKey("o_ffn")))
    assert first.args == {"x": "attn_out", "weight": "wo", "residual": "x_residual", "out": "res1"}
    assert swiglu.args == {"x": "normed2", "gate": "w_gate", "up": "w_up", "out": "swiglu"}
    assert last.args == {"x": "swiglu", "weight": "w_down", "residual": "res1", "out": "output"}


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
