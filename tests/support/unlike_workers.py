"""Workers of real builds that differ in what they have, and note in a file what they ran."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from stages.engine.steps import Step
from stages.graph import worker
from stages.graph.worker import begin
from stages.sharing.cluster import Crew, Has, Place
from stages.sharing.fleet import MEMORY
from stages.sharing.records import address
from stages.sharing.store import Store

__all__ = ["begin", "offered", "unlike_workers", "what_ran"]

_NAME, _MEMORY, _LOG = "NAME_OF_WORKER", "MEMORY_OF_WORKER", "LOG_OF_WORKERS"
"""Environment variables."""


@dataclass(frozen=True)
class Ran:
    """A step that a worker ran."""

    worker: str
    module: str
    """The module of its action."""
    address: str


def offered(scratch: Path) -> tuple[Has, Has]:
    """Return what a worker has: all that this machine has, but for its memory. What it runs from here on is noted."""
    offer = worker.offer_run

    def noted(store: Store, step: Step) -> None:
        with Path(os.environ[_LOG]).open("a") as log:
            print(os.environ[_NAME], step.module, address(step), file=log)
        offer(store, step)

    worker.offer_run = noted  # type: ignore[attr-defined]
    each, one = worker.offered(scratch)
    return {**each, MEMORY: float(os.environ[_MEMORY])}, one


@contextlib.contextmanager
def unlike_workers(
    place: str, store: Path, scratch: Path, kinds: Mapping[str, tuple[int, Mapping[str, str]]]
) -> Iterator[Path]:
    """Start a worker of each kind; gives the file in which they note what they run.

    Args:
        place: the address of their scheduler.
        store: the remote that they read and write.
        scratch: a directory to work in.
        kinds: the memory and the environment of each, by name.
    """
    log, crews = scratch / "ran", list[subprocess.Popen[bytes]]()
    log.touch()
    try:
        for name, (memory, environment) in kinds.items():
            with pytest.MonkeyPatch.context() as patched:
                for key, value in {**environment, _NAME: name, _MEMORY: str(memory), _LOG: str(log)}.items():
                    patched.setenv(key, value)
                crew = Crew(1, str(store), str(scratch / f"worker {name}"), __name__)
                crews.append(crew.start(Place(place)))
        yield log
    finally:
        for crew_process in crews:
            assert crew_process.stdin
            crew_process.stdin.close()
        for crew_process in crews:
            crew_process.wait()


def what_ran(log: Path) -> list[Ran]:
    """Return what a file of `unlike_workers` has."""
    return [Ran(*line.split()) for line in log.read_text().splitlines()]
