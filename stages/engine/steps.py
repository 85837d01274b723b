"""A build step: what it reads, what it writes, and whether it must run again.

A step runs when the content of its inputs, its parameters, its tool's fingerprint or its own code's content changed, or
when an output is not what it wrote. Each finished step leaves a receipt with all of these beside its outputs, so the
state travels with the artifact directory, survives a kill, and a timestamp never matters. Knows nothing of models.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path, PurePath
from typing import Any, Protocol

import xxhash
from doit.exceptions import TaskFailed

from llama_npu2 import trust
from llama_npu2.errors import UserError
from llama_npu2.regular import can_be_a_path, read_regular
from llama_npu2.schema import anything, list_of, load_json, mapping, record, text, whole
from stages.engine import definitions, memory
from stages.engine.changes import Change, input_change, key_change, output_change
from stages.engine.code import Code
from stages.engine.digests import Digests
from stages.engine.durations import Durations
from stages.engine.files import content_digest, content_sha256, fsync_path
from stages.engine.leftovers import Leftovers
from stages.engine.places import INCOMING, MANIFEST, PROVENANCE, ROOT
from stages.engine.progress import running
from stages.engine.room import no_room, still_to_come
from stages.engine.tree import Linked, Tree
from stages.engine.turn import Turn
from stages.engine.vouching import MAC, Vouching, is_native

FOREIGN = Change("trust", "was not built by you, and nobody whom you trust signed it")
"""Why native code of others is not current."""
BESIDE = (trust.LOCAL, trust.SIGNATURE, PROVENANCE)
"""What is said of the manifest."""
RECEIPTS = Path("build/receipts")
WORK = Path("build/work")

_TEXT = text(r"[^\x00\ud800-\udfff]*", "text")
CHECKSUM = "xxh3"
"""Of all else in a receipt, hex: one that is damaged, and was not forged, is as good as none."""

_PARTS = {"key", "declared", "inputs", "outputs", "sizes", MAC}
_RECEIPT = record(
    {
        "key": mapping(_TEXT, anything),
        "declared": list_of(_TEXT),
        "inputs": mapping(_TEXT, anything),
        "outputs": mapping(_TEXT, _TEXT),
    },
    {MAC: _TEXT, CHECKSUM: _TEXT, "sizes": mapping(_TEXT, whole(0, 1 << 60))},
)


class Shared(Protocol):
    """Where steps find outputs that were made before, on whatever machine."""

    def fetch(self, step: Step, work: Path) -> list[Path] | None:
        """Write the outputs of `step` below the empty directory `work` and return the inputs that it would find on the
        way; None, and nothing in `work`, if they cannot be had."""

    def offer(self, step: Step) -> None:
        """Give others what `step` just made here."""


@dataclass
class Project:
    """Where a build happens: the artifact directory of one model and target, and the digests shared by all."""

    directory: Path
    digests: Digests
    turn: Turn
    """Held from the first look at a step until the build is done: builds of one directory take turns."""
    shared: Shared | None = None
    accepted: Path | None = None
    """What is in the directory once the model was accepted. A new directory without it is of no use."""
    needed: Callable[[], int] | None = None
    """Bytes of the directory when it is complete, where that is known. It may raise OSError or UserError."""

    def __post_init__(self) -> None:
        memory.use_one_arena()

    @functools.cached_property
    def code(self) -> Code:
        return Code(self.digests)

    @functools.cached_property
    def durations(self) -> Durations:
        return Durations(self.digests.path.parent, self.directory)

    @functools.cached_property
    def vouching(self) -> Vouching:
        return Vouching(self.directory)

    @functools.cached_property
    def tree(self) -> Tree:
        """The directory as what is changed without following a link: it may have come from elsewhere.

        It may be a link itself, as may its model's directory, which then leads to artifacts on a larger disk. Raises
        Linked where it leads to something else, which must not be written over.
        """
        tree = Tree(self.directory)
        if (self.directory.is_symlink() or self.directory.parent.is_symlink()) and not self._may_be_built(tree):
            raise Linked(f"{self.directory} leads through a link to what is not an artifact directory: remove the link")
        return tree

    def _may_be_built(self, tree: Tree) -> bool:
        """Whether a directory is empty, or holds what builds leave."""
        built = any(load_receipt(self.directory / RECEIPTS / name) for name in tree.names(RECEIPTS))
        stopped = {*tree.names()} <= {"build"} and {*tree.names("build")} <= {WORK.name, INCOMING.name}
        return built or stopped

    @functools.cached_property
    def leftovers(self) -> Leftovers:
        """What is new here, from the first time that this is asked."""
        accepted = self.accepted and self.directory / self.accepted
        return Leftovers(self.directory, self.directory / WORK, self.turn, self.digests.path, accepted)

    def label(self, path: Path) -> str:
        """How a receipt names a file: relative to the artifact directory or the project if inside, so that both can be
        copied."""
        for root in (self.directory, ROOT):
            if path.is_relative_to(root):
                return path.relative_to(root).as_posix()
        return path.as_posix()

    def located(self, label: str) -> Path:
        """The file that a label means here."""
        inside = self.directory / label
        return inside if inside.exists() else ROOT / label

    def receipt_path(self, step: str) -> Path:
        """Of a step, by its name."""
        return self.directory / RECEIPTS / f"{file_name(step)}.json"

    def prune(self, steps: Iterable[str]) -> None:
        """Remove what steps left that are no more, and what never arrived: `steps` are all there are."""
        names = self.tree.names(RECEIPTS)
        current = set(map(self.receipt_path, steps))
        gone = [RECEIPTS / name for name in names if name.endswith(".json") and name[0] != "."]
        gone = [label for label in gone if self.directory / label not in current]
        kept = {label for path in current for label in (load_receipt(path) or {}).get("outputs", ())} if gone else ()
        # What cannot be removed is in nobody's way.
        with contextlib.suppress(OSError):
            self.tree.remove(INCOMING)
        for half in (name for name in names if name[0] == "."):  # of a process that was killed
            self.tree.remove(RECEIPTS / half)
        for receipt in gone:
            with contextlib.suppress(OSError):
                for label in (load_receipt(self.directory / receipt) or {"outputs": ()})["outputs"]:
                    if label not in kept:
                        self.tree.remove_file(label)
                        self.tree.remove_empty(PurePath(label).parent)
                self.tree.remove(receipt)

    def commit(self, step: str, work: Path, receipt: Mapping[str, Any]) -> None:
        """Make what a step left below `work` its outputs: move each into place by a rename, remove those of its last
        run that are not among them, and write `receipt`, to which their digests are added."""
        path, tree = self.receipt_path(step), self.tree
        old = (load_receipt(path) or {"outputs": {}})["outputs"]
        produced = sorted(p for p in work.rglob("*") if p.is_file())
        made = {p.relative_to(work).as_posix(): content_digest(p) for p in produced}
        for output in produced:
            fsync_path(output)
        root, gone = self.directory, [label for label in old if label not in made]
        for label in (*made, *gone, self.label(path)):
            tree.check(label)
        tree.remove_file(self.label(path))
        changed = [label for label, digest in made.items() if not self._holds(label, digest, work / label)]
        if any(not label.startswith("build/") and Path(label) != MANIFEST for label in changed + gone):
            # From here until the manifest is written again the directory says that it is incomplete.
            tree.remove_file(MANIFEST)
        for label in changed:
            tree.take(work / label, label)
        for label in gone:
            tree.remove_file(label)
        told = {**receipt, "outputs": made, "sizes": {label: (root / label).stat().st_size for label in made}}
        self._write_receipt(path, told)

    def adopt(self) -> None:
        """Take what all steps left as if it had been built here. Raises UserError."""
        for path in sorted((self.directory / RECEIPTS).glob("*.json")):
            if receipt := load_receipt(path):
                self._write_receipt(path, receipt)

    def _write_receipt(self, path: Path, receipt: Mapping[str, Any]) -> None:
        """Write a receipt as this user's own, with the code that says so and a checksum."""
        own = {**receipt, MAC: self.vouching.mac(path.stem, receipt)}
        whole = {**own, CHECKSUM: _checksum(own)}
        self.tree.write(self.label(path), json.dumps(whole, indent=1, sort_keys=True).encode())

    def sha256(self, label: str) -> str | None:
        """SHA-256, hex, of a file of the directory, None where there is none.

        What native code is made of is read each time, all else is remembered by its stat signature.
        """
        return self.vouching.sha256(label) if is_native(label) else self.digests.sha256(self.directory / label)

    def _holds(self, label: str, digest: str, made: Path) -> bool:
        """Whether an output is there already. For native code a digest that can be forged does not do."""
        there = self.directory / label
        if not there.is_file() or there.stat().st_size != made.stat().st_size:
            return False
        if is_native(label):
            return self.sha256(label) == content_sha256(made)
        return self.digests.of(there) == digest


def file_name(step: str) -> str:
    """A step's name as that of a file."""
    return re.sub("[:/]", "-", step)


def load_receipt(path: Path) -> dict[str, Any] | None:
    """What a step left, or None if that is not what it should be."""
    try:
        receipt: dict[str, Any] = load_json(read_regular(path))
        _RECEIPT(receipt)
        intact = receipt.pop(CHECKSUM, None) in (None, _checksum(receipt)) and receipt.keys() <= _PARTS
    except (OSError, ValueError, RecursionError):
        return None
    if not intact:
        return None
    labels = {*receipt["inputs"], *receipt["outputs"], *receipt["declared"]}
    return receipt if all(map(can_be_a_path, labels)) and all(map(is_inside, receipt["outputs"])) else None


def _checksum(receipt: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(receipt, sort_keys=True).encode())


def is_inside(label: str) -> bool:
    """Whether a label stays in its directory. Receipts come with directories that others made."""
    return not Path(label).is_absolute() and ".." not in Path(label).parts


@dataclass(frozen=True)
class Step:
    """One node of the DAG.

    `action(work)` writes the outputs, at their paths relative to the artifact directory, below the empty directory
    `work`, and may return further input files that it discovered (headers). `params=None` means "whatever the receipt
    says": the step cannot be rebuilt here, only used.
    """

    project: Project
    name: str
    doc: str
    action: Callable[[Path], Iterable[Path] | None]
    outputs: tuple[Path, ...]
    inputs: tuple[Path, ...] = ()
    params: Mapping[str, Any] | None = field(default_factory=dict)
    tool: Callable[[], str | None] | None = None
    after: tuple[str, ...] = ()
    """Steps to get done first although nothing of theirs is read: what fails for want of a tool comes last."""
    elsewhere: Callable[[], Mapping[str, Any] | None] = dict
    """What besides all this decides on the outputs on another machine: its CPU, its libraries, what a name stands for
    today. None from it: that cannot be said, so they are not shared."""
    private: bool = False
    """Whether the outputs hold what is the checkpoint's own, and so go where the checkpoint may go."""

    @property
    def receipt_path(self) -> Path:
        return self.project.receipt_path(self.name)

    def receipt(self) -> dict[str, Any] | None:
        return load_receipt(self.receipt_path)

    @property
    def module(self) -> str:
        """Where the action's code begins."""
        return (self.action.func if isinstance(self.action, functools.partial) else self.action).__module__

    def _digest(self, path: Path) -> str | None:
        return self.project.digests.of(path)

    def _key(self, receipt: dict[str, Any] | None) -> dict[str, Any]:
        """What must be equal, besides the inputs' content. A missing tool counts as the recorded one."""
        recorded = receipt["key"] if receipt else {}
        tool = self.tool() if self.tool else ""
        return {
            "code": self.project.code.digest(self.module),
            "params": recorded.get("params") if self.params is None else json.loads(json.dumps(self.params)),
            "tool": recorded.get("tool", "") if tool is None else tool,
        }

    def located(self, label: str) -> Path:
        """The file that a receipt's label means here."""
        declared = {self.project.label(p): p for p in self.inputs}
        return declared.get(label) or self.project.located(label)

    def changes(self) -> Iterator[Change]:
        """All reasons to run, as they are found; none if the step is current."""
        receipt = self.receipt()
        if receipt is None:
            label = self.project.label(self.receipt_path)
            there = self.receipt_path.exists()
            yield Change("receipt", f"receipt {label} is damaged" if there else "not built yet", label)
            return
        found = False
        for change in chain(self._key_changes(receipt), self._input_changes(receipt), self._output_changes(receipt)):
            found = True
            yield change
        if not found and not self.project.vouching.is_trusted(self.receipt_path.stem, receipt):
            yield FOREIGN

    def _key_changes(self, receipt: Mapping[str, Any]) -> Iterator[Change]:
        for part, value in self._key(dict(receipt)).items():
            if (was := receipt["key"].get(part)) != value:
                yield key_change(part, was, value)

    def _input_changes(self, receipt: Mapping[str, Any]) -> Iterator[Change]:
        if self.params is None:
            return
        recorded = receipt["inputs"]
        declared = {self.project.label(p) for p in self.inputs}
        for label in sorted(declared - recorded.keys()):
            yield Change("input", f"new input {label}", label)
        for label in sorted(set(receipt["declared"]) - declared):
            yield Change("input", f"input {label} is gone", label, recorded.get(label))
        for label, digest in recorded.items():
            path = self.located(label)
            # What an action discovers are files: a receipt that names "/" must not have all of it read.
            found = self._digest(path) if label in declared or not path.is_dir() else None
            if found != digest:
                yield input_change(label, digest, found)

    def _output_changes(self, receipt: Mapping[str, Any]) -> Iterator[Change]:
        for label, digest in receipt["outputs"].items():
            path, size = self.project.directory / label, receipt.get("sizes", {}).get(label)
            here = path.stat().st_size if path.is_file() else None
            # A file of another size is another file, however long it would take to read.
            found = self._digest(path) if here is None or size in (None, here) else f"{here} bytes"
            if found != digest:
                yield output_change(label, digest, found, (size, here or 0))

    def why_stale(self) -> str | None:
        """The first reason to run, or None if the step is current."""
        change = next(self.changes(), None)
        return change.text if change else None

    def is_own(self) -> bool:
        """Whether this user made its native outputs. Raises UserError."""
        receipt = self.receipt()
        return receipt is not None and self.project.vouching.is_own(self.receipt_path.stem, receipt)

    def is_current(self) -> bool:
        return self.why_stale() is None

    def run(self) -> TaskFailed | None:
        """Bring the outputs up to date. A user's mistake becomes a failed task with its one line."""
        try:
            with running(self.name):
                self._build()
        except UserError as error:
            return TaskFailed(str(error))
        except Exception as error:
            project = self.project
            more = functools.partial(still_to_come, project.directory, project.needed)
            if full := no_room(error, [project.directory], more):
                return TaskFailed(f"cannot build {self.name}: {full}")
            if not isinstance(error, OSError):
                raise
            where = f" {error.filename}:" if error.filename else ""
            return TaskFailed(f"cannot build {self.name}:{where} {error.strerror or error}: nothing was changed")
        finally:
            self.project.digests.save()
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
                "doit clean removes it"
            )
        key, shared, started = self._key(None), self.project.shared, time.monotonic()
        before = {p: self._digest(p) for p in self.inputs}
        made = tree.make_empty(work)
        try:
            fetched = shared.fetch(self, made) if shared else None
            for path in (self.action(made) or ()) if fetched is None else fetched:
                before.setdefault(path, self._digest(path))
            receipt = {
                "key": key,
                "declared": sorted(self.project.label(p) for p in self.inputs),
                "inputs": {self.project.label(p): digest for p, digest in sorted(before.items())},
            }
            definitions.keep(self.project, self.module)
            self.project.commit(self.name, made, receipt)
        finally:
            with contextlib.suppress(OSError):
                tree.remove(work)
            memory.give_back()
        if fetched is not None:
            print(f"{self.name}: fetched", file=sys.stderr, flush=True)
            return
        self.project.durations.note(self.name, time.monotonic() - started)
        if shared:
            shared.offer(self)

    def clean(self) -> None:
        """Remove the outputs and the receipt."""
        labels = (self.receipt() or {"outputs": {}})["outputs"]
        for label in (*labels, *(BESIDE if MANIFEST.as_posix() in labels else ())):
            with contextlib.suppress(UserError):
                self.project.tree.remove_file(label)
        self.project.tree.remove_file(self.project.label(self.receipt_path))
