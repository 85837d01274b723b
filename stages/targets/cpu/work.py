"""The least that a launch on the host moves and multiplies. `doit profile` compares its time with that."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from stages.model.part import HISTORY, Launch, Part, Slot, resolved
from stages.weights.scalars import ALL

FLOP = 2
"""A multiply-accumulate."""


def described_launch(part: Part, launch: Launch, dimensions: Mapping[str, float]) -> dict[str, Any]:
    """Return the description of a launch that the library gives.

    It has the kernel, and two lists of three numbers. `bytes` counts each tensor once, as it lies in memory: for a
    call, for each of its rows, for each position that they attend to. `operations` counts products: for a call, for
    each row, for each pair of a row and a position that it attends to. `sees` is how many positions a row attends to,
    where these are not all.
    """
    moved = [0, 0, 0]
    for arg in launch.kernel.args:
        scope, size = _moved(part, launch, launch.args[arg.name], arg.written, dimensions)
        moved[scope] += size
    products = [0, 0, 0]
    products[_per_row(part, launch)] += FLOP * _values(part, launch, dimensions)
    if launch.kernel.attends:
        # Queries with keys, and weights with values.
        products[2] = 2 * FLOP * math.prod(resolved((launch.scalars["heads"], launch.scalars["head_dim"]), dimensions))
    sees = launch.scalars.get("sees", ALL)
    window = {} if sees == ALL else {"sees": sees}
    return {"kernel": launch.kernel.name, "bytes": moved, "operations": products, **window}


def _moved(part: Part, launch: Launch, name: str, written: bool, dimensions: Mapping[str, float]) -> tuple[int, int]:
    """(index into what is said of each call, row and position; bytes) of a slot that a launch reads or else writes."""
    slot = part.slot(name)
    scope, share, (first, *rest) = int(bool(slot.keeps)), 1, slot.shape
    if slot.role == "weight" and "tokens" in launch.args:
        scope, share = 1, resolved([first], dimensions)[0]
    elif first in ("seq", "max_seq") or slot.keeps == HISTORY:
        scope, slot = 1, replace(slot, shape=(1, *rest))
    elif slot.keeps:
        # A cache that is no table of rows still grows by one position a row.
        share = int(dimensions["max_seq"])
    size = (
        int(part.host_bytes(slot, dimensions) * _chosen(launch, slot, dimensions, not _per_row(part, launch))) // share
    )
    return (2 if slot.keeps and not written else scope), size


def _values(part: Part, launch: Launch, dimensions: Mapping[str, float]) -> int:
    """Return the number of values of the matrices that the rows of a launch are multiplied with."""
    slots = [part.slot(name) for name in launch.reads()]
    if "tokens" in launch.args or all(slot.role == "weight" for slot in slots):
        return 0
    return sum(
        round(math.prod(resolved(slot.shape, dimensions)) * _chosen(launch, slot, dimensions, of_one=True))
        for slot in slots
        if slot.role == "weight" and len(slot.shape) > 1
    )


def _chosen(launch: Launch, slot: Slot, dimensions: Mapping[str, float], of_one: bool) -> float:
    """Return the share of a slot that a launch needs: of experts' weights those of one row, where it has one."""
    stacked = of_one and "chosen" in launch.args and slot.role == "weight"
    return dimensions["top"] / dimensions["experts"] if stacked else 1.0


def _per_row(part: Part, launch: Launch) -> int:
    return int(any(part.slot(name).shape[0] == "seq" for name in launch.writes()))
