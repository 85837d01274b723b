"""Steps that run on the workers of a cluster: what is sent, what is taken, and what is said and left when it fails."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from llama_npu2.errors import UserError
from llama_npu2.trust.envelopes import own_key
from stages.engine.digests import Digests
from stages.engine.lock import ProcessLock
from stages.engine.project import Project
from stages.engine.steps import Step
from stages.graph import Build
from stages.graph.options import parse_options
from stages.graph.worker import Workshop
from stages.sharing import cluster as cluster_module
from stages.sharing.cache import offer_run
from stages.sharing.fleet import Answer, Order, lacking
from stages.sharing.records import circumstances
from stages.sharing.remotes import open_remote
from stages.sharing.store import Store
from stages.targets import forget_tools
from stages.targets.cpu.toolchain import host_compiler_fingerprint
from tests.conftest import ROOT, Become, doit, write_checkpoint
from tests.support import fleets
from tests.support.fleets import Client, Grid, scheduler, until

pytest.importorskip("distributed")

ALL = {"0", "1", "2", "last"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Grid]:
    scratch = tmp_path_factory.mktemp("cluster")
    with scheduler(scratch) as (address, _):
        grid = Grid(address, scratch)
        try:
            yield grid
        finally:
            grid.stop()


@pytest.fixture
def grid(cluster: Grid, monkeypatch: pytest.MonkeyPatch) -> Grid:
    """A cluster of two workers, of which both say that they have version 3 of the tool, too, which is a lie."""
    monkeypatch.setenv(fleets.TOOL, "version 1")
    while len(cluster.alive) < 2:
        cluster.start("version 1", "version 3")
    return cluster


def client_of(grid: Grid, directory: Path, action: Callable[[str], str] = fleets.act, **options: Any) -> Client:
    """A client that sees both workers."""
    client = Client(directory, grid.store, grid.address, action, **options)
    until(lambda: len(client.fleet._connected().workers()) == 2)
    return client


def test_steps_run_once_on_workers_and_leave_the_bytes_of_a_local_build(grid: Grid, tmp_path: Path) -> None:
    local = Client(tmp_path / "local", tmp_path / "store", "")
    assert local.build() == [] and local.here == ALL
    clients = [client_of(grid, tmp_path / name, log=tmp_path / "log", seconds=0.2) for name in ("a", "b")]
    threads = [threading.Thread(target=client.build) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [name for name, _ in clients[0].ran] == sorted(ALL), "each once, for both"
    assert not clients[0].here
    assert len({process for _, process in clients[0].ran}) == 2, "both workers had something to do"
    assert all(client.made == local.made for client in clients)
    later = Client(tmp_path / "later", grid.store, "")
    assert later.build() == [] and not later.ran, "it is in the store, as what any build leaves there"


def test_a_lost_worker_costs_one_step(grid: Grid, tmp_path: Path) -> None:
    client = client_of(grid, tmp_path / "a", seconds=1.5, count=1)
    building = threading.Thread(target=client.build)
    building.start()
    ((_, first),) = until(lambda: client.ran)
    os.kill(first, signal.SIGKILL)
    building.join()
    assert [name for name, _ in client.ran] == ["0", "0", "last"] and not client.here
    assert [process for _, process in client.ran].count(first) == 1, "what another one ran was no more than this step"


def test_what_nobody_made_whom_the_user_trusts_is_not_taken(
    grid: Grid, tmp_path: Path, become: Become, capsys: pytest.CaptureFixture[str]
) -> None:
    signer = own_key()
    become("bob")
    client = client_of(grid, tmp_path / "a", count=1)
    assert client.build() == [] and client.here == {"0", "last"}
    said = capsys.readouterr().err
    assert f"doit trust key='{signer}'" in said and "is not used from here on" in said


LIES: dict[str, tuple[Callable[[str], str], str]] = {
    "says that it ran": (fleets.lie, "liar says that it ran 0, but"),
    "says something else": (fleets.babble, "an answer about 0 is malformed"),
    "other bytes": (fleets.damage, "is damaged"),
    "of an older configuration": (fleets.replay, "says that it ran 0, but"),
}


@pytest.mark.parametrize(("action", "line"), LIES.values(), ids=LIES.keys())
def test_who_lies_costs_a_step_that_runs_here(
    action: Callable[[str], str], line: str, grid: Grid, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    client = client_of(grid, tmp_path / "a", action, count=1)
    assert client.build() == [] and {"0", "last"} <= client.here
    said = capsys.readouterr().err
    assert line in said and "Traceback" not in said
    assert client.made["out-0"].decode() == f"0 of the configuration of {tmp_path}"


@pytest.mark.parametrize("fails", [pytest.param("", marks=pytest.mark.thorough), "no such luck"])
def test_a_scheduler_that_answers_for_another_catalogue(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever it is asked for, it answers with the first answer that it got, be that of a step that failed."""
    monkeypatch.setenv(fleets.TOOL, "version 1")
    with scheduler(tmp_path, "--preload", str(ROOT / "tests/support/lying_scheduler.py")) as (address, _):
        grid = Grid(address, tmp_path)
        grid.start("version 1")
        try:
            clients = [
                Client(tmp_path / name, grid.store, address, config=name, count=1, fails=fails if name == "one" else "")
                for name in ("one", "other")
            ]
            one, other = clients
            until(lambda: one.fleet.workers())
            failed = one.build()
            assert fails in "".join(failed) and bool(failed) == bool(fails), "this answer is the right one"
            capsys.readouterr()
            assert other.build() == [] and other.here == ALL & {"0", "last"}
        finally:
            grid.stop()
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "run on" not in line)
    assert f"on={address} is not used from here on: 0 was asked for, and the answer (from " in line
    assert "is about another step or build: steps run here" in line
    assert other.made == {f"out-{name}": f"{name} of other".encode() for name in ("0", "last")}


def test_a_step_that_fails_there_fails_here_in_its_words(grid: Grid, tmp_path: Path) -> None:
    client = client_of(grid, tmp_path / "a", fails="no such luck", count=1)
    (line,) = client.build()
    assert "no such luck" in line and f"(on {os.uname().nodename}/" in line
    assert not client.here and len(client.ran) == 1, "it is not tried again"
    assert not list(client.artifact.rglob("work/*"))


def test_versions_that_differ_are_said_before_a_step_is_sent(
    grid: Grid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(fleets.TOOL, "version 2")
    client = client_of(grid, tmp_path / "a")
    assert client.build() == [] and client.here == ALL
    (line,) = capsys.readouterr().err.splitlines()
    tool = "tests.support.fleets.tool"
    assert line == f"no worker fits: {tool} version 2 here, version 1, version 3 there: such steps run here"


def test_a_worker_refuses_what_is_another_step_there(
    grid: Grid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(fleets.TOOL, "version 3")
    client = client_of(grid, tmp_path / "a", count=1)
    assert client.build() == [] and client.here == {"0", "last"}
    said = capsys.readouterr().err
    assert "0 is another step here: its tool is version 1, not version 3: start the worker again: such" in said


def test_a_worker_notices_that_its_compiler_was_exchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version, exchanges, machine = tmp_path / "version", list[str](), platform.machine()
    compiler = tmp_path / "c++"
    compiler.write_text(f"#!/bin/sh\ncat {version}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))

    def act(name: str, work: Path) -> None:
        (work / f"out-{name}").write_text("made")
        if exchanges:
            version.write_text(exchanges.pop())

    def steps(order: Order | None, project: Project) -> dict[str, Step]:
        step = partial(Step, project, tool=host_compiler_fingerprint, portable=True)
        return {name: step(name, "", partial(act, name), (project.directory / f"out-{name}",)) for name in "ab"}

    def asked(name: str) -> Answer:
        known = circumstances(here[name])
        assert known
        return workshop.answer(Order(known, {}, {}).text)

    version.write_text("g++ 1")
    forget_tools()
    lock, digests = ProcessLock(tmp_path / "lock"), Digests(tmp_path / "digests")
    here = steps(None, Project(tmp_path / "client/artifact", digests, lock))
    workshop = Workshop(str(tmp_path / "store"), tmp_path / "scratch", steps)
    assert asked("a").outcome == "made"
    kept = {path for path in (tmp_path / "store").rglob("*") if path.is_file()}
    exchanges.append("g++ 2")
    during = asked("b")
    version.write_text("g++ 1")
    forget_tools()
    order = circumstances(here["b"])
    version.write_text("g++ 2")
    assert order
    later = workshop.answer(Order(order, {}, {}).text)
    for answer in (during, later):
        assert answer.outcome == "refused"
        assert f"its tool is g++ 2 for {machine}, not g++ 1 for {machine}: start the worker again" in answer.why
    assert {path for path in (tmp_path / "store").rglob("*") if path.is_file()} == kept
    monkeypatch.undo()
    forget_tools()


def test_memory_is_asked_for(grid: Grid, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    client = client_of(grid, tmp_path / "a", memory=4 << 30, count=1)
    assert client.build() == [] and client.here == {"0", "last"}
    assert "memory 4.3 GB here, 1.1 GB there" in capsys.readouterr().err


def test_a_tool_that_only_workers_have(
    grid: Grid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All have the same: its version is in the receipt, and the next build is current with or without them."""
    client = client_of(grid, tmp_path / "a", count=1)
    monkeypatch.delenv(fleets.TOOL)
    assert client.fleet.tool(fleets.tool_fingerprint)() is None, "they have two"
    monkeypatch.setattr(
        client.fleet._connected(), "workers", lambda: {"w": {"tests.support.fleets.tool: version 1": 1.0}}
    )
    tool = client.fleet.tool(fleets.tool_fingerprint)
    assert tool() == "version 1" and tool.__name__ == fleets.tool_fingerprint.__name__
    client.fleet.close()


def test_private_steps_stay(grid: Grid, tmp_path: Path) -> None:
    client = client_of(grid, tmp_path / "a", count=1)
    for step in client.steps.values():
        object.__setattr__(step, "private", True)
    assert client.build() == [] and client.here == {"0", "last"}


@pytest.mark.parametrize(
    ("how", "line"),
    [
        (signal.SIGKILL, "the scheduler is gone"),
        pytest.param(signal.SIGSTOP, "the scheduler does not answer", marks=pytest.mark.thorough),
    ],
)
def test_a_scheduler_that_goes_away_is_one_line(
    how: signal.Signals,
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(fleets.TOOL, "version 1")
    monkeypatch.setattr(cluster_module, "_CONNECTING", 3.0)
    with scheduler(tmp_path) as (address, process):
        client = Client(tmp_path / "a", tmp_path / "store", address)
        until(lambda: client.fleet._connected() is not None)
        grid = Grid(address, tmp_path)
        grid.start("version 1")
        until(lambda: client.fleet._connected().workers())
        client.options["seconds"] = "20"
        building = threading.Thread(target=client.build)
        building.start()
        until(lambda: client.ran)
        client.options["seconds"] = "0"
        process.send_signal(how)
        building.join(30)
        assert not building.is_alive() and client.here == ALL
        grid.stop()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and f"is not used from here on: {line}" in lines[0]
    nobody = Client(tmp_path / "b", tmp_path / "store", address)
    assert nobody.build() == [] and not nobody.ran, "it is in the store"


def test_what_is_said_of_orders_and_answers_is_checked() -> None:
    answer = Answer("made", "w", said=["line"])
    assert Answer.of_text(answer.text) == answer
    for change in ({"outcome": "other"}, {"milliseconds": -1}, {"logs": {"a": 1}}, {"said": "text"}):
        with pytest.raises(ValueError):
            Answer.of_text(json.dumps(json.loads(answer.text) | change))
    order = {
        "known": {"step": "s", "key": {}, "declared": {}},
        "options": {},
        "inputs": {"../up": {"sha256": "0" * 64, "size": 1}},
    }
    with pytest.raises(UserError, match="is no path"):
        Order.of_text(json.dumps(order))


def test_lacks_are_those_of_the_nearest_worker() -> None:
    workers = {"a": {"os: 1": 9.0, "tool: 1": 9.0, "memory": 5.0}, "b": {"os: 2": 9.0, "memory": 5.0}}
    assert lacking({"os: 1": 1, "tool: 1": 1, "memory": 5}, workers) == ""
    assert lacking({"os: 1": 1, "tool: 2": 1}, workers) == "no worker fits: tool 2 here, 1 there"
    assert lacking({"os: 1": 1}, {}) == "no worker is there"


# Of real builds


def build_of(tmp_path: Path, **variables: str) -> Build:
    given = {
        "target": "cpu",
        "artifacts": str(tmp_path / "artifacts"),
        "on": "tcp://127.0.0.1:1",
        "cache": str(tmp_path),
    }
    return Build(parse_options(given | variables))


def test_which_steps_may_go_to_workers(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model")
    own = build_of(tmp_path, model=str(tmp_path / "model"), weights="int4", calibrate="default")
    ordered = {name: own._ordered(step) for name, step in own.steps.items()}
    assert {name.partition(":")[0] for name, options in ordered.items() if options} == {"module", "object", "elf"}
    assert all("model" not in options and str(tmp_path) not in str(options) for options in ordered.values() if options)
    told = build_of(tmp_path, model=str(tmp_path / "model"), weights="int4", calibrate="default", include="weights")
    assert not any("calibration" in name for name, step in told.steps.items() if told._ordered(step)), "it is only here"
    public = build_of(tmp_path, weights="int4", calibrate="default")
    (options,) = {str(public._ordered(step)) for name, step in public.steps.items() if name.startswith("calibration")}
    assert "'model': 'demo'" in options and "'calibrate': 'default'" in options
    assert not any(public._ordered(public.steps[name]) for name in ("checkpoint", "tokenizer", "weights", "manifest"))


@pytest.mark.thorough
def test_doit_worker_runs_steps_of_doit_compile(cluster: Grid, demo: Path, tmp_path: Path) -> None:
    """All but the link of the CPU's library is in the store."""
    made = Build(parse_options({"artifacts": str(demo.parents[1]), "target": "cpu"}))
    store = Store(open_remote(str(tmp_path / "store")), made.project.digests)
    for name in sorted(made.steps.keys() - {"checkpoint", "module:host", "elf:host", "manifest"}):
        offer_run(store, made.steps[name])
    cluster.stop()
    given = [f"on={cluster.address}", f"cache={tmp_path / 'store'}"]
    command = [sys.executable, "-m", "doit", "worker", *given, f"artifacts={tmp_path / 'worker'}"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as worker:
        assert worker.stderr
        assert " steps at a time; what they make is signed by ssh-ed25519 " in worker.stderr.readline()
        client = Client(tmp_path / "client", tmp_path / "store", cluster.address)
        until(lambda: client.fleet._connected().workers())
        client.fleet.close()
        run = doit("compile", *given, "target=cpu", f"artifacts={tmp_path / 'artifacts'}")
        assert run.returncode == 0, run.stderr
        there = {line.rpartition(": run on ")[0] for line in run.stderr.splitlines() if ": run on " in line}
        assert there == {"module:host", "elf:host"}, run.stderr
        worker.terminate()
        worker.stderr.read()
    assert not list((tmp_path / "worker").glob(".worker-*")), "nothing is left"
    for name in ("elf/host.so", "manifest.json", "build/modules/host.json"):
        assert (tmp_path / "artifacts/demo/cpu" / name).read_bytes() == (demo / name).read_bytes()


def test_a_cluster_has_an_address(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="on=nonsense: must be the address of a scheduler"):
        _ = build_of(tmp_path, on="nonsense").project


def test_a_cluster_needs_a_store(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="also give cache=REMOTE"):
        _ = build_of(tmp_path, cache="").project


def test_nothing_of_a_cluster_is_imported_without_one(demo: Path) -> None:
    told = doit("compile", f"artifacts={demo.parents[1]}", "target=cpu", env={"PYTHONPROFILEIMPORTTIME": "1"}).stderr
    imported = {line.rpartition("|")[2].strip() for line in told.splitlines()}
    assert "stages.graph.build" in imported
    assert not {name for name in imported if name.partition(".")[0] in ("distributed", "dask")}
    assert not {"stages.sharing.fleet", "stages.sharing.cluster", "stages.graph.worker"} & imported
