"""Explains why steps would run: the changes of each in words, and the steps whose output it waits for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from stages.engine.changes import Change, abridged, differences, plain, shown
from stages.engine.definitions import OUTSIDE, Definitions, of_module, recorded
from stages.engine.digests import digest_of_files
from stages.engine.steps import Step

CURRENT, BEHIND, STALE, MISSING = "current", "behind", "stale", "missing"
"""States: the step will not run; it may run, because one before it will; it will run; it never ran."""


@dataclass
class Finding:
    """The state of a step and the reasons for it."""

    step: Step
    changes: list[Change]
    """Its own reasons to run."""
    reads: list[str]
    """The steps whose outputs it reads."""
    after: list[str]
    """The steps that come before it although it reads none of their outputs."""
    behind: list[str]
    """The steps with own reasons to run whose outputs it reads, directly or through other steps."""

    @property
    def state(self) -> str:
        """`CURRENT`, `BEHIND`, `STALE` or `MISSING`."""
        if any(change.kind == "receipt" for change in self.changes):
            return MISSING
        return STALE if self.changes else BEHIND if self.behind else CURRENT

    @property
    def roots(self) -> list[str]:
        """The steps that are the reason why a step that reads outputs of this one may run."""
        return [*self.behind, *([self.step.name] if self.changes else [])]

    @cached_property
    def sentences(self) -> list[str]:
        """The reasons in words, a line each; none for a step that is current."""
        sentences = [plain(line) for change in self.changes for line in explain(self.step, change)]
        if self.behind and self.state != MISSING:
            sentences.append(f"behind {', '.join(self.behind)}, which may change what it reads")
        return sentences

    def to_json(self) -> dict[str, Any]:
        """Return the finding as JSON. Each of `changes` has its kind, file (or empty), differences and sentences."""
        changes = [
            {
                "kind": change.kind,
                "file": change.what,
                "differences": [
                    {"of": path, "was": shown(was), "now": shown(now)} for path, was, now in _parts(self.step, change)
                ],
                "text": explain(self.step, change),
            }
            for change in self.changes
        ]
        return {"step": self.step.name, "state": self.state, "changes": changes, "behind": self.behind}


def examine(steps: Mapping[str, Step]) -> dict[str, Finding]:
    """Return the finding of each of `steps`, which are in an order in which they can run. Raises UserError."""
    makers = _Makers(steps.values())
    findings: dict[str, Finding] = {}
    for name, step in steps.items():
        # A receipt may list any inputs: receipts come with directories that others made.
        reads = sorted(makers.read_by(step) & findings.keys())
        after = sorted((set(step.after) & findings.keys()).difference(reads))
        changes = [change for change in step.changes() if not makers.will_restore(step, change)]
        roots = {root for maker in reads for root in findings[maker].roots}
        findings[name] = Finding(step, changes, reads, after, [root for root in findings if root in roots])
    return findings


class _Makers:
    """The steps by the outputs that they write."""

    def __init__(self, steps: Iterable[Step]) -> None:
        self._by_output = {output: step for step in steps for output in step.outputs}

    def read_by(self, step: Step) -> set[str]:
        """Return the steps that write the inputs of a step, declared ones and those of its receipt."""
        recorded_inputs = (step.receipt() or {"inputs": ()})["inputs"]
        paths = {*step.inputs, *map(step.project.directory.__truediv__, recorded_inputs)}
        return {maker.name for path in paths if (maker := self.of(path))}

    def of(self, path: Path) -> Step | None:
        """Return the step that writes a file, or the directory that it is in."""
        return next((self._by_output[p] for p in (path, *path.parents) if p in self._by_output), None)

    def will_restore(self, step: Step, change: Change) -> bool:
        """Return whether an input was altered after its maker wrote it.

        Then the maker will restore the file that the step read.
        """
        maker = self.of(step.project.directory / change.what) if change.kind == "input" else None
        receipt = maker.receipt() if maker else None
        return receipt is not None and digest_of_files(change.what, receipt["outputs"]) == change.was


def explain(step: Step, change: Change) -> list[str]:
    """Return a change in words: a line for each difference, where there are several."""
    match change.kind:
        case "params":
            parts = _parts(step, change)
            return [f"parameter {path}: {abridged(was)} -> {abridged(now)}" for path, was, now in parts]
        case "tool":
            return [f"its tool: {shown(change.was)} -> {shown(change.now)}"]
        case "code":
            return list(_explain_code(step, change)) or [f"{change.text}, by empty lines"]
    return [change.text]


def _parts(step: Step, change: Change) -> list[tuple[str, Any, Any]]:
    """Return the differences of a change: the path to each, and both values."""
    if change.kind == "code":
        then = recorded(step.project, str(change.was))
        return list(differences(then, of_module(step.project, step.module))) if then is not None else []
    return list(differences(change.was, change.now)) if change.kind in ("params", "tool") else []


def _explain_code(step: Step, change: Change) -> Iterator[str]:
    """Yield a line for each file of the project whose code changed."""
    then = recorded(step.project, str(change.was))
    if then is None:
        yield f"{change.text} (in what is not known: the record of how it was is gone)"
        return
    now = of_module(step.project, step.module)
    for file in sorted({*then, *now}):
        if file not in now:
            yield f"code {file} is not imported any more"
        elif file not in then:
            yield f"code {file} is imported now"
        elif changes := _explain_file(then, now, file):
            yield f"code {file}: {changes}"


def _explain_file(then: Definitions, now: Definitions, file: str) -> str:
    was, new = then[file], now[file]
    kinds = {
        "changed": [name for name in new if was.get(name, new[name]) != new[name] and name != OUTSIDE],
        "added": [name for name in new if name not in was and name != OUTSIDE],
        "removed": [name for name in was if name not in new and name != OUTSIDE],
    }
    changes = [f"{', '.join(names)} {kind}" for kind, names in kinds.items() if names]
    outside = was.get(OUTSIDE) != new.get(OUTSIDE)
    return "; ".join(changes) or ("imports or comments outside of definitions changed" if outside else "")
