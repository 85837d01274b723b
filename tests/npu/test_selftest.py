"""The bring-up ladder on the stand-in: green in full, and with each fault it names the rung and the cause."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import itertools
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16

from llama_npu2 import trust
from llama_npu2.artifact.dtypes import nbytes
from llama_npu2.artifact.manifest import Manifest
from llama_npu2.devices.sim import SimProgram
from llama_npu2.devices.xrt import session
from llama_npu2.engine.turns import TurnSteps
from stages import air
from stages.commands import selftest as command
from stages.engine.places import CONFIG, MODULES
from stages.estimate.constants import Machine, constants
from stages.graph import Build
from stages.graph.options import parse_options
from stages.model.families import read_config
from stages.model.grouping import programs
from stages.model.policy import parse_policy
from stages.proof.selftest import faults, graph, ladder, measure, raw, report
from stages.proof.selftest import model as model_rungs
from stages.proof.selftest.build import write_module
from stages.proof.selftest.faults import FAULTS, Fault, cause_of, fault
from stages.proof.selftest.ladder import BROKEN, LIMITED, PASSED, SKIPPED, Outcome, Rung, Setup, run_ladder
from stages.proof.selftest.probes import FEW, MANY, RATES, STREAMS, WATCHDOG, probes
from stages.proof.selftest.relink import relink
from stages.proof.selftest.trial import DISPATCHES, judge
from stages.targets import forget_tools
from stages.targets.npu2.groupings import GROUPINGS
from stages.targets.npu2.levels import VARIABLE
from stages.targets.npu2.modules import SUFFIX, build_module, sources
from stages.targets.npu2.toolchain import Npu
from stages.weights.formats import formats
from tests.conftest import A_LLAMA, ROOT, build, doit, of_command_line, ran, unfinished
from tests.npu import test_npu2_build, test_xrt
from tests.npu.printed import missing, quoted
from tests.support import pyxrt_standin
from tests.support.pyxrt_standin import install
from tests.support.several import CHOSEN, SEQUENCES, build_several
from tests.support.several import TOKENS as COUNT

BUCKETS = (64, 128)


@pytest.fixture(scope="session")
def simulated(artifacts: Path, model: Path) -> Path:
    """`artifacts` with the probes and the demo model for the simulator."""
    run = doit("probe:manifest", f"artifacts={artifacts}", "target=npu2-sim", "npu.buckets=64,128")
    assert run.returncode == 0, run.stdout + run.stderr
    made = artifacts / "selftest/npu2-sim"
    # As the command does behind the build.
    trust.mark_own(made, (made / "manifest.json").read_bytes())
    return artifacts


@pytest.fixture(scope="session")
def model(artifacts: Path) -> Path:
    return build("demo", artifacts, target="npu2-sim", buckets="64,128")


@pytest.fixture(scope="session")
def on_npu(simulated: Path, model: Path) -> Setup:
    """What the stand-in takes for artifacts of `npu2`."""
    return setup(simulated / "selftest/npu2-sim", model)


def setup(made: Path, model: Path) -> Setup:
    opened = [Manifest.open(directory) for directory in (made, model)]
    config = read_config(model / CONFIG)
    return Setup(*map(as_npu2, opened), config, programs(config, GROUPINGS["fused"], BUCKETS), threads=1, repeats=1)


TRIED = ("add", "rope_kv", "silu_and_mul", "gemm_kv", "int4_feed_forward", "token_attention_last")
"""Tile functions of a short climb."""


@pytest.fixture(scope="session")
def few(model: Path, artifacts: Path, tmp_path_factory: pytest.TempPathFactory) -> Setup:
    """Return what the stand-in takes for artifacts that have only the probes of a short climb."""
    root = tmp_path_factory.mktemp("few")
    shutil.copytree(artifacts / ".cache", root / ".cache", ignore=unfinished)
    given = {"model": "demo", "artifacts": str(root), "target": "npu2-sim", "npu.buckets": "64,128"}
    made = graph.Probes(Build(parse_options(given)))
    with pytest.MonkeyPatch.context() as patch:
        names = (measure.BASE, "rms_norm", "rate_add", *TRIED)
        patch.setattr(graph, "probes", lambda: {name: probes()[name] for name in names})
        with made.project.lock:
            for step in made.steps.values():
                assert step.run() is None, step.name
            made.finish()
    return setup(made.directory, model)


def as_npu2(manifest: Manifest) -> Manifest:
    told = {"kernel": "main", "instruction_bytes": 4096, "milliseconds": 1.0}
    described = {name: spec if spec["host"] else {**spec, **told} for name, spec in manifest.programs.items()}
    return replace(manifest, target={**manifest.target, "name": "npu2", "device": "xrt"}, programs=described)


@pytest.fixture(scope="session")
def expected() -> dict[Any, Any]:
    """What the references compute, once for all tests."""
    return {}


@pytest.fixture
def references_once(expected: dict[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    expect = model_rungs.expect

    def kept(manifest: Manifest, config: Any, programs: Any, phase: Any, ids: Sequence[int]) -> Any:
        asked = manifest.directory, phase, tuple(ids)
        if asked not in expected:
            expected[asked] = expect(manifest, config, programs, phase, ids)
        return expected[asked]

    monkeypatch.setattr(model_rungs, "expect", kept)


@pytest.fixture
def short(few: Setup, references_once: None, monkeypatch: pytest.MonkeyPatch) -> Setup:
    """Without the rungs that take long and which a test does not reach for."""
    monkeypatch.setattr(measure, "TIMED", ())
    monkeypatch.setattr(ladder, "tile_functions", lambda: [probes()[name] for name in TRIED])
    return few


@pytest.fixture(autouse=True)
def _clean(only_new_objects_are_collected: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(session.tempfile, "gettempdir", lambda: str(tmp_path))
    yield
    gc.collect()
    world = pyxrt_standin.WORLD
    assert world.alive() == {}, "something of the device was not released"
    assert world.violations == []
    lock = tmp_path / session.LOCK
    if lock.exists():
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    sys.modules.pop("pyxrt", None)


def results(found: Outcome) -> dict[str, set[str]]:
    by_rung: dict[str, set[str]] = {}
    for rung in found.rungs:
        by_rung.setdefault(rung.rung, set()).add(rung.result)
    return by_rung


# Right


def climbed(setup: Setup) -> Outcome:
    """Climb, check that all rungs hold in their order, and return what was found."""
    install()
    said: list[Rung] = []
    found = run_ladder(setup, said.append)
    assert said == found.rungs
    assert found.failed is None, found.failed
    expected = {name: {PASSED} for name in (faults.DEVICE, faults.CONTEXT, faults.KERNEL, faults.TILE, faults.LISTS)}
    times = {faults.TIMES: {PASSED}} if measure.TIMED else {}
    expected |= {faults.SWITCH: {PASSED}} | times | {n: {PASSED} for n in (faults.HEAP, faults.PROGRAM, faults.LAYER)}
    expected |= {faults.PROMPT: {PASSED}, faults.TOKEN: {PASSED}, faults.WATCHDOG: {SKIPPED}}
    assert list(results(found)) == list(expected), "in this order"
    assert results(found) == expected
    assert found.observed["heap"]["runs"] > 100
    assert found.observed["programs"].keys() == {
        *("prefill_attend.64", "prefill_up.64", "prefill_down.64"),
        *("rms_gemv_rope", "decode_layer", "decode_last"),
    }
    return found


def test_rungs_hold(short: Setup) -> None:
    found = climbed(short)
    assert {rung.what.partition(":")[0] for rung in found.rungs if rung.rung == faults.TILE} == {*TRIED}


@pytest.mark.thorough
def test_rungs_of_every_probe_hold(on_npu: Setup) -> None:
    found = climbed(on_npu)
    tried = {rung.what.partition(":")[0] for rung in found.rungs if rung.rung == faults.TILE}
    kernels = {"add", "rms_norm", "silu_and_mul", "rope", "rope_kv", "gemv", "gemv_f32", "gemm", "gemm_kv"}
    assert tried >= kernels | {"flash_attention", "gemm_bfp16", "int4_gemv", "int4_feed_forward"}
    assert tried >= {f"token_attention_{where}" for where in ("first", "middle", "last")}
    assert found.times.keys() == set(measure.TIMED)
    # Of the simulator's times, of which some differences may be lost in the noise.
    assert "ddr_gbps" in found.measured


def test_the_module_of_every_probe_is_made(tmp_path: Path) -> None:
    """`doit selftest` begins with these; only a thorough test compiles and runs all of them."""
    for name in probes():
        write_module(name, tmp_path / name, (), priced=True)
        air.check(air.parse_mlir((tmp_path / name / MODULES / f"{name}{SUFFIX}").read_text()))


def test_every_kernel_of_the_array_is_tried() -> None:
    """Probes call the tile functions of every C++ source that a program of the array has, whatever the weights."""
    device = [
        program
        for grouping in GROUPINGS.values()
        for weights in ("bf16", "int4", "int6", "int8")
        for kv in ("bf16", "int8")
        for program in programs(A_LLAMA, grouping, [64], parse_policy(weights, kv, "bfp16"))
        if not program.host
    ]
    used = sources(device)
    assert sources([probe.program for probe in ladder.tile_functions()]) == used


@pytest.mark.thorough
def test_the_simulator_climbs_what_it_can(simulated: Path) -> None:
    run = doit("selftest", f"artifacts={simulated}", "target=npu2-sim", "npu.buckets=64,128", "repeats=1")
    assert run.returncode == 0, run.stdout + run.stderr
    assert ran(run) == set(), "all was built"
    assert "passed   tile function, gemm: " in run.stdout
    assert "passed   token, tokens of demo" in run.stdout
    assert "checks passed" in run.stdout
    assert faults.DEVICE not in run.stdout.split()
    content = json.loads((simulated / "selftest/npu2-sim/report.json").read_text())
    assert content["measured"] == {}, "a simulator's times are not the NPU's"
    assert content["about"]["model"] == "demo"


def test_selftest_is_the_arrays(artifacts: Path) -> None:
    run = doit("selftest", f"artifacts={artifacts}", "target=cpu")
    assert run.returncode
    assert run.stderr == "error: selftest: target cpu runs no programs on the NPU: add target=npu2\n"


# Failure


def corrupted(
    monkeypatch: pytest.MonkeyPatch,
    program: str,
    change: Callable[[np.ndarray], None],
    since: int = 1,
    until: int = 999,
) -> None:
    """The last slot of a program, which is a result, is changed behind its executions from the `since`-th on."""
    count = itertools.count(1)

    def wrong(name: str, out: np.ndarray) -> None:
        if name == program and since <= next(count) <= until:
            change(out)

    behind_every_run(monkeypatch, wrong)


def behind_every_run(monkeypatch: pytest.MonkeyPatch, do: Callable[[str, np.ndarray], None]) -> None:
    """`do` gets a program's name and what its last slot holds, as bf16."""
    run = SimProgram.run

    def more(self: SimProgram, addresses: Sequence[int], **named: Any) -> None:
        run(self, addresses, **named)
        out = (ctypes.c_uint16 * (self.slot_bytes[-1] // 2)).from_address(addresses[-1])
        do(self.name, np.ctypeslib.as_array(out).view(bfloat16))

    monkeypatch.setattr(SimProgram, "run", more)


def garbage(values: np.ndarray) -> None:
    values.view(np.uint8)[:] ^= 0x2A


def zeros(values: np.ndarray) -> None:
    values[:] = 0


def no_numbers(values: np.ndarray) -> None:
    values[::7] = np.nan


def last_bit(values: np.ndarray) -> None:
    values.view(np.uint16)[:64] ^= 1


def elsewhere(values: np.ndarray) -> None:
    """Into the V half of the cache."""
    values[64] = 3


NO_CONTEXT = "DRM_IOCTL_AMDXDNA_CREATE_HWCTX IOCTL failed (err=-22): Invalid argument"

NOT_SUPPORTED = "DRM_IOCTL_AMDXDNA_EXEC_CMD IOCTL failed (err=-95): Operation not supported"


def firmware(monkeypatch: pytest.MonkeyPatch, number: str) -> None:
    """The machine's NPU has firmware of this version."""
    device = Npu(Path("/dev/accel/accel0"), "Strix", 8, "amdxdna of the kernel", False, number, True)
    monkeypatch.setattr(ladder, "npu", lambda: device)


def no_context(monkeypatch: pytest.MonkeyPatch, kind: type[Exception], said: str) -> None:
    def refuse(*_: Any) -> Any:
        raise kind(said)

    monkeypatch.setattr(sys.modules["pyxrt"], "hw_context", refuse)


def no_runs(monkeypatch: pytest.MonkeyPatch, since: int) -> None:
    """The heap for instructions is full."""
    init, count = pyxrt_standin.run.__init__, itertools.count(1)

    def full(self: Any, kernel: Any) -> None:
        if next(count) >= since:
            raise RuntimeError("DRM_IOCTL_AMDXDNA_CREATE_BO IOCTL failed (err=-28): No space left on device")
        init(self, kernel)

    monkeypatch.setattr(pyxrt_standin.run, "__init__", full)


def no_list(monkeypatch: pytest.MonkeyPatch, error: str, longer_than: int = 0) -> None:
    """Run lists, or those that are long, fail."""
    wait = pyxrt_standin.runlist.wait

    def failing(self: Any) -> None:
        wait(self)
        if len(self.runs) > longer_than:
            raise RuntimeError(error)

    monkeypatch.setattr(pyxrt_standin.runlist, "wait", failing)


def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that ran after another one computes garbage when its turn comes again."""
    order = []

    def switched(name: str, out: np.ndarray) -> None:
        order.append(name)
        if order[-3:] == ["rms_norm", measure.BASE, "rms_norm"]:
            garbage(out)

    behind_every_run(monkeypatch, switched)


Inject = Callable[[pytest.MonkeyPatch], object]

BREAKS: dict[str, tuple[dict[str, Any], Inject | None, str, str, str]] = {
    "no device": ({"vanish": 1}, None, faults.DEVICE, "gone", "No such device"),
    "no bindings": ({}, lambda m: m.setitem(sys.modules, "pyxrt", None), faults.DEVICE, "no bindings", "pyxrt"),
    "older XRT": ({}, lambda m: no_context(m, TypeError, "no overload"), faults.CONTEXT, "old bindings", "overload"),
    "no context": ({}, lambda m: no_context(m, RuntimeError, NO_CONTEXT), faults.CONTEXT, "stuck", "CREATE_HWCTX"),
    "old firmware": (
        {},
        lambda m: (no_context(m, RuntimeError, NOT_SUPPORTED), firmware(m, "1.0.0.166")),
        faults.CONTEXT,
        "old firmware",
        "Operation not supported; firmware 1.0.0.166",
    ),
    "refused by new firmware": (
        {},
        lambda m: (no_context(m, RuntimeError, NOT_SUPPORTED), firmware(m, "1.1.2.64")),
        faults.CONTEXT,
        "failed",
        "Operation not supported",
    ),
    "no memory": ({"fail_alloc": 1}, None, faults.KERNEL, "no memory", "Cannot allocate"),
    "deadline": ({"time_out": 1}, None, faults.KERNEL, "timeout", "TIMEOUT"),
    "hang": ({"hang": 1}, None, faults.KERNEL, "timeout", "TIMEOUT"),
    "second dispatch": (
        {},
        lambda m: corrupted(m, measure.BASE, garbage, 2),
        faults.KERNEL,
        "later dispatch",
        "dispatch 2: out: .* of 512 values",
    ),
    "vanishes": ({"vanish": 50}, None, faults.TILE, "gone", "No such device"),
    "tile function hangs": ({"hang": 5}, None, faults.TILE, "timeout", "did not finish in time"),
    "a cascade waits": ({"hang": 16}, None, faults.TILE, "timeout", "did not finish in time"),
    "a key is another": (
        {},
        lambda m: corrupted(m, "token_attention_last", garbage),
        faults.TILE,
        "wrong",
        r"row: \d+ of 256 values",
    ),
    "wrong numbers": (
        {},
        lambda m: corrupted(m, "add", garbage),
        faults.TILE,
        "wrong",
        r"out: \d+ of 16384 values, the worst is number \d+: ",
    ),
    "zeros": ({}, lambda m: corrupted(m, "silu_and_mul", zeros), faults.TILE, "zeros", "all 49152 values are zero"),
    "never computed": ({}, lambda m: corrupted(m, "add", no_numbers), faults.TILE, "no numbers", "2341 of 16384"),
    "a race": ({}, lambda m: corrupted(m, "silu_and_mul", last_bit, 3), faults.TILE, "unsteady", "dispatch 3: .*64 of"),
    "wrong place": ({}, lambda m: corrupted(m, "rope_kv", elsewhere), faults.TILE, "elsewhere", "1 values written"),
    "stale": ({}, lambda m: corrupted(m, "gemm_kv", zeros, 2), faults.TILE, "later dispatch", "dispatch 2: .*zero"),
    "refuses a second ELF": (
        {"fail_config": "DRM_IOCTL_AMDXDNA_CONFIG_HWCTX IOCTL failed (err=-12): Cannot allocate memory"},
        None,
        faults.SWITCH,
        "refused",
        "CONFIG_HWCTX",
    ),
    "forgets": ({}, forgetful, faults.SWITCH, "later dispatch", "dispatch 2"),
    "program": ({}, lambda m: corrupted(m, "decode_layer", garbage), faults.PROGRAM, "wrong", "relative error"),
    "program again": (
        {},
        lambda m: corrupted(m, "rms_gemv_rope", garbage, 2),
        faults.PROGRAM,
        "later dispatch",
        "dispatch 2",
    ),
    "layer": ({}, lambda m: corrupted(m, "decode_layer", garbage, 4, 4), faults.LAYER, "wrong", "decode: "),
    "prompt": ({}, lambda m: corrupted(m, "prefill_down", garbage, 7), faults.PROMPT, "wrong", "relative error"),
    "token": ({}, lambda m: corrupted(m, "decode_last", garbage, 5), faults.TOKEN, "wrong", "token 2: "),
}


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", BREAKS)
def test_a_fault_is_named(short: Setup, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    switches, inject, rung, cause, detail = BREAKS[name]
    install(**switches)
    if inject:
        inject(monkeypatch)
    found = run_ladder(short)
    broken = found.failed
    assert broken is not None
    assert (broken.rung, broken.cause) == (rung, cause), broken
    assert broken is found.rungs[-1], "it stops there"
    assert re.search(detail, broken.detail), broken.detail
    known = fault(rung, cause)
    assert (broken.meaning, broken.remedy) == (known.meaning, known.remedy)
    assert "\n" not in f"{broken.detail}{broken.meaning}{broken.remedy}"
    if name == "a cascade waits":
        assert broken.what.startswith("int4_feed_forward: ")
    if inject is None and name == "no bindings":
        install()


def test_a_kernel_of_another_name(short: Setup) -> None:
    install()
    named = {name: {**program, "kernel": "other"} for name, program in short.probes.programs.items()}
    broken = run_ladder(replace(short, probes=replace(short.probes, programs=named))).failed
    assert broken and (broken.rung, broken.cause) == (faults.CONTEXT, "no kernel"), broken


LISTS: dict[str, tuple[dict[str, Any], Inject, str]] = {
    "no run lists": ({"runlist": False}, lambda m: None, "none"),
    "firmware refuses": ({}, lambda m: no_list(m, "runlist failed execution (err=-95)"), "failed"),
    "lists hang": ({}, lambda m: no_list(m, "failed (ERT_CMD_STATE_TIMEOUT)"), "timeout"),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", LISTS)
def test_run_lists_can_be_done_without(short: Setup, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    switches, inject, cause = LISTS[name]
    install(**switches)
    inject(monkeypatch)
    found = run_ladder(short)
    assert found.failed is None, found.failed
    (limited,) = (rung for rung in found.rungs if rung.result == LIMITED)
    assert (limited.rung, limited.cause) == (faults.LISTS, cause)
    assert found.observed["run_lists"] is False
    assert ladder.NO_LISTS not in os.environ, "what the runtime was told ends with the climb"


@pytest.mark.thorough
def test_heap_is_counted(short: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    install()
    original, counts = ladder._Ladder.heap, []

    def heap(self: Any) -> str:
        with pytest.MonkeyPatch.context() as inner:
            no_runs(inner, 34)
            counts.append(original(self))
        return str(counts[0])

    monkeypatch.setattr(ladder._Ladder, "heap", heap)
    found = run_ladder(short)
    assert found.failed is None
    assert found.observed["heap"]["runs"] == 33
    assert "No space left" in found.observed["heap"]["refused"]


# What may reset the device


@pytest.fixture
def risky(short: Setup, monkeypatch: pytest.MonkeyPatch) -> Setup:
    """Every submission takes a fifth of a second, by the clock that there is."""
    ticks = itertools.count()
    monkeypatch.setattr(raw, "clock", lambda: 0.2 * next(ticks))
    # Its ELF takes seconds on the simulator, and its results are not looked at.
    quick = {**short.probes.programs, WATCHDOG: short.probes.programs["rate_add"]}
    return replace(short, risky=True, probes=replace(short.probes, programs=quick))


ENDED = "runlist failed execution (ERT_CMD_STATE_TIMEOUT)"


def test_watchdog_bites_where_it_must(risky: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    install()
    no_list(monkeypatch, ENDED, 10)
    monkeypatch.setattr(ladder, "LISTED", 4)
    found = run_ladder(risky)
    assert found.failed is None, found.failed
    seen = found.observed["watchdog"]
    assert seen["run_seconds"] == pytest.approx(0.2)
    assert seen["command_of_1_s"].startswith("5 runs")
    assert seen["command_of_1_s"].endswith("done")
    assert "15 runs, ended after" in seen["command_of_3_s"]


@pytest.mark.thorough
def test_watchdog_bites_too_early(risky: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    install()
    no_list(monkeypatch, ENDED, 4)
    monkeypatch.setattr(ladder, "LISTED", 4)
    broken = run_ladder(risky).failed
    assert broken and (broken.rung, broken.cause) == (faults.WATCHDOG, "timeout"), broken
    assert broken.detail.startswith("5 runs")


@pytest.mark.thorough
def test_device_does_not_come_back(risky: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    world = install()
    wait = pyxrt_standin.runlist.wait

    def fatal(self: Any) -> None:
        wait(self)
        if len(self.runs) > 10:
            world.vanish = 1
            raise RuntimeError(ENDED)

    monkeypatch.setattr(pyxrt_standin.runlist, "wait", fatal)
    monkeypatch.setattr(ladder, "LISTED", 4)
    broken = run_ladder(risky).failed
    assert broken and (broken.rung, broken.cause) == (faults.WATCHDOG, "not recovered"), broken


# Several tokens, and several sequences


@pytest.fixture(scope="session")
def together(artifacts: Path, tmp_path_factory: pytest.TempPathFactory) -> Setup:
    """What the stand-in takes for a model with programs of several tokens and of several sequences; without probes."""
    directory = build_several(artifacts)
    given = {"model": str(artifacts.with_name("models") / "several"), "artifacts": str(artifacts), "weights": "int4"}
    given |= {"target": "npu2-sim", **of_command_line(CHOSEN)}
    described, config = Build(parse_options(given)), read_config(directory / CONFIG)
    assert described.directory == directory
    manifest = Manifest.open(test_xrt.as_npu2(directory, tmp_path_factory.mktemp("together") / "npu2"))
    of = config, described.whole_grouping, described.buckets, described.policy, described.positions
    return Setup(manifest, manifest, config, programs(*of), described.bfp16, threads=2)


@pytest.fixture
def model_alone(together: Setup, references_once: None, monkeypatch: pytest.MonkeyPatch) -> Setup:
    monkeypatch.setattr(ladder._Ladder, "rungs", ladder._Ladder.model_rungs)
    return together


FIRST = {"token": f"tokens_first.{COUNT}.128", "sequence": f"sequences_{SEQUENCES}_first.{SEQUENCES}.128"}
LAYER = {"token": f"wide_tokens_layer.{COUNT}.128", "sequence": f"sequences_{SEQUENCES}_layer.{SEQUENCES}.128"}
LAST = {"token": f"wide_tokens_last.{COUNT}", "sequence": f"tokens_last.{SEQUENCES}"}


def entry_of(program: str) -> str:
    """The name of its function, which its sizes share."""
    return program.partition(".")[0]


def test_rungs_of_several_hold(model_alone: Setup) -> None:
    install()
    found = run_ladder(model_alone)
    assert found.failed is None, found.failed.detail
    for which, count in (("token", COUNT), ("sequence", SEQUENCES)):
        whats = [rung.what for rung in found.rungs if rung.rung == faults.SEVERAL[which]]
        programs_of = [each[which] for each in (FIRST, LAYER, LAST)]
        assert whats == [*programs_of, f"{count} {which}s of several"]
        assert found.observed[f"{count}_{which}s_ms"] > 0


def caches_change_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two sequences see each other's keys."""
    run = SimProgram.run

    def changed(self: SimProgram, addresses: Sequence[int], **named: Any) -> None:
        given = [*addresses]
        if self.name == entry_of(FIRST["sequence"]):
            given[5], given[8] = given[8], given[5]
        run(self, given, **named)

    monkeypatch.setattr(SimProgram, "run", changed)


def places_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs are right, and get the sequences in other places than their caches are in."""
    places = TurnSteps._places
    monkeypatch.setattr(TurnSteps, "_fill", lambda self, runs, at: None)
    monkeypatch.setattr(TurnSteps, "_places", lambda self, runs: places(self, runs)[::-1])


def rows_change_places(values: np.ndarray) -> None:
    """The first two rows of what comes last are exchanged."""
    rows = values.reshape(COUNT, -1)
    rows[:2] = rows[:2][::-1]


def a_head_is_missing(values: np.ndarray) -> None:
    """In the last token's row."""
    values.reshape(COUNT, -1)[-1, -64:] = 0


WRONG_TOGETHER: dict[str, tuple[Inject, str, str, str, str]] = {
    "another sequence's cache": (
        caches_change_places,
        *("sequence", FIRST["sequence"], "wrong", "attended of sequence 1: "),
    ),
    "other places": (places_change, "sequence", f"{SEQUENCES} sequences of several", "wrong", "sequence 1: "),
    "a neighbour's row": (
        lambda m: corrupted(m, entry_of(FIRST["token"]), rows_change_places),
        *("token", FIRST["token"], "wrong", "attended of token 1: "),
    ),
    "a head": (
        lambda m: corrupted(m, entry_of(LAYER["token"]), a_head_is_missing),
        *("token", LAYER["token"], "wrong", f"attended of token {COUNT}: "),
    ),
    "other bits": (
        lambda m: corrupted(m, entry_of(LAYER["token"]), last_bit, DISPATCHES + 1),
        *("token", f"{COUNT} tokens of several", "other bits", "token 1: "),
    ),
}


def several_alone(self: Any) -> Iterator[tuple[str, str, Callable[[], str | None]]]:
    """The rungs of several, behind the one that loads the model."""
    rungs = self.model_rungs()
    yield next(rungs)
    yield from (each for each in rungs if each[0] in faults.SEVERAL.values())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", WRONG_TOGETHER)
def test_a_fault_of_several_breaks_its_rung(name: str, model_alone: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    inject, which, what, cause, detail = WRONG_TOGETHER[name]
    monkeypatch.setattr(ladder._Ladder, "rungs", several_alone)
    install()
    inject(monkeypatch)
    broken = run_ladder(model_alone).failed
    assert broken and (broken.rung, broken.what, broken.cause) == (faults.SEVERAL[which], what, cause), broken
    assert broken.detail.startswith(detail)
    assert FAULTS[broken.rung, cause].meaning == broken.meaning


# Levels of optimisation


def copied(setup: Setup) -> Callable[[str, str, Path], dict[str, Any]]:
    """Instead of compilers: the probe as it is."""

    def link(name: str, level: str, work: Path) -> dict[str, Any]:
        shutil.copyfile(setup.probes.directory / setup.probes.programs[name]["file"], work / f"{level}.elf")
        return {"file": f"{level}.elf"}

    return link


def test_a_function_that_breaks_is_tried_at_another_level(short: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    install()
    corrupted(monkeypatch, "silu_and_mul", garbage, 1, DISPATCHES)
    found = run_ladder(replace(short, relink=copied(short)))
    assert found.failed and (found.failed.rung, found.failed.cause) == (faults.TILE, "wrong")
    assert re.search(r"; right at -O1 \(.*\): LLAMA_NPU2_PEANO_O=silu_and_mul=1$", found.failed.detail)
    assert found.observed["levels"] == {"silu_and_mul": "1"}
    assert found.failed.meaning.startswith("the tile function alone")


def test_a_function_that_is_wrong_at_each_level(short: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    install()
    monkeypatch.setenv(VARIABLE, "silu_and_mul=1")
    corrupted(monkeypatch, "silu_and_mul", garbage)
    failed = run_ladder(replace(short, relink=copied(short))).failed
    assert failed and "; at -O2 no better: wrong: out: " in failed.detail
    monkeypatch.delenv(VARIABLE)
    install()
    failed = run_ladder(short).failed
    assert failed and failed.detail.endswith(
        "; -O1 not tried, no compilers here: LLAMA_NPU2_PEANO_O=silu_and_mul=1 and doit selftest where they are"
    )


def test_a_probe_is_linked_at_another_level(
    fakes: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in fakes.items():
        monkeypatch.setenv(name, value)
    forget_tools()
    for level in ("1", "2"):
        facts = relink(tmp_path / "cache", "silu_and_mul", level, tmp_path / level)
        made = (tmp_path / level / facts["file"]).read_bytes()
        assert f"-O{level}".encode() in made
        assert f"-O{3 - int(level)}".encode() not in made
        assert (facts["kernel"], facts["resets"]) == ("main", 2)
    forget_tools()


# What the tutorial quotes


def test_the_tutorial_quotes_a_climb(short: Setup, capsys: pytest.CaptureFixture[str]) -> None:
    install()
    found = command.climb(short)
    print(command.end(found, Path("artifacts/selftest/npu2/report.json")))
    assert missing("ladder", capsys.readouterr().out.splitlines()) == []


def test_the_tutorial_quotes_a_ladder_that_stops(
    short: Setup, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install()
    corrupted(monkeypatch, "silu_and_mul", garbage, 1, DISPATCHES)
    found = command.climb(replace(short, relink=copied(short)))
    print(command.end(found, Path("artifacts/selftest/npu2/report.json")))
    assert missing("ladder that stops", capsys.readouterr().out.splitlines()) == []


def test_what_is_not_printed_is_missing() -> None:
    ladder_lines = [line for line in quoted()["ladder"] if line != "..."]
    assert missing("ladder", ladder_lines) == []
    assert missing("ladder", ladder_lines[:-1]) == ladder_lines[-1:]
    assert missing("ladder", [ladder_lines[1], ladder_lines[0], *ladder_lines[2:]]) == ladder_lines[1:2]


# The table


def test_every_entry_is_two_lines_of_its_own() -> None:
    texts = [text for entry in FAULTS.values() for text in (entry.meaning, entry.remedy)]
    assert all(text and "\n" not in text and len(text) < 160 and not text.endswith(".") for text in texts)
    meanings = [entry.meaning for entry in FAULTS.values()]
    assert len(set(meanings)) == len(meanings)


def test_a_cause_without_an_entry_is_a_refusal() -> None:
    assert isinstance(fault(faults.TIMES, "no kernel"), Fault)
    assert fault(faults.TIMES, "no kernel") is fault(faults.TIMES, "failed")


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        ("one, first: did not finish in time on the NPU (ERT_CMD_STATE_TIMEOUT)", "timeout"),
        ("ERT_CMD_STATE_ABORT after 0.1 s", "failed"),
        ("the NPU cannot be opened: Could not open device with index '0'", "gone"),
        ("the NPU driver has no 64 MiB more beside the 0 MiB in use: (err=-12)", "no memory"),
        ("Unable to find group idx for given kernel: main:add", "no kernel"),
    ],
)
def test_cause_of_what_is_said(said: str, cause: str) -> None:
    assert cause_of(said) == cause


def _a_share_is_left_out(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The sums of the second of eight cores, whose numbers of down are zeros where all scales are."""
    form = formats()["int4"]
    down = form.dequantise(values["down"], 512)
    down[:, 64:128] = 0
    return values | {"down": form.quantise(down)}


def _gate_for_up(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return values | {"weight": np.concatenate(np.split(values["weight"], 2)[::-1])}


def _own_key_is_another(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The token's own K and V are those that its position had before."""
    position = int(values["table"][0, 64:].view(np.int32)[0])
    x = values["x"].copy()
    x[256:] = values["kv"][position].reshape(2, 2, 64).transpose(1, 0, 2).reshape(-1)
    return values | {"x": x}


def _a_group_is_read_twice(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    x = values["x"].copy()
    x[..., 32:64] = x[..., :32]
    return values | {"x": x}


def _a_row_is_its_neighbour_s(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Each row of several tokens, or sequences, gets that of the one before."""
    return values | {"x": np.roll(values["x"], 1, axis=0)}


def _own_key_is_the_neighbour_s(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    x = values["x"].copy()
    x[1, 256:384] = x[2, 256:384]
    return values | {"x": x}


def _a_key_of_another_sequence(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    kv = values["kv"].copy()
    kv[3] = kv[200]
    return values | {"kv": kv}


def _norms_change_places(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    if "qk_norm" in values:
        return values | {"qk_norm": np.roll(values["qk_norm"], 64)}
    return values | {"q_norm": values["k_norm"], "k_norm": values["q_norm"]}


SEVERAL = [f"{stored}{of}" for of in ("batched_", "sequences2_") for stored in ("", "int8_rows_")]
SEVERAL += ["batched_norm_", "sequences2_norm_"]


@pytest.mark.parametrize(
    "name, change",
    [
        *(
            (name, _a_group_is_read_twice)
            for name in ("int4_gemv", "int8_gemv", "int6_gemv_f32", "rate_int4_gemv", "rate_int6_gemv")
        ),
        *(("int4_swiglu", _gate_for_up), ("int4_feed_forward", _a_share_is_left_out)),
        *((f"token_attention_{where}", _own_key_is_another) for where in ("first", "middle", "last")),
        *((f"int4_batched_{each}", _a_row_is_its_neighbour_s) for each in ("gemv", "feed_forward")),
        *(("int4_batched_gemv", _a_group_is_read_twice), ("int4_batched_feed_forward", _a_share_is_left_out)),
        *((f"{each}token_attention", _a_row_is_its_neighbour_s) for each in SEVERAL),
        *((f"{each}token_attention", _own_key_is_the_neighbour_s) for each in SEVERAL if "batched" in each),
        *((f"{each}token_attention", _a_key_of_another_sequence) for each in SEVERAL if "sequence" in each),
        *((f"{each}_norm_token_attention", _norms_change_places) for each in ("batched", "sequences2")),
    ],
)
def test_bounds_show_a_fault(name: str, change: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]) -> None:
    probe = probes()[name]
    values = probe.values()
    want = probe.expected(values)
    off = probe.bound(values, want)
    assert not judge([want], want, off).cause
    assert judge([probe.expected(change(values))], want, off).cause == "wrong"


def test_inputs_have_the_sizes_of_arguments() -> None:
    """Also those that are stored as their kernel takes them."""
    for probe in ladder.tile_functions():
        slots = {slot["name"]: slot for slot in build_module(probe.program, {}).described_slots()}
        for name, given in ladder.packed(probe, [*slots.values()], probe.values()).items():
            assert given.nbytes == nbytes(slots[name]["dtype"], slots[name]["shape"]), (probe.name, name)


def test_judging_needs_no_more_than_the_bound() -> None:
    want, off = {"out": np.array([1.0, np.nan, 3.0])}, {"out": np.array([0.5, 0.0, 0.0])}
    right = {"out": np.array([1.5, 0.0, 3.0], np.float32)}
    assert judge([right, right], want, off).cause == ""
    for index, value, cause in ((0, 1.6, "wrong"), (1, 1.0, "elsewhere"), (2, np.nan, "no numbers"), (2, 2.9, "wrong")):
        wrong = {"out": right["out"].copy()}
        wrong["out"][index] = value
        assert judge([wrong, wrong], want, off).cause == cause
        assert judge([right, wrong], want, off).cause == "later dispatch"
    other = {"out": np.array([1.2, 0.0, 3.0], np.float32)}
    assert judge([right, other], want, off).cause == "unsteady"


# Measuring


CODE = {f"launch_row_{MANY}": [8 << 12] * MANY, f"launch_array_{MANY}": [32 << 12] * MANY}
"""Bytes of code of launches whose cores load 4 KiB each."""


def times_of_a_machine() -> dict[str, float]:
    """Of one whose constants are round numbers."""
    submission, configuration, core, step = 80e-6, 40e-6, 5e-6, 20e-6
    cost = {"launch_row": configuration + 8 * core, "launch_array": configuration + 32 * core}
    times = {f"{kind}_{n}": submission + n * cost[kind] for kind in cost for n in (FEW, MANY)}
    base = times[measure.BASE]
    times |= {f"step_array_{n}": base + n * step for n in (FEW, MANY)}
    for count in STREAMS:
        source: Any = probes()[f"stream_{count}"].source
        times[f"stream_{count}"] = base + source.bytes / min(8e9 * count, 60e9)
    for name in RATES:
        rate: Any = probes()[name].source
        times[name] = base + rate.calls * 1000 / (measure.CLOCK_GHZ * 1e9)
    return times


def test_constants_are_those_of_the_machine() -> None:
    found = measure.constants(times_of_a_machine(), CODE)
    expected = {"submission_us": 80, "configuration_us": 40, "configuration_core_us": 5, "grid_step_us": 20}
    expected["configuration_kib_us"] = 1.25
    expected |= {"stream_gbps": 8, "ddr_gbps": 60, "read_4_gbps": 32, "gemm_cycles": 1000}
    for name, value in expected.items():
        assert found[name] == pytest.approx(value), name
    assert {*found} & {rate.name for rate in constants(Machine())} == measure.RATES_OF_TABLE
    gemm: Any = probes()["rate_gemm"].source
    assert found["macs_bf16"] == pytest.approx(gemm.macs / 1000)
    assert found["macs_bf16_x_bfp16"] == pytest.approx(gemm.macs / 1000)
    assert 0 < found["vector_cycles"] < 1000
    assert found["silu_and_mul_values_per_cycle"] == pytest.approx(probes()["rate_silu_and_mul"].source.values / 1000)  # type: ignore[union-attr]


def test_noise_measures_nothing() -> None:
    times = dict.fromkeys(times_of_a_machine(), 1e-4)
    assert measure.constants(times, CODE).keys() == {"submission_us"}
    assert measure.constants({}, CODE) == {}
    part = {name: value for name, value in times_of_a_machine().items() if not name.startswith("launch_array")}
    assert "configuration_us" not in measure.constants(part, CODE)


def test_code_says_what_of_a_launch_is_loading() -> None:
    """The cores of the larger launch have twice the code. A rate for each core would be too high."""
    times = times_of_a_machine()
    times |= {f"launch_array_{n}": 80e-6 + n * (40e-6 + 64 * 5e-6) for n in (FEW, MANY)}
    found = measure.constants(times, CODE | {f"launch_array_{MANY}": [64 << 12] * MANY})
    assert found["configuration_us"] == pytest.approx(40) and found["configuration_kib_us"] == pytest.approx(1.25)
    without = measure.constants(times, {})
    assert "configuration_us" not in without and "configuration_kib_us" not in without


# The report

NAMES = ("jane", "janes-laptop", "janes-laptop.home.example", "/home/jane doe", "/home/jane doe/llama")


def test_report_says_nothing_of_who_and_where(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(report.getpass, "getuser", lambda: "jane")
    monkeypatch.setattr(report.socket, "gethostname", lambda: "janes-laptop.home.example")
    monkeypatch.setattr(report.Path, "home", lambda: Path("/home/jane doe"))
    monkeypatch.setattr(report.Path, "cwd", lambda: Path("/home/jane doe/llama"))
    text = "/home/jane doe/llama/artifacts/x.elf cannot be loaded by jane@janes-laptop (in file:///home/jane/y.so:3)"
    rung = Rung("context", "an ELF", BROKEN, text, 0.1, "failed", "m", "see https://example.org/a/b")
    found = Outcome([rung], {}, {"step_us": 1.5}, {"heap": {"refused": "~/x/heap and /opt/xilinx/xrt/lib"}})
    rows = [{"what": "pyxrt", "found": "yes", "version": "/opt/xilinx/xrt/python/pyxrt.so"}]
    content = report.report(found, rows, {"model": "janes"})
    path = report.write(tmp_path, content)
    for written in (path.read_text(), path.with_suffix(".txt").read_text()):
        for name in ("jane ", "jane@", "janes-laptop", "doe", "/home", "/opt", "xilinx", "~/"):
            assert name not in written, name
        assert "https://example.org/a/b" in written, "an address of a page may stay"
        assert "x.elf" in written
        assert "pyxrt.so" in written
    assert json.loads(path.read_text())["measured"] == {"step_us": 1.5}


def test_report_of_a_real_climb_names_nobody(short: Setup, tmp_path: Path) -> None:
    install(fail_config="/dev/accel/accel0 is busy")
    from dataclasses import asdict

    from stages.commands import doctor

    content = report.report(run_ladder(short), [asdict(row) for row in doctor.report()], {"target": "npu2"})
    path = report.write(tmp_path, content)
    page = path.with_suffix(".txt").read_text()
    assert page.startswith("broken at context switch: ")
    assert "  meaning: " in page
    assert "  try: " in page
    for written in (path.read_text(), page):
        for name in report.names_of_here():
            assert not re.search(rf"(?<!\w){name}(?!\w)", written), name
        assert str(short.probes.directory) not in written


def test_report_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(report.UserError, match=r"report\.json cannot be written: .*artifacts="):
        report.write(tmp_path / "file", {"rungs": [], "about": {}, "measured": {}, "observed": {}, "machine": []})


# As a user would


@pytest.fixture
def fakes(tmp_path: Path, few: Setup) -> dict[str, str]:
    return everything(tmp_path / "fakes", few)


def everything(root: Path, setup: Setup) -> dict[str, str]:
    """An environment with everything that builds for the NPU, and with bindings."""
    (root / "simulated").mkdir(parents=True)
    for made in (setup.probes, setup.model):
        for library in (made.directory / "elf").iterdir():
            shutil.copy(library, root / "simulated" / library.name)
    made_tools = test_npu2_build.install(
        root, test_npu2_build.FAKE_PEANO, test_npu2_build.FAKE_AIRCC, test_npu2_build.FAKE_AIRCC
    )
    return made_tools | {"SIMULATED": str(root / "simulated")}


def bindings(checkout: Path, tmp_path: Path, **switches: Any) -> dict[str, str]:
    (checkout / "pyxrt.py").write_text("import tests.support.pyxrt_standin\n")
    path = f"{checkout}{os.pathsep}{ROOT}"
    return {"PYTHONPATH": path, "PYXRT_STANDIN": json.dumps(switches), "TMPDIR": str(tmp_path)}


COMMAND = ("selftest", "model=models/demo", "target=npu2", "npu.buckets=64", "repeats=1")


@pytest.mark.thorough
def test_probes_travel(built: Path, on_npu: Setup, tmp_path: Path) -> None:
    """Built by the tools, copied into a checkout on a machine that has none: nothing is built, the ladder climbs."""
    fakes = everything(tmp_path / "fakes", on_npu)
    first = doit(*COMMAND, cwd=built, env=fakes | bindings(built, tmp_path))
    assert {"probe:module:add", "probe:object:aie2p/gemm", "probe:elf:stream_16", "probe:manifest"} <= ran(first)
    assert "no check failed" in first.stdout
    other = tmp_path / "other"
    shutil.copytree(built, other, ignore=shutil.ignore_patterns("artifacts"))
    for name in ("demo", "selftest"):
        shutil.copytree(built / "artifacts" / name / "npu2", other / "artifacts" / name / "npu2")
    (tmp_path / "empty").mkdir()
    nothing = dict.fromkeys(("PEANO_INSTALL_DIR", "AIE_API_INCLUDE", "CXX", "PATH"), str(tmp_path / "empty"))
    (other / "artifacts/selftest/npu2/report.json").unlink()
    again = doit(*COMMAND, cwd=other, env=nothing | bindings(other, tmp_path, time_out=1))
    assert again.returncode
    assert "probe:" not in again.stderr
    assert "broken   first kernel" in again.stdout
    assert "meaning: the smallest program hangs" in again.stdout
    content = json.loads((other / "artifacts/selftest/npu2/report.json").read_text())
    assert content["rungs"][-1]["cause"] == "timeout"
    assert str(other) not in json.dumps(content)
