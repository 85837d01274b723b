"""`doit graph`: the steps of a build as a page to walk through, `graph.html`, and as `graph.json`."""

from __future__ import annotations

import json
from dataclasses import asdict

from stages.engine.files import write_atomic
from stages.engine.why import Finding, examine
from stages.graph import Build
from stages.reports.graph_page import Entry, page


def run(build: Build) -> None:
    """Write both files, and print the page's path, or with json=1 the JSON. Raises UserError."""
    entries = survey(build)
    content = json.dumps({"artifact": build.artifact, "steps": [asdict(entry) for entry in entries]}, indent=1)
    directory = build.report("graph")
    write_atomic(directory / "graph.json", content.encode() + b"\n")
    page(build.artifact, entries).write(directory / "graph.html")
    print(content if build.options.json else directory / "graph.html", flush=True)


def survey(build: Build) -> list[Entry]:
    """Return all steps, each after those that it needs. Raises UserError."""
    findings = examine(build.steps)
    readers: dict[str, list[str]] = {name: [] for name in findings}
    later: dict[str, set[str]] = {name: set() for name in findings}
    for name, finding in reversed(findings.items()):
        for read in finding.reads:
            readers[read].append(name)
            later[read] |= {name, *later[name]}
    return [_entry(build, findings[name], sorted(readers[name]), len(later[name])) for name in findings]


def _entry(build: Build, finding: Finding, read_by: list[str], depend: int) -> Entry:
    step = finding.step
    paths = (step.project.directory / label for label in (step.receipt() or {"outputs": ()})["outputs"])
    nbytes = sum(path.stat().st_size for path in paths if path.is_file())
    took = build.project.durations.last.get(step.name), nbytes
    return Entry(
        step.name, step.doc, finding.state, finding.sentences, *took, finding.reads, finding.after, read_by, depend
    )
