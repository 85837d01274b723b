"""The XRT device on the stand-in: results, submissions, what is synchronised, and every fault as one line."""

from __future__ import annotations

import ast
import fcntl
import gc
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ml_dtypes import bfloat16

from llama_npu2 import UserError, bench, load
from llama_npu2.devices import Binding, Call, xrt
from llama_npu2.devices.xrt import XrtDevice, session
from llama_npu2.devices.xrt.ranges import Ranges
from llama_npu2.dtypes import nbytes
from stages.air import parse_mlir, to_mlir
from stages.commands.estimate import host_traffic
from stages.kernels import add
from stages.model.families import read_config
from stages.targets.npu2_sim.objects import options
from stages.targets.npu2_sim.programs import link
from tests import pyxrt_standin
from tests.conftest import ROOT, build
from tests.pyxrt_standin import DECLARATIONS, install
from tests.sim_support import objects

ROWS, COLS = 4, 64
PROMPT = "The capital of France is"
HEADS = ("heads", "kv_heads")


@pytest.fixture(scope="session")
def simulated(artifacts: Path) -> Path:
    return build("demo", artifacts, target="npu2-sim", buckets="64,128")


@pytest.fixture(scope="session")
def npu2(simulated: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the stand-in takes for the artifacts of `npu2`."""
    directory = tmp_path_factory.mktemp("npu2") / "npu2"
    shutil.copytree(simulated, directory, copy_function=os.link, ignore=shutil.ignore_patterns("build"))
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest["target"] |= {"name": "npu2", "device": "xrt"}
    (directory / "manifest.json").unlink()
    (directory / "manifest.json").write_text(json.dumps(manifest))
    return directory


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(session.tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path / session.LOCK


@pytest.fixture(autouse=True)
def _clean(lock: Path) -> Iterator[None]:
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


def _declared() -> Iterator[tuple[str, list[str]]]:
    for line in DECLARATIONS.read_text().splitlines():
        if match := re.fullmatch(r"([\w.]+)\((.*)\)(?: -> \w+)? \| [\d-]+", line):
            yield match[1], [part for part in match[2].split(", ") if part]


def test_standin_has_the_declared_interface() -> None:
    install()
    pyxrt: Any = sys.modules["pyxrt"]
    overloads: dict[str, set[int]] = {}
    for name, arguments in _declared():
        overloads.setdefault(name, set()).add(len(arguments))
    for name, counts in overloads.items():
        found = pyxrt
        for part in name.split("."):
            found = getattr(found, part)
        parameters = [p for p in inspect.signature(found).parameters.values() if p.name != "self"]
        least = sum(p.default is p.empty for p in parameters)
        assert {least, len(parameters)} >= {min(counts), max(counts)}, name
    for kind in ("run", "runlist", "bo", "hw_context"):
        methods = {name for name, value in vars(vars(pyxrt)[kind]).items() if inspect.isfunction(value)}
        declared = {name.partition(".")[2] for name in overloads if name.startswith(f"{kind}.")}
        assert {name for name in methods if not name.startswith("_")} == declared


def test_runtime_uses_only_what_is_declared() -> None:
    names = {name.split(".")[0] for name, _ in _declared()} | {"xclBOSyncDirection", "ert_cmd_state"}
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
    """out = (a + b) + b, as two calls; `out` and the inputs are what the host sees."""

    def __init__(self, simulated: Path, programs: Path, second: str = "one") -> None:
        self.device = XrtDevice(simulated / "elf/host.so", 1)
        first, then = (self.device.load_program(programs / f"{stem}.so", stem, False) for stem in ("one", second))
        self.buffers = {name: self.device.alloc(BYTES) for name in ("a", "b", "sum", "out")}
        self.arrays = {name: self.array(name) for name in ("a", "b", "out")}
        calls = [self._call(first, "first", "a", "b", "sum"), self._call(then, "second", "sum", "b", "out")]
        self.submission = self.device.prepare(calls)

    def array(self, name: str) -> np.ndarray:
        return self.device.array(self.buffers[name], bfloat16, (ROWS, COLS))

    def _call(self, program: Any, place: str, *names: str) -> Call:
        return Call(program, [Binding(self.buffers[name], "", ROW) for name in names], SLOTS, place)

    def run(self) -> None:
        self.arrays["a"][:], self.arrays["b"][:] = 1, 2
        self.submission.run(ROWS, 0)
        np.testing.assert_array_equal(self.arrays["out"].astype(np.float32), 5)


@pytest.mark.parametrize(
    ("second", "switches", "submissions"),
    [
        ("one", {}, 1),
        ("one", {"runlist": False}, 2),
        ("two", {}, 2),
        ("two", {"add_config": False}, 2),
        ("two", {"merge": True}, 1),
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


def test_views_follow_the_position(simulated: Path, programs: Path) -> None:
    install()
    device = XrtDevice(simulated / "elf/host.so", 1)
    table, zero, out = (device.alloc(n * BYTES) for n in (3, 1, 1))
    rows = device.array(table, bfloat16, (3 * ROWS, COLS))
    rows[:] = np.arange(3 * ROWS)[:, None]
    result = device.array(out, bfloat16, (ROWS, COLS))
    program = device.load_program(programs / "one.so", "one", False)
    bindings = [Binding(table, "pos", ROW), Binding(zero, "", ROW), Binding(out, "", ROW)]
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
    ({"time_out": 1}, r"one, first: did not finish in time.*ERT_CMD_STATE_TIMEOUT"),
    ({"time_out": 2}, r"one, second: did not finish in time.*ERT_CMD_STATE_TIMEOUT"),
    ({"time_out": 4, "runlist": False}, r"one, second: did not finish in time.*ERT_CMD_STATE_TIMEOUT"),
    ({"hang": 3, "runlist": False}, r"one, first: did not finish in time.*ERT_CMD_STATE_TIMEOUT"),
    ({"hang": 3}, r"one, first: did not finish in time.*ERT_CMD_STATE_TIMEOUT"),
]


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
    device = XrtDevice(simulated / "elf/host.so", 1)
    with pytest.raises(UserError, match="blob ends 28 bytes early"):
        device.load_weights(path, 64, 64)
    device.close()


def test_no_bindings_installed(simulated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyxrt", None)
    with pytest.raises(UserError, match=r"needs XRT's Python bindings.*doit doctor"):
        XrtDevice(simulated / "elf/host.so", 1)
    install()


def test_bindings_without_elf_contexts(simulated: Path, programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install()

    def refuse(*_: Any) -> Any:
        raise TypeError("incompatible constructor arguments")

    monkeypatch.setattr(sys.modules["pyxrt"], "hw_context", refuse)
    device = XrtDevice(simulated / "elf/host.so", 1)
    with pytest.raises(UserError, match="installed XRT cannot load ELF programs"):
        device.load_program(programs / "one.so", "one", False)
    device.close()


def test_second_process_waits(simulated: Path, lock: Path, capfd: pytest.CaptureFixture[str]) -> None:
    install()
    program = (
        "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); "
        "print(flush=True); time.sleep(0.5)"
    )
    with subprocess.Popen([sys.executable, "-c", program, lock], stdout=subprocess.PIPE) as other:
        assert other.stdout
        other.stdout.readline()
        XrtDevice(simulated / "elf/host.so", 1).close()
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


def _tokens(directory: Path, count: int = 8) -> tuple[list[int], Any, list[dict[str, int]]]:
    """Greedy tokens of a prompt, the manifest, and what each phase added to the stand-in's counts."""
    llm = load(directory, 2)
    counts = pyxrt_standin.WORLD.counts
    marks = [dict(counts)]
    ids = llm.encode(PROMPT, raw=True)
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


@pytest.mark.parametrize("switches", [{}, {"runlist": False, "add_config": False}, {"merge": True}], ids=str)
def test_demo_generates_the_simulators_tokens(npu2: Path, expected: list[int], switches: dict[str, Any]) -> None:
    install(**switches)
    tokens, manifest, (prefill, first, *others) = _tokens(npu2)
    assert tokens == expected
    layers = manifest.model["layers"]
    listed = switches.get("runlist", True)
    assert prefill["submissions"] == (1 if listed else layers), "the host makes the logits"
    assert prefill["runs"] == layers
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


def test_bench_measures_what_the_buckets_hold(
    npu2: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install()
    for name, value in {
        "PROMPTS": (16, 512),
        "DEPTHS": (0, 16, 512),
        "GENERATED": 2,
        "cold_start": lambda *_: (),
    }.items():
        monkeypatch.setattr(bench, name, value)
    bench.run_bench(str(npu2), 2, 1, as_json=True)
    results = {r["test"]: r for r in json.loads(capsys.readouterr().out)["results"]}
    assert set(results) == {"pp16", "tg2 @ 0", "tg2 @ 16"}, "nothing token by token, and no limit of the CPU"
    assert all(r["share"] is None and r["values"][0] > 0 for r in results.values())


# The command line


def _command(npu2: Path, tmp_path: Path, switches: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    (tmp_path / "pyxrt.py").write_text("import tests.pyxrt_standin\n")
    paths = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "TMPDIR": str(tmp_path)}
    environment = os.environ | paths | {"PYXRT_STANDIN": json.dumps(switches)}
    command = [sys.executable, "-m", "runtime", "--raw", "--max-tokens=4", str(npu2), PROMPT]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)


def test_command_line(npu2: Path, tmp_path: Path) -> None:
    run = _command(npu2, tmp_path, {"runlist": True})
    assert (run.returncode, run.stdout.partition(".")[0]) == (0, " Paris")
    assert "npu2, host programs on cpu" in run.stderr


def test_host_library_that_does_not_load(npu2: Path, tmp_path: Path) -> None:
    """numpy does the work of a `host.so` that was made for another machine: the same text."""
    directory = tmp_path / "npu2"
    shutil.copytree(npu2, directory, copy_function=os.link)
    library = directory / "elf/host.so"
    size = library.stat().st_size
    library.unlink()
    library.write_bytes(b"of another machine".ljust(size))
    (native, numpy) = (_command(d, tmp_path, {}) for d in (npu2, directory))
    assert (numpy.returncode, numpy.stdout) == (0, native.stdout)
    said, times = numpy.stderr.splitlines()
    assert re.fullmatch(r".*host.so cannot be loaded \(.*\): .*; until then, host programs run on numpy, slower", said)
    assert times.endswith("npu2, host programs on numpy")


@pytest.mark.parametrize(
    ("switches", "message"),
    [
        ({"fail_alloc": 9}, "Cannot allocate memory"),
        ({"time_out": 3}, r"prefill_layer.64, layer 3 of 4: did not finish in time"),
        ({"hang": 7, "runlist": False}, r"decode_layer, layer 2 of 4: did not finish in time"),
        ({"hang": 9, "runlist": False}, r"decode_last, layer 4 of 4: did not finish in time"),
        ({"vanish": 60}, "No such device"),
    ],
)
def test_command_line_ends_in_one_line(npu2: Path, tmp_path: Path, switches: dict[str, Any], message: str) -> None:
    run = _command(npu2, tmp_path, switches)
    assert run.returncode == 1
    assert re.fullmatch(f"error: .*{message}.*\n", run.stderr), run.stderr
