"""What the tutorial of the NPU says that commands print, against what they print: words, not numbers."""

from __future__ import annotations

import re
from collections.abc import Iterable

from tests.conftest import ROOT

TUTORIAL = ROOT / "docs/tutorials/ryzen-ai.md"
_QUOTED = re.compile(r"<!-- printed: ([a-z ]+) -->\n+```text\n(.*?)```", re.DOTALL)
LEFT_OUT = "..."
"""Stands for lines, or for the rest of a line, that the tutorial leaves out."""


def quoted() -> dict[str, list[str]]:
    """The lines of each block of output."""
    return {name: lines.splitlines() for name, lines in _QUOTED.findall(TUTORIAL.read_text())}


def missing(name: str, printed: Iterable[str]) -> list[str]:
    """Return the lines of a block that were not printed, in this order; any number is as good as another."""
    lines, found = iter(printed), []
    for line in quoted()[name]:
        if line.strip() == LEFT_OUT:
            continue
        left = [*lines]
        at = next((at for at, other in enumerate(left) if _pattern(line).fullmatch(other.strip())), None)
        if at is None:
            found.append(line)
        lines = iter(left if at is None else left[at + 1 :])
    return found


def _pattern(line: str) -> re.Pattern[str]:
    escaped = re.escape(" ".join(line.split())).replace(re.escape(LEFT_OUT), ".*")
    return re.compile(re.sub(r"\d+(\\\.\d+)?(e(\\-|\\\+)\d+)?", r"[-+\\d.e]+", escaped).replace(r"\ ", r"\s+"))
