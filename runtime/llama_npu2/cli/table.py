"""Tables for a terminal or for Markdown, whose rows may come one by one: each is aligned as it comes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    title: str
    width: int = 0
    """Width of the widest cell, as far as it is known before; the title always fits."""
    right: bool = False
    """Whether cells are aligned on the right, as numbers are."""

    def cell(self, content: str) -> str:
        """Return a cell's text, padded."""
        width = max(self.width, len(self.title))
        return content.rjust(width) if self.right else content.ljust(width)


def amount(nbytes: float) -> str:
    """Return a number of bytes as text with three digits and a unit."""
    unit, name = next(((u, n) for u, n in ((1 << 30, "GiB"), (1 << 20, "MiB")) if nbytes >= u), (1 << 10, "KiB"))
    digits = max(0, 3 - len(f"{nbytes / unit:.0f}"))
    return f"{nbytes / unit:.{digits}f} {name}" if nbytes else "-"


class Table:
    """Makes a table's lines, without line ends: in Markdown, or with two blanks between columns."""

    def __init__(self, columns: Sequence[Column], markdown: bool = False) -> None:
        self.columns, self.markdown = columns, markdown

    def header(self) -> str:
        """Return the line of titles, in Markdown with the rule below it."""
        titles = self.row(*(column.title for column in self.columns))
        if not self.markdown:
            return titles
        rules = ("-" * (len(column.cell("")) + 1) + ("-:"[column.right]) for column in self.columns)
        return f"{titles}\n|{'|'.join(rules)}|"

    def row(self, *cells: object) -> str:
        """Return a row's line. Raises ValueError if there is not one cell per column."""
        aligned = [column.cell(str(cell)) for column, cell in zip(self.columns, cells, strict=True)]
        return f"| {' | '.join(aligned)} |" if self.markdown else "  ".join(aligned).rstrip()


def fitted(columns: Sequence[Column], rows: Iterable[Sequence[object]]) -> str:
    """Return a plain table whose columns are as wide as their widest cells."""
    lines = [[str(cell) for cell in row] for row in rows]
    widths = [max((len(line[at]) for line in lines), default=0) for at in range(len(columns))]
    table = Table([replace(column, width=max(column.width, w)) for column, w in zip(columns, widths, strict=True)])
    return "\n".join([table.header(), *(table.row(*line) for line in lines)])
