"""What a model computes on its way: `Llama.trace`, against transformers and against itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from llama_npu2 import Llama, load
from llama_npu2.artifact.plan import DECODE, PREFILL
from llama_npu2.engine.trace import TracedCall
from stages.model.sources import DEMO

IDS = [2038, *range(70, 100)]


@pytest.fixture(scope="module")
def llm(demo: Path) -> Iterator[Llama]:
    model = load(demo)
    yield model
    model.close()


def outputs(llm: Llama, ids: list[int], slots: dict[str, str]) -> list[np.ndarray]:
    """What each call of the programs in `slots` leaves in the slot named there."""
    llm.reset()
    seen: list[np.ndarray] = []

    def watch(call: TracedCall) -> None:
        if call.program in slots:
            seen.append(call[slots[call.program]].astype(np.float32))

    with llm.trace(watch):
        llm.prefill(ids)
    return seen


@pytest.mark.verify
def test_layers_are_those_of_transformers(llm: Llama) -> None:
    torch = pytest.importorskip("torch", reason="needs the verify extra: pip install -e '.[verify]'")
    pytest.importorskip("transformers", reason="needs the verify extra: pip install -e '.[verify]'")
    from stages.proof.comparison.transformers_model import load_transformers

    with torch.no_grad():
        run = load_transformers(DEMO, "float32")(torch.tensor([IDS]), output_hidden_states=True)
    # transformers' last one is behind the final norm.
    wanted = [state[0].numpy() for state in run.hidden_states[:-1]]
    found = outputs(llm, IDS, {"embed_tokens": "x", "o_ffn": "output"})
    assert len(found) == len(wanted) + 1
    for ours, theirs in zip(found, wanted, strict=False):
        # Each layer adds a few values rounded to the 8 bits of bf16.
        assert np.abs(ours - theirs).max() <= 0.02 * np.abs(theirs).max()
    normed = outputs(llm, IDS, {"final_norm": "normed"})[0]
    np.testing.assert_allclose(normed, run.hidden_states[-1][0, -1], atol=0.03 * np.abs(normed).max())


def test_results_are_those_without(llm: Llama) -> None:
    llm.reset()
    plain = [llm.prefill(IDS), llm.decode(5)]
    llm.reset()
    seen: list[TracedCall] = []
    with llm.trace(seen.append):
        traced = [llm.prefill(IDS), llm.decode(5)]
    np.testing.assert_array_equal(traced, plain)
    assert [(call.phase, call.program, call.layer) for call in seen] == [
        (phase, call.program, call.layer) for phase in (PREFILL, DECODE) for call in llm.manifest.plans[phase]
    ]
    assert {(call.rows, call.position) for call in seen} == {(len(IDS), 0), (1, len(IDS))}
    llm.decode(6)
    assert len(seen) == sum(len(llm.manifest.plans[phase]) for phase in (PREFILL, DECODE))


def test_slots_are_read_in_their_shapes(llm: Llama) -> None:
    shapes: dict[str, tuple[int, ...]] = {}

    def watch(call: TracedCall) -> None:
        for slot in call.slots:
            shapes[slot] = call[slot].shape
            if call.program == "o_ffn" and call.role(slot) == "scratch":
                # The activation happens in the tail of the products before it.
                assert np.isnan(call[slot].astype(np.float32)).all() == (slot in ("gate", "up", "proj", "down"))
        if call.program == "final_norm":
            np.testing.assert_array_equal(call["x"], last)
        with pytest.raises(KeyError):
            call["gone"]

    last = outputs(llm, IDS, {"o_ffn": "output"})[-1][-1]
    llm.reset()
    with llm.trace(watch):
        llm.prefill(IDS)
    assert shapes["tokens"] == (len(IDS),) and shapes["swiglu"] == (len(IDS), 768) and shapes["normed"] == (256,)
    assert shapes["wo"] == tuple(llm.manifest.buffers["model.layers.0.self_attn.o_proj.weight"]["shape"])
