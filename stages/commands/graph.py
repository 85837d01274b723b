"""`doit graph`: the steps of a build as a page to walk through, `graph.html`, and as `graph.json`: the state of each
and why it is stale, how long it took last, what it wrote, what depends on it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from markupsafe import Markup

from llama_npu2.cli.table import Column, amount
from stages.engine.durations import clock
from stages.engine.files import write_atomic
from stages.engine.why import BEHIND, CURRENT, MISSING, STALE, Finding, examine
from stages.graph import Build
from stages.reports.pages import Node, Page, facts, graph, note, table, tag

_MEANING = {
    CURRENT: "will not run",
    BEHIND: "runs if a step before it changes what it reads",
    STALE: "will run",
    MISSING: "never ran",
}
_COLUMNS = (
    Column("step"),
    Column("state"),
    Column("why"),
    Column("took last", right=True),
    Column("wrote", right=True),
    Column("reads from"),
    Column("comes after"),
    Column("read by"),
    Column("what it does"),
)


@dataclass(frozen=True)
class Entry:
    """A step. `seconds`: that it took when it ran last here, where that is known. `nbytes`: of what it wrote and is
    there. `reads`, `after`: steps right before it, by whether it reads of them; `read_by`: those that read of it,
    `depend`: how many would run if it changed all that it writes, and so on."""

    step: str
    doc: str
    state: str
    why: list[str]
    seconds: float | None
    nbytes: int
    reads: list[str]
    after: list[str]
    read_by: list[str]
    depend: int


def run(build: Build) -> None:
    """Raises UserError."""
    entries = survey(build)
    found = {"artifact": build.artifact, "steps": [asdict(entry) for entry in entries]}
    directory = build.report("graph")
    content = json.dumps(found, indent=1)
    write_atomic(directory / "graph.json", content.encode() + b"\n")
    page(build.artifact, entries).write(directory / "graph.html")
    print(content if build.options.json else directory / "graph.html", flush=True)


def survey(build: Build) -> list[Entry]:
    """All steps, each behind those that it needs. Raises UserError."""
    findings = examine(build.steps)
    readers: dict[str, list[str]] = {name: [] for name in findings}
    later: dict[str, set[str]] = {name: set() for name in findings}
    for name, finding in reversed(findings.items()):
        for each in finding.reads:
            readers[each].append(name)
            later[each] |= {name, *later[name]}
    last = build.project.durations.last
    return [
        _entry(finding, last.get(name), sorted(readers[name]), len(later[name])) for name, finding in findings.items()
    ]


def _entry(finding: Finding, seconds: float | None, read_by: list[str], depend: int) -> Entry:
    step = finding.step
    written = (step.project.directory / label for label in (step.receipt() or {"outputs": ()})["outputs"])
    nbytes = sum(path.stat().st_size for path in written if path.is_file())
    said = finding.sentences
    return Entry(
        step.name, step.doc, finding.state, said, seconds, nbytes, finding.reads, finding.after, read_by, depend
    )


def page(artifact: str, entries: list[Entry]) -> Page:
    """`artifact`: whose steps they are, as `model/target`."""
    states = Counter(entry.state for entry in entries)
    made = Page(f"How {artifact} is built", _lead(states))
    made.add("The build", facts(_totals(states, entries)), note(*_legend()))
    nodes = [Node(entry.step, entry.state, _brief(entry), [*entry.reads, *entry.after]) for entry in entries]
    rows = table(_COLUMNS, map(_row, entries), "Steps of the build")
    made.add("Steps", graph(nodes, f"The {len(entries)} steps, from the checkpoint to the manifest", rows))
    return made


def _lead(states: Mapping[str, int]) -> str:
    stale = states[STALE] + states[MISSING]
    if not stale:
        return "Every step is current: a build would run none."
    lead = f"A build would run {stale} of {sum(states.values())} steps"
    return f"{lead}, and {states[BEHIND]} more if those change what they read." if states[BEHIND] else f"{lead}."


def _totals(states: Mapping[str, int], entries: list[Entry]) -> dict[str, Any]:
    seconds = sum(entry.seconds or 0 for entry in entries)
    shown = {state: states[state] for state in _MEANING if states[state]}
    return {**shown, "written": amount(sum(entry.nbytes for entry in entries)), "of work, one by one": clock(seconds)}


def _legend() -> list[str]:
    return ["; ".join(f"{state}: {meaning}" for state, meaning in _MEANING.items()), "."]


def _brief(entry: Entry) -> str:
    seconds = clock(entry.seconds) if entry.seconds is not None else ""
    return ", ".join(filter(None, (entry.state, seconds, amount(entry.nbytes) if entry.nbytes else "")))


def _row(entry: Entry) -> tuple[object, ...]:
    seconds = clock(entry.seconds) if entry.seconds is not None else ""
    readers = ", ".join(entry.read_by) + (f" ({entry.depend} in all)" if entry.depend > len(entry.read_by) else "")
    names = (", ".join(entry.reads), ", ".join(entry.after), readers)
    why = Markup().join(tag("div", line) for line in entry.why)
    return entry.step, entry.state, why, seconds, amount(entry.nbytes), *names, entry.doc
