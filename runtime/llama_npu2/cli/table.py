"""Tables for a terminal or for Markdown, whose rows may come one by one: each is aligned as soon as it is known."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Column:
    """`width`: of the widest cell, as far as one knows; the title always fits. `right`: numbers."""

    title: str
    width: int = 0
    right: bool = False

    def cell(self, content: str) -> str:
        width = max(self.width, len(self.title))
        return content.rjust(width) if self.right else content.ljust(width)


def amount(nbytes: float) -> str:
    """Of bytes, with three digits and a unit."""
    unit, name = next(((u, n) for u, n in ((1 << 30, "GiB"), (1 << 20, "MiB")) if nbytes >= u), (1 << 10, "KiB"))
    digits = max(0, 3 - len(f"{nbytes / unit:.0f}"))
    return f"{nbytes / unit:.{digits}f} {name}" if nbytes else "-"


class Table:
    """Lines of text, without their line ends. `markdown`: with bars, else with two blanks between columns."""

    def __init__(self, columns: Sequence[Column], markdown: bool = False) -> None:
        self.columns, self.markdown = columns, markdown

    def header(self) -> str:
        titles = self.row(*(column.title for column in self.columns))
        if not self.markdown:
            return titles
        rules = ("-" * (len(column.cell("")) + 1) + ("-:"[column.right]) for column in self.columns)
        return f"{titles}\n|{'|'.join(rules)}|"

    def row(self, *cells: object) -> str:
        """One cell per column; ValueError otherwise."""
        aligned = [column.cell(str(cell)) for column, cell in zip(self.columns, cells, strict=True)]
        return f"| {' | '.join(aligned)} |" if self.markdown else "  ".join(aligned).rstrip()


def fitted(columns: Sequence[Column], rows: Iterable[Sequence[object]]) -> str:
    """A whole plain table, its columns as wide as their widest cells."""
    lines = [[str(cell) for cell in row] for row in rows]
    widths = [max((len(line[at]) for line in lines), default=0) for at in range(len(columns))]
    table = Table([replace(column, width=max(column.width, w)) for column, w in zip(columns, widths, strict=True)])
    return "\n".join([table.header(), *(table.row(*line) for line in lines)])
