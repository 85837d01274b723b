"""Guesses where a launch's work lies on the array, which only the compiler decides.

Herds are placed next to each other from the first column on. What is spread over several tiles takes the first that
have room, everything else the emptiest.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from llama_npu2.frozen import frozen
from stages.air import limits
from stages.air.dialect import HerdOp
from stages.air.occupancy import Segment

SHIM, MEMORY, CORES = 0, 1, 2
"""Rows of the array; cores have the four rows from `CORES` on."""

_COUNTED = ("DMA channels in", "DMA channels out", "descriptors")

Share = tuple[int, int]
"""An amount, and the number of tiles over which it is spread."""


@frozen
class Tile:
    """The resources that a launch uses of a tile."""

    column: int
    row: int
    bytes: int
    """Bytes of its memory, with stack and static data of a core."""
    channels_in: int
    channels_out: int
    descriptors: int


def tiles(segment: Segment) -> list[Tile]:
    """Return every tile that is used, from the shims up."""
    memory = [(segment.all_bytes(buffer), spread) for buffer, spread in segment.l2_tiles.items()]
    l2 = {way: list(streams.values()) for way, streams in segment.l2_streams.items()}
    shim_room = (0, limits.SHIM_CHANNELS, limits.SHIM_DESCRIPTORS)
    l2_room = (limits.L2_BYTES, limits.MEMTILE_CHANNELS, limits.MEMTILE_DESCRIPTORS)
    rows = [
        (SHIM, shim_room, [], segment.shim_streams, segment.shim_descriptors),
        (MEMORY, l2_room, memory, l2, segment.l2_descriptors),
    ]
    used = []
    for row, (room, channels, most_descriptors), stored, streams, descriptors in rows:
        ways = (_spread(((n, n) for n in streams[way]), channels) for way in ("in", "out"))
        by_column = zip(
            _spread(stored, room), *ways, _spread(((n, n) for n in descriptors), most_descriptors), strict=True
        )
        used += [Tile(column, row, *amounts) for column, amounts in enumerate(by_column) if any(amounts)]
    return [*used, *_cores(segment)]


def _spread(shares: Iterable[Share], room: int) -> list[int]:
    """Return how much each column takes of the shares. `room`: the most that one column can take."""
    taken = [0] * limits.COLUMNS
    for amount, tiles in sorted(shares, key=lambda share: -share[1]):
        part = -(-amount // tiles)
        order = sorted(range(limits.COLUMNS), key=lambda c: (taken[c] if tiles == 1 else taken[c] + part > room, c))
        for number, column in zip(range(tiles), itertools.cycle(order), strict=False):
            taken[column] += amount // tiles + (number < amount % tiles)
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
                uses["L1 bytes (with stack and static data)"],
                *(uses[f"compute tile {of}"] for of in _COUNTED),
            )


def _place(herd: HerdOp, free: set[tuple[int, int]]) -> set[tuple[int, int]]:
    """Return the first rectangle of free cores for a herd; nothing if there is none."""
    columns, rows = herd.shape()
    for left, bottom in itertools.product(range(limits.COLUMNS), range(limits.ROWS)):
        cores = {(left + column, bottom + row) for column in range(columns) for row in range(rows)}
        if cores <= free:
            return cores
    return set()
