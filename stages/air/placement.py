"""Where a launch's work may lie on the array. The compiler chooses, and does not say before it ran: here herds lie side
by side from the first column on, what is spread over tiles takes the first that have room, the rest those that have
least.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from stages.air import limits
from stages.air.dialect import HerdOp
from stages.air.occupancy import Segment

SHIM, MEMORY, CORES = 0, 1, 2
"""Rows of the array; cores have the four from `CORES` on."""

Share = tuple[int, int]
"""So much in all, and over how many tiles it is spread."""


@dataclass(frozen=True)
class Tile:
    """What a tile takes. `bytes`: of its memory, the stack of a core included."""

    column: int
    row: int
    bytes: int
    channels_in: int
    channels_out: int
    descriptors: int


def tiles(segment: Segment) -> list[Tile]:
    """Of every tile that does something, from the shims up."""
    memory = [(segment.all_bytes(buffer), spread) for buffer, spread in segment.l2_tiles.items()]
    l2 = {way: list(found.values()) for way, found in segment.l2_streams.items()}
    shim_room = (0, limits.SHIM_CHANNELS, limits.SHIM_DESCRIPTORS)
    l2_room = (limits.L2_BYTES, limits.MEMTILE_CHANNELS, limits.MEMTILE_DESCRIPTORS)
    rows = [
        (SHIM, shim_room, [], segment.shim_streams, segment.shim_descriptors),
        (MEMORY, l2_room, memory, l2, segment.l2_descriptors),
    ]
    found = []
    for row, (room, channels, most), stored, streams, descriptors in rows:
        ways = (_spread(((n, n) for n in streams[way]), channels) for way in ("in", "out"))
        taken = zip(_spread(stored, room), *ways, _spread(((n, n) for n in descriptors), most), strict=True)
        found += [Tile(column, row, *each) for column, each in enumerate(taken) if any(each)]
    return [*found, *_cores(segment)]


def _spread(shares: Iterable[Share], room: int) -> list[int]:
    """Of each column, which has so much room."""
    taken = [0] * limits.COLUMNS
    for amount, over in sorted(shares, key=lambda share: -share[1]):
        part = -(-amount // over)
        order = sorted(range(limits.COLUMNS), key=lambda c: (taken[c] if over == 1 else taken[c] + part > room, c))
        for at, column in zip(range(over), itertools.cycle(order), strict=False):
            taken[column] += amount // over + (at < amount % over)
    return taken


def _cores(segment: Segment) -> Iterator[Tile]:
    free = {(column, row) for column in range(limits.COLUMNS) for row in range(limits.ROWS)}
    for herd in segment.herds:
        uses = {use.limit: use.used for use in segment.herd_uses(herd)}
        place = _place(herd, free)
        free -= place
        for column, row in sorted(place):
            yield Tile(
                column,
                CORES + row,
                uses["L1 bytes (with stack)"],
                uses["compute tile DMA channels in"],
                uses["compute tile DMA channels out"],
                uses["compute tile descriptors"],
            )


def _place(herd: HerdOp, free: set[tuple[int, int]]) -> set[tuple[int, int]]:
    """The first rectangle of free cores that it fits, none if there is none."""
    columns, rows = herd.shape()
    for left, bottom in itertools.product(range(limits.COLUMNS), range(limits.ROWS)):
        wanted = {(left + column, bottom + row) for column in range(columns) for row in range(rows)}
        if wanted <= free:
            return wanted
    return set()
