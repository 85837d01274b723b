"""The charts of a profile's page: shares, layers, time lines, rooflines and the series of tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from markupsafe import Markup

from llama_npu2.cli.profile import summed
from stages.reports.pages import (
    Axis,
    Curve,
    Dot,
    Series,
    Span,
    bars,
    columns,
    details,
    legend,
    lines,
    table,
    tag,
    time_line,
)

Profile = Mapping[str, Any]
Phase = Mapping[str, Any]

OUTSIDE = "outside"
"""The place of what is in no layer."""
_LANES = ("host", "NPU", "programs")
"""Lanes above those of the threads."""
_COLOURS = 7
"""Kernels with colours of their own; all others share the last colour."""
OTHERS, WAITING, HOST, PYTHON, DEVICE = "others", "waiting for threads", "host", "Python", "NPU"
_FIXED = {OTHERS: "series-8", WAITING: "muted", HOST: "host", PYTHON: "bad", DEVICE: "accent"}


def segment(part: Mapping[str, Any], launched: frozenset[str]) -> str:
    """Return the name that a part's own time is shown under. `launched`: programs whose launches are known."""
    match part["kind"]:
        case "launch":
            return str(part["name"])
        case "program":
            return WAITING if part["name"] in launched else str(part["name"])
        case "native":
            return WAITING
        case "wait":
            return DEVICE
        case "phase" | "python":
            return PYTHON
    return HOST if part["kind"] == "host" else f"{part['kind']}s"


def launched(phase: Phase) -> frozenset[str]:
    """Return the programs whose launches are known."""
    return frozenset(part.get("program", "") for part in phase["parts"] if part["kind"] == "launch")


def segments(phase: Phase) -> dict[str, float]:
    """Return the seconds of each segment, the longest first."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for part in phase["parts"]:
        seconds[segment(part, launched(phase))] += part["seconds"]
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


class Palette:
    """The colour of each segment, the same in all charts of a page."""

    def __init__(self, phases: Iterable[Phase]) -> None:
        shares: defaultdict[str, float] = defaultdict(float)
        for phase in phases:
            for name, seconds in segments(phase).items():
                shares[name] += seconds / phase["mean"]
        chosen = [name for name in sorted(shares, key=lambda name: -shares[name]) if name not in _FIXED]
        self._own = {name: f"series-{number}" for number, name in enumerate(chosen[:_COLOURS], 1)}

    def named(self, name: str) -> str:
        """Return the name under which a segment is shown."""
        return name if name in self._own or name in _FIXED else OTHERS

    def of(self, name: str) -> str:
        """Return the colour of a name that `named` gave."""
        return self._own.get(name) or _FIXED[name]

    def gathered(self, seconds: Mapping[str, float]) -> dict[str, float]:
        """Return seconds by the names under which segments are shown."""
        sums: defaultdict[str, float] = defaultdict(float)
        for name, spent in seconds.items():
            sums[self.named(name)] += spent
        return dict(sums)


def shares(phases: Sequence[Phase], palette: Palette, whole: bool = True) -> Markup:
    """Return a bar for each phase; `whole`: all of one width, so that its parts show shares."""
    parts = [palette.gathered(segments(phase)) for phase in phases]
    names = list(dict.fromkeys(name for part in parts for name in part))
    titles = [phase["name"] for phase in phases]
    series = [Series(name, palette.of(name), [1e3 * part.get(name, 0.0) for part in parts]) for name in names]
    rows = [[name, *(f"{1e3 * part.get(name, 0.0):.4g}" for part in parts)] for name in names]
    titled = ["part", *(f">{title}, ms" for title in titles)]
    label = f"Where the time goes: {', '.join(titles)}"
    return bars(titles, series, "ms", label, table(titled, rows, label), shares=whole)


def layers(phase: Phase, palette: Palette) -> Markup:
    """Return a bar of each layer, in parts, and one of what is outside of the layers."""
    spent: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for part in phase["parts"]:
        if part["kind"] in ("program", "launch", "wait"):
            name = palette.named(segment(part, launched(phase)))
            spent[str(part.get("layer", OUTSIDE))][name] += 1e3 * part["seconds"]
    places = sorted(spent, key=lambda place: (place == OUTSIDE, place.zfill(4)))
    names = list(dict.fromkeys(name for place in places for name in spent[place]))
    series = [Series(name, palette.of(name), [spent[place][name] for place in places]) for name in names]
    titled = ["layer", *(f">{name}, ms" for name in names)]
    rows = [[place, *(f"{spent[place][name]:.4f}" for name in names)] for place in places]
    label = f"Time of a {phase['name']} by layer, counted from 0"
    y = Axis.of("ms", [sum(parts.values()) for parts in spent.values()])
    return columns(places, series, "layer", y, label, table(titled, rows, label), stacked=True)


def timeline(profile: Profile, phase: Phase, palette: Palette) -> Markup:
    """Return the time line of the last prompt, or of the token whose time is the median, on all threads."""
    line = profile["timeline"]
    start, end = list(pairwise(line["edges"]))[0 if phase["name"] == "prompt" else line["shown"] + 1]
    known, spans, rows = launched(phase), list[Span](), []
    tints: dict[str, str] = {}
    for number, thread, begin, length, _ in line["spans"]:
        kind, name, layer, _ = line["names"][number]
        if not start <= begin < end or kind in ("phase", "native"):
            continue
        shown = palette.named(segment({"kind": kind, "name": name}, known))
        text = name if layer is None else f"{name}, layer {layer}"
        begin, length = (begin - start) / 1e6, length / 1e6
        tints["programs, their launches below" if shown == WAITING else shown] = palette.of(shown)
        title = f"{text}: {length:.4f} ms from {begin:.4f} ms"
        spans.append(Span(_lane(kind, thread), palette.of(shown), begin, length, title))
        rows.append([spans[-1].lane, text, f"{begin:.4f}", f"{length:.4f}"])
    lanes = sorted({span.lane for span in spans}, key=lambda lane: (lane not in _LANES, len(lane), lane))
    which = "the last prompt" if phase["name"] == "prompt" else "the token whose time is the median"
    label = f"Time line of {which}: {(end - start) / 1e6:.3f} ms"
    titles = ["on", "what", ">from, ms", ">ms"]
    drawing = time_line(lanes, spans, (end - start) / 1e6, label)
    return tag("div", tag("h3", label), legend(tints.items()), drawing, details("Numbers", table(titles, rows, label)))


def _lane(kind: str, thread: int) -> str:
    if kind == "launch":
        return f"thread {thread}"
    return {"program": "programs", "host": "host"}.get(kind, "NPU")


def roofline(profile: Profile, palette: Palette) -> Markup:
    """Return operations per second of each kernel over operations per byte, below the machine's peaks.

    After Williams, Waterman and Patterson (2009). The larger a point, the more of the time it takes.
    """
    peaks, dots, rows = profile["peaks"], list[Dot](), []
    for phase in profile["phases"]:
        for row in summed(phase["parts"]):
            if row["kind"] != "launch" or not row["operations"]:
                continue
            x, y = row["operations"] / row["bytes"], row["operations"] / row["seconds"] / 1e9
            share = row["seconds"] / phase["mean"]
            title = f"{row['name']} of {row['program']}, {phase['name']}: {x:.2f} operations a byte, {y:.1f} GFLOP/s"
            tint = palette.of(palette.named(row["name"]))
            dots.append(Dot(tint, x, y, 8 + 40 * share**0.5, title, diamond=phase["name"] != "prompt"))
            rows.append([phase["name"], row["program"], row["name"], f"{x:.2f}", f"{y:.2f}", f"{share:.1%}"])
    knee = peaks["bf16"] / peaks["read"]
    roof = sorted({min([0.1, *(dot.x for dot in dots)]), knee, max([1e3, 2 * knee])})
    limit = [(x, min(peaks["bf16"], x * peaks["read"]) / 1e9) for x in roof]
    names = ("operations a byte", "GFLOP/s", "of the time")
    titles = ["of", "program", "kernel", *(f">{name}" for name in names)]
    label = (
        f"Roofline: {peaks['bf16'] / 1e9:.0f} GFLOP/s in bf16, {peaks['read'] / 1e9:.1f} GB/s, as measured. Circles: "
        "prompt, squares on their corner: tokens. What is above the line read from a cache, or ran faster than the "
        "peak did when it was measured"
    )
    x_axis, y_axis = (
        Axis.of(title, values, log=True)
        for title, values in (
            ("operations per byte", [*roof, *(dot.x for dot in dots)]),
            ("GFLOP/s", [*(y for _, y in limit), *(dot.y for dot in dots)]),
        )
    )
    curve = Curve("peaks of this machine", "muted", limit)
    used = {dot.tint for dot in dots}
    kernels = [(name, palette.of(name)) for name in {palette.named(row[2]): None for row in rows}]
    chart = lines([curve], x_axis, y_axis, label, table(titles, rows, "Roofline"), dots)
    return tag("div", legend(entry for entry in kernels if entry[1] in used), chart)


def series(profile: Profile, other: Profile | None) -> Markup:
    """Return the time of each token over the positions before it."""
    curves = []
    for name, run, tint in (("", profile, "series-1"), (", against", other, "series-7")):
        if run:
            tokens = [(position, 1e3 * spent, 1e3 * (spent - inside)) for position, spent, inside in run["series"]]
            curves.append(Curve(f"token{name}", tint, [(position, spent) for position, spent, _ in tokens]))
            outside = [(position, spent) for position, _, spent in tokens]
            curves.append(Curve(f"outside of programs{name}", tint, outside, dashed=True))
    titles = [">tokens before it", ">ms", ">in programs, ms"]
    rows = [[position, f"{1e3 * spent:.3f}", f"{1e3 * inside:.3f}"] for position, spent, inside in profile["series"]]
    label = f"Time of each of {len(rows)} tokens; spikes are the scheduler's, when other processes run"
    points = [point for curve in curves for point in curve.points]
    positions = [position for position, _ in points]
    x = Axis("tokens before it", min(positions), max(positions))
    y = Axis.of("ms", [spent for _, spent in points], log=True)
    return lines(curves, x, y, label, table(titles, rows, label))
