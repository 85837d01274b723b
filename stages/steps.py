"""A build step: what it reads, what it writes, and whether it must run again.

A step runs when the content of its inputs, its parameters, its tool's fingerprint or its own code's content changed, or
when an output is not what it wrote. Each finished step leaves a receipt with all of these beside its outputs, so the
state travels with the artifact directory, survives a kill, and a timestamp never matters. Knows nothing of models.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash
from doit.exceptions import TaskFailed

from runtime.errors import UserError
from stages.files import Turn, content_digest, fsync_path, write_atomic

RECEIPTS = Path("build/receipts")
WORK = Path("build/work")
MANIFEST = Path("manifest.json")

_OWN_PACKAGES = ("stages", "runtime")
_IMPORT = re.compile(
    r"^\s*(?:from\s+((?:stages|runtime)[\w.]*)\s+import\s+\(?([\w, ]*)|import\s+((?:stages|runtime)[\w.]*))", re.M
)
# A file changed again within this time of being hashed could keep its stat signature.
_STAT_GRANULARITY_NS = 50_000_000


class Digests:
    """xxh3-128 of files, remembered by stat signature in one JSON file, so that a no-op build hashes nothing twice."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known = self._load()
        self._dirty = False

    def _load(self) -> dict[str, list]:
        try:
            known = json.loads(self.path.read_text())
            return known if isinstance(known, dict) else {}
        except (OSError, ValueError):
            return {}

    def of(self, path: Path) -> str | None:
        """Hex digest of a file's content, or of a directory's names and contents; None if there is no such path."""
        try:
            status = path.stat()
        except OSError:
            return None
        if path.is_dir():
            members = [(p.relative_to(path).as_posix(), self.of(p)) for p in sorted(path.rglob("*")) if p.is_file()]
            return xxhash.xxh3_128_hexdigest(json.dumps(members).encode())
        signature = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
        known = self._known.get(str(path))
        if known and known[:4] == signature:
            return known[4]
        started = time.time_ns()
        digest = content_digest(path)
        if started - status.st_mtime_ns > _STAT_GRANULARITY_NS and started - status.st_ctime_ns > _STAT_GRANULARITY_NS:
            self._known[str(path)] = [*signature, digest]
            self._dirty = True
        return digest

    def save(self) -> None:
        """Merge into the file. Losing an entry to a concurrent writer only costs a hash."""
        if self._dirty and self.path.parent.is_dir():
            write_atomic(self.path, json.dumps(self._load() | self._known).encode())
            self._dirty = False


def _module_file(name: str) -> Path | None:
    spec = importlib.util.find_spec(name) if name.split(".")[0] in _OWN_PACKAGES else None
    return Path(spec.origin) if spec and spec.origin else None


def _imported(name: str, path: Path) -> set[str]:
    """Project modules that a module may import: those it names and, for a package, its members (found by name)."""
    modules = set()
    for package, members, plain in _IMPORT.findall(path.read_text(encoding="utf-8")):
        modules.add(package or plain)
        named = (f"{package}.{member.strip()}" for member in members.split(",") if member.strip())
        modules |= {
            member for member in named if package and (path.parents[1] / (member.replace(".", "/") + ".py")).exists()
        }
    if path.name == "__init__.py" and "." in name:
        modules |= {f"{name}.{member.stem}" for member in path.parent.glob("*.py") if member != path}
    return modules


@functools.cache
def _code_files(module: str) -> frozenset[Path]:
    """Source files of a module and, transitively, of what it imports from this project."""
    found: dict[str, Path | None] = {}
    todo = [module]
    while todo:
        name = todo.pop()
        if name not in found:
            found[name] = path = _module_file(name)
            todo += _imported(name, path) if path else ()
    return frozenset(path for path in found.values() if path)


@functools.cache
def code_digest(module: str) -> str:
    """Digest of a module's source and of all project modules it imports."""
    state = xxhash.xxh3_128()
    for path in sorted(_code_files(module), key=lambda p: p.as_posix()):
        state.update(path.name.encode())
        state.update(path.read_bytes())
    return state.hexdigest()


@dataclass
class Project:
    """Where a build happens: the artifact directory of one model and target, and the digests shared by all."""

    directory: Path
    digests: Digests
    turn: Turn
    """Held from the first look at a step until the build is done: builds of one directory take turns."""

    def label(self, path: Path) -> str:
        """How a receipt names a file: relative to the artifact directory if inside it, so that it can be copied."""
        return path.relative_to(self.directory).as_posix() if path.is_relative_to(self.directory) else path.as_posix()


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

    @property
    def _file_name(self) -> str:
        return re.sub("[:/]", "-", self.name)

    @property
    def _receipt_path(self) -> Path:
        return self.project.directory / RECEIPTS / f"{self._file_name}.json"

    def receipt(self) -> dict[str, Any] | None:
        try:
            receipt = json.loads(self._receipt_path.read_text())
            return receipt if {"key", "inputs", "outputs"} <= receipt.keys() else None
        except (OSError, ValueError, AttributeError):
            return None

    def _digest(self, path: Path) -> str | None:
        return self.project.digests.of(path)

    def _key(self, receipt: dict[str, Any] | None) -> dict[str, Any]:
        """What must be equal, besides the inputs' content. A missing tool counts as the recorded one."""
        recorded = receipt["key"] if receipt else {}
        action = self.action.func if isinstance(self.action, functools.partial) else self.action
        tool = self.tool() if self.tool else ""
        return {
            "code": code_digest(action.__module__),
            "params": recorded.get("params") if self.params is None else json.loads(json.dumps(self.params)),
            "tool": recorded.get("tool", "") if tool is None else tool,
        }

    def _located(self, label: str) -> Path:
        """The file that a receipt's label means here."""
        inside = self.project.directory / label
        declared = {self.project.label(p): p for p in self.inputs}
        return declared.get(label) or (inside if inside.exists() else Path(label))

    def why_stale(self) -> str | None:
        """The first reason to run, or None if the step is current."""
        receipt = self.receipt()
        if receipt is None:
            return "not built yet"
        key = self._key(receipt)
        for part, value in key.items():
            if receipt["key"].get(part) != value:
                return f"its {part} changed"
        recorded = receipt["inputs"]
        if self.params is not None:
            declared = {self.project.label(p) for p in self.inputs}
            if added := sorted(declared - recorded.keys()):
                return f"new input {added[0]}"
            if removed := sorted(set(receipt.get("declared", ())) - declared):
                return f"input {removed[0]} is gone"
            for label, digest in recorded.items():
                if self._digest(self._located(label)) != digest:
                    return f"input {label} changed"
        for label, digest in receipt["outputs"].items():
            found = self._digest(self.project.directory / label)
            if found != digest:
                return f"output {label} {'is missing' if found is None else 'was altered'}"
        return None

    def is_current(self) -> bool:
        return self.why_stale() is None

    def run(self) -> TaskFailed | None:
        """Bring the outputs up to date. A user's mistake becomes a failed task with its one line."""
        try:
            self._build()
        except UserError as error:
            return TaskFailed(str(error))
        except OSError as error:
            where = f" {error.filename}" if error.filename else ""
            return TaskFailed(f"cannot build {self.name}:{where}: {error.strerror or error}: nothing was changed")
        finally:
            self.project.digests.save()
        return None

    def _build(self) -> None:
        work = self.project.directory / WORK / self._file_name
        if self.is_current():
            return
        old = self.receipt() or {"outputs": {}}
        key = self._key(None)
        before = {p: self._digest(p) for p in self.inputs}
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        try:
            for path in self.action(work) or ():
                before.setdefault(path, self._digest(path))
            made = self._commit(work, old["outputs"])
        finally:
            shutil.rmtree(work, ignore_errors=True)
        receipt = {
            "key": key,
            "declared": sorted(self.project.label(p) for p in self.inputs),
            "inputs": {self.project.label(p): digest for p, digest in sorted(before.items())},
            "outputs": made,
        }
        write_atomic(self._receipt_path, json.dumps(receipt, indent=1, sort_keys=True).encode())

    def _commit(self, work: Path, old: Mapping[str, str]) -> dict[str, str]:
        """Move the outputs into place, each by a rename; remove outputs of the last run that this one did not make."""
        produced = sorted(p for p in work.rglob("*") if p.is_file())
        made = {p.relative_to(work).as_posix(): content_digest(p) for p in produced}
        for path in produced:
            fsync_path(path)
        self._receipt_path.unlink(missing_ok=True)
        root = self.project.directory
        changed = [label for label, digest in made.items() if self._digest(root / label) != digest]
        gone = [label for label in old if label not in made]
        if any(not label.startswith("build/") and Path(label) != MANIFEST for label in changed + gone):
            # From here until the manifest is written again the directory says that it is incomplete.
            (root / MANIFEST).unlink(missing_ok=True)
        for label in changed:
            (root / label).parent.mkdir(parents=True, exist_ok=True)
            (work / label).replace(root / label)
        for label in gone:
            (root / label).unlink(missing_ok=True)
        return made

    def clean(self) -> None:
        """Remove the outputs and the receipt."""
        for label in (self.receipt() or {"outputs": {}})["outputs"]:
            (self.project.directory / label).unlink(missing_ok=True)
        self._receipt_path.unlink(missing_ok=True)


class UpToDate:
    """The `uptodate` entry of a doit task; its text is what `doit info` shows."""

    def __init__(self, step: Step) -> None:
        self.step = step

    def __call__(self) -> bool:
        self.step.project.turn.take()
        return self.step.is_current()

    def __repr__(self) -> str:
        return self.step.why_stale() or "up to date"


def doit_task(step: Step, steps: Iterable[Step]) -> dict[str, Any]:
    """A step as a doit task; who comes before it is derived from who writes what it reads."""
    maker = {output: other.name for other in steps for output in other.outputs}
    group, _, member = step.name.partition(":")
    return {
        **({"name": member} if member else {"basename": group}),
        "doc": step.doc,
        "actions": [step.run],
        "uptodate": [UpToDate(step)],
        "targets": [output.as_posix() for output in step.outputs],
        "task_dep": sorted({maker[p] for p in step.inputs if p in maker} | set(step.after)),
        "clean": [step.clean],
        "verbosity": 2,
    }
