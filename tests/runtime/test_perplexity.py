"""Perplexity of artifacts as they run: which tokens are predicted from what, and how likely they are."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from llama_npu2 import Llama, UserError, load
from llama_npu2.engine.sampling import log_softmax
from stages.commands import perplexity
from stages.graph import Build
from stages.graph.options import parse_options
from stages.model.sources import DEMO
from stages.proof.comparison import divergence
from stages.proof.comparison.perplexity import Window, measure, side_by_side, strided

IDS = list(range(100, 117))


def predicted(windows: list[Window]) -> list[int]:
    return [token for window in windows for token in window.ids[window.first :]]


@pytest.mark.parametrize(("window", "stride"), [(8, 4), (8, 3), (8, 1), (17, 5), (30, 30), (2, 1)])
def test_every_token_but_the_first_is_predicted_once(window: int, stride: int) -> None:
    """From all that a window has before it: no less than `window - stride` tokens, where there are as many."""
    windows = list(strided(IDS, window, stride))
    assert predicted(windows) == IDS[1:]
    for number, each in enumerate(windows):
        assert each.ids == IDS[number * stride : number * stride + window]
        assert each.first == (max(window - stride, 1) if number else 1)


def test_windows_side_by_side_do_not_predict_their_first() -> None:
    """Of strides as long as windows; llama.cpp's program predicts the latter half, behind a token that texts begin
    with: of 17 tokens in windows of 8 those numbered 5, 6, 7 and 13, 14, 15."""
    assert predicted(list(strided(IDS, 8, 8))) == [token for token in IDS[1:] if token not in (108, 116)]
    windows = list(side_by_side(IDS, 8, [7]))
    assert [window.ids for window in windows] == [[7, *IDS[1:8]], [7, *IDS[9:16]]]
    assert predicted(windows) == [105, 106, 107, 113, 114, 115]
    assert [window.ids for window in side_by_side(IDS, 8, [])] == [IDS[:8], IDS[8:16]]


@pytest.fixture(scope="module")
def llm(demo: Path) -> Iterator[Llama]:
    with contextlib.closing(load(demo, 1)) as opened:
        yield opened


def test_the_figures_are_those_of_tokens_one_by_one(llm: Llama) -> None:
    ids = llm.encode(divergence.TEXT.read_text()[:400], raw=True)
    windows = list(strided(ids, 24, 10))
    surprise = []
    for window in windows:
        logprobs = log_softmax(divergence.artifact_logits(llm, window.ids))
        surprise += [-logprobs[at - 1, window.ids[at]] for at in range(window.first, len(window.ids))]
    found = measure(llm, windows)
    assert found.tokens == len(ids) - 1 and found.read == sum(len(window.ids) for window in windows)
    assert found.perplexity == np.exp(np.mean(surprise))
    means = np.random.default_rng(0).choice(surprise, (10_000, len(surprise))).mean(axis=1)
    assert found.error == pytest.approx(found.perplexity * means.std(), rel=0.05), "the spread of resampled means"


@pytest.mark.verify
def test_it_is_that_of_transformers(llm: Llama) -> None:
    """Its recipe with labels, as its documentation has it. In float32 we are no further off than its own run in bf16
    is, on average over tokens, times 1.5."""
    for package in ("torch", "transformers"):
        if not find_spec(package):
            pytest.skip("needs the verify extra: pip install -e '.[verify]'")
    import torch

    from stages.proof.comparison.transformers_model import load_transformers

    ids = llm.encode(divergence.TEXT.read_text()[:1200], raw=True)
    window, stride = 128, 64
    theirs: dict[str, list[float]] = {}
    for dtype in ("float32", "bfloat16"):
        model, theirs[dtype], end = load_transformers(DEMO, dtype), [], 0
        for start in range(0, len(ids), stride):
            previous, end = end, min(start + window, len(ids))
            inputs = torch.tensor([ids[start:end]])
            labels = inputs.clone()
            labels[:, : -(end - previous)] = -100
            with torch.no_grad():
                logits = model(inputs).logits.float()
            loss = torch.nn.functional.cross_entropy(logits[0, :-1], labels[0, 1:], reduction="none")
            theirs[dtype] += loss[labels[0, 1:] != -100].tolist()
            if end == len(ids):
                break
    ours = [-each.logprob for part in strided(ids, window, stride) for each in llm.score(part.ids, part.first)]
    exact, rounded = (np.array(theirs[dtype]) for dtype in ("float32", "bfloat16"))
    assert len(ours) == len(exact) == len(ids) - 1
    assert np.abs(np.array(ours) - exact).mean() <= 1.5 * np.abs(rounded - exact).mean()
    assert abs(np.mean(ours) - exact.mean()) <= 1.5 * np.abs(rounded - exact).mean()


def test_as_doit_runs_it(demo: Path, artifacts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    del demo
    (tmp_path / "text").write_text("The capital of France is Paris. " * 8)
    given = {"artifacts": str(artifacts), "text": str(tmp_path / "text"), "window": "16"}
    found = {}
    for recipe in ("transformers", "llama.cpp"):
        perplexity.run(Build(parse_options(given | {"recipe": recipe, "json": "1"})))
        found[recipe] = json.loads(capsys.readouterr().out)
        perplexity.run(Build(parse_options(given | {"recipe": recipe})))
        assert f"as {recipe}: perplexity {found[recipe]['perplexity']:.4f} " in capsys.readouterr().out
    assert [found[recipe]["stride"] for recipe in found] == [8, 16]
    assert found["transformers"]["artifact"] == "demo/cpu" and found["transformers"]["text"] == "text"
    assert 0 < found["llama.cpp"]["tokens"] < found["transformers"]["tokens"]


def test_what_cannot_be_measured(llm: Llama, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"stride=9: must be at most the window of 8"):
        list(strided(IDS, 8, 9))
    with pytest.raises(UserError, match="it has fewer than two tokens to predict"):
        measure(llm, list(side_by_side(IDS, 18, [7])))
    with pytest.raises(UserError, match=r"recipe=ours: choose one of transformers, llama.cpp"):
        parse_options({"recipe": "ours"})
    with pytest.raises(UserError, match=r"window=1: must be at least 2"):
        parse_options({"window": "1"})
