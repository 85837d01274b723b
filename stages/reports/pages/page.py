"""A page, from its sections to a file."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from stages.engine.files import write_atomic
from stages.reports.pages.blocks import anchor

_HERE = Path(__file__).parent


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
        return template.render(page=self, style=_own("page.css"), script=_own("page.js"))

    def write(self, path: Path) -> None:
        """Replace a file by the page, atomically."""
        write_atomic(path, self.html().encode())


@cache
def _templates() -> Environment:
    return Environment(loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True)


def _own(name: str) -> Markup:
    return Markup((_HERE / name).read_text(encoding="utf-8"))
