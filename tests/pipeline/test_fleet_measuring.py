"""Artifacts are measured on a worker that has the device: what it gets, what it runs, and what of it is taken."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from llama_npu2 import UserError
from llama_npu2.trust import SIGNATURE, settings
from stages.engine.digests import Digests
from stages.engine.lock import ProcessLock
from stages.engine.project import Project
from stages.graph.measuring import Measured, device_of, on_a_worker
from stages.graph.worker import Workshop
from stages.sharing.cache import Cache
from stages.sharing.fleet import MADE, Answer, Fleet, Order
from tests.conftest import Become

pytest.importorskip("distributed")


@dataclass
class Cluster:
    """One worker, in this process."""

    answer: Callable[[str], Answer]
    has: dict[str, dict[str, float]]
    asked: list[str] = field(default_factory=list)

    def connect(self) -> bool:
        return False

    def workers(self) -> dict[str, dict[str, float]]:
        return self.has

    def run(self, key: str, action: Any, text: str, needs: Any) -> str:
        self.asked.append(key)
        return self.answer(text).text


@dataclass
class World:
    """A directory that somebody built here, and a worker."""

    project: Project
    fleet: Fleet
    cluster: Cluster
    shareable: bool = True

    def measured(self) -> Measured | None:
        return on_a_worker(self.project, "cpu", self.shareable, self.fleet)


@pytest.fixture
def world(demo: Path, tmp_path: Path) -> World:
    directory = tmp_path / "artifacts/demo/cpu"
    shutil.copytree(demo, directory, copy_function=os.link, ignore=shutil.ignore_patterns("objects", SIGNATURE))
    project = Project(directory, Digests(tmp_path / "digests"), ProcessLock(tmp_path / "lock"))
    store = str(tmp_path / "store")
    fleet = Fleet(Cache(store, lambda step: True), "tcp://nowhere:1", None, str, lambda step: None)  # type: ignore[arg-type]
    cluster = Cluster(Workshop(store, tmp_path / "scratch").answer, {"worker": dict(device_of("cpu"))})
    fleet._cluster = cluster  # type: ignore[assignment]
    return World(project, fleet, cluster)


def test_a_worker_measures_once_and_signs_it(world: World) -> None:
    found = world.measured()
    assert found and found.times.ttft > 0 and found.times.tpot > 0 and found.where.endswith(f"/{os.getpid()}")
    assert found.signer == "you"
    assert world.measured() == found and len(world.cluster.asked) == 1


def test_nobody_is_asked_who_cannot(world: World) -> None:
    world.cluster.has = {"worker": dict(device_of("xrt"))}
    assert world.measured() is None
    world.cluster.has = {"worker": dict(device_of("cpu"))}
    world.shareable = False
    with pytest.raises(UserError, match="no worker gets it: include=weights"):
        world.measured()
    assert not world.cluster.asked


def test_a_worker_runs_only_what_its_user_trusts(world: World, become: Become, monkeypatch: pytest.MonkeyPatch) -> None:
    here, answer = os.environ[settings.DIRECTORY], world.cluster.answer

    def of_bob(text: str) -> Answer:
        become("bob")
        try:
            return answer(text)
        finally:
            monkeypatch.setenv(settings.DIRECTORY, here)

    world.cluster.answer = of_bob
    with pytest.raises(UserError, match="whom you do not trust; it would run native code"):
        world.measured()


def test_what_nobody_signed_is_not_taken(world: World) -> None:
    world.cluster.answer = lambda text: Answer(MADE, "liar", Order.of_text(text).address)
    with pytest.raises(UserError, match="liar says that it measured, but"):
        world.measured()


def test_another_manifest_is_refused(world: World) -> None:
    answer = world.cluster.answer

    def another(text: str) -> Answer:
        return replace(answer(text.replace('"manifest": "', '"manifest": "0', 1)), address=Order.of_text(text).address)

    world.cluster.answer = another
    with pytest.raises(UserError, match="the manifest is another one"):
        world.measured()
