"""`cache=REMOTE`: outputs of steps that were run before, by whomever the user trusts; and ours for others.

An entry is found in two stages, as a compiler cache finds objects: by all that is known before the step runs, and among
those runs by what they came upon (headers, objects that were linked), which must be here as it was there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from llama_npu2.errors import UserError
from llama_npu2.trust import Untrusted
from stages.engine.project import Project, file_name
from stages.engine.steps import Step
from stages.sharing.arrivals import Arrivals
from stages.sharing.records import Record, address, fits_here, record_of
from stages.sharing.remotes import check_url, open_remote
from stages.sharing.store import Damaged, Store, warn

_RUNS = 16
"""Of one signer under one address: what they came upon differs."""


@dataclass
class Cache:
    """The cache of a build, at a URL. Whatever fails costs a line, and the build goes on here.

    `is_shareable(step)` says whether others may have the outputs of a step. Raises UserError for a URL that names
    nothing.
    """

    url: str
    is_shareable: Callable[[Step], bool]
    _off: bool = field(default=False, init=False)
    _asked: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        check_url(self.url)

    def fetch(self, step: Step, work: Path) -> list[Path] | None:
        """As `engine.steps.Shared` says."""
        found: list[Path] | None = self._tried(lambda: self._fetched(step, work))
        return found

    def offer(self, step: Step) -> None:
        """As `engine.steps.Shared` says."""
        self._tried(lambda: self._offered(step))

    def _tried(self, action: Callable[[], Any]) -> Any:
        if self._off:
            return None
        try:
            return action()
        except Damaged as error:
            warn(f"not used: {error}")
        except UserError as error:
            self._off = True
            warn(f"cache= is not used from here on: {error}")
        return None

    def _store(self, project: Project) -> Store:
        # Connections do not outlive a fork, so each process of a parallel build has its own.
        return Store(self._remote, project.digests)

    @cached_property
    def _remote(self) -> Any:
        return open_remote(self.url)

    def _fetched(self, step: Step, work: Path) -> list[Path] | None:
        where = address(step)
        if where is None:
            return None
        store = self._store(step.project)
        entries = store.entries(step_entry(where))
        runs = [record for entry in entries for record in runs_of(entry.content, where)]
        record = next((record for record in runs if fits_here(step, record)), None)
        if record is None:
            self._ask_for_trust(store, step_entry(where))
            return None
        arrivals = Arrivals(store, step.project, record.outputs, file_name(step.name))
        arrivals.place(record.outputs, work)
        arrivals.done()
        return [step.located(label) for label in record.found]

    def _ask_for_trust(self, store: Store, name: str) -> None:
        """Say, once, whose outputs are there and not taken."""
        if not self._asked:
            # Nothing hangs on it, and not every remote can list what it has.
            with contextlib.suppress(UserError):
                try:
                    store.check_strangers(name)
                except Untrusted as error:
                    self._asked = True
                    warn(f"not used: {error}")

    def _offered(self, step: Step) -> None:
        if not self._remote.writable or not self.is_shareable(step):
            return
        record, store = record_of(step), self._store(step.project)
        if record and record.address:
            store.send({blob: step.project.directory / label for label, blob in record.outputs.items()})
            store.write(step_entries(store, [record]))


def step_entry(where: str) -> str:
    """Under which entries about steps of an address lie."""
    return f"steps/{where[:2]}/{where[2:]}"


def step_entries(store: Store, records: list[Record]) -> dict[str, dict[str, Any]]:
    """What to write so that runs of steps are found by others, beside what this user wrote before; nothing where it is
    there. Raises RemoteError."""

    def entry(record: Record) -> tuple[str, dict[str, Any]] | None:
        where = record.address
        if where is None:
            return None
        known = runs_of(store.own(step_entry(where)) or {}, where)
        if record in known:
            return None
        runs = [record, *(other for other in known if other.found != record.found)]
        return step_entry(where), {"address": where, "runs": [run.to_json() for run in runs[:_RUNS]]}

    return dict(filter(None, store.remote.parallel(entry, records)))


def runs_of(content: Mapping[str, Any], where: str) -> list[Record]:
    """Runs of a step that an entry tells of: those of the address that it lies under."""
    runs = content.get("runs")
    if content.get("address") != where or not isinstance(runs, list):
        return []
    return [record for record in map(Record.of_json, runs) if record.address == where]
