"""What a launch takes of the array: of each limit, memory, channel and descriptor, counted from its operations.

Necessary counts: the compiler places buffers and streams, and may need more. Checks refuse by them, the estimate
shows them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from xdsl.dialects import scf
from xdsl.ir import Operation, SSAValue

from stages.air import analysis, limits
from stages.air.analysis import Dims, Fifo, Side
from stages.air.dialect import (
    L1,
    L2,
    L3,
    ChannelGetOp,
    ChannelPutOp,
    DmaMemcpyNdOp,
    HerdOp,
    SegmentOp,
    enclosing,
    memory_space,
)

Stream = tuple[object, object]
Streams = dict[str, dict[Stream, int]]
"""Over how many tiles streams are spread, by the way that they go: `in` or `out` of the tiles in question."""

SHIM_DIMENSIONS = 4
PING_PONG_TASKS = 2
"""Tasks that wait in an L2 ping-pong on top of a shim channel's queue."""


@dataclass(frozen=True)
class Use:
    """So much of a limit, of so much that there is."""

    limit: str
    used: int
    available: int


@dataclass(frozen=True)
class Transfer:
    """A DMA, or one end of a channel with the channel as its other side."""

    op: Operation
    herd: HerdOp | None
    dst: Side | Fifo
    src: Side | Fifo

    @property
    def tiles(self) -> tuple[int, ...]:
        """Columns and rows of the tiles that it is made for; none if it is made once."""
        return analysis.tile_grid(self.op)

    @property
    def buffers(self) -> list[Side]:
        return [side for side in (self.dst, self.src) if isinstance(side, Side)]

    def side(self, space: int) -> tuple[Side, str] | None:
        """The buffer in a memory space and whether the transfer goes `in` to that memory or `out` of it."""
        for side, way in ((self.dst, "in"), (self.src, "out")):
            if isinstance(side, Side) and side.space == space:
                return side, way
        return None

    def far(self, space: int) -> Side | Fifo:
        return self.src if self.dst.space == space else self.dst

    def stream(self) -> Stream:
        """Transfers between the same two ends take turns on one stream, and those from DDR to one channel."""
        return self.dst.key, None if self.from_ddr else self.src.key

    @property
    def from_ddr(self) -> bool:
        """Whether it fills a channel from DDR."""
        return isinstance(self.dst, Fifo) and self.src.space == L3

    @property
    def direct(self) -> bool:
        """Whether it is between DDR and cores, if one of its sides is DDR."""
        return self.herd is not None or (self.from_ddr and self.dst.space == L1)

    @property
    def fills(self) -> bool:
        """Whether it brings what is in DDR."""
        return self.src.space == L3

    @staticmethod
    def of(op: Operation, where: str, spaces: Mapping[tuple[str, type], int]) -> Transfer:
        """`spaces`: see `Fifo.of`."""
        herd = enclosing(op, HerdOp)
        if isinstance(op, DmaMemcpyNdOp):
            return Transfer(op, herd, *analysis.sides(op, where))
        assert isinstance(op, ChannelPutOp | ChannelGetOp)
        ends: list[Side | Fifo] = [Fifo.of(op, spaces), analysis.end(op, where)]
        return Transfer(op, herd, *(ends if isinstance(op, ChannelPutOp) else reversed(ends)))


@dataclass(frozen=True)
class Buffer:
    """A buffer of L2, which is spread over `tiles` memory tiles, or of L1, which each core of a herd has of its own.

    `slots`: what passes through it from DDR (`way` is `in`) or to there (`out`); nothing, if it stays in the array.
    """

    memory: str
    way: str
    slots: tuple[str, ...]
    bytes: int
    """Of one copy, on all its tiles."""
    copies: int
    tiles: int


def streams(segment: SegmentOp, where: str) -> dict[Operation, int]:
    """Over how many streams, one per memory tile, each transfer between DDR and L2 is spread."""
    counted = Segment(segment, where)
    return {each.op: counted.streams(each) for each in counted.transfers if not each.tiles}


class Segment:
    """Counts of one segment. Herds of one segment share the array.

    `ping_pong`: whether the compiler may double the L1 buffers that live in a loop.
    """

    def __init__(self, op: SegmentOp, where: str, ping_pong: bool = True) -> None:
        self.op, self.where, self.ping_pong = op, where, ping_pong
        self.herds = list(analysis.walk_ops(op, HerdOp))
        cascades, moves = analysis.cascades(op), list(analysis.moves(op))
        ends = [move for move in moves if isinstance(move, ChannelPutOp | ChannelGetOp)]
        self.cascades = [end for end in ends if analysis.is_one_of(end, cascades)]
        spaces = {(end.chan_name.string_value(), type(end)): memory_space(end.buffer.type) for end in ends}
        self.transfers = [Transfer.of(m, where, spaces) for m in moves if not analysis.is_one_of(m, cascades)]

    def uses(self) -> Iterator[Use]:
        """Of every limit, those of one tile several times."""
        for herd in self.herds:
            yield from self.herd_uses(herd)
        yield from self._l2_uses()
        yield from self._shim_uses()

    def buffers(self) -> Iterator[Buffer]:
        """Of L2, then of L1, in order."""
        held = {way: self._held(way) for way in ("in", "out")}
        for memory, space in (("L2", L2), ("L1", L1)):
            for found in analysis.allocations(self.op, space):
                way = next((way for way in held if held[way][found]), "")
                slots = tuple(sorted(held[way][found])) if way else ()
                size, tiles = analysis.buffer_bytes(found), self.l2_tiles.get(found, 1)
                yield Buffer(memory, way, slots, size, self.copies(found), tiles)

    def _held(self, way: str) -> dict[object, set[str]]:
        """Slots that come from DDR to each buffer and channel, or go there from it, whatever is between."""
        held: dict[object, set[str]] = defaultdict(set)
        steps = [(each.src, each.dst) if way == "in" else (each.dst, each.src) for each in self.transfers]
        for near, _ in steps:
            if isinstance(near, Side) and near.space == L3:
                held[near.key] = {str(analysis.root(near.value).name_hint)}
        for _ in steps:
            for near, far in steps:
                if far.space != L3:
                    held[far.key] |= held[near.key]
        return held

    # compute tiles

    def herd_uses(self, herd: HerdOp) -> Iterator[Use]:
        """Of a herd's shape, and of each of its tiles."""
        columns, rows = herd.shape()
        yield Use("herd columns", columns, limits.COLUMNS)
        yield Use("herd rows", rows, limits.ROWS)
        # Every allocation has its own place for as long as the herd runs.
        taken = sum(self.all_bytes(buffer) for buffer in analysis.allocations(herd, L1))
        yield Use("L1 bytes (with stack)", taken + limits.STACK_BYTES, limits.L1_BYTES)
        differ = any(True for _ in analysis.walk_ops(herd, scf.IfOp))
        for tile in analysis.tiles(herd) if differ else [(0, 0)]:
            yield from self._tile_uses(herd, tile)

    def _tile_uses(self, herd: HerdOp, tile: tuple[int, int]) -> Iterator[Use]:
        descriptors = 0
        far: dict[tuple[str, bool], set[object]] = defaultdict(set)
        for transfer in self.transfers:
            found = transfer.side(L1) if transfer.herd is herd and analysis.runs_on(transfer.op, *tile) else None
            if found is not None:
                descriptors += self.copies(analysis.root(found[0].value))
                other = transfer.dst if found[1] == "out" else transfer.src
                far[found[1], isinstance(other, Side) and other.space == L3].add(other.key)
        yield Use("compute tile descriptors", descriptors, limits.TILE_DESCRIPTORS)
        for way in ("in", "out"):
            # Streams of one shim take turns on a channel; those of memory tiles and of other cores cannot.
            used = len(far[way, False]) + min(len(far[way, True]), limits.TILE_CHANNELS)
            yield Use(f"compute tile DMA channels {way}", used, limits.TILE_CHANNELS)

    def copies(self, buffer: SSAValue) -> int:
        """2 for a buffer that lives in a loop, or that one fills from DDR: the compiler makes a ping-pong of it, and a
        third for an odd step."""
        loop = buffer.owner.parent_op() if isinstance(buffer.owner, Operation) else None
        if isinstance(loop, SegmentOp):
            filling = (t.op for t in self.transfers if t.fills and t.dst.key is buffer)
            loop = next((around for op in filling if (around := enclosing(op, scf.ForOp))), None)
        if not self.ping_pong or not isinstance(loop, scf.ForOp):
            return 1
        return 2 + analysis.trip_count(loop, self.where) % 2

    def all_bytes(self, buffer: SSAValue) -> int:
        """With its copies."""
        return analysis.buffer_bytes(buffer) * self.copies(buffer)

    # memory tiles

    def _l2_uses(self) -> Iterator[Use]:
        used = sum(map(self.all_bytes, analysis.allocations(self.op, L2)))
        yield Use("L2 bytes", used, limits.L2_BYTES * limits.COLUMNS)
        for buffer, tiles in self.l2_tiles.items():
            yield Use("bytes of one memory tile", self.all_bytes(buffer) // tiles, limits.L2_BYTES)
        for way, found in self.l2_streams.items():
            available = limits.MEMTILE_CHANNELS * limits.COLUMNS
            yield Use(f"memory tile DMA channels {way}", sum(found.values()), available)
        yield Use("memory tile descriptors", sum(self.l2_descriptors), limits.MEMTILE_DESCRIPTORS * limits.COLUMNS)

    @cached_property
    def l2_tiles(self) -> dict[SSAValue, int]:
        """Over how many memory tiles each buffer of L2 is spread."""
        tiles = dict.fromkeys(analysis.allocations(self.op, L2), limits.COLUMNS)
        for transfer in self.transfers:
            found = None if transfer.tiles else transfer.side(L2)
            if found is not None:
                buffer = analysis.root(found[0].value)
                tiles[buffer] = min(tiles[buffer], self.streams(transfer))
        return tiles

    @cached_property
    def l2_streams(self) -> Streams:
        """Of the memory tiles."""
        streams: Streams = {"in": {}, "out": {}}
        for transfer in self.transfers:
            if found := transfer.side(L2):
                streams[found[1]][transfer.stream()] = self.streams(transfer)
        return streams

    @property
    def l2_descriptors(self) -> list[int]:
        """Of the memory tiles: one for each stream of each transfer."""
        return [self.streams(transfer) for transfer in self.transfers if transfer.side(L2)]

    def one_part(self, transfer: Transfer, side: Side) -> Dims:
        """Folded dimensions of what one memory tile takes of a transfer."""
        spread = 1 if transfer.tiles else self.streams(transfer)
        return side.dims[1:] if spread > 1 and len(side.dims) > 1 and side.dims[0][0] == spread else side.dims

    def streams(self, transfer: Transfer) -> int:
        """Streams of a transfer: one per group of tiles that sees other data. L2 <-> DDR: one per memory tile that the
        buffer can be spread over, because the herd cuts it and the transfer names that dimension first."""
        if transfer.tiles:
            ends = [end for end in (transfer.src, transfer.dst) if isinstance(end, Side)]
            told = ends[0] if transfer.herd is None else transfer.far(L1)
            return math.prod(transfer.tiles[axis] for axis in told.axes())
        l2, ddr = transfer.far(L3), transfer.side(L3)
        if ddr is None:
            return 1
        cuts = self._cuts(l2.key)
        parts = cuts[min(cuts)] if cuts else 1
        named = next((size for size in ddr[0].sizes if size != 1), 1) == parts
        return parts if named else 1

    def _cuts(self, buffer: object) -> dict[int, int]:
        """Into how many parts tiles cut an L2 buffer, by the axis of the tiles."""
        cuts: dict[int, int] = {}
        for transfer in filter(lambda each: each.tiles, self.transfers):
            found = transfer.side(L2)
            if found is not None and found[0].key is buffer:
                cuts |= {axis: transfer.tiles[axis] for axis in found[0].axes()}
        return cuts

    # shims

    def _shim_uses(self) -> Iterator[Use]:
        for way, found in self.shim_streams.items():
            yield Use(f"shim DMA channels {way}", sum(found), limits.SHIM_CHANNELS * limits.COLUMNS)
        yield Use("shim descriptors", sum(self.shim_descriptors), limits.SHIM_DESCRIPTORS * limits.COLUMNS)
        tasks: dict[Stream, int] = defaultdict(int)
        staged: set[Stream] = set()
        for transfer in self.transfers:
            if found_side := transfer.side(L3):
                tasks[transfer.stream()] += self._tasks(transfer, found_side[0])
                staged |= set() if transfer.direct else {transfer.stream()}
        for stream, count in tasks.items():
            waiting = PING_PONG_TASKS if stream in staged else 0
            yield Use("queue entries of a shim channel per launch step", count, limits.QUEUE_DEPTH + waiting)

    @property
    def shim_streams(self) -> dict[str, list[int]]:
        """Of the shims, into the array and out of it. Streams between DDR and the same tiles can take turns on their
        shim channels; those of L2 cannot."""
        staged: Streams = {"in": {}, "out": {}}
        direct: Streams = {"in": {}, "out": {}}
        for transfer in self.transfers:
            if found := transfer.side(L3):
                kind = direct if transfer.direct else staged
                kind["in" if found[1] == "out" else "out"][transfer.stream()] = self.streams(transfer)
        return {way: [*staged[way].values(), *sorted(direct[way].values())[-limits.TILE_CHANNELS :]] for way in staged}

    @property
    def shim_descriptors(self) -> list[int]:
        """Of the shims, by transfer."""
        found = ((transfer, transfer.side(L3)) for transfer in self.transfers)
        return [self.streams(transfer) * self._pieces(transfer, side[0]) for transfer, side in found if side]

    def _pieces(self, transfer: Transfer, side: Side) -> int:
        """Descriptors for one execution: what is longer than a descriptor's dimensions is cut."""
        return math.prod(size for size, _ in self.one_part(transfer, side)[:-SHIM_DIMENSIONS])

    def _tasks(self, transfer: Transfer, side: Side) -> int:
        """Descriptors pushed per launch step: a loop folds into one as long as the descriptor has dimensions left."""
        free = SHIM_DIMENSIONS - len(self.one_part(transfer, side))
        pushed = self._pieces(transfer, side)
        parent = transfer.op.parent_op()
        while isinstance(parent, scf.ForOp):
            if free > 0:
                free -= 1
            else:
                pushed *= analysis.trip_count(parent, self.where)
            parent = parent.parent_op()
        return pushed
