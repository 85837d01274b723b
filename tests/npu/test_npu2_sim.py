"""The NPU targets under the whole pipeline: doit builds them, the runtime runs them, on the demo model."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from llama_npu2 import Llama, UserError, load
from llama_npu2.artifact import cpu_features
from llama_npu2.artifact.dtypes import nbytes
from llama_npu2.artifact.manifest import Manifest
from llama_npu2.artifact.plan import Phase
from llama_npu2.engine.chunks import Chunk
from llama_npu2.engine.completion import Logprob
from stages.graph import Build
from stages.graph.options import parse_options
from stages.targets.npu2_sim import toolchain
from stages.targets.npu2_sim.objects import options
from stages.targets.npu2_sim.toolchain import native_fingerprint
from tests.conftest import ROOT, build, complaints, doit, ran, unfinished, write_checkpoint
from tests.support.browser import Look
from tests.support.npu_shapes import FEW

EXPECTED = json.loads((ROOT / "models/demo/expected.json").read_text())
BUCKETS = "64,128"


@pytest.fixture(scope="module")
def fused(artifacts: Path) -> Path:
    return build("demo", artifacts, target="npu2-sim", buckets=BUCKETS)


@pytest.fixture(scope="module")
def separate(artifacts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("separate")
    shutil.copytree(artifacts / ".cache", root / ".cache", ignore=unfinished)
    return build("demo", root, target="npu2-sim", buckets="64", grouping="separate")


def greedy(llm: Llama, ids: list[int], count: int) -> list[int]:
    llm.reset()
    tokens = [int(np.argmax(llm.prefill(ids)))]
    while len(tokens) < count:
        tokens.append(int(np.argmax(llm.decode(tokens[-1]))))
    return tokens


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("prompt", "start"), EXPECTED["raw"][::12], ids=lambda text: text[:24])
def test_simulated_npu_completes(fused: Path, prompt: str, start: str) -> None:
    llm = load(fused)
    assert "".join(llm.generate(prompt, raw=True, max_tokens=48)).startswith(start[:40])
    llm.close()


@pytest.mark.thorough
@pytest.mark.parametrize("grouping", ["fused", "separate"])
def test_groupings_and_cpu_choose_the_same_tokens(grouping: str, demo: Path, request: pytest.FixtureRequest) -> None:
    chosen = []
    for directory in (request.getfixturevalue(grouping), demo):
        llm = load(directory)
        chosen.append(greedy(llm, llm.encode("The capital of Italy is", raw=True), 4))
        llm.close()
    assert chosen[0] == chosen[1]


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_weights_in_groups_choose_the_cpus_tokens(artifacts: Path, weights: str) -> None:
    """Prompts with what the host unpacks, in chunks as at once, tokens with what the array unpacks."""
    chosen = []
    for target, programs in (("npu2-sim", FEW), ("cpu", {})):
        llm = load(build("demo", artifacts, target=target, weights=weights, **programs))
        chosen.append(greedy(llm, llm.encode("The capital of Italy is", raw=True), 12))
        if programs:
            cuts = [(0, 64)], [(0, 41), (41, 43), (43, 64)], [(0, 30), (20, 64)]
            phases = "prefill@64", "prefill@64@256"
            made = [[chunk(phases[first > 0], first, end) for first, end in cut] for cut in cuts]
            results = [in_chunks(llm, list(range(5, 69)), chunks) for chunks in made]
            assert results[0] == results[1] == results[2]
        llm.close()
    assert chosen[0] == chosen[1]


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_a_second_copy_gives_the_same_bits(artifacts: Path, weights: str) -> None:
    """Whatever has been computed in between; and a trace sees it."""
    directory = build("demo", artifacts, target="npu2-sim", weights=weights, **FEW)
    found = []
    for second_copy in (False, True):
        with closing(load(directory, second_copy=second_copy)) as llm:
            assert ("a second copy" in llm.description) == second_copy
            programs: list[str] = []
            made = [in_chunks(llm, list(range(5, end)), []) for end in (60, 40)]
            with llm.trace(lambda call, programs=programs: programs.append(call.program)):
                made.append(in_chunks(llm, list(range(9, 60)), []))
            found.append(made)
            assert any(name.startswith("unpack") for name in programs) != second_copy
    assert found[0] == found[1]


def test_hidden_state_is_the_same_in_two_buckets(fused: Path) -> None:
    """Padding is never read: the last prompt position is bit-identical, whatever lies behind it."""
    llm = load(fused)
    ids = llm.encode("Once upon a time there was a small", raw=True)
    layers = llm.manifest.model["layers"]
    memory, calls = llm.unaliased
    x, states = memory.array(f"x.{layers % 2}"), []
    for phase in ("prefill@64", "prefill@128"):
        for filler in (1, 2):
            memory.array("tokens")[:] = filler
            memory.array("tokens")[: len(ids)] = ids
            x[:] = filler
            llm.device.prepare(calls[Phase.parse(phase)]).run(len(ids), 0)
            states.append(x[len(ids) - 1].copy())
    for state in states[1:]:
        np.testing.assert_array_equal(state.view(np.uint16), states[0].view(np.uint16))
    llm.close()


def chunk(phase: str, start: int, end: int) -> Chunk:
    return Chunk(Phase.parse(phase), start, end)


def in_chunks(llm: Llama, ids: list[int], chunks: list[Chunk]) -> tuple[bytes, bytes]:
    """Logits of the last token, and all that the caches hold, of a text that is cut like this."""
    llm.reset()
    logits = llm.prefill(ids, chunks)
    caches = sorted(name for name in llm.manifest.buffers if name.startswith("kv_cache"))
    return logits.tobytes(), b"".join(llm.memory.array(name)[: len(ids)].tobytes() for name in caches)


def test_a_prompt_in_chunks_is_the_prompt_at_once(fused: Path) -> None:
    """Bit for bit, wherever it is cut and through whatever window; also where a chunk makes what is there again."""
    llm = load(fused)
    ids = np.random.default_rng(0).integers(5, 1900, 128).tolist()
    whole = in_chunks(llm, ids, [chunk("prefill@128", 0, 128)])
    for cut in (
        [chunk("prefill@64", 0, 64), chunk("prefill@64@2048", 64, 128)],
        [chunk("prefill@64", 0, 37), chunk("prefill@128@2048", 37, 128)],
        [chunk("prefill@128", 0, 127), chunk("prefill@64@2048", 127, 128)],
        [chunk("prefill@64@2048", 0, 64), chunk("prefill@128@2048", 50, 100), chunk("prefill@64@2048", 70, 128)],
    ):
        assert in_chunks(llm, ids, cut) == whole, cut
    llm.close()


SHAPES = {
    "three groups": {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64},
    "one group": {"num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 64},
    "heads of 96": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 96},
}


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("shape", SHAPES)
def test_any_shape_goes_on_from_anywhere(shape: str, weights: str, artifacts: Path, tmp_path: Path) -> None:
    sizes = {"hidden_size": 192, "intermediate_size": 320, "num_hidden_layers": 2, "max_position_embeddings": 256}
    write_checkpoint(tmp_path / "model", **sizes, **SHAPES[shape])
    llm = load(build(tmp_path / "model", tmp_path / "artifacts", target="npu2-sim", weights=weights, buckets="64,128"))
    ids = np.random.default_rng(4).integers(5, 250, 128).tolist()
    whole = in_chunks(llm, ids, [chunk("prefill@128", 0, 128)])
    for cut in (1, 63, 64, 77, 127):
        first = [chunk("prefill@128", 0, cut)]
        assert in_chunks(llm, ids, [*first, chunk("prefill@128@256", cut, 128)]) == whole, cut
        rest = [chunk("prefill@64@256", start, min(start + 64, 128)) for start in range(cut, 128, 64)]
        assert in_chunks(llm, ids, [*first, *rest]) == whole, cut
    llm.close()


def test_prompt_longer_than_the_buckets(fused: Path, demo: Path) -> None:
    """In chunks, three of them, where 131 tokens would be."""
    ids = np.random.default_rng(0).integers(5, 200, 259).tolist()
    llm = load(fused)
    logits = [llm.prefill(ids)]
    counted = {name: counts.submissions for name, counts in llm.device.counters().items() if counts.submissions}
    layers = llm.manifest.model["layers"]
    first, more = ({f"prefill_{third}.{size}" for third in ("up", "down")} for size in (64, 128))
    assert counted == dict.fromkeys({*first, "prefill_attend.64"}, layers) | dict.fromkeys(
        {*more, "prefill_attend.128.2048"}, 2 * layers
    )
    llm.close()
    llm = load(demo)
    logits.append(llm.prefill(ids))
    llm.close()
    np.testing.assert_allclose(logits[0], logits[1], atol=0.1 * np.abs(logits[1]).max())


@pytest.mark.thorough
def test_a_context_is_filled_to_its_end(fused: Path) -> None:
    """The last chunk has rows for tokens that no room is left for: it begins earlier."""
    llm = load(fused)
    ids = np.random.default_rng(2).integers(5, 1900, 2048).tolist()
    expected, _ = in_chunks(
        llm, ids, [chunk("prefill@128" + "@2048" * (at > 0), at, at + 128) for at in range(0, 2048, 128)]
    )
    llm.rewind(1990)
    assert llm._chunks.cheapest(1990, 2048) == [chunk("prefill@64@2048", 1984, 2048)]
    assert llm.prefill(ids[1990:]).tobytes() == expected and llm.position == 2048
    llm.close()


def test_scores_are_by_the_logits_of_prefill(fused: Path) -> None:
    """Bit for bit those that the buckets give for less of the text, behind what the cache has of it."""
    llm = load(fused)
    ids = np.random.default_rng(1).integers(5, 200, 180).tolist()
    found = {length: llm.score(ids, length)[0] for length in (1, 60, 127, 150)}
    llm.reset()
    llm.prefill(ids[:140])
    assert llm.score(ids, 150)[0] == found[150], "of which 140 are there"
    for length, score in found.items():
        logits, _ = in_chunks(
            llm,
            ids[:length],
            [chunk("prefill@64" + "@2048" * (at > 0), at, min(at + 64, length)) for at in range(0, length, 64)],
        )
        assert score == Logprob.of(ids[length], np.frombuffer(logits, np.float32))
    llm.close()


def test_a_conversation_processes_what_is_new(fused: Path) -> None:
    """From where the cache ends, or all from the start if that is cheaper: the very logits of a fresh start, but that
    few new tokens may go one by one, which rounds elsewhere than a bucket does and chooses the same tokens here."""
    llm = load(fused)
    story = "Once upon a time there was a small dog who lived in a house. " * 10
    "".join(llm.generate(story, raw=True, max_tokens=1))
    held = llm.position
    assert held > 128
    more = f"{story} The capital of France is"
    kept = "".join(llm.generate(more, raw=True, keep_context=True, max_tokens=6))
    assert llm.stats.reused_tokens > 128 and llm.stats.prompt_tokens < 64
    assert kept == "".join(llm.generate(more, raw=True, max_tokens=6))
    llm.reset()
    llm.prefill(list(range(10)))
    assert llm._keep(list(range(60))) == 0, "a bucket for all of them attends over no more than its rows"
    llm.close()


def test_a_manifest_says_what_the_estimate_does(fused: Path, estimated: Path) -> None:
    """Of every phase: within 1 %, as it counts what crosses to the host from the plan."""
    said, found = Manifest.open(fused).milliseconds, json.loads((estimated / "estimate.json").read_text())["phases"]
    names = {"prompt of 64": "prefill@64", "last 128 of a prompt of 2048": "prefill@128@2048", "token": "decode"}
    for name, phase in names.items():
        assert said[Phase.parse(phase)] == pytest.approx(found[name]["milliseconds"], rel=0.01), phase
    assert len(said) == 5


@pytest.fixture(scope="module")
def estimated(fused: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of `doit estimate` on what was built."""
    directory = tmp_path_factory.mktemp("estimate")
    given = ("model=demo", f"artifacts={fused.parents[1]}", "target=npu2-sim", f"npu.buckets={BUCKETS}")
    run = doit("estimate", *given, f"output={directory}")
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == f"{directory / 'estimate.html'}"
    return directory


def test_the_simulator_counts_what_the_estimate_says(estimated: Path) -> None:
    counted = json.loads((estimated / "estimate.json").read_text())["counted"]
    assert set(counted["programs"]) == {
        *("prefill_attend.64", "prefill_up.64", "prefill_down.64"),
        *("rms_gemv_rope", "decode_layer", "decode_last"),
    }
    launches = [launch for program in counted["programs"].values() for launch in program]
    slots = [slot for launch in launches for slot in launch["slots"].values()]
    assert [launch["calls"]["counted"] for launch in launches] == [launch["calls"]["estimated"] for launch in launches]
    assert [slot["counted"] for slot in slots] == [slot["estimated"] for slot in slots]
    assert all(any(slot["counted"]) for slot in slots) and sum(launch["macs"] for launch in launches) > 0


def test_the_page_of_an_estimate(estimated: Path, look_at: Look) -> None:
    assert look_at(estimated / "estimate.html") == []


def test_time_lines_of_tokens_come_before_those_of_prompts(estimated: Path) -> None:
    text = (estimated / "estimate.html").read_text()
    token, prompt = (f"<summary>{name}: " for name in ("token after 2047 others", "prompt of 64"))
    places = [text.rindex(head) for head in ("Time line of a token</h2>", token, "Time lines of prompts</h2>", prompt)]
    assert places == sorted(places)


def test_submissions_and_traffic(fused: Path) -> None:
    """A prompt takes three programs per layer, a token layers + 1; weights are read once per token."""
    llm = load(fused)
    layers = llm.manifest.model["layers"]
    llm.prefill([1, 2, 3])
    before = {name: counted.submissions for name, counted in llm.device.counters().items()}
    assert sum(before.values()) == 3 * layers
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
    for third in ("attend", "up", "down"):
        assert counted[f"prefill_{third}.64"].submissions == layers
        assert counted[f"prefill_{third}.128"].submissions == 2 * layers
    llm.close()


@pytest.mark.thorough
def test_simulated_programs_are_rebuilt_from_what_they_read(built: Path, fused: Path) -> None:
    """A comment in a tile function stops at its objects; a change reaches the programs that link them, and no other."""
    del fused  # its tile objects are in the session's cache, not in this checkout's
    arguments = ("compile", "target=npu2-sim", "npu.buckets=64", "model=models/demo")
    first = ran(doit(*arguments, cwd=built))
    assert {
        "module:prefill_attend.64",
        "object:aie2p/gemm",
        "object:sim/device",
        "elf:decode_last",
        "manifest",
    } <= first
    assert ran(doit(*arguments, cwd=built)) == set()
    source = built / "kernel_src/aie2p/silu_and_mul.cc"
    source.write_text(source.read_text() + "\n// a comment\n")
    assert ran(doit(*arguments, cwd=built)) == {"object:aie2p/silu_and_mul"}
    source.write_text(source.read_text() + '\nextern "C" int added_for_a_test() { return 7; }\n')
    linked = {"elf:prefill_up.64", "elf:decode_layer", "elf:decode_last"}
    assert ran(doit(*arguments, cwd=built)) == {"object:aie2p/silu_and_mul", "manifest"} | linked
    # One variant: only prefill's rows are this wide.
    source.write_text(source.read_text().replace("return 7;", "return COUNT > 1000 ? 8 : 7;"))
    tasks = ran(doit(*arguments, cwd=built))
    objects = built / "artifacts/demo/npu2-sim/build/objects/aie2p/silu_and_mul"
    assert len(list(objects.glob("*.o"))) > 1
    assert tasks == {"object:aie2p/silu_and_mul", "elf:prefill_up.64", "manifest"}
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


def test_the_level_of_optimisation_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one builds programs anew."""
    before, options_before = native_fingerprint(), options()
    monkeypatch.delenv(toolchain.LEVEL)
    assert "-O3" in options() and native_fingerprint() != before and "-O0" in options_before
    monkeypatch.setenv(toolchain.LEVEL, "fast")
    with pytest.raises(UserError, match="LLAMA_NPU2_SIM_O=fast: must be 0 to 3"):
        options()


@pytest.mark.thorough
def test_npu2_builds_up_to_the_missing_tools(artifacts: Path, fused: Path) -> None:
    """Without the NPU's compiler all up to MLIR and weight blobs is built, then one line says what is missing."""
    from stages.targets.npu2.toolchain import npu_fingerprint

    if npu_fingerprint() is not None:
        pytest.skip("the NPU's tools are on this machine")
    run = doit("compile", "target=npu2", f"npu.buckets={BUCKETS}", f"artifacts={artifacts}")
    assert run.returncode == 1
    assert len(complaints(run)) == 1
    assert "aircc" in run.stderr
    assert "doit doctor" in run.stderr
    parallel = doit("-n", "3", "compile", "target=npu2", f"npu.buckets={BUCKETS}", f"artifacts={artifacts}")
    assert complaints(parallel) == complaints(run), "one line also when several steps miss them at once"
    directory = artifacts / "demo/npu2"
    assert {p.name for p in (directory / "build/modules").glob("prefill*.mlir")} == {
        *(f"prefill_attend.{sizes}.mlir" for sizes in ("64", "64.2048", "128", "128.2048")),
        *(f"prefill_{third}.{bucket}.mlir" for third in ("up", "down") for bucket in (64, 128)),
    }
    for path in (directory / "build/modules").glob("*.mlir"):
        simulated = fused / "build/modules" / path.name
        assert simulated.read_bytes() == path.read_bytes(), "what is simulated is what the compiler gets"
    assert list((directory / "weights").glob("layer_*.safetensors"))
    assert not (directory / "manifest.json").exists()


@pytest.mark.verify
@pytest.mark.thorough
def test_verify_passes(fused: Path) -> None:
    pytest.importorskip("torch", reason="needs the verify extra: pip install -e '.[verify]'")
    pytest.importorskip("transformers", reason="needs the verify extra: pip install -e '.[verify]'")
    from stages.commands.verify import shipped
    from stages.proof.comparison.verification import verify

    assert verify(fused, ROOT / "models/demo", shipped(full=False)).passed


@pytest.mark.parametrize("buckets", ["", "abc", "100", "0", "64,65"])
def test_bad_buckets_are_refused(buckets: str) -> None:
    with pytest.raises(UserError, match=r"^npu\.buckets="):
        Build(parse_options({"target": "npu2-sim", "npu.buckets": buckets}))


def test_bad_grouping_is_refused() -> None:
    with pytest.raises(UserError, match=r"^npu\.grouping=nice: target npu2-sim has separate, fused$"):
        _ = Build(parse_options({"target": "npu2-sim", "npu.grouping": "nice"})).steps
