"""A page, from its sections to a file."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from stages.engine.files import write_atomic
from stages.reports.pages.blocks import CHART, anchor

_HERE = Path(__file__).parent


@dataclass
class Page:
    """`lead`: the answer in a sentence or two, below the title."""

    title: str
    lead: str = ""
    sections: list[tuple[str, str, tuple[Markup, ...]]] = field(default_factory=list)
    """Name in links, heading, blocks."""

    def add(self, heading: str, *blocks: Markup) -> None:
        """A section at the end."""
        name, taken = anchor(heading), [name for name, _, _ in self.sections]
        self.sections.append((f"{name}-{len(taken)}" if name in taken else name, heading, blocks))

    def html(self) -> str:
        """The page, with all that it needs: what draws charts (4.8 MB) only where there is one."""
        charts = any(CHART in block for _, _, blocks in self.sections for block in blocks)
        template = _templates().get_template("page.html.jinja")
        return template.render(page=self, style=_own("page.css"), script=_own("page.js"), plotly=charts and _plotly())

    def write(self, path: Path) -> None:
        """Replace a file by the page, atomically."""
        write_atomic(path, self.html().encode())


@cache
def _templates() -> Environment:
    return Environment(loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True)


def _own(name: str) -> Markup:
    return Markup((_HERE / name).read_text(encoding="utf-8"))


def _plotly() -> Markup:
    from plotly.offline import get_plotlyjs

    return Markup(get_plotlyjs())
