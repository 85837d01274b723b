"""What pages are made of."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup, escape

from llama_npu2.cli.table import Column

CHART = Markup('<script type="application/json" class="figure">')
"""Before what a chart shows: by this a page knows that it needs the library that draws it."""


def tag(name: str, *content: object, **attributes: object) -> Markup:
    """An element of HTML or SVG. Content that is no Markup is escaped, as are attributes: `class_`, `stroke_width` are
    `class`, `stroke-width`; None and False leave one out, True has it without a value."""
    said = ((key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items())
    kept = [(key, value) for key, value in said if value is not None and value is not False]
    written = (
        Markup(" {}").format(key) if value is True else Markup(' {}="{}"').format(key, value) for key, value in kept
    )
    return Markup("<{0}{1}>{2}</{0}>").format(Markup(name), Markup().join(written), Markup().join(map(escape, content)))


def colour(name: str) -> str:
    """A colour of the page, in the notation of CSS: in charts and drawings it follows the theme."""
    return f"var(--{name})"


def note(*text: object) -> Markup:
    """A paragraph."""
    return tag("p", *text)


def preformatted(text: str, label: str) -> Markup:
    """Text as it is, line by line."""
    return _scrolling(tag("pre", text), label)


def facts(pairs: Mapping[str, object]) -> Markup:
    """A few figures that a reader looks for first, by name."""
    return tag("dl", *(tag("div", tag("dt", key), tag("dd", value)) for key, value in pairs.items()), class_="facts")


def details(summary: object, *blocks: Markup, opened: bool = False) -> Markup:
    """What is shown once it is asked for."""
    return tag("details", tag("summary", summary), *blocks, open=opened)


def table(columns: Sequence[Column], rows: Iterable[Sequence[object]], label: str) -> Markup:
    """Rows below titles, one cell per column; it scrolls sideways where it is wider than the page."""
    sides = ["number" if column.right else None for column in columns]
    titles = zip(columns, sides, strict=True)
    head = tag("tr", *(tag("th", column.title, scope="col", class_=side) for column, side in titles))
    lines = [tag("tr", *(tag("td", cell, class_=side) for cell, side in zip(row, sides, strict=True))) for row in rows]
    return _scrolling(tag("table", tag("thead", head), tag("tbody", *lines)), label)


def svg(width: float, height: float, label: str, *shapes: Markup, zoom: bool = False, role: str = "img") -> Markup:
    """A drawing of `width` x `height` pixels, which scrolls where there is less room. `zoom`: with buttons for that.
    `role`: `group` where what is in it can be chosen."""
    box = f"0 0 {width:g} {height:g}"
    # How large it is drawn is for the style alone, so that buttons can change it.
    named = {"role": role, "aria_label": label if role != "img" else None}
    drawn = tag("svg", tag("title", label), *shapes, viewBox=box, width=f"{width:g}", height=f"{height:g}", **named)
    scrolling = _scrolling(drawn, label)
    return tag("div", _ZOOM, scrolling, class_="zoom") if zoom else scrolling


def chart(traces: Sequence[Mapping[str, Any]], layout: Mapping[str, Any], label: str, numbers: Markup) -> Markup:
    """A figure of Plotly's, as its traces and layout are in JSON. What `colour` gives is put in when it is drawn.
    Plotly takes texts for markup (`<br>`, `<b>`, `<extra>`, links); here just those that are Markup.

    `label`: what it shows, for those who do not see it, and below it. `numbers`: a table of what it shows.
    """
    drawn = tag("div", class_="plot", role="img", aria_label=label)
    shown = CHART + htmlsafe_json_dumps(_escaped({"data": traces, "layout": layout})) + Markup("</script>")
    return tag("figure", drawn, shown, tag("figcaption", label), details("Numbers", numbers))


def _escaped(value: Any) -> Any:
    """The same JSON, with texts as `markupsafe.escape` has them."""
    match value:
        case Mapping():
            return {key: _escaped(inner) for key, inner in value.items()}
        case str():
            return escape(value)
        case Sequence():
            return [_escaped(inner) for inner in value]
    return value


def anchor(heading: str) -> str:
    """A heading's name in links."""
    return re.sub(r"[^a-z0-9]+", "-", heading.lower()).strip("-") or "section"


def _scrolling(content: Markup, label: str) -> Markup:
    """It can be reached, so that arrow keys scroll it."""
    return tag("div", content, class_="scroll", tabindex="0", role="group", aria_label=label)


_ZOOM = tag(
    "div",
    tag("button", "+", type="button", data_zoom="1.25", aria_label="Zoom in"),
    tag("button", "\N{MINUS SIGN}", type="button", data_zoom="0.8", aria_label="Zoom out"),
    tag("button", "Fit", type="button", data_zoom="0", aria_label="Zoom to fit"),
    class_="buttons",
)
