"""The page of `doit graph`: the steps of a build, the state of each, how long it took, and what depends on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from llama_npu2.cli.table import amount
from llama_npu2.frozen import frozen
from stages.engine.durations import clock
from stages.engine.why import BEHIND, CURRENT, MISSING, STALE
from stages.reports.pages import Node, Page, details, facts, graph, note, table, tag

_MEANING = {
    CURRENT: "will not run",
    BEHIND: "runs if a step before it changes what it reads",
    STALE: "will run",
    MISSING: "never ran",
}
_COLUMNS = ("step", "what it does", "state", "why", ">last run", ">wrote", "reads from", "comes after", "read by")
_TIMES = "Times are of each step's last run here; objects that the cache already had take no time."
_NAMES = 4
"""Names of steps that a cell shows at once."""


@frozen
class Entry:
    """A step of a build."""

    step: str
    doc: str
    state: str
    why: list[str]
    seconds: float | None
    """How long its last run here took, where this is known."""
    nbytes: int
    """Bytes that it wrote and that are still there."""
    reads: list[str]
    """Direct predecessors whose output it reads."""
    after: list[str]
    """Direct predecessors that it only comes after."""
    read_by: list[str]
    """Steps that read its output."""
    depend: int
    """Steps that would run if all of its output changed, and so on."""


def page(artifact: str, entries: list[Entry]) -> Page:
    """Return the page for `artifact`, as in `model/target`."""
    states = Counter(entry.state for entry in entries)
    shown = Page(f"How {artifact} is built", _lead(states))
    legend = "; ".join(f"{state}: {meaning}" for state, meaning in _MEANING.items() if states[state])
    shown.add("The build", facts(_totals(states, entries)), note(f"{legend}."), *_slowest(entries))
    nodes = [Node(entry.step, entry.state, _brief(entry), [*entry.reads, *entry.after]) for entry in entries]
    label = f"The {len(entries)} steps, from the checkpoint to the manifest"
    shown.add("Steps", graph(nodes, label, _table(entries)))
    return shown


def _lead(states: Mapping[str, int]) -> str:
    stale = states[STALE] + states[MISSING]
    if not stale:
        return "Every step is current: a build would run none."
    lead = f"A build would run {stale} of {sum(states.values())} steps"
    return f"{lead}, and {states[BEHIND]} more if those change what they read." if states[BEHIND] else f"{lead}."


def _totals(states: Mapping[str, int], entries: Sequence[Entry]) -> dict[str, Any]:
    seconds = sum(entry.seconds or 0 for entry in entries)
    counts = {state: states[state] for state in _MEANING if states[state]}
    return {**counts, "written": amount(sum(entry.nbytes for entry in entries)), "sum of all times": clock(seconds)}


def _slowest(entries: Sequence[Entry]) -> list[Markup]:
    timed = sorted((entry for entry in entries if entry.seconds), key=lambda entry: -(entry.seconds or 0))
    slowest = ", ".join(f"{entry.step} {clock(entry.seconds or 0)}" for entry in timed[:5])
    return [note(f"Slowest: {slowest}. {_TIMES}")] if slowest else []


def _brief(entry: Entry) -> str:
    return ", ".join(filter(None, (entry.state, _seconds(entry), amount(entry.nbytes) if entry.nbytes else "")))


def _seconds(entry: Entry) -> str:
    return "" if entry.seconds is None else clock(entry.seconds)


def _table(entries: Sequence[Entry]) -> Markup:
    """Return all steps, without the columns that are empty."""
    rows = [_row(entry) for entry in entries]
    kept = [at for at in range(len(_COLUMNS)) if any(row[at] for row in rows)]
    return table([_COLUMNS[at] for at in kept], ([row[at] for at in kept] for row in rows), "Steps of the build")


def _row(entry: Entry) -> tuple[object, ...]:
    indirect = f" ({entry.depend} depend on it)" if entry.depend > len(entry.read_by) else ""
    names = (_names(entry.reads), _names(entry.after), _names(entry.read_by, indirect))
    why = Markup().join(tag("div", line) for line in entry.why)
    return entry.step, entry.doc, entry.state, why, _seconds(entry), amount(entry.nbytes), *names


def _names(names: Sequence[str], more: str = "") -> object:
    text = ", ".join(names) + more
    return details(f"{len(names)} steps{more}", note(text)) if len(names) > _NAMES else text
