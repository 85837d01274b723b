"""`cache=REMOTE`: outputs of steps that somebody whom the user trusts ran before; and ours for others.

A run is found in two stages, as a compiler cache finds objects: by all that is known before the step runs, and among
those runs by the inputs that they discovered (headers, objects that were linked), which must be the same here.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from llama_npu2.errors import UserError
from llama_npu2.trust import Untrusted
from stages.engine.places import INCOMING, MANIFEST
from stages.engine.project import Project, file_name
from stages.engine.steps import Step
from stages.sharing.records import Blob, Record, address, fits_here, is_here, record_of
from stages.sharing.remotes import check_url, open_remote
from stages.sharing.store import Damaged, Store, warn


class Arrivals:
    """Files by label that were received from a remote."""

    def __init__(self, store: Store, project: Project, files: Mapping[str, Blob], name: str) -> None:
        """Receive the files that the artifact directory does not have. Raises UserError.

        Args:
            store: the remote's content.
            project: the artifact directory.
            files: the files by label.
            name: the folder for received files. What a stopped process received under this name is not received again.
        """
        self._directory, self._tree, self._incoming = project.directory, project.tree, INCOMING / name
        self._absent = {label: blob for label, blob in files.items() if not is_here(project, label, blob)}
        if self._absent and (manifest := MANIFEST.as_posix()) in files:
            # It is removed when the first other file is put into place.
            self._absent[manifest] = files[manifest]
        self._uses = Counter(self._absent.values())
        self._received = store.receive(self._uses, self._tree, self._incoming)

    @property
    def nbytes(self) -> int:
        """The bytes that were received."""
        return sum(blob.size for blob in self._uses)

    def place(self, labels: Iterable[str], work: Path) -> None:
        """Put these of the files below `work`, the artifact directory or a directory in it.

        Files that the artifact directory has already get a second name there. A link that lies where a file goes is
        replaced, not followed.
        """
        inside = work.relative_to(self._directory)
        for label in labels:
            blob = self._absent.get(label)
            if blob is None:
                if inside.parts:
                    self._tree.link(label, inside / label)
                continue
            self._uses[blob] -= 1
            received = self._received[blob]
            if self._uses[blob]:
                received = received.with_suffix(".copy")
                shutil.copyfile(self._received[blob], received)
            self._tree.take(received, inside / label)

    def done(self) -> None:
        """Remove the folder for received files, once all are in place."""
        self._tree.remove(self._incoming)


_RUNS = 16
"""Most runs of one signer under one address. They differ in the inputs that they discovered."""


@dataclass
class Cache:
    """The cache of a build. A failure prints a line, and the build goes on here.

    Raises UserError for a URL that cannot be used.
    """

    url: str
    is_shareable: Callable[[Step], bool]
    """Returns whether others may have the outputs of a step."""
    is_off: bool = field(default=False, init=False)
    """Whether it failed, and so is not used any more."""
    _asked: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        check_url(self.url)

    def fetch(self, step: Step, work: Path) -> list[Path] | None:
        """Fetch the outputs of a step, see `engine.project.Shared`."""
        discovered = self.look_up(step, work)
        if discovered is not None:
            print(f"{step.name}: fetched\n", end="", file=sys.stderr, flush=True)  # one write: threads share the stream
        return discovered

    def look_up(self, step: Step, work: Path) -> list[Path] | None:
        """Fetch the outputs of a step without saying so."""
        discovered: list[Path] | None = self._try(lambda: self._fetch(step, work))
        return discovered

    def offer(self, step: Step) -> None:
        """Add the outputs of a step, see `engine.project.Shared`."""
        self._try(lambda: self._offer(step))

    def tool(self, find: Callable[[], str | None]) -> Callable[[], str | None]:
        """Return `find`, as nobody runs steps for this build."""
        return find

    def close(self) -> None:
        """Do nothing, as nothing runs elsewhere."""

    def _try(self, action: Callable[[], Any]) -> Any:
        if self.is_off:
            return None
        try:
            return action()
        except Damaged as error:
            warn(f"not used: {error}")
        except UserError as error:
            self.is_off = True
            warn(f"cache= is not used from here on: {error}")
        return None

    def store(self, project: Project) -> Store:
        """Return the remote's content, for a build of this project."""
        # Connections do not outlive a fork, so each process of a parallel build has its own.
        return Store(self._remote, project.digests)

    @cached_property
    def _remote(self) -> Any:
        return open_remote(self.url)

    def _fetch(self, step: Step, work: Path) -> list[Path] | None:
        where = address(step)
        if where is None:
            return None
        store = self.store(step.project)
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
        """Print, once, that a signer who is not trusted has outputs for this build."""
        if not self._asked:
            # A failure does no harm, and not every remote can list its files.
            with contextlib.suppress(UserError):
                try:
                    store.check_strangers(name)
                except Untrusted as error:
                    self._asked = True
                    warn(f"not used: {error}")

    def _offer(self, step: Step) -> None:
        if self._remote.writable and self.is_shareable(step):
            offer_run(self.store(step.project), step)


def offer_run(store: Store, step: Step) -> None:
    """Add the outputs of a step, which is current, to a store. Raises UserError."""
    record = record_of(step)
    if record and record.address:
        store.send({blob: step.project.directory / label for label, blob in record.outputs.items()})
        store.write(step_entries(store, [record]))


def step_entry(where: str) -> str:
    """Return the name of the folder with the entries about runs of an address."""
    return f"steps/{where[:2]}/{where[2:]}"


def step_entries(store: Store, records: list[Record]) -> dict[str, dict[str, Any]]:
    """Return the entries that make runs of steps known to others, merged with those that this user wrote before.

    Runs that are known already need no entry. Raises RemoteError.
    """

    def entry(record: Record) -> tuple[str, dict[str, Any]] | None:
        where = record.address
        if where is None:
            return None
        written = runs_of(store.own(step_entry(where)) or {}, where)
        if record in written:
            return None
        runs = [record, *(other for other in written if other.found != record.found)]
        return step_entry(where), {"address": where, "runs": [asdict(run) for run in runs[:_RUNS]]}

    return dict(filter(None, store.remote.parallel(entry, records)))


def runs_of(content: Mapping[str, Any], where: str) -> list[Record]:
    """Return the runs in an entry that have the address under which the entry lies."""
    runs = content.get("runs")
    if content.get("address") != where or not isinstance(runs, list):
        return []
    return [record for record in map(Record.of_json, runs) if record.address == where]
