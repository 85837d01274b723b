"""Comparing with other programs: they must run the very same model, and their absence or end is one line."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import resource
import shutil
from collections.abc import Sequence
from math import prod
from pathlib import Path

import numpy as np
import pytest

from llama_npu2 import Llama, UserError, load
from llama_npu2.cli import bench as runtime_bench
from llama_npu2.cli.bench import GENERATED, Bench, Ours, Result, cold_start, table
from llama_npu2.options import Running
from stages.commands import bench
from stages.engine.places import ROOT, RUNTIME, python_environment
from stages.graph import Build
from stages.graph.options import parse_options
from stages.model.checkpoint import Checkpoint
from stages.model.families import tensors
from stages.model.sources import DEMO as DEMO_DIRECTORY
from stages.model.sources import GgufSource, LocalSource
from stages.proof.comparison import divergence, gguf_file, openvino_model, peers
from tests.conftest import build, needs_llama_cpp, write_checkpoint

DEMO = LocalSource("demo", DEMO_DIRECTORY)

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


CHANGES = {
    "default": {},
    "untied": {"tie_word_embeddings": False, "head_dim": 32},
    "llama3 rope": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
}


@needs_llama_cpp
@pytest.mark.parametrize(
    "changes", [CHANGES["default"], CHANGES["untied"] | CHANGES["llama3 rope"]], ids=["default", "all others"]
)
def test_llama_cpp_runs_the_same_model(changes: dict, artifacts: Path, tmp_path: Path) -> None:
    from stages.proof.comparison.gguf_file import write_gguf

    directory = tmp_path / "checkpoint"
    write_checkpoint(directory, **changes)
    write_gguf(Checkpoint.open(directory), tmp_path / "model.gguf")
    assert not list(tmp_path.glob("*.part"))
    steps_alike(peers.LlamaCpp(tmp_path / "model.gguf", 2, 64), build(directory, artifacts))


@needs_llama_cpp
@pytest.mark.parametrize("changes", [CHANGES["default"], CHANGES["untied"]], ids=["default", "untied"])
def test_openvino_runs_the_same_model(changes: dict, artifacts: Path, tmp_path: Path) -> None:
    pytest.importorskip("openvino_genai", reason="needs the openvino extra: pip install -e '.[openvino]'")
    config, source = write_checkpoint(tmp_path / "model", **changes), LocalSource("model", tmp_path / "model")
    (plain,) = peers.entrants(["openvino"], "bf16", source, tmp_path / "cache")
    steps_alike(openvino_model.OpenVino(plain.model, 2, 64), build(tmp_path / "model", artifacts))
    values = sum(map(prod, tensors(config).values())) - (0 if config.tied else config.vocab * config.emb)
    assert 2 * values < plain.token_bytes < 2.1 * values
    rounded, wide = peers.entrants(["openvino"], "int8", source, tmp_path / "cache")
    assert [rounded.format, wide.format] == ["INT8", "INT8 activations=16-bit"] and rounded.model == wide.model
    assert values < rounded.token_bytes < 0.7 * plain.token_bytes
    assert not list(tmp_path.glob("tmp*"))
    ids = [3, 1, 4]
    exact, *others = [
        openvino_model.OpenVino(each.model, 2, 64, *each.switches).step(ids) for each in (plain, rounded, wide)
    ]
    assert all(0 < np.abs(other - exact).max() < 0.1 * np.abs(exact).max() for other in others)


@needs_llama_cpp
def test_scaled_rotations_are_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """OpenVINO's reader of GGUF files does not know the factors: only the speed is that of the same model."""
    pytest.importorskip("openvino_genai", reason="needs the openvino extra: pip install -e '.[openvino]'")
    write_checkpoint(tmp_path / "model", **CHANGES["llama3 rope"])
    peers.entrants(["openvino"], "bf16", LocalSource("model", tmp_path / "model"), tmp_path / "cache")
    assert "only its speed compares" in capfd.readouterr().err


def test_a_family_that_openvino_does_not_read(tmp_path: Path) -> None:
    pytest.importorskip("openvino_genai", reason="needs the openvino extra: pip install -e '.[openvino]'")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match=r"^peers=openvino: OpenVINO does not read this model: .*: leave it out$"):
        openvino_model.convert(tmp_path / "model.gguf", tmp_path / "made")
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


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
    found = peers.entrants(["llama.cpp"], "int4", DEMO, tmp_path / "demo")
    with peers.open_peers(found, 1, llm) as (peer, other):
        assert (peer.name, other.name) == ("llama.cpp Q4_0", "llama.cpp Q4_K_M")
        assert 0 < peer.prefill([1, 2, 3]) < 60
        assert 0 < peer.decode(3, [4, 5]) < 60
        assert peer.logits([1, 2, 3]).shape == (3, llm.manifest.model["vocab"])
        with pytest.raises(UserError, match=r"^peers=llama.cpp: .*decode"):
            peer.prefill([10**9])
    llm.close()


def test_a_peer_starts_wherever_one_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes wrong is the peer's own business: its module was found, and not a namesake."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stages").mkdir()
    peer = peers.Peer(peers.Entrant("onnx", "ONNX", Path("model"), 0), 1, 64)
    with pytest.raises(UserError, match=r"^peers=onnx: KeyError: 'onnx'"):
        peer.prefill([1])
    peer.close()


_ENDING = """
import os, signal, types

LLAMA = types.SimpleNamespace
llama_token = __import__("ctypes").c_int32
llama_model_default_params = lambda: LLAMA(use_extra_bufts=True)
llama_context_default_params = LLAMA
llama_log_set = llama_backend_init = llama_synchronize = lambda *_: None
llama_memory_seq_rm = lambda *_: True
llama_model_load_from_file = lambda path, params: params
llama_init_from_model = lambda model, options: model
llama_get_memory = llama_model_get_vocab = llama_batch_get_one = lambda *_: None
llama_vocab_n_tokens = lambda vocab: 2
llama_get_logits = lambda context: (__import__("ctypes").c_float * 2)(1, 2)


def llama_decode(context, batch):
    if context.use_extra_bufts or os.environ["ALWAYS_ENDS"]:
        os.kill(os.getpid(), signal.SIGSEGV)
    return 0
"""
"""A llama.cpp whose weights for AMX end its process."""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("always", ["", "1"])
def test_a_peer_that_ends_by_a_signal_begins_again(
    always: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "llama_cpp.py").write_text(_ENDING)
    monkeypatch.setenv("ALWAYS_ENDS", always)
    monkeypatch.setattr(
        peers, "python_environment", lambda: python_environment() | {"PYTHONPATH": f"{tmp_path}:{ROOT}:{RUNTIME}"}
    )
    peer = peers.Peer(peers.Entrant("llama.cpp", "Q4_0", Path("model"), 0), 1, 64)
    if always:
        with pytest.raises(UserError, match=r"^peers=llama.cpp: its process ended with status -11"):
            peer.prefill([1])
    else:
        assert 0 < peer.prefill([1]) < 60
        assert np.array_equal(peer.logits([1, 1]), [[1, 2], [1, 2]])
    assert peer.note.startswith("signal 11 ended it")
    peer.close()
    assert capsys.readouterr().err.count("llama.cpp Q4_0: signal 11 ended it, so it ran again") == 1


BALLAST = 400 << 20
"""Bytes, many times what a run of the small model holds."""


@pytest.mark.thorough
def test_memory_is_that_of_a_run(demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of a peer, one of which ended before, nor of the process that measures."""
    (tmp_path / "llama_cpp.py").write_text(f"{_ENDING}\nballast = b'x' * {BALLAST}\n")
    monkeypatch.setenv("ALWAYS_ENDS", "")
    monkeypatch.setattr(
        peers, "python_environment", lambda: python_environment() | {"PYTHONPATH": f"{tmp_path}:{ROOT}:{RUNTIME}"}
    )
    llm, own = load(demo, 1), np.ones(BALLAST, np.uint8)
    with peers.open_peers([peers.Entrant("llama.cpp", "Q4_0", Path("model"), 0)], 1, llm) as (peer,):
        assert peer.prefill([1]) > 0
        rows = {row.test: row for row in cold_start(str(demo), llm, Running(repeats=2))}
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10 > own.nbytes, "it is of the peer that ended"
    (peak,) = rows["peak memory"].values
    assert 20 < peak < 200 and rows["peak memory"].peers == {}
    llm.close()


def test_memory_that_nobody_knows_is_left_out(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_bench, "_RUN", "raise SystemExit(1)")
    llm = load(demo, 1)
    assert [row.test for row in cold_start(str(demo), llm, Running(repeats=1))] == ["load", "cold start"]
    llm.close()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"llama_cpp: pip install -e '.\[bench\]'"):
        peers.entrants(["llama.cpp"], "bf16", DEMO, tmp_path / "demo")


@pytest.fixture
def quantised(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What llama.cpp was asked to quantise to; it is not there, and its files are the ones it was given."""
    asked = list[str]()

    def quantise(source: Path, path: Path, kind: str) -> None:
        asked.append(kind)
        shutil.copy(source, path)

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(gguf_file, "quantise_gguf", quantise)
    return asked


def test_a_peer_runs_in_its_nearest_formats(quantised: list[str], tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="not installed: pip install -e '.[test]'")
    for _ in range(2):
        found = peers.entrants(["llama.cpp"], "int4", DEMO, tmp_path / "demo")
        assert [(each.format, each.model.name) for each in found] == [
            ("Q4_0", "demo-Q4_0.gguf"),
            ("Q4_K_M", "demo-Q4_K_M.gguf"),
        ]
    assert quantised == ["Q4_0", "Q4_K_M"]
    both = peers.entrants(["transformers", "llama.cpp"], "bf16", DEMO, tmp_path / "demo")
    assert [(each.program, each.format, each.model.name) for each in both] == [
        ("transformers", "BF16", "demo"),
        ("llama.cpp", "BF16", "demo-BF16.gguf"),
    ]
    assert len(quantised) == 2
    (itself,) = peers.entrants(["llama.cpp"], peers.AS_IT_IS, GgufSource("own", both[1].model), tmp_path / "own")
    assert itself.model == both[1].model


@pytest.mark.parametrize("tied", [True, False])
def test_bytes_that_a_token_reads(tied: bool, quantised: list[str], tmp_path: Path) -> None:
    """Those of all tensors but an embedding of which a row is taken; norms are f32 in a GGUF file."""
    pytest.importorskip("gguf", reason="not installed: pip install -e '.[test]'")
    config = write_checkpoint(tmp_path / "model", tie_word_embeddings=tied)
    shapes = tensors(config)
    values = sum(map(prod, shapes.values())) - (0 if tied else config.vocab * config.emb)
    in_norms = sum(shape[0] for shape in shapes.values() if len(shape) == 1)
    source = LocalSource("model", tmp_path / "model")
    found = peers.entrants(["llama.cpp", "transformers"], "bf16", source, tmp_path / "cache")
    assert [each.token_bytes for each in found] == [2 * values + 2 * in_norms, 2 * values]


def test_a_format_that_a_peer_does_not_have(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs the verify extra: pip install -e '.[verify]'")
    with pytest.raises(UserError, match=r"^peers=transformers: it has no format like int4: leave it out"):
        peers.entrants(["transformers"], "int4", DEMO, tmp_path / "demo")


class Still:
    """An engine that takes a second for everything, and reads twice what ours does."""

    name = "still"
    takes_streams = False
    note = "it stood still"

    def __init__(self, llm: Llama) -> None:
        self.llm, self.token_bytes = llm, 2 * Ours(llm).token_bytes

    def prefill(self, ids: Sequence[int]) -> float:
        return 1.0

    def decode(self, depth: int, ids: Sequence[int]) -> float:
        return 1.0

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        return divergence.artifact_logits(self.llm, ids)


def test_each_engine_is_held_against_its_own_limit(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a token, the bandwidth over the bytes that it reads; for a prompt, the same arithmetic for all."""
    llm = load(demo, 1)
    measured = Bench(llm, 2, [Still(llm)])
    monkeypatch.setattr(measured, "read_bandwidth", lambda: 1e9)
    monkeypatch.setattr(measured.device, "measure_peak", lambda kind, iterations: 1e9)
    read, token, prompt = measured.read_per_token(), measured.decode(0), measured.prefill(8)
    assert read.ratios == {"still": 0.5}
    assert token.peers == {"still": [GENERATED] * 2} and prompt.peers == {"still": [8.0] * 2}
    assert token.limits == pytest.approx([1 / read.values[0]] * 2)
    assert token.peer_limits["still"] == pytest.approx([0.5 / read.values[0]] * 2)
    assert prompt.peer_limits["still"] == prompt.limits
    llm.close()


def test_a_table_ends_with_what_peers_ran_into(
    demo: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Bench, "results", lambda self, streams: [self.read_per_token()])
    monkeypatch.setattr(runtime_bench, "cold_start", lambda *_: [])
    running, opened = Running(threads=1, repeats=1), lambda llm: contextlib.nullcontext([Still(llm)])
    runtime_bench.run_bench(str(demo), running, False, opened)
    assert capsys.readouterr().out.endswith("\nstill: it stood still.\n")
    runtime_bench.run_bench(str(demo), running, True, opened)
    assert json.loads(capsys.readouterr().out)["notes"] == {"still": "it stood still"}


@pytest.mark.parametrize(("bandwidth", "peak"), [(1e9, 1e15), (1e15, 1e9)], ids=["memory", "arithmetic"])
def test_streams_share_what_is_read_and_not_what_is_multiplied(
    bandwidth: float, peak: float, demo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = load(demo, 1)
    measured = Bench(llm, 2, [Still(llm)])
    monkeypatch.setattr(measured, "read_bandwidth", lambda: bandwidth)
    monkeypatch.setattr(measured, "prompt_products", lambda: peak)
    (one,), (four,) = measured.decode_streams(1), measured.decode_streams(4)
    assert not four.peers, "it takes none"
    assert four.limits == pytest.approx([(4 if bandwidth < peak else 1) * limit for limit in one.limits])
    values = sum(map(prod, tensors(Checkpoint.open(DEMO.fetch()).config).values()))
    if bandwidth < peak:
        assert one.limits == pytest.approx([1e9 / Ours(llm).token_bytes] * 2)
    else:
        assert one.limits == pytest.approx([1e9 / 2 / values] * 2, rel=0.02), "norms multiply too"
    llm.close()


@needs_llama_cpp
def test_llama_cpp_takes_streams(artifacts: Path, tmp_path: Path) -> None:
    from stages.proof.comparison.gguf_file import write_gguf

    write_checkpoint(tmp_path / "checkpoint")
    write_gguf(Checkpoint.open(tmp_path / "checkpoint"), tmp_path / "model.gguf")
    engine = peers.LlamaCpp(tmp_path / "model.gguf", 2, 64)
    for streams in ([[3, 1, 4], [1, 5, 9], [2, 6, 5]], [[3, 5, 8], [9, 7, 9]]):
        together = engine.step_streams(streams)
        for row, ids in zip(together, streams, strict=True):
            engine.rewind(0)
            alone = engine.step(ids)
            np.testing.assert_allclose(row, alone, atol=2e-2 * np.abs(alone).max())


@needs_transformers
@pytest.mark.verify
def test_quality_of_all_is_measured_alike(demo: Path, artifacts: Path, tmp_path: Path) -> None:
    """A peer that has our logits loses what we lose."""
    (tmp_path / "text").write_text("The capital of France is Paris. " * 8)
    wanted = Build(parse_options({"artifacts": str(artifacts), "text": str(tmp_path / "text")}))
    llm = load(demo, 1)
    divergence, tail, same = bench.losses(wanted, llm, [Still(llm)])
    for row in (divergence, tail, same):
        assert row.peers == {"still": row.values}
    assert 0 < divergence.values[0] < tail.values[0] < 0.01 and 90 < same.values[0] <= 100
    llm.close()


def test_an_unknown_peer_is_refused() -> None:
    known = "llama.cpp, openvino, transformers"
    with pytest.raises(UserError, match=f"peers=llama.cpp,onnx: onnx is unknown: choose among {known}"):
        parse_options({"peers": "llama.cpp,onnx"})


def test_ratios_are_medians_over_repeats() -> None:
    theirs = {"llama.cpp": [5, 10, 10]}
    result = Result("pp512", "tokens/s", [10, 40, 30], [20, 50, 50], theirs, {"llama.cpp": [10, 40, 40]})
    assert result.share == 0.6
    assert (result.ratios, result.peer_shares) == ({"llama.cpp": 3.0}, {"llama.cpp": 0.25})
    names = ["llama.cpp", "other"]
    assert table(names).row(*result.cells(names)).endswith(f"|   10.00  3.00x  25.0% | {'':21} |")


def test_small_figures_keep_their_digits() -> None:
    assert Result("KL divergence", "nats", [0.001857]).cells([])[1:3] == ["0.00186", "0.00186 ± 0.00    "]
