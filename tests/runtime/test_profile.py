"""Where time goes: spans against clocks of their own, what launches move and multiply against the model's sizes, and
what is made of it."""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from llama_npu2 import Llama, UserError, load
from llama_npu2.artifact.attended import pairs_attended, positions_read
from llama_npu2.artifact.plan import DECODE, Phase
from llama_npu2.cli.bench import Bench
from llama_npu2.cli.profile import described, profile, summed
from llama_npu2.devices.spans import Recorder, Span, nested
from stages.commands.profile import read_profile, write_report
from stages.model.families import parse_config
from stages.model.part import PartKey
from stages.model.parts import part
from stages.model.plan import make_plan
from stages.model.policy import parse_policy
from stages.targets import targets
from stages.targets.cpu.fusion import fuse
from stages.targets.cpu.modules import launches
from stages.targets.cpu.work import described_launch
from tests.conftest import A_LLAMA, CONFIG, build, doit, write_checkpoint
from tests.support import browser
from tests.support.runtime_process import run_module

IDS = [2038, *range(70, 109)]
WINDOWED = {
    **{"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "hidden_activation": "gelu_pytorch_tanh"},
    **{"hidden_act": None, "sliding_window": 16, "sliding_window_pattern": 2, "rope_local_base_freq": 10000.0},
    **{"query_pre_attn_scalar": 64, "rope_scaling": None, "vocab_size": 2048},
}


@pytest.fixture(scope="module")
def llm(demo: Path) -> Iterator[Llama]:
    model = load(demo, 2)
    yield model
    model.close()


def spans_of(llm: Llama, ids: list[int]) -> list[Span]:
    """Of a prompt and a token behind it."""
    llm.reset()
    with llm.profile() as recorder:
        llm.prefill(ids)
        llm.decode(5)
    return recorder.spans()


def phase_of(spans: list[Span], name: str) -> list[Span]:
    (phase,) = (span for span in spans if (span.kind, span.name) == ("phase", name))
    return [span for span in spans if phase.start <= span.start < phase.end]


def test_launches_are_those_that_the_parts_say(llm: Llama, demo: Path) -> None:
    spans = spans_of(llm, IDS)
    for phase in ("prefill", "decode"):
        inside = phase_of(spans, phase)
        plan = llm.manifest.plans[Phase(phase)]
        programs = [(span.name, span.about.get("layer")) for span in inside if span.kind == "program"]
        assert programs == [(call.program, call.layer) for call in plan]
        kernels = [launch.kernel.name for call in plan for launch in fuse(part(A_LLAMA, PartKey(call.program)))]
        for thread in range(llm.device.threads):
            assert [s.name for s in inside if s.kind == "launch" and s.thread == thread] == kernels


def test_launches_move_and_multiply_what_the_model_has(llm: Llama) -> None:
    spans, manifest = spans_of(llm, IDS), llm.manifest
    config, rows = manifest.model, len(IDS)
    attention = 4 * config["layers"] * config["heads"] * config["head_dim"]
    position = (
        sum(manifest.nbytes(name) for name, spec in manifest.buffers.items() if spec["kind"] == "cache")
        // config["max_seq"]
    )
    for phase, count, pairs in (("prefill", rows, rows * (rows + 1) // 2), ("decode", 1, rows + 1)):
        calls = manifest.plans[Phase(phase)]
        weights = [w for call in calls for w in manifest.weights_read(call).values()]
        products = sum(
            weight.values * manifest.rows(call.program, count)
            for call in calls
            for weight in manifest.weights_read(call).values()
        )
        launches = [s for s in phase_of(spans, phase) if s.kind == "launch" and not s.thread]
        assert sum(span.about["operations"] for span in launches) == 2 * products + attention * pairs
        attending = [span for span in launches if "attention" in span.name]
        q_and_out = 2 * 2 * count * config["heads"] * config["head_dim"] * config["layers"]
        length = rows if phase == "prefill" else rows + 1
        assert sum(span.about["bytes"] for span in attending) == position * length + q_and_out
        # What is not weights are activations: little for a token.
        read = sum(weight.nbytes for weight in weights)
        moved = sum(span.about["bytes"] for span in launches)
        assert read < moved
        assert phase == "prefill" or moved < 1.1 * (read + position * length)


@pytest.mark.thorough
def test_layers_with_windows_read_their_windows(artifacts: Path, tmp_path: Path) -> None:
    config = write_checkpoint(tmp_path / "windows", **WINDOWED)
    sees = [mixer.window or len(IDS) + 1 for mixer in config.decoder.attentions]
    assert min(sees) < len(IDS) < max(sees)
    with contextlib.closing(load(build(tmp_path / "windows", artifacts), 1)) as llm:
        spans, depth = spans_of(llm, IDS), len(IDS)
        per_pair = 4 * config.heads * config.head_dim
        per_position = 2 * 2 * config.kv_heads * config.head_dim
        for phase, rows in (("prefill", range(depth)), ("decode", range(depth, depth + 1))):
            seen = [[set(range(max(0, row + 1 - window), row + 1)) for row in rows] for window in sees]
            attending = [s for s in phase_of(spans, phase) if s.kind == "launch" and "attention" in s.name]
            assert [s.about["operations"] for s in attending] == [per_pair * sum(map(len, each)) for each in seen]
            q_and_out = 2 * 2 * len(rows) * config.heads * config.head_dim
            positions = [len(set.union(*each)) for each in seen]
            assert [s.about["bytes"] - q_and_out for s in attending] == [per_position * count for count in positions]
        bench = Bench(llm, repeats=1)
        bench.read_bandwidth = lambda: 1.0  # type: ignore[method-assign]
        cached = 1 / bench.decode(depth).limits[0] - 1 / bench.decode(0).limits[0]
    assert cached == pytest.approx(per_position * sum(min(depth, window - 1) for window in sees))


@pytest.mark.parametrize("sees", [None, 1, 5, 8, 100])
def test_positions_and_pairs_are_those_of_every_row(sees: int | None) -> None:
    for pos, rows in itertools.product((0, 1, 6, 9), (1, 2, 7)):
        seen = [set(range(max(0, row + 1 - (sees or 10**6)), row + 1)) for row in range(pos, pos + rows)]
        assert pairs_attended(pos, rows, sees) == sum(map(len, seen))
        assert positions_read(pos, rows, sees) == len(set.union(*seen))


@pytest.mark.parametrize("weights", ["bf16", "int8", "int4", "w8a8"])
def test_launches_move_weights_as_they_lie_in_memory(weights: str) -> None:
    config = parse_config(CONFIG | {"hidden_size": 2048, "intermediate_size": 5632}, "test")
    policy = parse_policy(weights)
    plan = make_plan(config, targets()["cpu"].grouping("separate"), "cpu", policy=policy)
    totals: Counter[str] = Counter()
    for call in plan.phases[DECODE]:
        placed = part(config, PartKey(call.program), policy)
        moved = [described_launch(placed, launch, config.dimensions())["bytes"] for launch in launches(placed)]
        buffers = [plan.buffers[name] for name in call.names]
        read = sum(buffer.nbytes for buffer in buffers if buffer.kind == "weight")
        if "embed" in call.program:
            assert sum(of_a_row for _, of_a_row, _ in moved) < read / 50, "one row of many"
        else:
            totals += Counter({"read": read, "moved": sum(of_a_call for of_a_call, _, _ in moved)})
    assert totals["read"] <= totals["moved"] < 1.05 * totals["read"], "little but weights"


def test_spans_add_up_to_what_clocks_say(llm: Llama) -> None:
    """The best of several replies: a busy machine takes time between two clocks, too."""
    list(llm.generate("Once upon a time", max_tokens=2))
    found = [_reply_in_seconds(llm) for _ in range(5)]
    assert all(reply.spans < reply.wall for reply in found), "no time is counted twice"
    # Python between the spans takes the rest, some microseconds of a token, which with this model takes a hundred.
    assert max(reply.spans / reply.wall for reply in found) > 0.8
    assert max(reply.programs / reply.native for reply in found) > 0.8
    assert min(abs(reply.teams / reply.native - 1) for reply in found) < 0.05


class _Reply(NamedTuple):
    """Seconds of a reply: by the clock, and in spans."""

    wall: float
    native: float
    """What the device counted of native code."""
    spans: float
    teams: float
    programs: float


def _reply_in_seconds(llm: Llama) -> _Reply:
    native = llm.device.native_seconds
    with llm.profile() as recorder:
        started = time.perf_counter()
        list(llm.generate("Once upon a time", max_tokens=40))
        wall = time.perf_counter() - started
    native = llm.device.native_seconds - native
    parts = nested([span for span in recorder.spans() if span.thread == 0])
    assert min(part.alone for part in parts) >= 0, "no time is counted twice"
    assert {part.span.name for part in parts if part.span.kind == "host"} == {
        "template", "tokenise", "copy tokens", "copy logits", "sample", "detokenise"
    }  # fmt: skip
    teams, programs = (
        sum(part.span.end - part.span.start for part in parts if part.span.kind == kind) / 1e9
        for kind in ("native", "program")
    )
    return _Reply(wall, native, sum(part.alone for part in parts) / 1e9, teams, programs)


def test_a_profile_changes_nothing_and_ends(llm: Llama) -> None:
    llm.reset()
    plain = [llm.prefill(IDS), llm.decode(5)]
    llm.reset()
    with llm.profile() as recorder:
        profiled = [llm.prefill(IDS), llm.decode(5)]
    np.testing.assert_array_equal(profiled, plain)
    count = len(recorder.spans())
    llm.decode(6)
    assert len(recorder.spans()) == count
    # A phase with more launches than any before it finds room for its own.
    with llm.profile() as recorder:
        llm.device.laps(1)
        llm.decode(7)
    assert Counter(s.kind for s in recorder.spans())["launch"] == llm.device.threads * len(
        [span for span in phase_of(recorder.spans(), "decode") if span.kind == "launch" and not span.thread]
    )


def test_libraries_without_laps_are_refused(llm: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.device, "_native", SimpleNamespace(_name="elf/host.so"))
    with pytest.raises(UserError, match=r"elf/host\.so cannot be profiled, it is of an older version: run doit"):
        with llm.profile():
            pass


def test_nested_spans_have_what_is_left() -> None:
    def span(name: str, start: int, end: int) -> Span:
        return Span("host", name, start, end)

    recorder = Recorder()
    for each in (span("inner", 2, 3), span("outer", 1, 6), span("last", 3, 6), span("next", 6, 8)):
        recorder.note(each)
    found = [(part.span.name, part.alone, part.inside) for part in nested(recorder.spans())]
    assert found == [("outer", 1, -1), ("inner", 1, 0), ("last", 3, 0), ("next", 2, -1)]


@pytest.fixture(scope="module")
def found(llm: Llama) -> dict[str, Any]:
    """A profile, as its JSON is read again."""
    return json.loads(json.dumps(profile(llm, None, False, 24, 3, streams=(1, 3))))


def test_parts_of_a_profile_add_up(found: dict[str, Any]) -> None:
    prompt, token, one, three = found["phases"]
    assert (one["name"], one["rows"], three["name"], three["rows"]) == (
        *("step of 1 sequences", 1, "step of 3 sequences", 3),
    )
    assert (prompt["name"], len(prompt["seconds"]), token["name"], len(token["seconds"])) == ("prompt", 3, "token", 23)
    assert token["position"] == prompt["rows"] > 400
    for phase in found["phases"]:
        assert sum(part["seconds"] for part in phase["parts"]) == pytest.approx(phase["mean"], rel=1e-6)
        assert min(part["seconds"] for part in phase["parts"]) >= 0
        assert sum(part["kind"] == "python" for part in phase["parts"]) == 1
    # Little is between the spans of most steps: in a few of them another process may have had the core.
    inside = np.array([seconds for _, _, seconds in found["series"]])
    assert np.median(inside / token["seconds"]) > 0.4
    timeline = found["timeline"]
    assert len(timeline["edges"]) == 1 + 1 + 23
    lengths = np.diff(timeline["edges"])
    np.testing.assert_allclose(lengths[1:] / 1e9, token["seconds"])
    assert [position for position, _, _ in found["series"]] == list(range(prompt["rows"], prompt["rows"] + 23))
    # The reply does not end at an end token.
    assert found["machine"]["model"] == "demo" and set(found["peaks"]) == {"read", "bf16"}


def test_a_step_multiplies_all_rows_by_all_weights(found: dict[str, Any], llm: Llama) -> None:
    """The LM head of three sequences is one product, which reads its weights once."""
    model, (_, token, one, three) = llm.manifest.model, found["phases"]
    (head,) = (part for part in three["parts"] if part["name"] == "gemm_f32")
    assert head["calls"] == 1 and head["operations"] == 2 * 3 * model["vocab"] * model["emb"]
    assert head["bytes"] < 2 * model["vocab"] * (model["emb"] + 2 * 3) + 2**14
    assert three["calls"]["lm_head_gemm"] == 1 and "lm_head_gemm" not in one["calls"]
    assert {part["name"] for part in one["parts"] if part["kind"] == "launch"} == {
        part["name"] for part in token["parts"] if part["kind"] == "launch"
    }


def test_tables_show_programs_launches_and_the_rest(demo: Path, found: dict[str, Any]) -> None:
    table = described(found)
    for row in ("o_gemv_ffn ", "  gemv_silu ", "sample ", "tokenise ", "between spans "):
        assert f"\n{row}" in table
    run = run_module(demo, "Once upon a time", "--repeats=1", "--max-tokens=2", "--raw", "--json", command="profile")
    assert run.returncode == 0, run.stderr
    assert "template" not in {part["name"] for part in json.loads(run.stdout)["phases"][0]["parts"]}


def slices(content: bytes) -> dict[str, list[tuple[str, int, int]]]:
    """Of a trace, by Perfetto's own classes: by track, the name, beginning and length of each slice; begins and ends
    are in order, and every slice ends. Counters are slices without a length."""
    messages = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    trace = messages.Trace.FromString(content)
    event = messages.TrackEvent
    names: dict[int, str] = {}
    tracks: dict[int, str] = {}
    found: dict[str, list[tuple[str, int, int]]] = {}
    for packet in trace.packet:
        names |= {name.iid: name.name for name in packet.interned_data.event_names}
        if packet.HasField("track_descriptor"):
            tracks[packet.track_descriptor.uuid] = packet.track_descriptor.name
    stacks: dict[int, list[tuple[str, int]]] = {uuid: [] for uuid in tracks}
    last = dict.fromkeys(tracks, 0)
    for packet in trace.packet:
        if packet.HasField("track_event"):
            said, stack = packet.track_event, stacks[packet.track_event.track_uuid]
            assert packet.timestamp >= last[said.track_uuid]
            last[said.track_uuid] = packet.timestamp
            track = found.setdefault(tracks[said.track_uuid], [])
            if said.type == event.TYPE_SLICE_BEGIN:
                stack.append((names[said.name_iid], packet.timestamp))
            elif said.type == event.TYPE_SLICE_END:
                name, begin = stack.pop()
                track.append((name, begin, packet.timestamp - begin))
            else:
                assert said.type == event.TYPE_COUNTER
                track.append((f"{said.double_counter_value:.6f}", packet.timestamp, 0))
    assert not any(stacks.values())
    return found


def test_the_trace_says_what_the_json_says(found: dict[str, Any], tmp_path: Path) -> None:
    write_report(found, tmp_path)
    tracks = slices((tmp_path / "profile.pftrace").read_bytes())
    timeline, token = found["timeline"], found["phases"][1]
    main = next(track for name, track in tracks.items() if name.startswith("thread 0"))
    sums: Counter[str] = Counter()
    for name, _, length in main:
        sums[name] += length
    tokens = [sums[f"token {number}"] for number in range(1, len(token["seconds"]) + 1)]
    np.testing.assert_allclose(np.array(tokens) / 1e9, token["seconds"])
    assert sums["prompt"] / 1e9 == pytest.approx(found["phases"][0]["seconds"][-1])
    assert sums["decode"] / 1e9 == pytest.approx(sum(inside for _, _, inside in found["series"]))
    # Slices hold each other as spans do, so all of a thread's spans are there, each with its length.
    lengths: Counter[str] = Counter()
    for number, thread, _, length, _ in timeline["spans"]:
        lengths[timeline["names"][number][1]] += length if thread == 0 else 0
    assert {name: sums[name] for name in lengths} == lengths
    # Of another thread there are the prompt and one token.
    (other,) = (track for name, track in tracks.items() if name.startswith("thread 1"))
    launches = sum(name == "gemm_silu" for name, _, _ in other)
    assert launches == sum(row["calls"] for row in summed(found["phases"][0]["parts"]) if row["name"] == "gemm_silu")
    assert [value for value, _, _ in tracks["token"]] == [f"{1e3 * each:.6f}" for each in token["seconds"]]


def test_another_profile_is_checked(found: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    with pytest.raises(UserError, match=r"against=.*profile\.json: No such file"):
        read_profile(path)
    path.write_text(json.dumps(found))
    assert read_profile(path) == found
    for damaged in (found | {"format": 2}, found | {"phases": found["phases"][:1]}, [found]):
        path.write_text(json.dumps(damaged))
        with pytest.raises(UserError, match=r"profile\.json is not a profile .*: give one that doit profile wrote"):
            read_profile(path)


def test_the_page(found: dict[str, Any], tmp_path: Path, look_at: browser.Look) -> None:
    other = found | {"machine": found["machine"] | {"model": "<b>other</b>"}}
    page = write_report(found, tmp_path, other)
    text = page.read_text()
    assert "&lt;b&gt;other" in text and "<b>other" not in text
    for shown in ("Time lines", "Roofline", "Token by token", "o_gemv_ffn, layer by layer", "Against the other"):
        assert f">{shown}<" in text
    assert ">step of 3 sequences, tokens/s<" in text and "A step of 3 sequences: 3 rows" in text
    assert look_at(page) == []


def test_the_command_writes_all_three(demo: Path, tmp_path: Path) -> None:
    given = (f"artifacts={demo.parents[1]}", f"output={tmp_path}", "max_tokens=4", "repeats=1", "prompt=Once upon")
    run = doit("profile", "target=cpu", *given)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == str(tmp_path / "profile.html")
    assert "\no_gemv_ffn " in run.stdout
    assert json.loads((tmp_path / "profile.json").read_text())


@pytest.mark.thorough
def test_the_command_compares_with_an_earlier_profile(demo: Path, tmp_path: Path) -> None:
    given = (f"artifacts={demo.parents[1]}", f"output={tmp_path}", "max_tokens=4", "repeats=1", "prompt=Once upon")
    doit("profile", "target=cpu", *given)
    run = doit("profile", "target=cpu", *given, f"against={tmp_path / 'profile.json'}", "json=1")
    found = json.loads(run.stdout)
    assert found == json.loads((tmp_path / "profile.json").read_text())
    assert "Against the other" in (tmp_path / "profile.html").read_text()
