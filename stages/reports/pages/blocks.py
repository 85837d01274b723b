"""A page, and its blocks: text, tables, drawings and what opens on a click. Each block is `markupsafe.Markup`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from stages.engine.files import write_atomic
from stages.engine.places import RUNTIME


def tag(name: str, *content: object, **attributes: object) -> Markup:
    """Return an element of HTML or SVG. Content and attributes that are not Markup are escaped.

    `class_` and `stroke_width` are written `class` and `stroke-width`. None and False leave an attribute out; True
    writes it without a value.
    """
    named = ((key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items())
    kept = [(key, value) for key, value in named if value is not None and value is not False]
    written = "".join(f" {key}" if value is True else f' {key}="{escape(value)}"' for key, value in kept)
    return Markup(f"<{name}{written}>{''.join(map(escape, content))}</{name}>")


def colour(name: str) -> str:
    """Return a colour of `page.css` or `look.css` in the notation of CSS, so that drawings follow the theme."""
    return f"var(--{name})"


def note(*text: object) -> Markup:
    """Return a paragraph."""
    return tag("p", *text)


def facts(pairs: Mapping[str, object]) -> Markup:
    """Return the few figures, by name, that a reader looks for first."""
    return tag("dl", *(tag("div", tag("dt", key), tag("dd", value)) for key, value in pairs.items()), class_="facts")


def details(summary: object, *blocks: Markup, opened: bool = False) -> Markup:
    """Return blocks that a click on their summary shows."""
    return tag("details", tag("summary", summary), *blocks, open=opened)


def table(titles: Sequence[str], rows: Iterable[Sequence[object]], label: str) -> Markup:
    """Return a table with one cell per column, which scrolls sideways where it is wider than the page.

    `>` before a title aligns its cells on the right, as numbers are.
    """
    sides = ["number" if title.startswith(">") else None for title in titles]
    names = zip(titles, sides, strict=True)
    head = tag("tr", *(tag("th", name.removeprefix(">"), scope="col", class_=side) for name, side in names))
    lines = [tag("tr", *(tag("td", cell, class_=side) for cell, side in zip(row, sides, strict=True))) for row in rows]
    return scrolling(tag("table", tag("thead", head), tag("tbody", *lines)), label)


def svg(width: float, height: float, label: str, *shapes: Markup, zoom: bool = False, role: str = "img") -> Markup:
    """Return a drawing of `width` x `height` pixels, which scrolls where there is less room.

    Args:
        zoom: Add buttons that make it larger and smaller, and open it as large as fits.
        role: `group` where its parts can be chosen.
    """
    box = f"0 0 {width:g} {height:g}"
    # The size is in attributes, so that the buttons can change it.
    named = {"role": role, "aria_label": label if role != "img" else None}
    drawn = tag("svg", tag("title", label), *shapes, viewBox=box, width=f"{width:g}", height=f"{height:g}", **named)
    return zoomed(drawn, label) if zoom else scrolling(drawn, label)


def zoomed(drawing: Markup, label: str) -> Markup:
    """Return a drawing with buttons that make it larger and smaller; one without a view box becomes wider only."""
    return tag("div", _BUTTONS, scrolling(drawing, label), class_="zoom")


def scrolling(content: Markup, label: str) -> Markup:
    """Return content in a box that scrolls, and that the keyboard reaches."""
    return tag("div", content, class_="scroll", tabindex="0", role="group", aria_label=label)


def anchor(heading: str) -> str:
    """Return a heading's name in links."""
    return re.sub(r"[^a-z0-9]+", "-", heading.lower()).strip("-") or "section"


_BUTTONS = tag(
    "div",
    tag("button", "+", type="button", data_zoom="1.25", aria_label="Zoom in"),
    tag("button", "\N{MINUS SIGN}", type="button", data_zoom="0.8", aria_label="Zoom out"),
    tag("button", "Fit", type="button", data_zoom="0", aria_label="Zoom to fit"),
    class_="buttons",
)


_HERE = Path(__file__).parent
_SHARED = RUNTIME / "llama_npu2/serve/page"
"""Where the look is that all pages have: the server needs it without a checkout."""


@dataclass
class Page:
    """A page: a title, the answer in a sentence or two, and sections."""

    title: str
    lead: str = ""
    """The answer, below the title."""
    sections: list[tuple[str, str, tuple[Markup, ...]]] = field(default_factory=list)
    """Name in links, heading and blocks of each section."""

    def add(self, heading: str, *blocks: Markup) -> None:
        """Add a section at the end."""
        name, taken = anchor(heading), [name for name, _, _ in self.sections]
        self.sections.append((f"{name}-{len(taken)}" if name in taken else name, heading, blocks))

    def html(self) -> str:
        """Return the page with its style and its script."""
        template = _templates().get_template("page.html.jinja")
        style = _text(_SHARED / "look.css", _HERE / "page.css")
        return template.render(page=self, style=style, script=_text(_SHARED / "theme.js", _HERE / "page.js"))

    def write(self, path: Path) -> None:
        """Replace a file by the page, atomically."""
        write_atomic(path, self.html().encode())


@cache
def _templates() -> Environment:
    return Environment(loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True)


def _text(*paths: Path) -> Markup:
    return Markup("\n").join(Markup(path.read_text(encoding="utf-8")) for path in paths)
