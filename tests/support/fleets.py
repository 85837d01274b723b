"""A cluster with workers that run steps of a small build, which say in a file that they ran."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from stages.engine.digests import Digests
from stages.engine.files import write_atomic
from stages.engine.lock import ProcessLock
from stages.engine.places import CONFIG
from stages.engine.project import Project
from stages.engine.steps import Step
from stages.graph.worker import Workshop, remembered
from stages.sharing.cache import Cache, step_entry
from stages.sharing.cluster import Crew, Has, Place
from stages.sharing.fleet import ENOUGH, MADE, MEMORY, Answer, Fleet, Order, kind_of, sources, versions
from stages.sharing.remotes import open_remote
from stages.sharing.store import Store

TOOL = "TOOL_OF_TESTS"
"""Environment variable: the version of the tool that steps run."""
CLAIMS = "CLAIMS_OF_TESTS"
"""Environment variable: the versions that a worker says that it has, as JSON."""


def tool_fingerprint() -> str | None:
    return os.environ.get(TOOL)


def write(directory: Path, name: str, log: str, seconds: float, fails: str, work: Path) -> None:
    """Say that it runs, wait, and write what the configuration says."""
    with Path(log).open("a") as file:
        print(name, os.getpid(), file=file)
    if seconds:
        subprocess.run(["sleep", str(seconds)], check=False)
    if fails:
        raise OSError(fails)
    (work / f"out-{name}").write_text(f"{name} of {(directory / CONFIG).read_text()}")


def steps_of(options: Mapping[str, str], project: Project) -> dict[str, Step]:
    """`count` steps that read the configuration, and one that reads what they wrote."""
    names = [str(number) for number in range(int(options["count"]))]
    arguments = (options["log"], float(options.get("seconds", 0)), options.get("fails", ""))
    outputs = [project.directory / f"out-{name}" for name in names]
    step = partial(Step, project, tool=tool_fingerprint, portable=True, memory=int(options.get("memory", 0)))
    made = {
        name: step(
            name, "", partial(write, project.directory, name, *arguments), (output,), (project.directory / CONFIG,)
        )
        for name, output in zip(names, outputs, strict=True)
    }
    last = (project.directory / "out-last",)
    made["last"] = step("last", "", partial(write, project.directory, "last", *arguments), last, tuple(outputs))
    return made


def offered(scratch: Path) -> tuple[Has, Has]:
    """Return what a worker of a `Grid` says that it has."""
    project = Project(scratch / "none", remembered(scratch), ProcessLock(scratch / "lock"))
    known = [sources(project), *({kind_of(tool_fingerprint): version} for version in json.loads(os.environ[CLAIMS]))]
    return {name: ENOUGH for each in known for name in versions(each)} | {MEMORY: 1 << 30}, {}


@functools.cache
def workshop() -> Workshop:
    here = Crew.here()
    return Workshop(here.store, Path(here.scratch), lambda order, project: steps_of(order.options, project))


def begin() -> None:
    workshop()


def act(content: str) -> str:
    return workshop().answer(content).text


def lie(content: str) -> str:
    """Say that it is done."""
    return Answer(MADE, "liar", Order.of_text(content).address).text


def babble(content: str) -> str:
    return "not JSON"


def damage(content: str) -> str:
    """Run it, then change the bytes of what it left."""
    answer = act(content)
    for path in (Path(Crew.here().store) / "objects").rglob("*"):
        if path.is_file() and b" of " in (found := path.read_bytes()):
            path.write_bytes(bytes([found[0] ^ 1]) + found[1:])
    return answer


def replay(content: str) -> str:
    """Run it, then leave, where its run belongs, one that was made of an older configuration."""
    answer, order, here = act(content), Order.of_text(content), Crew.here()
    store, name = Store(open_remote(here.store), Digests(Path(here.scratch) / "digests")), step_entry(order.address)
    entry = store.own(name)
    assert entry
    for run in entry["runs"]:
        run["declared"] = dict.fromkeys(run["declared"], "0" * 64)
    store.write({name: entry})
    return answer


@dataclass
class Grid:
    """A scheduler, and processes that are its workers."""

    address: str
    scratch: Path
    workers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    urls: Sequence[str] = ()
    """Other ways to the same store: each worker takes the next one."""

    @property
    def store(self) -> Path:
        return self.scratch / "store"

    def start(self, *claims: str) -> None:
        """Start a worker, which says that it has the tool in these versions."""
        number, ways = len(self.workers), (str(self.store), *self.urls)
        crew = Crew(1, ways[number % len(ways)], str(self.scratch / f"worker {number}"), __name__)
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv(TOOL, "version 1")
            environment.setenv(CLAIMS, json.dumps(claims))
            self.workers.append(crew.start(Place(self.address)))

    @property
    def alive(self) -> list[subprocess.Popen[bytes]]:
        return [worker for worker in self.workers if worker.poll() is None]

    def stop(self) -> None:
        """End all workers."""
        for worker in self.workers:
            if worker.stdin:
                worker.stdin.close()
            worker.wait()


@contextlib.contextmanager
def scheduler(scratch: Path, *more: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Start a scheduler, with more options; gives its address and process."""
    file = scratch / "scheduler.json"
    options = [
        "--host",
        "127.0.0.1",
        "--port",
        "0",
        "--no-dashboard",
        "--no-show",
        "--scheduler-file",
        str(file),
        *more,
    ]
    command = [sys.executable, "-m", "distributed.cli.dask_scheduler", *options]
    # It has no checkout: in this directory there is none.
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, cwd=scratch) as process:
        try:
            yield until(lambda: json.loads(file.read_text())["address"] if file.exists() else None), process
        finally:
            process.kill()


def until(ask: Callable[[], Any], seconds: float = 30) -> Any:
    """Return what `ask` returns, as soon as that is something."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(ValueError):
            if found := ask():
                return found
        time.sleep(0.02)
    raise AssertionError("it took too long")


class Client:
    """A checkout that builds on a cluster."""

    def __init__(
        self,
        directory: Path,
        store: Path | str,
        address: str,
        action: Callable[[str], str] = act,
        config: str = "",
        crew: Crew | None = None,
        **options: Any,
    ) -> None:
        self.artifact = directory / "artifact"
        (self.artifact / CONFIG).parent.mkdir(parents=True, exist_ok=True)
        if not (self.artifact / CONFIG).exists():
            write_atomic(self.artifact / CONFIG, (config or f"the configuration of {directory.parent}").encode())
        given = {"count": 3, "log": directory / "log"} | options
        self.options = {name: str(value) for name, value in given.items()}
        self.log = Path(self.options["log"])
        cache = Cache(str(store), lambda step: not step.private)
        self.fleet = Fleet(cache, address, lambda: crew or _no_crew(), action, self._ordered, (self.artifact / CONFIG,))
        lock, digests = ProcessLock(directory / "lock"), Digests(directory / ".digests")
        self.project = Project(self.artifact, digests, lock, self.fleet if address else cache)
        self.steps = steps_of(self.options, self.project)

    def _ordered(self, step: Step) -> Mapping[str, str] | None:
        return None if step.private else self.options

    def build(self) -> list[str]:
        """Run all steps as doit does; return what went wrong."""
        steps = list(self.steps.values())
        try:
            with ThreadPoolExecutor(16) as pool:
                failed = [each for each in pool.map(Step.run, steps[:-1]) if each]
            failed += filter(None, [] if failed else [steps[-1].run()])
        finally:
            self.fleet.close()
        return [each.message for each in failed]

    @property
    def ran(self) -> list[tuple[str, int]]:
        """The steps that ran, each with the process in which it did."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return sorted((name, int(process)) for name, process in map(str.split, lines))

    @property
    def here(self) -> set[str]:
        """The steps that ran in this process."""
        return {name for name, process in self.ran if process == os.getpid()}

    @property
    def made(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.artifact.glob("out-*")}


def _no_crew() -> Crew:
    raise AssertionError("no cluster is started here")
