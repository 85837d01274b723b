"""Tables for a terminal or for Markdown, whose rows may come one by one: each is aligned as it comes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def amount(nbytes: float) -> str:
    """Return a number of bytes as text with three digits and a unit."""
    unit, name = next(((u, n) for u, n in ((1 << 30, "GiB"), (1 << 20, "MiB")) if nbytes >= u), (1 << 10, "KiB"))
    digits = max(0, 3 - len(f"{nbytes / unit:.0f}"))
    return f"{nbytes / unit:.{digits}f} {name}" if nbytes else "-"


class Table:
    """Makes a table's lines, without line ends: in Markdown, or with two blanks between columns.

    A column is a title, after `>` if cells are aligned on the right, as numbers are, and the width of its widest cell,
    as far as it is known before; the title always fits.
    """

    def __init__(self, columns: Iterable[tuple[str, int]], markdown: bool = False) -> None:
        sized = [(title.removeprefix(">"), width, title.startswith(">")) for title, width in columns]
        self.titles, self.markdown = [title for title, _, _ in sized], markdown
        self._columns = [(max(width, len(title)), right) for title, width, right in sized]

    def header(self) -> str:
        """Return the line of titles, in Markdown with the rule below it."""
        if not self.markdown:
            return self.row(*self.titles)
        rules = ("-" * (width + 1) + "-:"[right] for width, right in self._columns)
        return f"{self.row(*self.titles)}\n|{'|'.join(rules)}|"

    def row(self, *cells: object) -> str:
        """Return a row's line. Raises ValueError if there is not one cell per column."""
        pairs = zip(cells, self._columns, strict=True)
        aligned = [str(cell).rjust(width) if right else str(cell).ljust(width) for cell, (width, right) in pairs]
        return f"| {' | '.join(aligned)} |" if self.markdown else "  ".join(aligned).rstrip()


def fitted(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a plain table whose columns are as wide as their widest cells; `>` before a title is as in `Table`."""
    lines = [[str(cell) for cell in row] for row in rows]
    widths = [max((len(line[at]) for line in lines), default=0) for at in range(len(titles))]
    table = Table(zip(titles, widths, strict=True))
    return "\n".join([table.header(), *(table.row(*line) for line in lines)])
