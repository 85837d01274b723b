"""The XRT device on the stand-in: results, submissions, what is synchronised, and every fault as one line."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import fcntl
import gc
import inspect
import itertools
import json
import operator
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ml_dtypes import bfloat16

from llama_npu2 import UserError, load
from llama_npu2.artifact.dtypes import nbytes
from llama_npu2.artifact.manifest import Manifest, NpuProgram
from llama_npu2.artifact.plan import FROM_POSITION, TOKENS, WHOLE
from llama_npu2.artifact.storage import File
from llama_npu2.artifact.validation import check_manifest
from llama_npu2.cli import bench
from llama_npu2.cli.profile import profile
from llama_npu2.devices import Binding, Call, StoredWeight, xrt
from llama_npu2.devices.spans import nested
from llama_npu2.devices.xrt import XrtDevice, limits, session, submissions
from llama_npu2.devices.xrt.buffers import Ranges
from llama_npu2.engine.completion import Completion
from llama_npu2.engine.memory import CacheRows, memory_of_blocks
from llama_npu2.engine.serving import Serving
from llama_npu2.engine.trace import TracedCall
from llama_npu2.options import Running
from stages.air import parse_mlir, to_mlir
from stages.commands.diagnose import diagnose
from stages.commands.profile import estimates, write_report
from stages.engine.files import file_digests
from stages.graph import Build
from stages.graph.needs import locked_memory
from stages.graph.options import parse_options
from stages.kernels import add
from stages.model.families import read_config
from stages.model.plan import make_plan
from stages.proof.comparison import transformers_model
from stages.reports.estimated import host_traffic
from stages.targets.npu2_sim.objects import options
from stages.targets.npu2_sim.programs import link
from tests.conftest import ROOT, build, change_manifest, of_command_line
from tests.npu.printed import missing
from tests.support import forked, pyxrt_standin
from tests.support.faults import ON_ARRAY
from tests.support.npu_shapes import FEW
from tests.support.pyxrt_standin import IN_FLIGHT, NEWEST, Facts, declared, install, release
from tests.support.several import build_several
from tests.support.sim_support import objects

ROWS, COLS = 4, 64
PROMPT = "The capital of France is"
LONGER = 4 * f"{PROMPT} Paris. "
"""One that takes less as a prompt than token by token, also where tokens have weights in groups."""
HEADS = ("heads", "kv_heads")
RELEASES = ("2.19.194", "2.20.197", "2.21.75", "2.23.0", NEWEST)


@pytest.fixture(scope="session")
def simulated(artifacts: Path) -> Path:
    return build("demo", artifacts, target="npu2-sim", buckets="64,128")


FACTS = {"instruction_bytes": 1 << 20, "milliseconds": 20.0}
"""Of the demo's programs, in which nothing comes near a limit."""


def as_npu2(simulated: Path, directory: Path, **facts: Any) -> Path:
    """What the stand-in takes for the artifacts of `npu2`. `facts`: of every program, beside a kernel's name each."""
    shutil.copytree(simulated, directory, copy_function=os.link, ignore=shutil.ignore_patterns("build"))

    def change(manifest: dict[str, Any]) -> None:
        manifest["target"] |= {"name": "npu2", "device": "xrt"}
        for name, program in manifest["programs"].items():
            if not program["host"]:
                about = Facts(**{"kernel": re.sub(r"\W", "_", name), **FACTS, **facts})
                program |= {key: value for key, value in vars(about).items() if key != "resets"}
                with_facts(directory / program["file"], about)
                manifest["files"][program["file"]] = file_digests(directory / program["file"])

    change_manifest(directory, change)
    return directory


def with_facts(path: Path, facts: Facts) -> None:
    """Put a trailer behind a shared object that may have other names."""
    content = path.read_bytes() + facts.trailer()
    path.unlink()
    path.write_bytes(content)


@pytest.fixture(scope="session")
def npu2(simulated: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return as_npu2(simulated, tmp_path_factory.mktemp("npu2") / "npu2")


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(session.tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path / session.LOCK


@pytest.fixture(autouse=True)
def _clean(only_new_objects_are_collected: None, lock: Path) -> Iterator[None]:
    yield
    gc.collect()
    world = pyxrt_standin.WORLD
    assert world.alive() == {}, "something of the device was not released"
    assert world.violations == []
    if lock.exists():
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    sys.modules.pop("pyxrt", None)


# The stand-in is what it stands in for


@pytest.mark.parametrize("version", RELEASES)
def test_standin_has_the_declared_interface(version: str) -> None:
    install(version=version)
    pyxrt: Any = sys.modules["pyxrt"]
    overloads: dict[str, set[int]] = {}
    for name, arguments, since in declared():
        if release(since) <= release(version):
            overloads.setdefault(name, set()).add(len(arguments))
        elif name != "hw_context":
            with pytest.raises(AttributeError):
                operator.attrgetter(name)(pyxrt)
    for name, counts in overloads.items():
        found = pyxrt
        for part in name.split("."):
            found = getattr(found, part)
        parameters = [p for p in inspect.signature(found).parameters.values() if p.name != "self"]
        least = sum(p.default is p.empty for p in parameters)
        assert {least, len(parameters)} >= {min(counts), max(counts)}, name
    for kind in {"run", "runlist", "bo", "hw_context"} & vars(pyxrt).keys():
        methods = {name for name, value in vars(vars(pyxrt)[kind]).items() if inspect.isfunction(value)}
        declared_ = {name.partition(".")[2] for name in overloads if name.startswith(f"{kind}.")}
        assert {name for name in methods if not name.startswith("_")} == declared_


def test_runtime_uses_only_what_is_declared() -> None:
    names = {name.split(".")[0] for name, _, _ in declared()} | {"xclBOSyncDirection", "ert_cmd_state"}
    sources = [path.read_text() for directory in xrt.__path__ for path in Path(directory).glob("*.py")]
    used = {
        node.attr
        for source in sources
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("pyxrt")
    }
    assert {"device", "elf", "run", "runlist", "bo", "ext"} <= used <= names


# Small programs


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with two programs `one` and `two`, each out = a + b."""
    directory = tmp_path_factory.mktemp("programs")
    (kernel,) = add.KERNELS
    assert kernel.tiling and kernel.program
    text = to_mlir(kernel.program(kernel.tiling({"rows": ROWS, "cols": COLS})).module)
    for name in ("one", "two"):
        module = parse_mlir(text.replace("func.func @add(", f"func.func @{name}("))
        link(module, objects(module, options()), directory / f"{name}.so", directory / name)
    return directory


SLOTS = [
    {"name": name, "shape": [ROWS, COLS], "role": role, "dtype": "bf16"}
    for name, role in (("a", "input"), ("b", "input"), ("out", "output"))
]
ROW = nbytes("bf16", [COLS])
BYTES = ROWS * ROW


class Adder:
    """out = a + calls * b, as so many calls, the last of the program `second`; `out` and the inputs are what the host
    sees. `facts`: of both ELFs, whose kernels are called as the programs unless it says otherwise."""

    def __init__(
        self, simulated: Path, programs: Path, second: str = "one", calls: int = 2, **facts: dict[str, Any]
    ) -> None:
        directory = Path(tempfile.mkdtemp(dir=programs))
        about = {}
        for stem in ("one", "two"):
            shutil.copyfile(programs / f"{stem}.so", directory / f"{stem}.so")
            values = vars(Facts(**{"kernel": stem, **facts.get(stem, {})}))
            with_facts(directory / f"{stem}.so", Facts(**values))
            about[File.at(directory / f"{stem}.so")] = NpuProgram(**{k: v for k, v in values.items() if k != "resets"})
        self.calls = calls
        self.device = XrtDevice(File.at(simulated / "elf/host.so"), 1, programs=about)
        loaded = {
            stem: self.device.load_program(File.at(directory / f"{stem}.so"), stem, False) for stem in ("one", second)
        }
        sums = [f"sum {number}" for number in range(1, calls)]
        self.buffers = {name: self.device.alloc(BYTES) for name in ("a", "b", *sums, "out")}
        self.arrays = {name: self.array(name) for name in ("a", "b", "out")}
        steps = list(pairwise(("a", *sums, "out")))
        self.submission = self.device.prepare(
            [
                self._call(loaded["one" if number < calls else second], f"call {number}", source, "b", result)
                for number, (source, result) in enumerate(steps, 1)
            ]
        )

    def array(self, name: str) -> np.ndarray:
        return self.device.array(self.buffers[name], bfloat16, (ROWS, COLS))

    def _call(self, program: Any, place: str, *names: str) -> Call:
        return Call(program, [Binding(self.buffers[name], WHOLE, ROW) for name in names], SLOTS, place)

    def run(self) -> None:
        self.arrays["a"][:], self.arrays["b"][:] = 1, 2
        self.submission.run(ROWS, 0)
        np.testing.assert_array_equal(self.arrays["out"].astype(np.float32), 1 + 2 * self.calls)


@pytest.mark.parametrize(
    ("second", "switches", "submissions"),
    [
        ("one", {}, 1),
        ("one", {"runlist": False}, 2),
        ("two", {}, 1),
        ("two", {"version": "2.23.0"}, 1),
        ("two", {"version": "2.21.75"}, 2),
    ],
)
def test_submissions_and_syncs(
    simulated: Path, programs: Path, second: str, switches: dict[str, Any], submissions: int
) -> None:
    world = install(**switches)
    adder = Adder(simulated, programs, second)
    for _ in range(3):
        before = dict(world.counts)
        adder.run()
        assert world.counts["submissions"] - before.get("submissions", 0) == submissions
        assert world.counts["runs"] - before.get("runs", 0) == 2
        assert world.counts["to_device"] - before["to_device"] == 2 * BYTES, "the two inputs, each once"
        assert world.counts["from_device"] - before.get("from_device", 0) == BYTES, "the sum stays on the device"
    counts = adder.device.counts
    assert (counts.to_device, counts.from_device) == (world.counts["to_device"], world.counts["from_device"])
    assert (counts.submissions, counts.runs) == (world.counts["submissions"], world.counts["runs"])
    adder.device.close()


# What the driver allows

SLOW, SHORT = {"milliseconds": 300.0}, {"milliseconds": 0.1}


@pytest.mark.parametrize(
    ("second", "calls", "facts", "submitted", "commands"),
    [
        ("one", 7, {"one": SLOW}, 3, [900, 900, 300]),
        ("two", 4, {"one": SLOW, "two": {"milliseconds": 900.0}}, 2, [900, 900]),
        ("one", 60, {"one": SHORT}, 1, [2.4, 2.4, 1.2]),
        ("two", 25, {"one": SHORT, "two": {"milliseconds": 999.0}}, 1, [2.4, 999]),
        ("two", 24, {"one": SHORT, "two": {"milliseconds": 999.0}}, 2, [2.3, 999]),
        ("one", 121, {"one": SHORT}, 1, [*[2.4] * 5, 0.1]),
        ("one", 48, {"one": {"milliseconds": 40.0}}, 1, [960, 960]),
    ],
)
def test_no_command_comes_near_the_watchdog(
    simulated: Path, programs: Path, second: str, calls: int, facts: Any, submitted: int, commands: list[float]
) -> None:
    """Whatever the length of the list: XRT makes every 24 runs a command."""
    world = install()
    adder = Adder(simulated, programs, second, calls, **facts)
    adder.run()
    assert world.commands == pytest.approx(commands)
    assert (world.counts["submissions"], world.counts["runs"]) == (submitted, calls)
    assert world.counts["blocked"] == max(0, (len(commands) - IN_FLIGHT) if submitted == 1 else 0)
    adder.run()
    adder.device.close()


@dataclass(frozen=True)
class Timed:
    """Of a run, what it takes to cut lists of runs."""

    program: NpuProgram


@given(st.lists(st.floats(0.01, 999, allow_subnormal=False), max_size=80))
def test_run_lists_are_as_long_as_they_may_be(times: list[float]) -> None:
    runs: Any = [Timed(NpuProgram(milliseconds=time)) for time in times]
    cut = list(submissions.lists(runs))
    assert [run for group in cut for run in group] == runs

    def longest(group: list[Timed]) -> float:
        return max(sum(r.program.milliseconds for r in group[at : at + 24]) for at in range(0, len(group), 24))

    for group, following in pairwise([*cut, []]):
        assert longest(group) < 1000 * (1 + 1e-9)
        assert not following or longest([*group, following[0]]) >= 1000 * (1 - 1e-9)


def test_program_that_is_too_slow_is_not_loaded(simulated: Path, programs: Path) -> None:
    install()
    message = r"two takes 1.2 s a call by the estimate, .* driver ends what takes 2 s: .*smaller npu.buckets="
    with pytest.raises(UserError, match=message):
        Adder(simulated, programs, "two", two={"milliseconds": 1200.0})


@pytest.mark.parametrize("switches", [{"slow": 2.5}, {"slow": 8.0, "runlist": False}], ids=str)
def test_watchdog_ends_a_command(simulated: Path, programs: Path, switches: dict[str, Any]) -> None:
    """As it would if the estimate were that wrong."""
    world = install(**switches)
    adder = Adder(simulated, programs, calls=4, one=SLOW)
    with pytest.raises(UserError, match=r"one, call [13]: did not finish in time on the NPU \(ERT_CMD_STATE_TIMEOUT\)"):
        adder.run()
    assert world.counts["recoveries"] == 1


def test_the_drivers_verdict_is_waited_for() -> None:
    assert submissions.TIMEOUT_MS > 1000 * limits.WATCHDOG_PERIODS * limits.WATCHDOG + 150, "and waking up"
    assert pyxrt_standin.World().watchdog / 2 >= 1000 * limits.COMMAND


MIB = 1 << 20


@pytest.mark.parametrize("version", ["2.21.75", NEWEST])
def test_instruction_buffers_stay_within_half_the_heap(simulated: Path, programs: Path, version: str) -> None:
    """The arguments of a run that calls share are set for each; what is small keeps a run per call, and run lists."""
    world = install(version=version)
    adder = Adder(simulated, programs, calls=24, one={"instruction_bytes": 3 * MIB})
    for _ in range(2):
        before = world.counts["submissions"]
        adder.run()
        assert world.counts["submissions"] - before == 24
    assert world.counts["heap"] < 4 * MIB
    adder.device.close()
    world = install(version=version)
    adder = Adder(simulated, programs, calls=24, one={"instruction_bytes": MIB})
    adder.run()
    assert world.counts["submissions"] == 1
    assert 24 * MIB < world.counts["heap"] < 32 * MIB
    adder.device.close()


def test_what_a_run_holds_beside_its_instructions_counts(simulated: Path, programs: Path) -> None:
    """110 runs of a quarter MiB would fit, but not with two device images each."""
    world = install()
    adder = Adder(simulated, programs, calls=110, one={"instruction_bytes": MIB // 4})
    adder.run()
    assert world.counts["heap"] < 32 * MIB
    adder.device.close()


def test_what_takes_least_of_the_heap_has_runs_of_its_own(simulated: Path, programs: Path) -> None:
    world = install()
    adder = Adder(simulated, programs, "two", 12, one={"instruction_bytes": 3 * MIB}, two={"instruction_bytes": MIB})
    small = adder.device.prepare(
        [adder._call(adder.device._session.programs[1], "small", "a", "b", f"sum {n}") for n in range(1, 11)]
    )
    small.run(ROWS, 0)
    assert world.counts["submissions"] == 1, "a run list"
    adder.run()
    assert world.counts["submissions"] == 1 + 12, "11 of the run that is shared"
    assert world.counts["heap"] < 16 * MIB
    adder.device.close()


def test_heap_that_is_full(simulated: Path, programs: Path) -> None:
    install(heap=2 * MIB)
    with pytest.raises(UserError, match=r"one: the NPU's driver has no room for .*: No space left.*fewer npu.buckets="):
        Adder(simulated, programs, one={"instruction_bytes": 3 * MIB}).run()


def test_kernels_of_one_name_do_not_share_a_context(simulated: Path, programs: Path) -> None:
    world = install()
    adder = Adder(simulated, programs, "two", one={"kernel": "main"}, two={"kernel": "main"})
    adder.run()
    assert (len(world.living("hw_context")), world.counts["submissions"]) == (2, 2)
    adder.device.close()
    with pytest.raises(UserError, match=r"no hardware context beside 1 others: .* an NPU has 16: .*fewer npu.buckets="):
        install(contexts=1)
        Adder(simulated, programs, "two", one={"kernel": "main"}, two={"kernel": "main"})


@pytest.mark.parametrize(("resets", "garbage"), [(2, False), (3, True), (15, True), (16, False)])
def test_standin_ignores_the_reset_to_the_image_that_is_loaded(
    simulated: Path, programs: Path, resets: int, garbage: bool
) -> None:
    install()
    adder = Adder(simulated, programs, "two", two={"resets": resets})
    adder.run()
    for _ in range(2):
        if garbage:
            with pytest.raises(AssertionError):
                adder.run()
        else:
            adder.run()
    adder.device.close()


BAD = [
    ("kernel", None),
    ("kernel", "main:x"),
    ("instruction_bytes", 0),
    ("instruction_bytes", True),
    ("milliseconds", -1),
    ("milliseconds", float("inf")),
    ("milliseconds", "3"),
]


@pytest.mark.parametrize(("field", "value"), BAD)
def test_manifest_says_what_a_program_costs(npu2: Path, field: str, value: Any) -> None:
    manifest = json.loads((npu2 / "manifest.json").read_text())
    check_manifest(manifest)
    manifest["programs"]["decode_layer"][field] = value
    with pytest.raises(ValueError, match=rf"^programs\.decode_layer\.{field} = .* must be"):
        check_manifest(manifest)


def test_views_follow_the_position(simulated: Path, programs: Path) -> None:
    install()
    device = XrtDevice(File.at(simulated / "elf/host.so"), 1)
    table, zero, out = (device.alloc(n * BYTES) for n in (3, 1, 1))
    rows = device.array(table, bfloat16, (3 * ROWS, COLS))
    rows[:] = np.arange(3 * ROWS)[:, None]
    result = device.array(out, bfloat16, (ROWS, COLS))
    program = device.load_program(File.at(programs / "one.so"), "one", False)
    bindings = [Binding(table, FROM_POSITION, ROW), Binding(zero, WHOLE, ROW), Binding(out, WHOLE, ROW)]
    submission = device.prepare([Call(program, bindings, SLOTS)])
    for pos in (0, 3, 2 * ROWS):
        submission.run(1, pos)
        np.testing.assert_array_equal(result[:, 0].astype(int), np.arange(pos, pos + ROWS))
    with pytest.raises(UserError, match=r"slot a needs 512 bytes from 1152 on, its buffer has 1536"):
        submission.run(1, 2 * ROWS + 1)
    device.close()


FAULTS = [
    ({"fail_alloc": 3}, r"driver has no .* more .*Cannot allocate memory.*locked memory"),
    ({"vanish": 1}, r"NPU cannot be opened.*No such device"),
    ({"vanish": 4}, r"No such device"),
    ({"time_out": 1}, r"one, call 1: did not finish in time.*ERT_CMD_STATE_TIMEOUT"),
    ({"time_out": 2}, r"one, call 2: did not finish in time.*ERT_CMD_STATE_TIMEOUT"),
    ({"time_out": 4, "runlist": False}, r"one, call 2: did not finish in time.*ERT_CMD_STATE_TIMEOUT"),
    ({"hang": 3, "runlist": False}, r"one, call 1: did not finish in time.*ERT_CMD_STATE_TIMEOUT"),
    ({"hang": 3}, r"one, call 1: did not finish in time.*ERT_CMD_STATE_TIMEOUT"),
]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("switches", "message"), FAULTS, ids=lambda value: str(value)[:30])
def test_fault_is_one_line_and_leaks_nothing(
    simulated: Path, programs: Path, switches: dict[str, Any], message: str
) -> None:
    install(**switches)
    with pytest.raises(UserError, match=message) as caught:
        adder = Adder(simulated, programs)
        for _ in range(3):
            adder.run()
    assert "\n" not in str(caught.value)


def test_only_a_taken_name_makes_another_context(simulated: Path, programs: Path) -> None:
    install(fail_config="DRM_IOCTL_AMDXDNA_CONFIG_HWCTX IOCTL failed (err=-12): Cannot allocate memory\n")
    with pytest.raises(UserError, match=r"two.so cannot be loaded beside other programs: .*Cannot allocate memory"):
        Adder(simulated, programs, "two")


def test_device_is_gone_at_any_call(simulated: Path, programs: Path) -> None:
    """Whatever call of the driver is the first to fail: one line, and nothing stays behind."""

    def use() -> None:
        adder = Adder(simulated, programs)
        adder.run()
        adder.device.close()

    world = install()
    use()
    for number in range(1, world.counts["driver_calls"] + 1):
        world = install(vanish=number)
        with pytest.raises(UserError, match="No such device"):
            use()
        gc.collect()
        assert world.alive() == {}, f"call {number}"


def test_lost_device_stays_lost(simulated: Path, programs: Path) -> None:
    install(time_out=1)
    adder = Adder(simulated, programs)
    for _ in range(2):
        with pytest.raises(UserError, match="did not finish in time"):
            adder.run()
    adder.device.close()
    with pytest.raises(UserError, match="did not finish in time"):
        adder.submission.run(1, 0)


def test_interrupt_while_waiting(simulated: Path, programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C leaves the device usable, and what was under way is waited for."""
    install(runlist=False)
    adder = Adder(simulated, programs)
    wait, pending = pyxrt_standin.run.wait, [KeyboardInterrupt()]

    def interrupted(run: Any, timeout_ms: int = 0) -> Any:
        if pending:
            raise pending.pop()
        run.unchecked = False
        return wait(run, timeout_ms)

    monkeypatch.setattr(pyxrt_standin.run, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        adder.run()
    adder.run()
    adder.device.close()


def test_blob_that_ends_early(simulated: Path, tmp_path: Path) -> None:
    install()
    path = tmp_path / "blob"
    path.write_bytes(bytes(100))
    device = XrtDevice(File.at(simulated / "elf/host.so"), 1)
    with pytest.raises(UserError, match="blob ends 28 bytes early"):
        device.load_weights([StoredWeight(File.at(path), 64, 64, host=False)])
    device.close()


def test_no_bindings_installed(simulated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyxrt", None)
    with pytest.raises(UserError, match=r"needs XRT's Python bindings.*doit doctor"):
        XrtDevice(File.at(simulated / "elf/host.so"), 1)
    install()


@pytest.mark.parametrize("version", ["2.19.194", "2.20.197", "2.21.21"])
def test_bindings_without_elf_contexts(npu2: Path, version: str) -> None:
    install(version=version)
    with pytest.raises(UserError, match="the installed XRT cannot load ELF programs from Python: see doit doctor"):
        load(npu2, 2)


def test_second_process_waits(simulated: Path, lock: Path, capfd: pytest.CaptureFixture[str]) -> None:
    install()
    program = (
        "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); "
        "print(flush=True); time.sleep(0.5)"
    )
    with subprocess.Popen([sys.executable, "-c", program, lock], stdout=subprocess.PIPE) as other:
        assert other.stdout
        other.stdout.readline()
        XrtDevice(File.at(simulated / "elf/host.so"), 1).close()
        assert other.wait() == 0, "the device was taken before the other process let go"
    assert "waiting for another process that uses the NPU" in capfd.readouterr().err


# Ranges


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30), st.integers(0, 30))))
def test_ranges_are_sets_of_bytes(steps: list[tuple[bool, int, int]]) -> None:
    ranges, model = Ranges(), set()
    for adds, low, high in steps:
        if adds:
            ranges.add(low, high)
            model |= set(range(low, high))
        else:
            taken = [byte for first, end in ranges.take(low, high) for byte in range(first, end)]
            assert taken == sorted(model & set(range(low, high)))
            model -= set(range(low, high))
    assert bool(ranges) == bool(model)


# The demo model


def _tokens(
    directory: Path, count: int = 8, prompt: str = PROMPT, second_copy: bool = False
) -> tuple[list[int], Any, list[dict[str, int]]]:
    """Greedy tokens of a prompt, the manifest, and what each phase added to the stand-in's counts."""
    llm = load(directory, 2, second_copy)
    counts = pyxrt_standin.WORLD.counts
    marks = [dict(counts)]
    ids = llm.encode(prompt, raw=True)
    logits = llm.prefill(ids)
    assert np.isfinite(logits).all()
    marks.append(dict(counts))
    tokens = [int(np.argmax(logits))]
    while len(tokens) < count:
        tokens.append(int(np.argmax(llm.decode(tokens[-1]))))
        marks.append(dict(counts))
    manifest = llm.manifest
    llm.close()
    phases = [{k: b.get(k, 0) - a.get(k, 0) for k in b} for a, b in pairwise(marks)]
    phases[0]["prompt"] = len(ids)
    return tokens, manifest, phases


@pytest.fixture(scope="session")
def expected(simulated: Path) -> list[int]:
    return _tokens(simulated)[0]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("switches", [{}, {"runlist": False}, {"version": "2.21.75"}], ids=str)
def test_demo_generates_the_simulators_tokens(npu2: Path, expected: list[int], switches: dict[str, Any]) -> None:
    install(**switches)
    tokens, manifest, (prefill, first, *others) = _tokens(npu2)
    assert tokens == expected
    layers = manifest.model["layers"]
    # Without `add_config` each program has a context of its own.
    listed = switches == {}
    assert prefill["submissions"] == (1 if listed else 3 * layers), "the host makes the logits"
    assert prefill["runs"] == 3 * layers
    for token in (first, *others):
        assert token["submissions"] == layers + 1
    model = manifest.model
    emb, q, kv = (nbytes("bf16", size) for size in ([model["emb"]], *([model[n], model["head_dim"]] for n in HEADS)))
    logits = manifest.nbytes("logits")
    prompt = prefill["prompt"]
    assert (prefill["to_device"], prefill["from_device"]) == (prompt * emb, emb)
    flushed = emb + nbytes("f32", [model["vocab"]])
    assert first["to_device"] == emb + layers * q + flushed, (
        "also the prompt's last row and logits, which the host made"
    )
    for token in others:
        assert token["to_device"] == emb + layers * q
    assert first["from_device"] == layers * (q + 2 * kv) + logits + layers * prompt * 2 * kv, (
        "the prompt's K and V, once"
    )
    for token in others:
        assert token["from_device"] == layers * (q + 2 * kv) + logits
    crossed = [sum(phase[way] for way in ("to_device", "from_device")) for phase in (prefill, first, others[0])]
    assert host_traffic(read_config(ROOT / "models/demo/config.json"), bucket=prompt) == {
        "prompt": crossed[0] + crossed[1] - crossed[2],
        "token": crossed[2],
    }


def test_chunks_of_a_prompt_are_the_simulators(npu2: Path, simulated: Path) -> None:
    """A long prompt, more behind it, and up to the end of the context: a submission for each chunk."""
    text = np.random.default_rng(3).integers(5, 1900, 2048).tolist()
    world = install()
    found = []
    for directory in (simulated, npu2):
        with contextlib.closing(load(directory, 2)) as llm:
            made = []
            for start, end in ((0, 200), (200, 290), (2000, 2048)):
                llm._cached[:] = text[:start]
                before = world.counts["submissions"]
                made.append(llm.prefill(text[start:end]).tobytes())
                if directory == npu2:
                    chunks = llm._chunks.cheapest(start, end)
                    assert world.counts["submissions"] - before == len(chunks) < 3
                    assert all(chunk.phase.kind == "prefill" for chunk in chunks)
            found.append(made)
    assert found[0] == found[1]


def test_sequences_that_take_turns_are_what_each_is_alone(npu2: Path, simulated: Path) -> None:
    """Prompts that share chunks, in too few blocks for all: what the simulator says of each, and no line is stale."""
    draw = np.random.default_rng(4)
    text = draw.integers(5, 1900, 150).tolist()
    prompts = [text[:140], [*text[:128], 7, 8], text[:30], [*text[:135], 9]]
    with contextlib.closing(load(simulated, 2)) as llm:
        alone = [next(llm.complete(prompt, max_tokens=4, logprobs=1)) for prompt in prompts]
        caches = sum(llm.manifest.nbytes(name) for name in CacheRows.of(llm.manifest))
        block = memory_of_blocks(llm.manifest, 1) - caches

    async def together(engine: Serving) -> list[Completion]:
        streams = [engine.submit(prompt, max_tokens=4, logprobs=1) for prompt in prompts]
        return [await stream.whole() for stream in streams]

    install()
    with contextlib.closing(load(npu2, 2, kv_memory=caches + 3 * block)) as llm:
        assert "sequences take turns" in llm.description and llm.context_length == 384
        with llm.engine() as engine:
            replies = asyncio.run(together(engine))
            counts = engine.counts
            with pytest.raises(UserError, match="sequences take turns on this device"):
                engine.pin(text)
    assert [(reply.tokens, reply.logprobs) for reply in replies] == [(each.tokens, each.logprobs) for each in alone]
    assert counts.shared and counts.swaps + counts.evicted and not counts.drafted


def test_what_is_too_little_for_the_cache_of_the_device(simulated: Path) -> None:
    with pytest.raises(UserError, match="kv_memory=1000000: 128 positions beside 4194304 of the device take"):
        load(simulated, kv_memory=1_000_000)


def _traced(directory: Path, tokens: int) -> tuple[list[tuple[str, str, Any, dict[str, bytes]]], list[int]]:
    """What each call of a prompt and of tokens left in its slots but weights; and the tokens, as many again behind the
    trace."""
    seen: list[tuple[str, str, Any, dict[str, bytes]]] = []

    def watch(call: TracedCall) -> None:
        slots = {slot: call[slot].tobytes() for slot in call.slots if call.role(slot) not in ("weight", "table")}
        seen.append((call.phase, call.program, call.layer, slots))

    with contextlib.closing(load(directory, 2)) as llm:
        with llm.trace(watch):
            found = [int(np.argmax(llm.prefill(llm.encode(PROMPT, raw=True))))]
            while len(found) < tokens:
                found.append(int(np.argmax(llm.decode(found[-1]))))
        while len(found) < 2 * tokens:
            found.append(int(np.argmax(llm.decode(found[-1]))))
    return seen, found


def test_a_trace_shows_what_the_simulators_does(npu2: Path, simulated: Path, expected: list[int]) -> None:
    """Scratch, too; nothing of it is held behind it."""
    install()
    (ours, tokens), (wanted, _) = _traced(npu2, 4), _traced(simulated, 4)
    assert tokens == expected
    assert [call[:3] for call in ours] == [call[:3] for call in wanted]
    for (*call, found), (*_, slots) in zip(ours, wanted, strict=True):
        assert [name for name in slots if found[name] != slots[name]] == [], call


@pytest.mark.thorough
def test_a_fault_of_the_array_is_named(npu2: Path, artifacts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> None:
        raise UserError("launches alone")

    install()
    monkeypatch.setattr(transformers_model, "layer_outputs", missing)
    given = {"model": "demo", "target": "npu2-sim", "npu.buckets": "64,128", "artifacts": str(artifacts)}
    described = Build(parse_options(given))
    with contextlib.closing(load(npu2, 2)) as llm:

        def changed(values: np.ndarray) -> None:
            ON_ARRAY[0].change(values)
            llm.unaliased[0].buffer(site.buffers[site.written[0].name]).push()

        site = replace(ON_ARRAY[0], change=changed)(described, llm)
        (first, *_) = diagnose(described, llm).wrong
    assert (first.op.phase, first.op.call, first.op.index) == (site.phase, site.call, site.index)


def test_weights_in_groups_generate_the_simulators_tokens(artifacts: Path, tmp_path: Path) -> None:
    """The host unpacks what a program multiplies with before it runs: a submission each. A token is one, in which
    nothing crosses but its embedding and the logits."""
    simulated = build("demo", artifacts, target="npu2-sim", weights="int4", **FEW)
    expected = _tokens(simulated, prompt=LONGER)[0]
    install()
    tokens, manifest, (prefill, *others) = _tokens(as_npu2(simulated, tmp_path / "npu2"), prompt=LONGER)
    assert tokens == expected
    layers = manifest.model["layers"]
    assert prefill["submissions"] == 3 * layers
    assert [token["submissions"] for token in others] == [1] * len(others)
    crossing = host_traffic(read_config(ROOT / "models/demo/config.json"), attends=True)["token"]
    assert {token["to_device"] + token["from_device"] for token in others[1:]} == {crossing}


def test_tokens_of_sequences_at_once_are_the_simulators(artifacts: Path, tmp_path: Path) -> None:
    """One submission makes a token of each, with its own place in the caches."""
    simulated, asked = build_several(artifacts), {"max_tokens": 4, "logprobs": 1}
    texts = [PROMPT, "one two three", "Once upon a time", "a b c"]
    with contextlib.closing(load(simulated, 2)) as llm:
        alone = [next(llm.complete(text, raw=True, **asked)) for text in texts]

    async def together(engine: Serving) -> list[Completion]:
        streams = [engine.submit(text, raw=True, **asked) for text in texts]
        return [await stream.whole() for stream in streams]

    install()
    with contextlib.closing(load(as_npu2(simulated, tmp_path / "npu2"), 2)) as llm:
        with llm.engine(speculate=False) as engine:
            replies = asyncio.run(together(engine))
            assert engine.counts.joined and llm.device.counts.submissions == engine.counts.steps
        (step,) = profile(llm, PROMPT, True, 3, 1, [len(texts)])["phases"][2:]
    assert [(reply.tokens, reply.logprobs) for reply in replies] == [(each.tokens, each.logprobs) for each in alone]
    assert (step["joined"], step["joined_tokens"]) == (3, 3 * len(texts))
    assert step["alone"].keys() == step["calls"].keys()
    waits = {part["name"]: part for part in step["parts"] if part["kind"] == "wait"}
    assert sum(part["calls"] for part in waits.values()) == 1, "a submission for all"


def test_the_first_logits_of_several_tokens_are_the_simulators(artifacts: Path, tmp_path: Path) -> None:
    """The host looks at them for the first time after the device has written them."""
    simulated, found = build_several(artifacts), []
    install()
    for directory in (simulated, as_npu2(simulated, tmp_path / "npu2")):
        with contextlib.closing(load(directory, 2)) as llm:
            phase = next(phase for phase in llm.calls if phase.kind == TOKENS)
            found.append(llm._run_tokens(phase, range(5, 5 + phase.rows), 0).tobytes())
    assert found[0] == found[1]


@pytest.mark.thorough
def test_a_second_copy_is_made_once(artifacts: Path, tmp_path: Path) -> None:
    """A prompt is one submission then, in which nothing of weights crosses."""
    simulated = build("demo", artifacts, target="npu2-sim", weights="int4", **FEW)
    expected = _tokens(simulated, prompt=LONGER)[0]
    install()
    tokens, manifest, (first, *_) = _tokens(as_npu2(simulated, tmp_path / "npu2"), prompt=LONGER, second_copy=True)
    assert tokens == expected
    assert first["submissions"] == 1
    assert not [name for calls in manifest.plans.values() for name in calls if name.program.startswith("unpack")]
    copies = [name for name in manifest.buffers if name.startswith("unpacked.")]
    assert len(copies) == 6 * manifest.model["layers"], "Q, K, V, O, gate with up, down"
    with contextlib.closing(load(tmp_path / "npu2", 2, second_copy=True)) as llm:
        device, ids = llm.device.counts, llm.encode(LONGER, raw=True)
        sent = []
        for _ in range(3):
            llm.reset()
            before = device.to_device
            llm.prefill(ids)
            sent.append(device.to_device - before)
    assert sent[0] - sent[1] == sum(manifest.nbytes(name) for name in copies)
    assert sent[1] == sent[2]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("second_copy", [False, True])
def test_what_is_locked_is_what_the_estimate_says(artifacts: Path, tmp_path: Path, second_copy: bool) -> None:
    given = {"model": "demo", "weights": "int4", "artifacts": str(artifacts), **of_command_line(FEW)}
    simulated = build("demo", artifacts, target="npu2-sim", weights="int4", **FEW)
    install()
    described = Build(parse_options({**given, "target": "npu2-sim"}))
    config, grouping = read_config(ROOT / "models/demo/config.json"), described.target.grouping("fused")
    of_plan = config.within(described.context), grouping, described.buckets, described.policy
    plan = make_plan(of_plan[0], grouping, described.target.kernel_set, *of_plan[2:])
    held = locked_memory(plan, *of_plan, second_copy)
    with contextlib.closing(load(as_npu2(simulated, tmp_path / "npu2"), 2, second_copy)) as llm:
        assert sum(buffer.nbytes for buffer in llm.device._session.buffers) == sum(held.values()) - held["driver"]
    assert ("second copy" in held) == second_copy


def test_the_host_unpacks_for_a_program_while_the_array_runs_the_one_before(artifacts: Path, tmp_path: Path) -> None:
    """Were the buffer that of the program which runs, it would wait; the bits are the same."""
    simulated = build("demo", artifacts, target="npu2-sim", weights="int4", **FEW)
    install()

    def one_buffer(manifest: dict[str, Any]) -> None:
        for call in itertools.chain(*manifest["plans"].values()):
            call["buffers"] = [name.replace("unpacked.w_down", "unpacked.w_gate_up") for name in call["buffers"]]

    found = []
    for name, change, ahead in (("apart", lambda manifest: None, {0, 1, 2}), ("one", one_buffer, {0, 1})):
        change_manifest(as_npu2(simulated, tmp_path / name), change)
        with contextlib.closing(load(tmp_path / name, 2)) as llm, llm.profile() as recorder:
            found.append(llm.prefill(llm.encode(LONGER, raw=True)).tobytes())
            layers = llm.manifest.model["layers"]
        spans = recorder.spans()
        started = [span.end for span in spans if (span.kind, span.name) == ("submit", "start")]
        waited = [span.start for span in spans if span.kind == "wait"]
        programs = [span for span in spans if span.kind == "program" and span.name.startswith("unpack")]
        # Attention's and the projection's are of one program.
        of_one = itertools.groupby(programs, lambda span: span.name.endswith(("rope_kv", "o_add")) or span.name)
        unpacked = [list(group) for _, group in of_one]
        assert len(unpacked) == len(started) == 3 * layers
        for call, group in enumerate(unpacked[1:], 1):
            early = started[call - 1] < group[0].start and group[-1].end < waited[call - 1]
            assert early == (call % 3 in ahead), (name, call)
    assert found[0] == found[1]


def test_demo_within_the_limits(simulated: Path, expected: list[int], tmp_path: Path) -> None:
    """Instructions of which a run for each layer of a prompt is too much, and layers of which few fit a command."""
    world = install()
    directory = as_npu2(simulated, tmp_path / "npu2", instruction_bytes=5 * MIB, milliseconds=400.0)
    tokens, manifest, (prefill, *_) = _tokens(directory)
    assert tokens == expected
    assert prefill["submissions"] == 3 * manifest.model["layers"]
    assert max(world.commands) < 1000
    assert world.counts["heap"] < 32 * MIB


@pytest.mark.thorough
def test_bench_measures_what_the_context_holds(
    npu2: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install()
    for name, value in {
        "PROMPTS": (16, 130, 4096),
        "DEPTHS": (0, 130, 4096),
        "GENERATED": 2,
        "cold_start": lambda *_: (),
    }.items():
        monkeypatch.setattr(bench, name, value)
    bench.run_bench(str(npu2), Running(threads=2, repeats=1), as_json=True)
    results = {r["test"]: r for r in json.loads(capsys.readouterr().out)["results"]}
    assert set(results) == {"read per token", "pp16", "pp130", "tg2 @ 0", "tg2 @ 130"}, "in chunks, and no CPU limit"
    assert all(r["share"] is None and r["values"][0] > 0 for r in results.values())


def test_a_profile_has_waiting_syncs_and_submissions(npu2: Path) -> None:
    install()
    llm = load(npu2, 2)
    counts = pyxrt_standin.WORLD.counts
    ids = llm.encode(PROMPT, raw=True)
    llm.prefill(ids)
    covered = []
    # The best of three: a busy machine takes time between two spans, too.
    for _ in range(3):
        llm.reset()
        before = dict(counts)
        with llm.profile() as recorder:
            started = time.perf_counter_ns()
            llm.prefill(ids)
            llm.decode(5)
            wall = time.perf_counter_ns() - started
        parts = nested([span for span in recorder.spans() if not span.thread])
        assert min(part.alone for part in parts) >= 0
        covered.append(sum(part.alone for part in parts) / wall)
    assert max(covered) > 0.7 and all(share <= 1 for share in covered)
    spans = recorder.spans()
    done = {name: counts[name] - before[name] for name in ("submissions", "runs", "to_device", "from_device")}
    assert Counter(span.name for span in spans)["start"] == done["submissions"]
    assert sum(span.about["runs"] for span in spans if span.kind == "wait") == done["runs"]
    for way in ("to_device", "from_device"):
        synced = (span.about["bytes"] for span in spans if (span.kind, span.name) == ("sync", way.replace("_", " ")))
        assert sum(synced) == done[way]
    # A token's host programs, launch by launch, are between the submissions of its layers.
    attended = [span.about["layer"] for span in spans if span.name == "decode_attn_kv"]
    assert attended == list(range(llm.manifest.model["layers"]))
    count = len(spans)
    llm.decode(6)
    assert len(recorder.spans()) == count
    llm.close()


def test_the_estimate_stands_beside_what_was_measured(npu2: Path, simulated: Path, tmp_path: Path) -> None:
    """And on the simulator, beside what it counted."""
    given = {"target": "npu2-sim", "npu.buckets": "64,128", "artifacts": str(simulated.parents[1])}
    build_ = Build(parse_options(given))
    install()
    estimate = estimates(build_, {*Manifest.open(simulated).programs})
    for directory in (npu2, simulated):
        llm = load(directory, 2)
        found = profile(llm, PROMPT, True, 3, 1) | {"estimate": estimate}
        llm.close()
        for phase in found["phases"]:
            programs = {name for name in phase["calls"] if not llm.manifest.programs[name]["host"]}
            assert programs and programs <= estimate.keys()
            assert sum(part["seconds"] for part in phase["parts"]) == pytest.approx(phase["mean"], rel=1e-6)
            if directory is npu2:
                assert programs <= phase["alone"].keys() and min(phase["alone"].values()) > 0
            else:
                assert programs == phase["counted"].keys()
                for name in programs:
                    calls, counted = phase["calls"][name], phase["counted"][name]
                    moved = sum(sum(amounts) for launch in counted for amounts in launch["slots"].values())
                    weights = sum(
                        nbytes(slot["dtype"], slot["shape"])
                        for slot in llm.manifest.programs[name]["slots"]
                        if slot["role"] == "weight"
                    )
                    assert moved >= calls * weights and estimate[name]["milliseconds"] > 0
        text = write_report(found, tmp_path / directory.name).read_text()
        own = "Submissions, syncs and waiting" if directory is npu2 else "What the simulator counted"
        assert f">{own}<" in text and ">Estimated and measured<" in text


# The command line


def _command(npu2: Path, tmp_path: Path, switches: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    (tmp_path / "pyxrt.py").write_text("import tests.support.pyxrt_standin\n")
    paths = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "TMPDIR": str(tmp_path)}
    environment = os.environ | paths | {"PYXRT_STANDIN": json.dumps(switches)}
    command = [sys.executable, "-m", "runtime", "--raw", "--max-tokens=4", str(npu2), PROMPT]
    return forked.run(command, cwd=ROOT, env=environment, timeout=120)


def test_command_line(npu2: Path, tmp_path: Path) -> None:
    run = _command(npu2, tmp_path, {"runlist": True})
    assert (run.returncode, run.stdout.partition(".")[0]) == (0, " Paris")
    assert "npu2, host programs on cpu" in run.stderr
    assert missing("run", [*run.stdout.splitlines(), *run.stderr.splitlines()]) == []


def test_the_tutorial_quotes_bench(
    npu2: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install()
    for name, value in {"PROMPTS": (128,), "DEPTHS": (0,), "cold_start": lambda *_: ()}.items():
        monkeypatch.setattr(bench, name, value)
    bench.run_bench(str(npu2), Running(threads=2, repeats=1), as_json=False)
    assert missing("bench", capsys.readouterr().out.splitlines()) == []


def test_host_library_that_does_not_load(npu2: Path, tmp_path: Path) -> None:
    """A `host.so` that was made for another machine is refused: what, where, what to do."""
    directory = tmp_path / "npu2"
    shutil.copytree(npu2, directory, copy_function=os.link)
    library = directory / "elf/host.so"
    library.unlink()
    library.write_bytes(b"of another machine")
    change_manifest(directory, lambda manifest: manifest["files"].update({"elf/host.so": file_digests(library)}))
    run = _command(directory, tmp_path, {})
    assert (run.returncode, run.stdout) == (1, "")
    assert re.fullmatch(r"error: .*host.so cannot be loaded \(.*\): rebuild it with doit compile\n", run.stderr)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("switches", "message"),
    [
        ({"fail_alloc": 9}, "Cannot allocate memory"),
        ({"time_out": 8}, r"prefill_up.64, layer 3 of 4: did not finish in time"),
        ({"hang": 15, "runlist": False}, r"decode_layer, layer 2 of 4: did not finish in time"),
        ({"hang": 17, "runlist": False}, r"decode_last, layer 4 of 4: did not finish in time"),
        ({"vanish": 60}, "No such device"),
    ],
)
def test_command_line_ends_in_one_line(npu2: Path, tmp_path: Path, switches: dict[str, Any], message: str) -> None:
    run = _command(npu2, tmp_path, switches)
    assert run.returncode == 1
    assert re.fullmatch(f"error: .*{message}.*\n", run.stderr), run.stderr
