"""Counts what a launch uses of the array, of memories, channels and descriptors, from its operations.

The counts are necessary: the compiler places buffers and streams, and may need more. Checks refuse by them, and the
estimate shows them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cached_property

from xdsl.dialects import scf
from xdsl.ir import Operation, SSAValue

from llama_npu2.frozen import frozen
from stages.air import analysis, limits
from stages.air.analysis import Dims, Fifo, Side
from stages.air.dialect import (
    L1,
    L2,
    L3,
    ChannelEnd,
    ChannelPutOp,
    DmaMemcpyNdOp,
    HerdOp,
    SegmentOp,
    enclosing,
    memory_space,
)

Stream = tuple[object, object]
"""The ends of a stream."""

Streams = dict[str, dict[Stream, int]]
"""Number of tiles over which each stream is spread, by its direction seen from the tiles: `in` or `out`."""

SHIM_DIMENSIONS = 4
PING_PONG_TASKS = 2
"""Tasks that wait in an L2 ping-pong on top of a shim channel's queue."""


@frozen
class Use:
    """How much is used of a limited resource."""

    limit: str
    used: int
    available: int


@frozen
class Transfer:
    """A DMA, or one end of a channel with the channel as its other side."""

    op: Operation
    herd: HerdOp | None
    dst: Side | Fifo
    src: Side | Fifo

    @cached_property
    def tiles(self) -> tuple[int, ...]:
        """Columns and rows of the tiles that it is made for; nothing if it is made once."""
        return analysis.tile_grid(self.op)

    @property
    def buffers(self) -> list[Side]:
        return [side for side in (self.dst, self.src) if isinstance(side, Side)]

    def side(self, space: int) -> tuple[Side, str] | None:
        """Return the buffer in a memory space, and whether the transfer goes `in` to that memory or `out` of it."""
        for side, way in ((self.dst, "in"), (self.src, "out")):
            if isinstance(side, Side) and side.space == space:
                return side, way
        return None

    def far(self, space: int) -> Side | Fifo:
        """Return the side that is not in a memory space."""
        return self.src if self.dst.space == space else self.dst

    def stream(self) -> Stream:
        """Return its stream. Transfers between the same two ends share one, and so do those from DDR to a channel."""
        return self.dst.key, None if self.from_ddr else self.src.key

    @property
    def from_ddr(self) -> bool:
        """Whether it fills a channel from DDR."""
        return isinstance(self.dst, Fifo) and self.src.space == L3

    @property
    def direct(self) -> bool:
        """Whether it connects DDR and cores, not DDR and L2, if one of its sides is DDR."""
        return self.herd is not None or (self.from_ddr and self.dst.space == L1)

    @property
    def fills(self) -> bool:
        """Whether its source is in DDR."""
        return self.src.space == L3

    @staticmethod
    def of(op: Operation, where: str, spaces: Mapping[tuple[str, type], int]) -> Transfer:
        """Return the transfer of an operation. `spaces`: see `Fifo.of`."""
        herd = enclosing(op, HerdOp)
        if isinstance(op, DmaMemcpyNdOp):
            return Transfer(op, herd, *analysis.sides(op, where))
        assert isinstance(op, ChannelEnd)
        ends: list[Side | Fifo] = [Fifo.of(op, spaces), analysis.end(op, where)]
        return Transfer(op, herd, *(ends if isinstance(op, ChannelPutOp) else reversed(ends)))


@frozen
class Buffer:
    """A buffer of L2, or one of L1, of which each core of a herd has its own."""

    memory: str
    """`L1` or `L2`."""
    way: str
    """`in` if its content comes from DDR, `out` if it goes there, empty if it stays in the array."""
    slots: tuple[str, ...]
    """The arguments (slots) that pass through it."""
    bytes: int
    """Bytes of one copy, on all its tiles."""
    copies: int
    tiles: int
    """Memory tiles over which it is spread."""


class Segment:
    """The counts of one segment, whose herds share the array."""

    def __init__(self, op: SegmentOp, where: str) -> None:
        self.op, self.where = op, where
        self.herds = list(analysis.walk_ops(op, HerdOp))
        cascades, moves = analysis.cascades(op), list(analysis.moves(op))
        ends = [move for move in moves if isinstance(move, ChannelEnd)]
        self.cascades = [end for end in ends if analysis.is_one_of(end, cascades)]
        spaces = {(end.chan_name.string_value(), type(end)): memory_space(end.buffer.type) for end in ends}
        self.transfers = [Transfer.of(m, where, spaces) for m in moves if not analysis.is_one_of(m, cascades)]

    def uses(self) -> Iterator[Use]:
        """Yield the use of every limit; limits of one tile come several times."""
        for herd in self.herds:
            yield from self.herd_uses(herd)
        yield from self._l2_uses()
        yield from self._shim_uses()

    def buffers(self) -> Iterator[Buffer]:
        """Yield the buffers of L2, then those of L1, in order."""
        slots_by_way = {way: self._slots_through(way) for way in ("in", "out")}
        for memory, space in (("L2", L2), ("L1", L1)):
            for buffer in analysis.allocations(self.op, space):
                way = next((way for way, slots in slots_by_way.items() if slots[buffer]), "")
                slots = tuple(sorted(slots_by_way[way][buffer])) if way else ()
                size, tiles = analysis.buffer_bytes(buffer), self.l2_tiles.get(buffer, 1)
                yield Buffer(memory, way, slots, size, self.copies(buffer), tiles)

    def _slots_through(self, way: str) -> dict[object, set[str]]:
        """Return the slots that come from DDR to each buffer and channel, or go there from it, over any others."""
        slots: dict[object, set[str]] = defaultdict(set)
        steps = [(t.src, t.dst) if way == "in" else (t.dst, t.src) for t in self.transfers]
        for near, _ in steps:
            if isinstance(near, Side) and near.space == L3:
                slots[near.key] = {str(analysis.root(near.value).name_hint)}
        for _ in steps:
            for near, far in steps:
                if far.space != L3:
                    slots[far.key] |= slots[near.key]
        return slots

    def streams_of_ddr(self) -> dict[Operation, int]:
        """Return the number of streams, one per memory tile, over which each transfer between DDR and L2 is spread."""
        return {transfer.op: self.streams(transfer) for transfer in self.transfers if not transfer.tiles}

    # compute tiles

    def herd_uses(self, herd: HerdOp) -> Iterator[Use]:
        """Yield the uses of a herd's shape, and of each of its tiles."""
        columns, rows = herd.shape()
        yield Use("herd columns", columns, limits.COLUMNS)
        yield Use("herd rows", rows, limits.ROWS)
        # Every allocation has its own place for as long as the herd runs.
        size = sum(self.all_bytes(buffer) for buffer in analysis.allocations(herd, L1))
        taken = size + limits.STACK_BYTES + limits.STATIC_BYTES
        yield Use("L1 bytes (with stack and static data)", taken, limits.L1_BYTES)
        tiles_differ = any(True for _ in analysis.walk_ops(herd, scf.IfOp))
        for tile in analysis.tiles(herd) if tiles_differ else [(0, 0)]:
            yield from self._tile_uses(herd, tile)

    def _tile_uses(self, herd: HerdOp, tile: tuple[int, int]) -> Iterator[Use]:
        descriptors = 0
        far: dict[tuple[str, bool], set[object]] = defaultdict(set)
        for transfer in self.transfers:
            end = transfer.side(L1) if transfer.herd is herd and analysis.runs_on(transfer.op, *tile) else None
            if end is not None:
                side, way = end
                descriptors += self.copies(analysis.root(side.value))
                other = transfer.dst if way == "out" else transfer.src
                far[way, isinstance(other, Side) and other.space == L3].add(other.key)
        yield Use("compute tile descriptors", descriptors, limits.TILE_DESCRIPTORS)
        for way in ("in", "out"):
            # Streams from shims can share a channel; those from memory tiles and from other cores cannot.
            used = len(far[way, False]) + min(len(far[way, True]), limits.TILE_CHANNELS)
            yield Use(f"compute tile DMA channels {way}", used, limits.TILE_CHANNELS)

    def copies(self, buffer: SSAValue) -> int:
        """Return how many buffers the compiler makes of one.

        They are two if the buffer is allocated in a loop, or filled by a loop from DDR: a ping-pong. If the loop has an
        odd number of steps, they are three. Of one that a channel fills it makes copies where the same loop over tiles
        sends its content on, else none (mlir-air of 2026-05-08): then it is not filled while it is read.
        """
        loop = buffer.owner.parent_op() if isinstance(buffer.owner, Operation) else None
        if isinstance(loop, SegmentOp):
            filling = (t.op for t in self.transfers if t.dst.key is buffer and self._copied(t, buffer))
            loop = next((outer for op in filling if (outer := enclosing(op, scf.ForOp))), None)
        if not isinstance(loop, scf.ForOp):
            return 1
        return 2 + analysis.trip_count(loop, self.where) % 2

    def _copied(self, filling: Transfer, buffer: SSAValue) -> bool:
        """Return whether the compiler copies a buffer for this transfer into it."""
        if isinstance(filling.op, DmaMemcpyNdOp):
            return filling.fills
        over = enclosing(filling.op, scf.ParallelOp)
        drains = (t.op for t in self.transfers if t.src.key is buffer)
        return over is not None and all(enclosing(op, scf.ParallelOp) is over for op in drains)

    def all_bytes(self, buffer: SSAValue) -> int:
        """Return the bytes of a buffer with its copies."""
        return analysis.buffer_bytes(buffer) * self.copies(buffer)

    # memory tiles

    def _l2_uses(self) -> Iterator[Use]:
        used = sum(map(self.all_bytes, analysis.allocations(self.op, L2)))
        yield Use("L2 bytes", used, limits.L2_BYTES * limits.COLUMNS)
        for buffer, tiles in self.l2_tiles.items():
            yield Use("bytes of one memory tile", self.all_bytes(buffer) // tiles, limits.L2_BYTES)
        for way, streams in self.l2_streams.items():
            available = limits.MEMTILE_CHANNELS * limits.COLUMNS
            yield Use(f"memory tile DMA channels {way}", sum(streams.values()), available)
        yield Use("memory tile descriptors", sum(self.l2_descriptors), limits.MEMTILE_DESCRIPTORS * limits.COLUMNS)

    @cached_property
    def l2_tiles(self) -> dict[SSAValue, int]:
        """Number of memory tiles over which each buffer of L2 is spread."""
        tiles = dict.fromkeys(analysis.allocations(self.op, L2), limits.COLUMNS)
        for transfer in self.transfers:
            end = None if transfer.tiles else transfer.side(L2)
            if end is not None:
                buffer = analysis.root(end[0].value)
                tiles[buffer] = min(tiles[buffer], self.streams(transfer))
        return tiles

    @cached_property
    def l2_streams(self) -> Streams:
        """The streams of the memory tiles."""
        streams: Streams = {"in": {}, "out": {}}
        for transfer in self.transfers:
            if end := transfer.side(L2):
                streams[end[1]][transfer.stream()] = self.streams(transfer)
        return streams

    @property
    def l2_descriptors(self) -> list[int]:
        """Descriptors of the memory tiles by transfer: one for each of its streams."""
        return [self.streams(transfer) for transfer in self.transfers if transfer.side(L2)]

    def one_part(self, transfer: Transfer, side: Side) -> Dims:
        """Return the folded dimensions of the part of a transfer that one memory tile takes."""
        spread = 1 if transfer.tiles else self.streams(transfer)
        return side.dims[1:] if spread > 1 and len(side.dims) > 1 and side.dims[0][0] == spread else side.dims

    def streams(self, transfer: Transfer) -> int:
        """Return the number of streams of a transfer: one per group of tiles that gets the same elements.

        Between L2 and DDR there is one per memory tile over which the buffer can be spread, if the herd cuts it and the
        transfer has that dimension first.
        """
        if transfer.tiles:
            ends = [end for end in (transfer.src, transfer.dst) if isinstance(end, Side)]
            deciding = ends[0] if transfer.herd is None else transfer.far(L1)
            return math.prod(transfer.tiles[axis] for axis in deciding.axes())
        l2, ddr = transfer.far(L3), transfer.side(L3)
        if ddr is None:
            return 1
        cuts = self._cuts(l2.key)
        parts = cuts[min(cuts)] if cuts else 1
        first = next((size for size in ddr[0].sizes if size != 1), 1)
        return parts if first == parts else 1

    def _cuts(self, buffer: object) -> dict[int, int]:
        """Return the number of parts into which tiles cut an L2 buffer, by the axis of the tiles."""
        cuts: dict[int, int] = {}
        for transfer in self.transfers:
            end = transfer.side(L2) if transfer.tiles else None
            if end is not None and end[0].key is buffer:
                cuts |= {axis: transfer.tiles[axis] for axis in end[0].axes()}
        return cuts

    # shims

    def _shim_uses(self) -> Iterator[Use]:
        for way, streams in self.shim_streams.items():
            yield Use(f"shim DMA channels {way}", sum(streams), limits.SHIM_CHANNELS * limits.COLUMNS)
        yield Use("shim descriptors", sum(self.shim_descriptors), limits.SHIM_DESCRIPTORS * limits.COLUMNS)
        tasks: dict[Stream, int] = defaultdict(int)
        staged: set[Stream] = set()
        for transfer in self.transfers:
            if end := transfer.side(L3):
                tasks[transfer.stream()] += self._tasks(transfer, end[0])
                staged |= set() if transfer.direct else {transfer.stream()}
        for stream, count in tasks.items():
            waiting = PING_PONG_TASKS if stream in staged else 0
            yield Use("queue entries of a shim channel per launch step", count, limits.QUEUE_DEPTH + waiting)

    @property
    def shim_streams(self) -> dict[str, list[int]]:
        """Channels that each stream of the shims takes, `in` to the array and `out` of it.

        Streams between DDR and the same cores can share their shim channels; those of L2 cannot.
        """
        staged: Streams = {"in": {}, "out": {}}
        direct: Streams = {"in": {}, "out": {}}
        for transfer in self.transfers:
            if end := transfer.side(L3):
                kind = direct if transfer.direct else staged
                kind["in" if end[1] == "out" else "out"][transfer.stream()] = self.streams(transfer)
        return {way: [*staged[way].values(), *sorted(direct[way].values())[-limits.TILE_CHANNELS :]] for way in staged}

    @property
    def shim_descriptors(self) -> list[int]:
        """Descriptors of the shims by transfer."""
        ends = ((transfer, transfer.side(L3)) for transfer in self.transfers)
        return [self.streams(transfer) * self._pieces(transfer, end[0]) for transfer, end in ends if end]

    def _pieces(self, transfer: Transfer, side: Side) -> int:
        """Return the descriptors of one execution: patterns of more dimensions than a descriptor has are cut."""
        return math.prod(size for size, _ in self.one_part(transfer, side)[:-SHIM_DIMENSIONS])

    def _tasks(self, transfer: Transfer, side: Side) -> int:
        """Return the descriptors queued per launch step. A loop needs no more of them if they have dimensions left."""
        free = SHIM_DIMENSIONS - len(self.one_part(transfer, side))
        queued = self._pieces(transfer, side)
        parent = transfer.op.parent_op()
        while isinstance(parent, scf.ForOp):
            if free > 0:
                free -= 1
            else:
                queued *= analysis.trip_count(parent, self.where)
            parent = parent.parent_op()
        return queued
