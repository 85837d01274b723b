"""The page of a profile, alone or compared with another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from markupsafe import Markup

from llama_npu2.cli.profile import COLUMNS, cells, summed
from llama_npu2.cli.table import amount
from stages.reports.pages import Page, details, facts, note, table, tag
from stages.reports.profile_charts import (
    OUTSIDE,
    PYTHON,
    WAITING,
    Palette,
    Phase,
    Profile,
    layers,
    roofline,
    segments,
    series,
    shares,
    timeline,
)


def profile_page(profile: Profile, other: Profile | None = None) -> Page:
    """Return the page of one profile, or of two next to each other (see `llama_npu2.cli.profile.profile`).

    `profile` may have an `estimate` of its programs: `milliseconds` and `launches` by name.
    """
    about, phases = profile["machine"], profile["phases"]
    page = Page(f"Profile of {about['model']}", f"{about['device']}, on {about['cpu']}. {_answer(phases)}")
    palette = Palette(phases)
    page.add("At a glance", facts(dict(_facts(profile))), shares(phases, palette))
    page.add("Layers", *(layers(phase, palette) for phase in phases))
    page.add("Time lines", *(timeline(profile, phase, palette) for phase in phases[:2]))
    if profile["peaks"]:
        page.add("Roofline", roofline(profile, palette))
    page.add("Token by token", series(profile, other))
    for phase in phases:
        page.add(f"Parts of a {phase['name']}", *_parts(phase, profile["peaks"]))
    if any(part["kind"] in ("wait", "sync") for phase in phases for part in phase["parts"]):
        page.add("Submissions, syncs and waiting", *map(_crossing, phases))
    if any("counted" in phase for phase in phases):
        page.add("What the simulator counted", *(block for phase in phases for block in _counted(phase)))
    if profile.get("estimate"):
        blocks = (block for phase in phases for block in _estimated(phase, profile["estimate"]))
        page.add("Estimated and measured", *blocks)
    if other:
        page.add("Against the other", *_compared(profile, other))
    return page


def _answer(phases: list[Phase]) -> str:
    def largest(phase: Phase) -> str:
        return ", ".join(f"{name} {spent / phase['mean']:.0%}" for name, spent in list(segments(phase).items())[:3])

    return " ".join(
        f"A {phase['name']} takes {1e3 * phase['mean']:.3f} ms in the mean of the middle half of "
        f"{len(phase['seconds'])}: {largest(phase)}."
        for phase in phases
    )


def _facts(profile: Profile) -> Iterator[tuple[str, str]]:
    prompt, token, *steps = profile["phases"]
    yield f"prompt of {prompt['rows']}", f"{1e3 * prompt['mean']:.2f} ms"
    yield "prompt, tokens/s", f"{prompt['rows'] / prompt['mean']:.1f}"
    yield "token", f"{1e3 * token['mean']:.3f} ms"
    yield "tokens/s", f"{1 / token['mean']:.1f}"
    for step in steps:
        yield f"{step['name']}, tokens/s", f"{step['rows'] / step['mean']:.1f} ({1e3 * step['mean']:.3f} ms)"
    slow = sorted(token["seconds"])[-max(1, len(token["seconds"]) // 100)]
    yield "slowest hundredth of tokens (scheduling)", f"{1e3 * slow:.3f} ms"
    parts = segments(token)
    yield "of a token, Python", f"{parts.get(PYTHON, 0.0) / token['mean']:.1%}"
    if WAITING in parts:
        yield "of a token, waiting for threads", f"{parts[WAITING] / token['mean']:.1%}"
    for name, unit in (("read", "GB/s"), ("bf16", "GFLOP/s")):
        if name in profile["peaks"]:
            yield f"peak, {name}", f"{profile['peaks'][name] / 1e9:.1f} {unit}"


def _parts(phase: Phase, peaks: Mapping[str, float]) -> Iterator[Markup]:
    rows = summed(phase["parts"])
    yield note(
        f"Means of the middle half of {len(phase['seconds'])}, each of {phase['rows']} rows. The parts add up to the "
        "whole; a program's figures include its launches'. A launch above 100 % of the roofline read from a cache, or "
        "ran faster than the machine did when its peak was measured."
    )
    lines = (cells(row, phase["mean"], peaks) for row in rows)
    # Blanks at a cell's beginning are not shown.
    shown = ([name.replace("  ", "\N{EM SPACE}"), *others] for name, *others in lines)
    yield table(COLUMNS, shown, f"Parts of a {phase['name']}")
    for row in rows:
        if row["kind"] == "program":
            yield details(f"{row['name']}, layer by layer", _by_layer(phase, row["name"]))


def _by_layer(phase: Phase, program: str) -> Markup:
    """Return milliseconds of each launch of a program in each layer, and of the program itself."""
    spent: dict[tuple[int, str], dict[Any, float]] = {}
    for part in phase["parts"]:
        if program in (part.get("program"), part["name"] if part["kind"] == "program" else None):
            key = (part.get("launch", len(phase["parts"])), part["name"])
            spent.setdefault(key, {})[part.get("layer")] = 1e3 * part["seconds"]
    keys = sorted(spent)
    places = list(dict.fromkeys(place for key in keys for place in spent[key]))
    titles = [f">{name if name != program else 'itself'}" for _, name in keys]
    lines = (
        [OUTSIDE if place is None else place, *(f"{spent[key].get(place, 0.0):.4f}" for key in keys)]
        for place in places
    )
    return table(["layer", *titles], lines, f"{program}, ms by layer and launch")


def _crossing(phase: Phase) -> Markup:
    """Return what goes between host and NPU in a prompt or a token."""
    columns = ("calls", "runs", "moved", "ms", "share")
    rows = [
        [
            part["kind"],
            part["name"],
            f"{part['calls']:g}",
            f"{part['runs']:g}" if "runs" in part else "",
            amount(part["bytes"]) if "bytes" in part else "",
            f"{1e3 * part['seconds']:.3f}",
            f"{part['seconds'] / phase['mean']:.1%}",
        ]
        for part in phase["parts"]
        if part["kind"] in ("wait", "sync", "submit")
    ]
    titles = ["kind", "what", *(f">{name}" for name in columns)]
    return details(f"Of a {phase['name']}", table(titles, rows, f"Between host and NPU, {phase['name']}"), opened=True)


def _counted(phase: Phase) -> Iterator[Markup]:
    titles = ["launch", *(f">{name}" for name in ("read", "written", "GMAC"))]
    for program, launches in phase.get("counted", {}).items():
        rows = [
            [
                launch["name"],
                amount(sum(read for read, _ in launch["slots"].values())),
                amount(sum(written for _, written in launch["slots"].values())),
                f"{launch['macs'] / 1e9:.4f}",
            ]
            for launch in launches
        ]
        slots = [
            [launch["name"], slot, amount(read), amount(written)]
            for launch in launches
            for slot, (read, written) in launch["slots"].items()
        ]
        columns = ["launch", "slot", ">read", ">written"]
        label = f"{program}, of a {phase['name']}"
        yield details(label, table(titles, rows, label), table(columns, slots, f"{label}: DDR by slot"))


def _estimated(phase: Phase, estimate: Mapping[str, Any]) -> Iterator[Markup]:
    """Yield the estimate of each program, next to its time when submitted alone, where that was measured."""
    alone = phase.get("alone", {})
    titles = ("calls", "estimate, ms", *(("measured, ms", "measured / estimate") if alone else ()))
    calls = {name: count for name, count in phase["calls"].items() if name in estimate}
    rows = []
    for name, count in calls.items():
        wanted = count * estimate[name]["milliseconds"]
        measured = [f"{1e3 * alone[name]:.3f}", f"{1e3 * alone[name] / wanted:.2f}"] if alone else []
        rows.append([name, count, f"{wanted:.3f}", *measured])
    label = f"Programs of a {phase['name']}, estimated and measured"
    yield tag("h3", label)
    yield table(["program", *(f">{title}" for title in titles)], rows, label)
    columns = ["kernel", ">launches", ">ms", "limit"]
    for name in calls:
        launches = (
            [launch["kernel"], launch["launches"], f"{launch['milliseconds']:.4f}", launch["limit"]]
            for launch in estimate[name]["launches"]
        )
        yield details(f"{name}, a call by the estimate", table(columns, launches, f"{name}, of a {phase['name']}"))


def _compared(profile: Profile, other: Profile) -> Iterator[Markup]:
    about = other["machine"]
    yield note(f"The other is {about['model']}: {about['device']}, on {about['cpu']}.")
    titles = ["part", *(f">{name}" for name in ("this, ms", "other, ms", "this / other"))]
    others = {phase["name"]: phase for phase in other["phases"]}
    for ours in (phase for phase in profile["phases"] if phase["name"] in others):
        theirs = others[ours["name"]]
        what = [f"{phase['rows']} rows from position {phase['position']}" for phase in (ours, theirs)]
        label = f"A {ours['name']}: {', against '.join(what)}"
        mine, its = ({_key(row): row["seconds"] for row in summed(phase["parts"])} for phase in (ours, theirs))
        rows = [_pair("all", ours["mean"], theirs["mean"])]
        rows += [_pair(" of ".join(filter(None, key[::-1])), mine.get(key), its.get(key)) for key in mine | its]
        bars = [{**ours, "name": "this"}, {**theirs, "name": "other"}]
        yield tag("h3", label)
        yield shares(bars, Palette(bars), whole=False)
        yield table(titles, rows, label)


def _key(row: Mapping[str, Any]) -> tuple[str, str]:
    return (row["program"] if row["kind"] == "launch" else "", row["name"])


def _pair(name: str, ours: float | None, theirs: float | None) -> list[str]:
    shown = ["" if seconds is None else f"{1e3 * seconds:.4g}" for seconds in (ours, theirs)]
    return [name, *shown, f"{ours / theirs:.2f}" if ours and theirs else ""]
