"""What a profile's page draws: shares, layers, time lines, rooflines, the series of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from markupsafe import Markup

from llama_npu2.cli.profile import summed
from llama_npu2.cli.table import Column
from stages.reports.pages import chart, colour, details, svg, table, tag

Profile = Mapping[str, Any]
Phase = Mapping[str, Any]

_COLOURS = 7
"""Kernels with colours of their own; all others share the last."""
OTHERS, WAITING, HOST, PYTHON, DEVICE = "others", "waiting for threads", "host", "Python", "NPU"
_FIXED = {OTHERS: "series-8", WAITING: "muted", HOST: "warning", PYTHON: "bad", DEVICE: "accent"}


def segment(part: Mapping[str, Any], launched: frozenset[str]) -> str:
    """What a part's own time is shown as. `launched`: programs whose launches are known."""
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
    """Programs whose launches are known."""
    return frozenset(part.get("program", "") for part in phase["parts"] if part["kind"] == "launch")


def segments(phase: Phase) -> dict[str, float]:
    """Seconds of each, the longest first."""
    found: dict[str, float] = {}
    for part in phase["parts"]:
        name = segment(part, launched(phase))
        found[name] = found.get(name, 0.0) + part["seconds"]
    return dict(sorted(found.items(), key=lambda item: -item[1]))


class Palette:
    """The colour of each segment, the same in all charts of a page."""

    def __init__(self, phases: Iterable[Phase]) -> None:
        shares: dict[str, float] = {}
        for phase in phases:
            for name, seconds in segments(phase).items():
                shares[name] = shares.get(name, 0.0) + seconds / phase["mean"]
        chosen = [name for name in sorted(shares, key=lambda name: -shares[name]) if name not in _FIXED]
        self._own = {name: f"series-{number}" for number, name in enumerate(chosen[:_COLOURS], 1)}

    def named(self, name: str) -> str:
        """The segment as it is shown."""
        return name if name in self._own or name in _FIXED else OTHERS

    def of(self, name: str) -> str:
        """Of a name that `named` gave."""
        return colour(self._own.get(name) or _FIXED[name])

    def gathered(self, seconds: Mapping[str, float]) -> dict[str, float]:
        """Segments as they are shown, in the order of what they take."""
        found: dict[str, float] = {}
        for name, each in seconds.items():
            found[self.named(name)] = found.get(self.named(name), 0.0) + each
        return found


def shares(phases: Sequence[Phase], palette: Palette, unit: str = "%") -> Markup:
    """A bar of each phase, in percent of the whole or else in ms."""
    parts = [palette.gathered(segments(phase)) for phase in phases]
    names = list(dict.fromkeys(name for each in parts for name in each))
    titles = [phase["name"] for phase in phases]
    scales = [100 / phase["mean"] if unit == "%" else 1e3 for phase in phases]
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "y": titles,
            "x": [each.get(name, 0.0) * scale for each, scale in zip(parts, scales, strict=True)],
            "marker": {"color": palette.of(name)},
            "hovertemplate": "%{y}: %{x:.4g} " + unit + "<extra>" + name + "</extra>",
        }
        for name in names
    ]
    axes = {"xaxis": {"title": {"text": unit}}, "yaxis": {"autorange": "reversed"}}
    rows = [[name, *(f"{1e3 * each.get(name, 0.0):.3f}" for each in parts)] for name in names]
    columns = [Column("part"), *(Column(f"{title}, ms", right=True) for title in titles)]
    label = f"Where the time goes: {', '.join(titles)}"
    return _stacked(traces, axes, 240, legend(names, palette), label, table(columns, rows, label))


def layers(phase: Phase, palette: Palette) -> Markup:
    """A bar of each layer, in parts; what is outside of the layers is one more."""
    found: dict[str, dict[str, float]] = {}
    for part in phase["parts"]:
        if part["kind"] in ("program", "launch", "wait"):
            place = str(part.get("layer", "outside"))
            bar = found.setdefault(place, {})
            name = palette.named(segment(part, launched(phase)))
            bar[name] = bar.get(name, 0.0) + 1e3 * part["seconds"]
    places = sorted(found, key=lambda place: (place == "outside", place.zfill(4)))
    names = list(dict.fromkeys(name for place in places for name in found[place]))
    traces = [
        {
            "type": "bar",
            "name": name,
            "x": places,
            "y": [found[place].get(name, 0.0) for place in places],
            "marker": {"color": palette.of(name)},
            "hovertemplate": "layer %{x}: %{y:.3f} ms<extra>" + name + "</extra>",
        }
        for name in names
    ]
    axes = {"xaxis": {"title": {"text": "layer"}, "type": "category"}, "yaxis": {"title": {"text": "ms"}}}
    columns = [Column("layer"), *(Column(f"{name}, ms", right=True) for name in names)]
    rows = [[place, *(f"{found[place].get(name, 0.0):.4f}" for name in names)] for place in places]
    label = f"Time of a {phase['name']} by layer"
    return _stacked(traces, axes, 340, legend(names, palette), label, table(columns, rows, label))


def _stacked(
    traces: Sequence[Mapping[str, Any]],
    axes: Mapping[str, Any],
    height: int,
    names: Markup,
    label: str,
    numbers: Markup,
) -> Markup:
    """Bars on one another. Plotly's own legend of many entries covers them when a window changes its width."""
    layout = {"barmode": "stack", "height": height, "showlegend": False, **axes}
    return tag("div", names, chart(traces, layout, label, numbers))


def legend(names: Iterable[str], palette: Palette, titles: Mapping[str, str] = MappingProxyType({})) -> Markup:
    """What colours mean; `titles`: of segments that are called something else."""
    entries = (
        tag(
            "span", _swatch(palette.of(name)), "\N{NO-BREAK SPACE}", titles.get(name, name), style="white-space: nowrap"
        )
        for name in names
    )
    return tag("p", Markup(" &ensp;").join(entries))


_WIDTH, _LEFT, _TOP, _LANE = 1200, 90, 24, 34
"""Of a time line, in pixels: all of it, room for names, room for the axis, a lane."""


def timeline(found: Profile, phase: Phase, palette: Palette) -> Markup:
    """The last prompt, or the token whose time is the median, on all threads."""
    line = found["timeline"]
    start, end = list(pairwise(line["edges"]))[0 if phase["name"] == "prompt" else line["shown"] + 1]
    inside = [
        (_lane(line["names"][number][0], thread), *line["names"][number][:3], begin - start, length)
        for number, thread, begin, length, _ in line["spans"]
        if start <= begin < end and line["names"][number][0] not in ("phase", "native")
    ]
    lanes = [name for name in _LANES if any(bar[0] == name for bar in inside)]
    lanes += sorted({bar[0] for bar in inside} - {*lanes}, key=lambda name: (len(name), name))
    known, shown, shapes, rows = launched(phase), dict[str, None](), list[Markup](), []
    for lane, kind, name, layer, begin, length in inside:
        kept = palette.named(segment({"kind": kind, "name": name}, known))
        text = name if layer is None else f"{name}, layer {layer}"
        row = [lane, text, f"{begin / 1e6:.4f}", f"{length / 1e6:.4f}"]
        shown[kept] = None
        rows.append(row)
        x, width = (_WIDTH - _LEFT) * begin / (end - start), (_WIDTH - _LEFT) * length / (end - start)
        place = {"x": f"{_LEFT + x:.2f}", "width": f"{max(width, 0.2):.2f}", "height": _LANE - 8}
        title = tag("title", f"{text}: {row[3]} ms from {row[2]} on")
        shapes.append(tag("rect", title, y=_TOP + _LANE * lanes.index(lane), fill=palette.of(kept), **place))
    label = f"Time line of a {phase['name']} of {(end - start) / 1e6:.3f} ms"
    drawing = svg(_WIDTH, _TOP + _LANE * len(lanes), label, *_frame(lanes, (end - start) / 1e6), *shapes, zoom=True)
    columns = [Column("on"), Column("what"), Column("from, ms", right=True), Column("ms", right=True)]
    names = legend(shown, palette, {WAITING: "programs, their launches below"})
    return tag("div", tag("h3", label), names, drawing, details("Numbers", table(columns, rows, label)))


_LANES = ("host", "NPU", "programs")


def _swatch(tint: str) -> Markup:
    square = tag("rect", width=12, height=12, fill=tint)
    return tag("svg", square, width=12, height=12, aria_hidden="true", style="display: inline")


def _frame(lanes: Sequence[str], milliseconds: float) -> Iterator[Markup]:
    """Names of lanes, and an axis with five marks."""
    for number, name in enumerate(lanes):
        yield tag("text", name, x=0, y=_TOP + _LANE * number + 18, font_size=13)
    for mark in range(6):
        x = _LEFT + (_WIDTH - _LEFT) * mark / 5
        anchor = "start" if not mark else "end" if mark == 5 else "middle"
        yield tag("text", f"{milliseconds * mark / 5:.4g} ms", x=f"{x:g}", y=14, font_size=12, text_anchor=anchor)


def _lane(kind: str, thread: int) -> str:
    if kind == "launch":
        return f"thread {thread}"
    return {"program": "programs", "host": "host"}.get(kind, "NPU")


def roofline(found: Profile, palette: Palette) -> Markup:
    """Operations per second of each kernel over operations per byte, below what the machine's peaks allow (Williams et
    al. 2009). The larger a point, the more of the time it takes."""
    peaks, traces, rows = found["peaks"], [], []
    for phase, symbol in zip(found["phases"], ("circle", "diamond"), strict=True):
        kernels = [row for row in summed(phase["parts"]) if row["kind"] == "launch" and row["operations"]]
        points = [(row["operations"] / row["bytes"], row["operations"] / row["seconds"] / 1e9) for row in kernels]
        rows += [
            [
                phase["name"],
                row["program"],
                row["name"],
                f"{x:.2f}",
                f"{y:.2f}",
                f"{row['seconds'] / phase['mean']:.1%}",
            ]
            for row, (x, y) in zip(kernels, points, strict=True)
        ]
        marker = {
            "symbol": symbol,
            "size": [8 + 40 * (row["seconds"] / phase["mean"]) ** 0.5 for row in kernels],
            "color": [palette.of(palette.named(row["name"])) for row in kernels],
            "line": {"width": 1, "color": colour("text")},
        }
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": phase["name"],
                "x": [x for x, _ in points],
                "y": [y for _, y in points],
                "text": [f"{row['name']} of {row['program']}" for row in kernels],
                "marker": marker,
                "hovertemplate": "%{text}<br>%{x:.2f} operations a byte, %{y:.1f} GFLOP/s",
            }
        )
    knee = peaks["bf16"] / peaks["read"]
    roof = sorted({min([0.1, *(x for trace in traces for x in trace["x"])]), knee, max([1e3, 2 * knee])})
    limit = [min(peaks["bf16"], x * peaks["read"]) / 1e9 for x in roof]
    line = {"color": colour("muted"), "dash": "dash"}
    traces.append({"type": "scatter", "mode": "lines", "name": "peaks", "x": roof, "y": limit, "line": line})
    axes = {
        "xaxis": {"type": "log", "title": {"text": "operations per byte"}},
        "yaxis": {"type": "log", "title": {"text": "GFLOP/s"}},
    }
    names = ("operations a byte", "GFLOP/s", "of the time")
    columns = [Column("of"), Column("program"), Column("kernel"), *(Column(name, right=True) for name in names)]
    label = f"Roofline: {peaks['bf16'] / 1e9:.0f} GFLOP/s in bf16, {peaks['read'] / 1e9:.1f} GB/s, as measured"
    return chart(traces, {"height": 420, **axes}, label, table(columns, rows, label))


def series(found: Profile, other: Profile | None) -> Markup:
    """Time of each token over the positions before it."""
    traces = []
    for name, profile, tint in (("this", found, "series-1"), ("against", other, "series-2")):
        if profile:
            positions, seconds, inside = zip(*profile["series"], strict=True)
            outside = [1e3 * (whole - part) for whole, part in zip(seconds, inside, strict=True)]
            line = {"color": colour(tint)}
            point: dict[str, Any] = {"type": "scatter", "mode": "lines", "x": positions}
            traces.append({**point, "name": f"token, {name}", "y": [1e3 * each for each in seconds], "line": line})
            dotted = {**line, "dash": "dot"}
            traces.append({**point, "name": f"of it outside of programs, {name}", "y": outside, "line": dotted})
    axes = {
        "xaxis": {"title": {"text": "tokens before it"}},
        "yaxis": {"title": {"text": "ms"}, "rangemode": "tozero"},
    }
    columns = [Column("tokens before it", right=True), Column("ms", right=True), Column("in programs, ms", right=True)]
    rows = [[position, f"{1e3 * whole:.3f}", f"{1e3 * inside:.3f}"] for position, whole, inside in found["series"]]
    label = f"Time of each of {len(rows)} tokens"
    return chart(traces, {"height": 380, **axes}, label, table(columns, rows, label))
