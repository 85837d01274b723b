"""A build step: its inputs, its outputs, and whether it must run again.

A step runs when the content of its inputs, its parameters, its tool's fingerprint or its own code's content changed, or
when an output was altered. Each finished step leaves a receipt with all of these next to its outputs, so the state
travels with the artifact directory, survives a kill, and a timestamp never matters. It knows nothing of models.
"""

from __future__ import annotations

import contextlib
import functools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import field
from itertools import chain
from pathlib import Path, PurePath
from typing import Any

from doit.exceptions import TaskFailed

from llama_npu2.errors import UserError
from llama_npu2.frozen import frozen
from stages.engine import definitions
from stages.engine.changes import Change, input_change, key_change, output_change
from stages.engine.extras import missing_package
from stages.engine.places import MANIFEST
from stages.engine.progress import running
from stages.engine.project import (
    BESIDE,
    FOREIGN,
    WORK,
    Project,
    file_name,
    free_memory,
    load_receipt,
)
from stages.engine.room import no_room, still_to_come


@frozen
class Step:
    """One node of the build's graph."""

    project: Project
    name: str
    doc: str
    action: Callable[[Path], Iterable[Path] | None]
    """Writes the outputs, at their paths relative to the artifact directory, below the empty directory that it is
    given. It may return further input files that it discovered (headers)."""
    outputs: tuple[Path, ...]
    inputs: tuple[Path, ...] = ()
    params: Mapping[str, Any] | None = field(default_factory=dict)
    """None: those that the receipt has. The step cannot be rebuilt here, only used."""
    tool: Callable[[], str | None] | None = None
    """Returns the tool's fingerprint, None if it is missing here."""
    after: tuple[str, ...] = ()
    """Steps that run first although none of their outputs is read: steps that may lack a tool come last."""
    machine_key: Callable[[], Mapping[str, Any] | None] = dict
    """Returns the properties of the machine that also decide on the outputs: its CPU, its libraries, the content that a
    name stands for today. None: they are not known, so the outputs are not shared."""
    private: bool = False
    """Whether the outputs hold content of the checkpoint, and so may go only where the checkpoint may go."""
    portable: bool = False
    """Whether any machine with its inputs, and with the checkpoint if it is private, can run it (`on=`)."""
    discovers: Callable[[], Iterable[Path]] = tuple
    """Returns the files of the artifact directory that the action will discover, once the inputs are there."""
    memory: int = 0
    """Bytes that the action may take, if that is much."""

    @property
    def receipt_path(self) -> Path:
        return self.project.receipt_path(self.name)

    def receipt(self) -> dict[str, Any] | None:
        """Return the receipt of the last run, None if it is missing or damaged."""
        return load_receipt(self.receipt_path)

    @property
    def module(self) -> str:
        """The module of the action."""
        return (self.action.func if isinstance(self.action, functools.partial) else self.action).__module__

    def _digest(self, path: Path) -> str | None:
        return self.project.digests.of(path)

    def _key(self, receipt: dict[str, Any] | None) -> dict[str, Any]:
        """Return the values, besides the inputs' content, that must be those of the receipt.

        A missing tool counts as the recorded one.
        """
        recorded = receipt["key"] if receipt else {}
        tool = self.tool() if self.tool else ""
        return {
            "code": self.project.code.digest(self.module),
            "params": recorded.get("params") if self.params is None else json.loads(json.dumps(self.params)),
            "tool": recorded.get("tool", "") if tool is None else tool,
        }

    @functools.cached_property
    def declared(self) -> dict[str, Path]:
        """The inputs by the label that receipts give them. What else a receipt lists was discovered by the action."""
        return {self.project.label(path): path for path in self.inputs}

    def located(self, label: str) -> Path:
        """Return the file that a receipt's label names here."""
        return self.declared.get(label) or self.project.located(label)

    def changes(self) -> Iterator[Change]:
        """Yield all reasons to run, as they are found; none if the step is current."""
        receipt = self.receipt()
        if receipt is None:
            label = self.project.label(self.receipt_path)
            exists = self.receipt_path.exists()
            yield Change("receipt", f"receipt {label} is damaged" if exists else "not built yet", label)
            return
        changed = False
        for change in chain(self._key_changes(receipt), self._input_changes(receipt), self._output_changes(receipt)):
            changed = True
            yield change
        if not changed and not self.project.vouching.is_trusted(self.receipt_path.stem, receipt):
            yield FOREIGN

    def _key_changes(self, receipt: Mapping[str, Any]) -> Iterator[Change]:
        for part, value in self._key(dict(receipt)).items():
            if (was := receipt["key"].get(part)) != value:
                yield key_change(part, was, value)

    def _input_changes(self, receipt: Mapping[str, Any]) -> Iterator[Change]:
        if self.params is None:
            return
        recorded = receipt["inputs"]
        declared = self.declared
        for label in sorted(declared.keys() - recorded.keys()):
            yield Change("input", f"new input {label}", label)
        for label in sorted({*receipt["declared"]} - declared.keys()):
            yield Change("input", f"input {label} is gone", label, recorded.get(label))
        for label, digest in recorded.items():
            path = self.located(label)
            # Actions discover files only: a receipt that names "/" must not make us read all of it.
            now = self._digest(path) if label in declared else self.project.digests.of_file(path)
            if now != digest:
                yield input_change(label, digest, now)

    def _output_changes(self, receipt: Mapping[str, Any]) -> Iterator[Change]:
        for label, digest in receipt["outputs"].items():
            path, size = self.project.directory / label, receipt.get("sizes", {}).get(label)
            here = path.stat().st_size if path.is_file() else None
            # A file of another size was altered: it need not be read.
            now = self._digest(path) if here is None or size in (None, here) else f"{here} bytes"
            if now != digest:
                yield output_change(label, digest, now, (size, here or 0))

    def why_stale(self) -> str | None:
        """Return the first reason to run, or None if the step is current."""
        change = next(self.changes(), None)
        return change.text if change else None

    def is_own(self) -> bool:
        """Return whether this user made its native outputs. Raises UserError."""
        receipt = self.receipt()
        return receipt is not None and self.project.vouching.is_own(self.receipt_path.stem, receipt)

    def is_current(self) -> bool:
        """Return whether there is no reason to run."""
        return self.why_stale() is None

    def run(self) -> TaskFailed | None:
        """Bring the outputs up to date. A UserError, and an OSError, becomes a failed task with one line."""
        try:
            with running(self.name):
                self._build()
        except UserError as error:
            return TaskFailed(str(error))
        except Exception as error:
            if missing := missing_package(error):
                return TaskFailed(f"cannot build {self.name}: {missing}")
            project = self.project
            more = functools.partial(still_to_come, project.directory, project.needed)
            if full := no_room(error, [project.directory], more):
                return TaskFailed(f"cannot build {self.name}: {full}")
            if not isinstance(error, OSError):
                raise
            where = f" {error.filename}:" if error.filename else ""
            return TaskFailed(f"cannot build {self.name}:{where} {error.strerror or error}: nothing was changed")
        finally:
            self.project.digests.save(soon=True)
        return None

    def _build(self) -> None:
        tree, work = self.project.tree, WORK / file_name(self.name)
        stale = next(self.changes(), None)
        if stale is None:
            return
        if stale == FOREIGN:
            where = self.project.directory
            raise UserError(
                f"{self.name} in {where} {FOREIGN.text}: doit trust key={where} takes the directory as it is, "
                "doit clean removes it, artifacts= builds elsewhere"
            )
        key, shared, started = self._key(None), self.project.shared, time.monotonic()
        before = {p: self._digest(p) for p in self.inputs}
        produced = tree.make_empty(work)
        try:
            fetched = shared.fetch(self, produced) if shared else None
            for path in self._act(produced) if fetched is None else fetched:
                before.setdefault(path, self._digest(path))
            receipt = {
                "key": key,
                "declared": sorted(self.project.label(p) for p in self.inputs),
                "inputs": {self.project.label(p): digest for p, digest in sorted(before.items())},
            }
            if self.project.lasting:
                definitions.keep(self.project, self.module)
            self.project.commit(self.name, produced, receipt)
        finally:
            with contextlib.suppress(OSError):
                tree.remove(work)
            free_memory()
        if fetched is not None:
            return
        self.project.durations.note(self.name, time.monotonic() - started)
        if shared:
            shared.offer(self)

    def _act(self, work: Path) -> Iterable[Path]:
        with self.project.at_once:
            return self.action(work) or ()

    def clean(self, dryrun: bool = False) -> str:
        """Remove the outputs and the receipt, but with `dryrun`; return which in words, empty for none.

        Raises OSError for a file that cannot be removed.
        """
        labels = [*(self.receipt() or {"outputs": {}})["outputs"]]
        if not dryrun:
            for label in (*labels, *(BESIDE if MANIFEST.as_posix() in labels else ())):
                with contextlib.suppress(UserError):  # where a link lies on the way, the file is not ours
                    self._remove(label)
            self._remove(self.project.label(self.receipt_path))
        return f"{labels[0]}{f' and {len(labels) - 1} more' * (len(labels) > 1)}" if labels else ""

    def _remove(self, label: str | PurePath) -> None:
        """Remove a file, and the directories that are empty without it. Raises UserError, OSError."""
        self.project.tree.remove_file(label)
        self.project.tree.remove_empty(PurePath(label).parent)
