"""A bar of progress. What shows one imports this when it does: tqdm takes longer to import than all else here."""

from __future__ import annotations

import io
from typing import Any

from tqdm import tqdm

from stages.engine.progress import speaker


class Bar(tqdm):
    """tqdm's bar; where the steps of this thread are shown, text instead."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._speak = speaker()
        # Even what is not drawn is disabled unless it is on a terminal.
        hidden = {"file": io.StringIO(), "disable": bool(options.get("disable"))} if self._speak else {}
        super().__init__(*args, **{"disable": None, **options, **hidden})

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        if self._speak is None:
            super().display(msg, pos)
            return
        state = self.format_dict
        number = tqdm.format_sizeof if state["unit_scale"] else str
        total = f" of {number(state['total'])}" if state["total"] else ""
        unit = state["unit"] if state["unit_scale"] else ""
        self._speak(f"{state['prefix'].removesuffix(': ')}: {number(state['n'])}{total}{unit}")
