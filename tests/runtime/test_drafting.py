"""A small model that drafts for another one, and drafts in replies of one text: the same tokens, sooner."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llama_npu2 import Llama, UserError, load
from llama_npu2.__main__ import main
from llama_npu2.artifact.manifest import Manifest
from llama_npu2.engine.batch import drafts as drafting
from llama_npu2.engine.batch.gain import Gain
from llama_npu2.engine.batch.pace import Pace
from llama_npu2.engine.batch.small_model import SmallModel
from llama_npu2.engine.completion import Completion
from llama_npu2.engine.drafting import check_drafts
from llama_npu2.engine.generation import Generation
from llama_npu2.engine.memory import memory_of_blocks
from llama_npu2.options import OptionError
from llama_npu2.text.replies import Piece
from tests.conftest import build, write_checkpoint

ASKED: list[dict[str, Any]] = [
    {},
    {"temperature": 1.2, "seed": 5, "top_k": 20, "logprobs": 3},
    {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    {"temperature": 0.8, "seed": 1, "stop": ("the",), "logprobs": 0},
    {"logit_bias": {40: 5.0, 41: -100.0}, "min_p": 0.05, "temperature": 1.0, "seed": 9},
    {"logit_bias": {7: 60.0, 8: 60.0, 9: 60.0}, "temperature": 1.0, "seed": 2},
]
TEXTS = ["The capital of France is", "one two three one two three one two", [7, 8, 9] * 60, "Once upon a time"]


class Counted:
    """What was drafted, and what of it was chosen."""

    drafted = accepted = 0


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    counts, real = Counted(), drafting.Drafts.note

    def note(self: drafting.Drafts, key: Any, drafted: int, accepted: int) -> None:
        counts.drafted, counts.accepted = counts.drafted + drafted, counts.accepted + accepted
        real(self, key, drafted, accepted)

    monkeypatch.setattr(drafting.Drafts, "note", note)
    return counts


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are made whether or not they pay, which depends on the machine's load."""
    monkeypatch.setattr(Pace, "hoped", lambda self, rows: 1e-9)
    monkeypatch.setattr(Pace, "known", lambda self, rows: False)
    monkeypatch.setattr(Gain, "allowed", lambda self, made: float("inf"))
    monkeypatch.setattr(drafting.Drafts, "_begins", lambda self, *about: True)
    monkeypatch.setattr(SmallModel, "seconds", lambda self, texts: 0.0)


@pytest.fixture(scope="module")
def int4(artifacts: Path) -> Path:
    return build("demo", artifacts, weights="int4", kv="int8")


@pytest.fixture(scope="module")
def llm(demo: Path, int4: Path) -> Iterator[Llama]:
    with closing(load(demo, 2, draft=int4)) as model:
        yield model


def replies(llm: Llama, speculate: bool) -> list[Completion]:
    llm.speculate = speculate
    return [
        reply
        for text in TEXTS
        for asked in ASKED
        for reply in llm.complete(text, raw=True, max_tokens=40, n=2, **asked)
    ]


def compare(found: list[Completion], wanted: list[Completion]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert (one.tokens, one.text, one.logprobs) == (other.tokens, other.text, other.logprobs)
        assert one.stats.finish_reason == other.stats.finish_reason


@pytest.mark.parametrize("small", [False, True])
def test_replies_are_the_same_token_for_token(
    small: bool, llm: Llama, always: None, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not small:
        monkeypatch.setattr(llm, "_drafting", None)
    wanted = replies(llm, False)
    assert not counted.drafted
    compare(replies(llm, True), wanted)
    assert counted.drafted > counted.accepted > len(wanted)


def test_an_engine_drafts_with_a_small_model(llm: Llama, always: None, counted: Counted) -> None:
    wanted = replies(llm, False)[::2]

    async def main() -> list[Completion]:
        with llm.engine() as engine:
            asked = [(text, options) for text in TEXTS for options in ASKED]
            streams = [engine.submit(text, raw=True, max_tokens=40, **options) for text, options in asked]
            return [await stream.whole() for stream in streams]

    compare(asyncio.run(main()), wanted)
    assert counted.drafted > counted.accepted > len(wanted)
    small = llm._drafting
    assert small and not small.model._texts


def test_a_context_that_is_taken_between_two_drafted_tokens(llm: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another reply that begins alike leaves K and V of its own draft there, which is not what it says next."""
    token, other = (llm.encode(text, raw=True)[-1] for text in "ab")
    asked: dict[str, Any] = {"raw": True, "max_tokens": 12, "logit_bias": {token: 100.0}}
    llm.speculate, drafts, real = True, list[int](), Generation.take
    logits: dict[Generation, list[bytes]] = defaultdict(list)

    def take(self: Generation, row: np.ndarray) -> list[Piece]:
        logits[self].append(row.tobytes())
        return real(self, row)

    monkeypatch.setattr(drafting.Drafts, "draft", lambda self, wanted, room: [drafts[:]])
    monkeypatch.setattr(Generation, "take", take)
    assert set(llm.generate("Once", **asked).whole().tokens) == {token}
    behind, ahead = (llm.generate("Once", keep_context=True, **asked) for _ in range(2))
    read = [*islice(behind, 2), *islice(ahead, 6)]
    drafts[:] = [token] * 3
    read.append(next(ahead))
    drafts[:] = [other]
    read.append(next(behind))
    drafts.clear()
    for reply in (ahead, behind):
        reply.whole()
    alone, *others = logits.values()
    assert len(read) == 10 and others == [alone, alone]


def test_a_reply_that_is_left_keeps_no_blocks(llm: Llama, always: None) -> None:
    llm.speculate = True
    reply = llm.generate("Once upon a time", raw=True, max_tokens=40)
    for _ in range(5):
        next(reply)
    assert llm._drafting and llm._drafting.model._texts
    held = llm._cached[:]
    del reply
    assert not llm._drafting.model._texts
    text = [*held, 5, 6]
    found = llm.generate(text, max_tokens=9, keep_context=True).whole()
    assert found.stats.reused_tokens == len(held)
    llm.reset()
    assert found.tokens == llm.generate(text, max_tokens=9).whole().tokens


def test_a_context_is_filled_to_its_end(llm: Llama, always: None) -> None:
    text = [7, 8, 9, 10] * (llm.context_length // 4 - 3)
    ends = {}
    for llm.speculate in (False, True):
        ends[llm.speculate] = llm.generate(text, max_tokens=99, logit_bias=dict.fromkeys(llm.eos, -100.0)).whole()
    assert ends[True].tokens == ends[False].tokens
    assert len(text) + len(ends[True].tokens) == llm.context_length + 1


def test_phases_are_traced_without_drafts(llm: Llama, always: None, counted: Counted) -> None:
    llm.speculate, calls = True, []
    with llm.trace(calls.append):
        traced = llm.generate(TEXTS[1], raw=True, max_tokens=8).whole()
    with llm.profile() as recorder:
        profiled = llm.generate(TEXTS[1], raw=True, max_tokens=8).whole()
    assert calls and not counted.drafted and traced.tokens == profiled.tokens
    assert sum(span.kind == "phase" for span in recorder.spans()) == len(profiled.tokens)


def test_memory_is_for_both_models(demo: Path, int4: Path) -> None:
    with closing(load(demo, 1, draft=int4)) as llm:
        assert llm._drafting
        sizes = [memory_of_blocks(each.manifest, 1) for each in (llm, llm._drafting.engine)]
        assert "drafts by demo" in llm.description
    with closing(load(demo, 1, kv_memory=3 * sum(sizes) + 5, draft=int4)) as llm:
        assert llm._drafting
        assert llm.steps.blocks == llm._drafting.engine.steps.blocks == 3
    with pytest.raises(UserError, match=f"kv_memory={sum(sizes) - 1}: 128 positions take {sum(sizes)} bytes"):
        load(demo, 1, kv_memory=sum(sizes) - 1, draft=int4)


def test_models_that_cannot_draft_are_refused(demo: Path, artifacts: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model")
    other = build(tmp_path / "model", artifacts)
    with pytest.raises(OptionError, match=r"draft=.*its tokenizer is not that of .*: give a smaller model"):
        load(demo, draft=other)
    with pytest.raises(UserError, match="nothing"):
        load(demo, draft=tmp_path / "nothing")
    model = Manifest.open(demo)
    contiguous = {
        name: {key: value for key, value in spec.items() if key != "row_positions"}
        for name, spec in model.buffers.items()
    }
    for small, large in ((model, replace(model, buffers=contiguous)), (replace(model, buffers=contiguous), model)):
        with pytest.raises(OptionError, match="holds one sequence alone: give artifacts of target=cpu"):
            check_drafts(demo, small, large)


def test_the_command_line_takes_a_small_model(demo: Path, int4: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [str(demo), "Once upon a time", "--raw", "--max-tokens=12"]
    assert main(["run", *asked]) == 0
    alone = capsys.readouterr().out
    assert main(["run", *asked, f"--draft={int4}"]) == 0
    drafted = capsys.readouterr()
    assert drafted.out == alone and "drafts by demo" in drafted.err
    assert main(["run", *asked, "--draft=nowhere"]) == 1
    assert "nowhere" in capsys.readouterr().err
