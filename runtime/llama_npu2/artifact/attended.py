"""How many positions attention reads, and how many pairs it multiplies, where layers see all positions or a window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def positions_read(pos: int, rows: int, sees: int | None = None) -> int:
    """Return how many positions of a cache rows `pos .. pos + rows - 1` read, their own included.

    Args:
        sees: how many positions a row attends to, its own included; None: all.
    """
    return pos + rows - (0 if sees is None else max(0, pos + 1 - sees))


def pairs_attended(pos: int, rows: int, sees: int | None = None) -> int:
    """Return the number of pairs of one of these rows and a position that it attends to; `sees` as above."""
    shorter = rows if sees is None else max(0, min(rows, sees - pos))
    return shorter * pos + shorter * (shorter + 1) // 2 + (rows - shorter) * (sees or 0)


def layers_seen(model: Mapping[str, Any]) -> Sequence[int | None]:
    """Return what each attention layer of a manifest's model sees: a number of positions, or all (None)."""
    windows: Sequence[int] = model.get("windows", ())
    return (*windows, *[None] * (model.get("attention_layers", model["layers"]) - len(windows)))
