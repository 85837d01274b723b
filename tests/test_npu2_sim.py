"""The NPU targets under the whole pipeline: doit builds them, the runtime runs them, on the demo model."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from llama_npu2 import Llama, UserError, cpu_features, load
from llama_npu2.completion import Logprob
from llama_npu2.dtypes import nbytes
from llama_npu2.llama import MAX_STEPPED_TOKENS
from llama_npu2.manifest import Manifest
from stages.targets.npu2_sim.toolchain import native_fingerprint
from tests.browser import Look
from tests.conftest import ROOT, build, doit, ran

EXPECTED = json.loads((ROOT / "models/demo/expected.json").read_text())
BUCKETS = "64,128"


@pytest.fixture(scope="module")
def fused(artifacts: Path) -> Path:
    return build("demo", artifacts, target="npu2-sim", buckets=BUCKETS)


@pytest.fixture(scope="module")
def separate(artifacts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("separate")
    shutil.copytree(artifacts / ".cache", root / ".cache")
    return build("demo", root, target="npu2-sim", buckets="64", grouping="separate")


def greedy(llm: Llama, ids: list[int], count: int) -> list[int]:
    llm.reset()
    tokens = [int(np.argmax(llm.prefill(ids)))]
    while len(tokens) < count:
        tokens.append(int(np.argmax(llm.decode(tokens[-1]))))
    return tokens


@pytest.mark.parametrize(("prompt", "start"), EXPECTED["raw"][::12], ids=lambda text: text[:24])
def test_simulated_npu_completes(fused: Path, prompt: str, start: str) -> None:
    llm = load(fused)
    assert "".join(llm.generate(prompt, raw=True, max_tokens=48)).startswith(start[:40])
    llm.close()


def test_groupings_and_cpu_choose_the_same_tokens(fused: Path, separate: Path, demo: Path) -> None:
    chosen = []
    for directory in (fused, separate, demo):
        llm = load(directory)
        chosen.append(greedy(llm, llm.encode("The capital of Italy is", raw=True), 4))
        llm.close()
    assert chosen[0] == chosen[1] == chosen[2]


@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_weights_in_groups_choose_the_cpus_tokens(artifacts: Path, weights: str) -> None:
    """Prompts with what the host unpacks, tokens with what the array unpacks."""
    chosen = []
    for target, buckets in (("npu2-sim", {"buckets": "64"}), ("cpu", {})):
        llm = load(build("demo", artifacts, target=target, weights=weights, **buckets))
        chosen.append(greedy(llm, llm.encode("The capital of Italy is", raw=True), 12))
        llm.close()
    assert chosen[0] == chosen[1]


def test_hidden_state_is_the_same_in_two_buckets(fused: Path) -> None:
    """Padding is never read: the last prompt position is bit-identical, whatever lies behind it."""
    llm = load(fused)
    ids = llm.encode("Once upon a time there was a small", raw=True)
    layers = llm.manifest.model["layers"]
    states = []
    for phase in ("prefill@64", "prefill@128"):
        for filler in (1, 2):
            llm.reset()
            llm._tokens[:] = filler
            llm.memory.array(f"x.{layers % 2}")[:] = filler
            llm._run(phase, ids)
            states.append(llm.memory.array(f"x.{layers % 2}")[len(ids) - 1].copy())
    for state in states[1:]:
        np.testing.assert_array_equal(state.view(np.uint16), states[0].view(np.uint16))
    llm.close()


def test_prompt_longer_than_the_buckets(fused: Path, demo: Path) -> None:
    ids = np.random.default_rng(0).integers(5, 200, 131).tolist()
    logits = []
    for directory in (fused, demo):
        llm = load(directory)
        logits.append(llm.prefill(ids))
        llm.close()
    np.testing.assert_allclose(logits[0], logits[1], atol=0.1 * np.abs(logits[1]).max())


def test_scores_are_by_the_logits_of_prefill(fused: Path) -> None:
    """Bit for bit those that the bucket gives for less of the text, then those of single tokens."""
    llm = load(fused)
    ids = np.random.default_rng(1).integers(5, 200, 132).tolist()
    found = {length: llm.score(ids, length)[0] for length in (1, 60, 127)}
    rest = llm.score(ids, 128)
    for length, score in found.items():
        llm.reset()
        assert score == Logprob.of(ids[length], llm.prefill(ids[:length]))
    llm.reset()
    logits = [llm.prefill(ids[:128]), *(llm.decode(token) for token in ids[128:-1])]
    assert rest == [Logprob.of(token, row) for token, row in zip(ids[128:], logits, strict=True)]
    llm.close()


def test_a_cache_is_reused_for_few_new_tokens(fused: Path) -> None:
    """More than `MAX_STEPPED_TOKENS` are processed with all before them: the very logits of a fresh start. Fewer go one
    by one, which rounds elsewhere than a bucket does, and choose the same tokens here."""
    llm = load(fused)
    story = "Once upon a time there was a small dog who lived in a house."
    for more, stepped in ((" The capital of France is", True), (" It was small. " * 6, False)):
        "".join(llm.generate(story, raw=True, max_tokens=1))
        kept = "".join(llm.generate(story + more, raw=True, keep_context=True, max_tokens=6))
        assert (llm.stats.reused_tokens > 0) == (llm.stats.prompt_tokens <= MAX_STEPPED_TOKENS) == stepped
        assert kept == "".join(llm.generate(story + more, raw=True, max_tokens=6))
    long = [*llm.encode(story, raw=True) * 12][:150]
    llm.reset()
    llm.prefill(long)
    assert llm._keep([*long, *range(100, 130)]) == 150, "30 steps instead of 52 behind the largest bucket"
    assert llm._keep([*long[:100], *range(100, 130)]) == 0, "a bucket and 2 steps instead of 30"
    llm.close()


def test_command_line_says_what_a_larger_bucket_would_help(fused: Path) -> None:
    prompt = "The capital of France is Paris. " * 40

    def run(text: str) -> list[str]:
        command = [sys.executable, "-m", "runtime", "--raw", "--max-tokens=1", str(fused), text]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stderr.splitlines()

    llm = load(fused)
    tokens = len(llm.encode(prompt, raw=True))
    llm.close()
    assert 128 < tokens <= 512
    said, times = run(prompt)
    assert said == (
        f"the prompt has {tokens} tokens, the largest bucket is 128: {tokens - 128} go one by one; "
        f"doit compile buckets=64,128,{256 if tokens <= 256 else 512} makes a larger one"
    )
    assert f"{tokens} prompt tokens" in times
    assert len(run("The capital of France is")) == 1


@pytest.fixture(scope="module")
def estimated(fused: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of `doit estimate` on what was built."""
    directory = tmp_path_factory.mktemp("estimate")
    given = ("model=demo", f"artifacts={fused.parents[1]}", "target=npu2-sim", f"buckets={BUCKETS}")
    run = doit("estimate", *given, f"output={directory}")
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == f"{directory / 'estimate.html'}"
    return directory


def test_the_simulator_counts_what_the_estimate_says(estimated: Path) -> None:
    counted = json.loads((estimated / "estimate.json").read_text())["counted"]
    assert set(counted["programs"]) == {"prefill_layer.64", "rms_gemv_rope", "decode_layer", "decode_last"}
    launches = [launch for program in counted["programs"].values() for launch in program]
    slots = [slot for launch in launches for slot in launch["slots"].values()]
    assert [launch["calls"]["counted"] for launch in launches] == [launch["calls"]["estimated"] for launch in launches]
    assert [slot["counted"] for slot in slots] == [slot["estimated"] for slot in slots]
    assert all(any(slot["counted"]) for slot in slots) and sum(launch["macs"] for launch in launches) > 0


def test_the_page_of_an_estimate(estimated: Path, look_at: Look) -> None:
    assert look_at(estimated / "estimate.html") == []


def test_submissions_and_traffic(fused: Path) -> None:
    """A prompt takes a program per layer, a token layers + 1; weights are read once per token."""
    llm = load(fused)
    layers = llm.manifest.model["layers"]
    llm.prefill([1, 2, 3])
    before = {name: counted.submissions for name, counted in llm.device.counters().items()}
    assert sum(before.values()) == layers
    llm.decode(4)
    after = llm.device.counters()
    assert sum(counted.submissions for counted in after.values()) - sum(before.values()) == layers + 1
    layer = after["decode_layer"]
    slots = llm.manifest.programs["decode_layer"]["slots"]
    weights = sum(nbytes(slot["dtype"], slot["shape"]) for slot in slots if slot["role"] == "weight")
    assert layer.read < 1.1 * weights * (layers - 1), "each weight byte is read once per token"
    llm.close()


def test_buckets_are_counted_apart(fused: Path) -> None:
    """They have one entry point, in files of their own."""
    llm = load(fused)
    for tokens in (3, 100, 100):
        llm.reset()
        llm.prefill(list(range(tokens)))
    layers, counted = llm.manifest.model["layers"], llm.device.counters()
    assert counted["prefill_layer.64"].submissions == layers
    assert counted["prefill_layer.128"].submissions == 2 * layers
    llm.close()


def test_simulated_programs_are_rebuilt_from_what_they_read(built: Path, fused: Path) -> None:
    """A comment in a tile function stops at its objects; a change reaches the programs that link them, and no other."""
    del fused  # its tile objects are in the session's cache, not in this checkout's
    arguments = ("compile", "target=npu2-sim", "buckets=64", "model=models/demo")
    first = ran(doit(*arguments, cwd=built))
    assert {"module:prefill_layer.64", "object:aie2p/gemm", "object:sim/device", "elf:decode_last", "manifest"} <= first
    assert ran(doit(*arguments, cwd=built)) == set()
    source = built / "kernel_src/aie2p/silu_and_mul.cc"
    source.write_text(source.read_text() + "\n// a comment\n")
    assert ran(doit(*arguments, cwd=built)) == {"object:aie2p/silu_and_mul"}
    source.write_text(source.read_text() + '\nextern "C" int added_for_a_test() { return 7; }\n')
    linked = {"elf:prefill_layer.64", "elf:decode_layer", "elf:decode_last"}
    assert ran(doit(*arguments, cwd=built)) == {"object:aie2p/silu_and_mul", "manifest"} | linked
    # One variant: only prefill's rows are this wide.
    source.write_text(source.read_text().replace("return 7;", "return COUNT > 1000 ? 8 : 7;"))
    tasks = ran(doit(*arguments, cwd=built))
    objects = built / "artifacts/demo/npu2-sim/build/objects/aie2p/silu_and_mul"
    assert len(list(objects.glob("*.o"))) > 1
    assert tasks == {"object:aie2p/silu_and_mul", "elf:prefill_layer.64", "manifest"}
    next(objects.glob("*.o")).unlink()
    assert ran(doit(*arguments, cwd=built)) == {"object:aie2p/silu_and_mul"}, "the same object again"
    header = source.with_name("silu.h")
    header.write_text(header.read_text() + '\nextern "C" int added_to_a_header() { return 7; }\n')
    assert ran(doit(*arguments, cwd=built)) == {"object:aie2p/silu_and_mul", "manifest"} | linked


def test_a_cpu_that_lacks_what_the_objects_use_is_refused(
    fused: Path, demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = Manifest.open(fused).target["features"]
    assert needed, "compiled for this CPU"
    assert "features" not in Manifest.open(demo).target, "host kernels choose at run time"
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor : 0\nflags\t\t: fpu {' '.join(needed[1:])} tsc\n")
    monkeypatch.setattr(cpu_features, "CPUINFO", cpuinfo)
    with pytest.raises(
        UserError, match=f"built for a CPU with {needed[0]}, which this one does not have: build it here"
    ):
        Manifest.open(fused)
    before = native_fingerprint()
    cpuinfo.write_text(f"flags : {' '.join(needed)}\n")
    assert Manifest.open(fused)
    assert native_fingerprint() != before, "and doit compile builds it again"


def test_npu2_builds_up_to_the_missing_tools(artifacts: Path, fused: Path) -> None:
    """Without the NPU's compiler all up to MLIR and weight blobs is built, then one line says what is missing."""
    from stages.targets.npu2.toolchain import npu_fingerprint

    if npu_fingerprint() is not None:
        pytest.skip("the NPU's tools are on this machine")
    run = doit("compile", "target=npu2", f"buckets={BUCKETS}", f"artifacts={artifacts}")
    assert run.returncode == 1
    assert len(run.stderr.strip().splitlines()) == 1
    assert "aircc" in run.stderr
    assert "doit doctor" in run.stderr
    parallel = doit("-n", "3", "compile", "target=npu2", f"buckets={BUCKETS}", f"artifacts={artifacts}")
    assert parallel.stderr == run.stderr, "one line also when several steps miss them at once"
    directory = artifacts / "demo/npu2"
    assert {p.name for p in (directory / "build/modules").glob("prefill*.mlir")} == {
        "prefill_layer.64.mlir",
        "prefill_layer.128.mlir",
    }
    for path in (directory / "build/modules").glob("*.mlir"):
        simulated = fused / "build/modules" / path.name
        assert simulated.read_bytes() == path.read_bytes(), "what is simulated is what the compiler gets"
    assert list((directory / "weights").glob("layer_*.safetensors"))
    assert not (directory / "manifest.json").exists()


@pytest.mark.verify
def test_verify_passes(fused: Path) -> None:
    pytest.importorskip("torch", reason="needs the verify extra: pip install -e '.[verify]'")
    pytest.importorskip("transformers", reason="needs the verify extra: pip install -e '.[verify]'")
    from stages.commands.verify import shipped, verify

    assert verify(fused, ROOT / "models/demo", shipped(full=False)).passed


@pytest.mark.parametrize("buckets", ["", "abc", "100", "0", "64,65"])
def test_bad_buckets_are_one_line(buckets: str, tmp_path: Path) -> None:
    run = doit("compile", "target=npu2-sim", f"buckets={buckets}", f"artifacts={tmp_path}")
    assert run.returncode != 0
    assert len(run.stderr.strip().splitlines()) == 1
    assert "buckets=" in run.stderr


def test_bad_grouping_is_one_line(tmp_path: Path) -> None:
    run = doit("compile", "target=npu2-sim", "grouping=nice", f"artifacts={tmp_path}")
    assert run.returncode != 0
    assert run.stderr.strip().splitlines() == ["ERROR: grouping=nice: target npu2-sim has separate, fused"]
