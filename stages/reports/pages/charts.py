"""Charts, drawn in SVG where the page is made: they need no script, and follow the page's width and theme.

Widths are percentages of the page, so that text keeps its size on a phone. A pointer that rests on a mark shows its
figures; below each chart is a table of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from markupsafe import Markup

from llama_npu2.frozen import frozen
from stages.reports.pages.blocks import colour, details, tag, zoomed

_HEIGHT = 280
"""Pixels of a chart with axes."""
_ROW, _BAR = 44, 18
"""Pixels of a row of horizontal bars, its name included, and of the bar."""
_LANE = 34
"""Pixels of a lane of a time line."""
_LABELS = 12
"""Names of categories that fit below a chart."""


@frozen
class Series:
    """The bars of one colour: a value for each category."""

    name: str
    tint: str
    """A colour of the page, by its name in `page.css`."""
    values: Sequence[float]


@frozen
class Axis:
    """The values from one end of a chart to the other."""

    title: str
    low: float
    high: float
    log: bool = False

    @classmethod
    def of(cls, title: str, values: Iterable[float], log: bool = False) -> Axis:
        """Return the axis that has room for values: from 0, or from one power of ten to another."""
        positive = [value for value in values if 0 < value < math.inf] or [1.0]
        if not log:
            return cls(title, 0, max(positive) * 1.05)
        low, high = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
        return cls(title, 10.0**low, 10.0 ** max(high, low + 1), log=True)

    def place(self, value: float) -> float:
        """Return where a value lies, from 0 to 1."""
        if self.log:
            return math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low or 1)

    def ticks(self, most: int = 5) -> list[float]:
        """Return round values on the axis."""
        if self.log:
            powers = range(round(math.log10(self.low)), round(math.log10(self.high)) + 1)
            return [10.0**power for power in powers[:: math.ceil(len(powers) / (most + 1))]]
        rough = (self.high - self.low) / most or 1
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]


@frozen
class Curve:
    """A line through points, dotted where it is `dashed`."""

    name: str
    tint: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False
    marked: bool = False


@frozen
class Dot:
    """A point of `size` pixels; `title` is shown where a pointer rests on it."""

    tint: str
    x: float
    y: float
    size: float
    title: str
    diamond: bool = False


@frozen
class Span:
    """Something that happens on a lane of a time line, in milliseconds from its beginning."""

    lane: str
    tint: str
    begin: float
    length: float
    title: str


def legend(names: Iterable[tuple[str, str]]) -> Markup:
    """Return a line that says what colours mean: pairs of a name and a colour of the page."""
    entries = (
        tag("span", tag("span", class_="swatch", style=f"background: {colour(tint)}"), name, class_="entry")
        for name, tint in names
    )
    return tag("p", *entries, class_="legend")


def bars(
    categories: Sequence[str], series: Sequence[Series], unit: str, label: str, numbers: Markup, shares: bool = False
) -> Markup:
    """Return stacked horizontal bars, one for each category, its name and sum above it.

    `shares`: each bar is as wide as the page, and its parts show what part of the whole they are.
    """
    sums = [sum(values) for values in zip(*(one.values for one in series), strict=True)]
    shapes = []
    for row, (category, total) in enumerate(zip(categories, sums, strict=True)):
        top = _ROW * row + 16
        shapes.append(tag("text", category, y=top - 4))
        shapes.append(tag("text", f"{total:.4g} {unit}", x="100%", y=top - 4, text_anchor="end"))
        width = total if shares else max(sums)
        for one, start in zip(series, accumulate((one.values[row] for one in series), initial=0.0), strict=False):
            value = one.values[row]
            title = tag("title", f"{category}, {one.name}: {value:.4g} {unit}, {value / (total or 1):.1%}")
            place = {"x": _percent(start / (width or 1)), "width": _percent(value / (width or 1))}
            shapes.append(tag("rect", title, y=top, height=_BAR, fill=colour(one.tint), **place))
    return _chart(label, numbers, _ROW * len(categories), shapes, _names(series), plain=True)


def columns(
    categories: Sequence[str],
    series: Sequence[Series],
    x_title: str,
    y: Axis,
    label: str,
    numbers: Markup,
    stacked: bool,
) -> Markup:
    """Return vertical bars, on one another or side by side; `x_title`: what the categories are."""
    side_by_side = 1 if stacked else len(series)
    width = 0.8 / len(categories) / side_by_side
    shapes = list(_frame(Axis(x_title, 0, 1), y, x_ticks=False))
    for at, category in enumerate(categories):
        below = 0.0
        left = (at + 0.1) / len(categories)
        for number, one in enumerate(series):
            value = one.values[at]
            low, high = (_HEIGHT * (1 - y.place(edge)) for edge in (below, below + value))
            title = tag("title", f"{category}, {one.name}: {value:.4g}")
            x = left + (0 if stacked else number * width)
            place = {"x": _percent(x), "width": _percent(width), "y": f"{high:.1f}", "height": f"{low - high:.1f}"}
            shapes.append(tag("rect", title, fill=colour(one.tint), **place))
            below += value if stacked else 0
        if x_title and at % math.ceil(len(categories) / _LABELS) == 0:
            shapes.append(_label(category, (at + 0.5) / len(categories)))
    return _chart(label, numbers, _HEIGHT, shapes, _names(series))


def lines(curves: Sequence[Curve], x: Axis, y: Axis, label: str, numbers: Markup, dots: Sequence[Dot] = ()) -> Markup:
    """Return curves and points over two axes."""
    shapes = list(_frame(x, y))
    for curve in curves:
        places = [(x.place(across), y.place(up)) for across, up in curve.points]
        path = " ".join(f"{1000 * across:.1f},{1000 * (1 - up):.1f}" for across, up in places)
        line = tag("polyline", points=path, stroke=colour(curve.tint), stroke_dasharray="2 5" if curve.dashed else None)
        size = {"width": "100%", "height": _HEIGHT}
        shapes.append(tag("svg", line, class_="curve", viewBox="0 0 1000 1000", preserveAspectRatio="none", **size))
        if curve.marked:
            dots = [
                *dots,
                *(Dot(curve.tint, *point, 7, f"{curve.name}: {_figure(point[1])}") for point in curve.points),
            ]
    shapes += (_dot(dot, x, y) for dot in dots)
    names = [(f"{curve.name} (dotted)" if curve.dashed else curve.name, curve.tint) for curve in curves]
    return _chart(label, numbers, _HEIGHT, shapes, legend(names))


def time_line(lanes: Sequence[str], spans: Iterable[Span], end: float, label: str) -> Markup:
    """Return what happens on each lane in `end` milliseconds, with buttons that stretch it."""
    shapes = []
    for number, name in enumerate(lanes):
        shapes.append(tag("text", name, y=24 + _LANE * number + 9, class_="lane"))
    for tick in Axis("", 0, end).ticks():
        across = _percent(tick / end)
        shapes.append(tag("line", x1=across, x2=across, y1=16, y2=24 + _LANE * len(lanes), class_="rule"))
        shapes.append(tag("text", f"{_figure(tick)} ms", x=across, y=12, text_anchor=_anchor(tick / end)))
    for span in spans:
        place = {"x": _percent(span.begin / end), "width": _percent(max(span.length / end, 0.0002))}
        top = 24 + _LANE * lanes.index(span.lane) + 12
        shapes.append(tag("rect", tag("title", span.title), y=top, height=_LANE - 16, fill=colour(span.tint), **place))
    drawing = tag("svg", tag("title", label), *shapes, role="img", width="100%", height=30 + _LANE * len(lanes))
    return zoomed(drawing, label)


def _chart(
    label: str, numbers: Markup, height: int, shapes: Sequence[Markup], names: Markup, plain: bool = False
) -> Markup:
    drawing = tag("svg", tag("title", label), *shapes, role="img", width="100%", height=height)
    plot = tag("div", drawing, class_="plot plain" if plain else "plot")
    return tag("figure", names, plot, tag("figcaption", label), details("Numbers", numbers))


def _names(series: Sequence[Series]) -> Markup:
    return legend((one.name, one.tint) for one in series)


def _frame(x: Axis, y: Axis, x_ticks: bool = True) -> Iterator[Markup]:
    """Yield lines and figures of both axes."""
    for tick in y.ticks():
        up = f"{_HEIGHT * (1 - y.place(tick)):.1f}"
        yield tag("line", x1=0, x2="100%", y1=up, y2=up, class_="rule")
        yield tag("text", _figure(tick), x=-6, y=up, dy=4, text_anchor="end")
    for tick in x.ticks() if x_ticks else ():
        place = _percent(x.place(tick))
        yield tag("line", x1=place, x2=place, y1=0, y2=_HEIGHT, class_="rule")
        yield _label(_figure(tick), x.place(tick))
    yield tag("text", x.title, x="50%", y=_HEIGHT + 36, text_anchor="middle")
    yield tag("text", y.title, x=-48, y=-8)


def _label(text: str, place: float) -> Markup:
    return tag("text", text, x=_percent(place), y=_HEIGHT + 18, text_anchor="middle")


def _anchor(place: float) -> str:
    return "start" if place < 0.02 else "end" if place > 0.98 else "middle"


def _dot(dot: Dot, x: Axis, y: Axis) -> Markup:
    """A nested drawing moves with the page's width, which a path cannot."""
    radius = dot.size / 2
    turned = {"transform": "rotate(45)"} if dot.diamond else {"rx": f"{radius:.1f}"}
    edge, size = f"{-radius:.1f}", f"{dot.size:.1f}"
    mark = tag(
        "rect", tag("title", dot.title), x=edge, y=edge, width=size, height=size, fill=colour(dot.tint), **turned
    )
    return tag("svg", mark, x=_percent(x.place(dot.x)), y=f"{_HEIGHT * (1 - y.place(dot.y)):.1f}", class_="dot")


def _percent(share: float) -> str:
    return f"{100 * share:.3f}%"


def _figure(value: float) -> str:
    """Return a value of an axis as people write it."""
    return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e") if 0 < abs(value) < 1e-3 else f"{value:,.6g}"
