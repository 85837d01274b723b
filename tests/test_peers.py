"""Comparing with other programs: they must run the very same model, and their absence or end is one line."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from llama_npu2 import UserError, load
from llama_npu2.bench import Result, table
from stages.commands import peers, verify
from stages.commands.options import parse_options
from stages.model.checkpoint import Checkpoint
from stages.model.sources import LocalSource
from tests.conftest import ROOT, build, write_checkpoint

needs_llama_cpp = pytest.mark.skipif(
    not (importlib.util.find_spec("llama_cpp") and importlib.util.find_spec("gguf")),
    reason="llama-cpp-python and gguf are not installed: pip install -e '.[bench]'",
)
needs_transformers = pytest.mark.skipif(
    not importlib.util.find_spec("transformers"), reason="transformers is not installed: pip install -e '.[verify]'"
)


def steps_alike(peer, directory: Path) -> None:
    """A prompt, a second part behind it, and a rewind give the logits that ours gives, up to bf16's error."""
    llm = load(directory, 2)
    ids = np.random.default_rng(1).integers(0, llm.manifest.model["vocab"], 24).tolist()
    for depth, part in [(0, ids[:16]), (16, ids[16:17]), (17, ids[17:20]), (5, ids[20:])]:
        llm.rewind(depth)
        peer.rewind(depth)
        ours, theirs = llm.prefill(part), peer.step(part)
        assert np.abs(ours - theirs).max() < 0.03 * np.abs(theirs).max()
    llm.close()


@needs_llama_cpp
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": False, "head_dim": 32},
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ],
    ids=["default", "untied", "llama3 rope"],
)
def test_llama_cpp_runs_the_same_model(changes: dict, artifacts: Path, tmp_path: Path) -> None:
    from stages.commands.gguf_file import write_gguf

    directory = tmp_path / "checkpoint"
    write_checkpoint(directory, **changes)
    write_gguf(Checkpoint.open(directory), tmp_path / "model.gguf")
    assert not list(tmp_path.glob("*.part"))
    steps_alike(peers.LlamaCpp(tmp_path / "model.gguf", 2, 64), build(directory, artifacts))


@needs_transformers
@pytest.mark.verify
def test_transformers_runs_the_same_model(artifacts: Path, tmp_path: Path) -> None:
    directory = tmp_path / "checkpoint"
    write_checkpoint(directory)
    steps_alike(peers.Transformers(directory, 2, 64), build(directory, artifacts))


@needs_llama_cpp
def test_a_peer_measures_in_its_own_process_and_its_end_is_one_line(
    demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    llm = load(demo, 1)
    with peers.open_peers(["llama.cpp"], LocalSource("demo", ROOT / "models/demo"), tmp_path / "demo.gguf", 1, llm) as (
        peer,
    ):
        assert 0 < peer.prefill([1, 2, 3]) < 60
        assert 0 < peer.decode(3, [4, 5]) < 60
        with pytest.raises(UserError, match=r"^peers=llama.cpp: .*decode"):
            peer.prefill([10**9])
    llm.close()


def test_a_peer_starts_wherever_one_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes wrong is the peer's own business: its module was found, and not a namesake."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stages").mkdir()
    peer = peers.Peer("onnx", Path("model"), 1, 64)
    with pytest.raises(UserError, match=r"^peers=onnx: KeyError: 'onnx'"):
        peer.prefill([1])
    peer.close()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, demo: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    llm = load(demo, 1)
    with pytest.raises(UserError, match=r"llama_cpp: pip install -e '.\[bench\]'"):
        with peers.open_peers(["llama.cpp"], LocalSource("demo", ROOT / "models/demo"), tmp_path / "demo.gguf", 1, llm):
            pass
    llm.close()


def test_an_unknown_peer_is_refused() -> None:
    with pytest.raises(UserError, match=r"peers=llama.cpp,onnx: onnx is unknown: choose among llama.cpp, transformers"):
        parse_options({"peers": "llama.cpp,onnx"})


def logits(*best: int) -> np.ndarray:
    """Of nine tokens, in this order of preference, the others equal."""
    row = np.zeros(9, np.float32)
    row[list(best)] = range(len(best), 0, -1)
    return row


@pytest.mark.parametrize(("last", "passed"), [((1, 2), True), ((2, 3, 4, 5, 6, 1), False)])
def test_verify_counts_every_position_after_a_difference(
    last: tuple[int, ...], passed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sides go on with the reference's token, and a bad rank in the very last position still fails."""
    ours = [logits(1, 2)] * verify.TOKENS
    ours[3], ours[10], ours[-1] = logits(2, 1), logits(5, 1), logits(*last)
    steps, fed = iter(ours), list[int]()

    class Ours:
        def encode(self, prompt: str, raw: bool) -> list[int]:
            return [0]

        def reset(self) -> None:
            pass

        def prefill(self, ids: list[int]) -> np.ndarray:
            return next(steps)

        def decode(self, token: int) -> np.ndarray:
            fed.append(token)
            return next(steps)

    monkeypatch.setattr(verify, "TransformersSteps", lambda model: lambda ids: logits(1, 2))
    comparison = verify.compare(Ours(), None, "prompt")  # type: ignore[arg-type]
    assert fed == [1] * (verify.TOKENS - 1)
    assert (comparison.equal, comparison.first) == (30 if passed else 29, 3)
    assert comparison.ranks == ((2, 1) if passed else (2, 5))
    assert comparison.passed == passed


def test_ratios_are_medians_over_repeats() -> None:
    result = Result("pp512", "tokens/s", [10, 40, 30], [20, 50, 50], {"llama.cpp": [5, 10, 10]})
    assert result.share == 0.6
    assert result.ratios == {"llama.cpp": 3.0}
    names = ["llama.cpp", "other"]
    assert table(names).row(*result.cells(names)).endswith(f"|      10.00  3.00x | {'':17} |")
