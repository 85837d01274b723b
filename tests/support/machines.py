"""Checkouts that make something for one another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stages.engine.digests import Digests
from stages.engine.lock import ProcessLock
from stages.engine.project import Project
from stages.engine.steps import Step
from stages.sharing.cache import Cache
from stages.sharing.remotes import open_remote
from stages.sharing.store import Store
from stages.sharing.travel import Exchange


@pytest.fixture
def url() -> Iterator[str]:
    from fsspec.implementations.memory import MemoryFileSystem

    MemoryFileSystem.store.clear()
    yield "memory://shared"
    MemoryFileSystem.store.clear()


class Machine:
    """A checkout with two steps: `copy` makes `copied` of a source, `join` makes `joined` of that and of a header that
    it comes upon."""

    def __init__(self, directory: Path, url: str = "", **more: Any) -> None:
        self.directory, self.ran, self.url = directory, list[str](), url
        self.params, self.more, self.outputs = {"level": 1}, more, ("copied", "joined")
        directory.mkdir(exist_ok=True)
        self.source, self.header = directory / "source", directory / "artifact/header"
        self.header.parent.mkdir(exist_ok=True)
        self.source.write_text("source")
        self.header.write_text("header")

    def project(self) -> Project:
        shared = Cache(self.url, lambda step: not step.private) if self.url else None
        lock = ProcessLock(self.directory / "lock")
        return Project(self.directory / "artifact", Digests(self.directory / ".digests"), lock, shared)

    def steps(self) -> dict[str, Step]:
        project = self.project()
        copied, joined = (project.directory / output for output in self.outputs)
        copy = Step(project, "copy", "", self._copy, (copied,), (self.source,), self.params, **self.more)
        join = Step(project, "join", "", self._join, (joined,), (copied,))
        return {"copy": copy, "join": join}

    def build(self) -> list[str]:
        """Names of the steps whose action ran."""
        self.ran.clear()
        for step in self.steps().values():
            failed = step.run()
            assert failed is None, failed
        assert all(step.is_current() for step in self.steps().values())
        assert (self.directory / "artifact" / self.outputs[1]).read_text() == self.joined
        return self.ran

    @property
    def joined(self) -> str:
        return self.source.read_text() + self.header.read_text()

    def _copy(self, work: Path) -> None:
        self.ran.append("copy")
        self._write(work / self.outputs[0], self.source.read_text())

    def _join(self, work: Path) -> list[Path]:
        self.ran.append("join")
        self._write(work / self.outputs[1], self.joined)
        return [self.header]

    def _write(self, path: Path, text: str) -> None:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)

    def exchange(self, url: str) -> Exchange:
        project = self.project()
        return Exchange(Store(open_remote(url), project.digests), project, "model/cpu", ("said",))

    def push(self, url: str) -> int:
        return self.exchange(url).push(self.steps().values(), lambda step: not step.private)[1]

    def pull(self, url: str) -> int:
        return self.exchange(url).pull(self.steps())[1]
