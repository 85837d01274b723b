"""What the hardware would refuse in an AIR module, found without running it.

Knows the IR and the limits, not the builders: everything is counted from the operations. The counts are necessary
conditions; placement by the real compiler may need more, never less.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from xdsl.dialects import scf
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation, SSAValue

from llama_npu2.errors import UserError
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
    constant_of,
    enclosing,
)

Stream = tuple[object, object]

SHIM_DIMENSIONS = 4
MEMTILE_DIMENSIONS = 4
TILE_DIMENSIONS = 3
PING_PONG_TASKS = 2
"""Tasks that wait in an L2 ping-pong on top of a shim channel's queue."""


def check(module: ModuleOp, ping_pong: bool = True) -> None:
    """Refuse what breaks a limit, in one line that names launch, limit and count.

    `ping_pong`: whether the compiler may double the L1 buffers that live in a loop.
    """
    name = analysis.public_function(module).sym_name.data
    for position, launch in enumerate(analysis.launches(module)):
        segments = [op for op in launch.body.block.ops if isinstance(op, SegmentOp)]
        where = f"{name} launch {position}"
        if len(segments) != 1:
            raise UserError(f"{where}: has {len(segments)} segments; a launch of several needs exactly one")
        _Segment(segments[0], f"{where} ({analysis.name_of(segments[0], 'segment')})", ping_pong).check()


def streams(segment: SegmentOp, where: str) -> dict[Operation, int]:
    """Over how many streams, one per memory tile, each transfer between DDR and L2 is spread."""
    counted = _Segment(segment, where, ping_pong=True)
    return {each.op: counted.streams(each) for each in counted.transfers if each.herd is None}


def _check_words(side: Side, where: str) -> None:
    """DMA moves 32-bit words: a smaller element has no address of its own."""
    size, kind = analysis.element_bytes(side.kind), side.kind.element_type
    if size % limits.GRANULARITY_BYTES == 0:
        return
    length, stride = side.dims[-1]
    if stride != 1:
        raise UserError(f"{where}: innermost stride {stride} of {kind}; DMA cannot take single {kind} apart")
    for what, number in (("run", length), *(("stride", stride) for _, stride in side.dims[:-1])):
        if number * size % limits.GRANULARITY_BYTES:
            raise UserError(
                f"{where}: {what} of {number * size} bytes is not a multiple of {limits.GRANULARITY_BYTES} bytes"
            )


@dataclass(frozen=True)
class _Transfer:
    """A DMA, or one end of a channel with the channel as its other side."""

    op: Operation
    herd: HerdOp | None
    dst: Side | Fifo
    src: Side | Fifo

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
        """Transfers between the same two ends take turns on one stream."""
        return self.dst.key, self.src.key

    @staticmethod
    def of(op: Operation, herd: HerdOp | None, where: str) -> _Transfer:
        if isinstance(op, DmaMemcpyNdOp):
            return _Transfer(op, herd, *analysis.sides(op, where))
        assert isinstance(op, ChannelPutOp | ChannelGetOp)
        name = op.chan_name.string_value()
        if isinstance(op, ChannelPutOp):
            return _Transfer(op, herd, Fifo(name, L1), analysis.end(op, where))
        return _Transfer(op, herd, analysis.end(op, where), Fifo(name, L2))


class _Segment:
    """Counts of one segment. Herds of one segment share the array."""

    def __init__(self, op: SegmentOp, where: str, ping_pong: bool) -> None:
        self.op, self.where, self.ping_pong = op, where, ping_pong
        self.herds = list(analysis.walk_ops(op, HerdOp))
        self.transfers = [
            _Transfer.of(moving, enclosing(moving, HerdOp), where)
            for moving in analysis.walk_ops(op, DmaMemcpyNdOp, ChannelPutOp, ChannelGetOp)
        ]

    def check(self) -> None:
        for transfer in self.transfers:
            for side in transfer.buffers:
                _check_words(side, self.where)
                self._check_dimensions(transfer, side)
                self._check_cut(transfer, side)
            self._check_race(transfer)
        for herd in self.herds:
            self._check_herd(herd)
        self._check_l2()
        self._check_shim()

    def _require(self, limit: str, used: int, available: int) -> None:
        limits.require(self.where, limit, used, available)

    def _check_dimensions(self, transfer: _Transfer, side: Side) -> None:
        if side.space == L3:
            return  # the compiler cuts what is longer into several descriptors
        most, memory = (MEMTILE_DIMENSIONS, "L2") if side.space == L2 else (TILE_DIMENSIONS, "L1")
        dims = self._one_part(transfer, side)
        self._require(f"DMA dimensions on the {memory} side", len(dims), most)
        if len(dims) > 1:
            what = f"steps in one DMA dimension on the {memory} side"
            self._require(what, max(size for size, _ in dims), limits.WRAP)

    def _check_cut(self, transfer: _Transfer, side: Side) -> None:
        """The compiler cuts what goes between DDR and several memory tiles. It tells dimensions by their strides, and
        those of one element have their neighbour's: each part then moves all of it, in silence (mlir-air,
        `air-split-l2-memref`)."""
        if transfer.herd is not None or transfer.side(L3) is None or self.streams(transfer) == 1:
            return
        named = zip(side.sizes, side.offsets, strict=False)
        idle = [size for size, offset in named if size == 1 and constant_of(offset) == 0]
        if idle or (side.space == L2 and 1 in side.kind.get_shape()):
            raise UserError(
                f"{self.where}: a dimension of one element between DDR and L2, which the compiler takes for another"
            )

    def _one_part(self, transfer: _Transfer, side: Side) -> Dims:
        """Folded dimensions of what one memory tile takes of a transfer."""
        spread = self.streams(transfer) if transfer.herd is None else 1
        return side.dims[1:] if spread > 1 and len(side.dims) > 1 and side.dims[0][0] == spread else side.dims

    def _check_race(self, transfer: _Transfer) -> None:
        if transfer.herd is None or transfer.dst.space == L1:
            return
        missing = {axis for axis, size in enumerate(transfer.herd.shape()) if size > 1} - transfer.dst.axes()
        if missing:
            axis = "column" if 0 in missing else "row"
            raise UserError(f"{self.where}: tiles that differ only in their {axis} write the same bytes")

    def _check_herd(self, herd: HerdOp) -> None:
        columns, rows = herd.shape()
        self._require("herd columns", columns, limits.COLUMNS)
        self._require("herd rows", rows, limits.ROWS)
        self._require("L1 bytes (with stack)", self._l1_bytes(herd) + limits.STACK_BYTES, limits.L1_BYTES)
        self._check_turns(herd)
        descriptors = 0
        far: dict[tuple[str, int], set[object]] = defaultdict(set)
        for transfer in self.transfers:
            found = transfer.side(L1) if transfer.herd is herd else None
            if found is not None:
                descriptors += self._copies(analysis.root(found[0].value))
                other = transfer.far(L1)
                far[found[1], other.space].add(other.key)
        self._require("compute tile descriptors", descriptors, limits.TILE_DESCRIPTORS)
        for way in ("in", "out"):
            # Streams of one shim take turns on a channel; those of memory tiles cannot.
            used = len(far[way, L2]) + min(len(far[way, L3]), limits.TILE_CHANNELS)
            self._require(f"compute tile DMA channels {way}", used, limits.TILE_CHANNELS)

    def _check_turns(self, herd: HerdOp) -> None:
        """Buffers of a loop come round in the order in which the core uses them: see `limits.in_turn`."""
        for buffer in analysis.allocations(herd, L1) if self.ping_pong else ():
            loop = buffer.owner.parent_op() if isinstance(buffer.owner, Operation) else None
            steps = analysis.trip_count(loop, self.where) if isinstance(loop, scf.ForOp) else 1
            if not limits.in_turn(steps):
                raise UserError(f"{self.where}: in {steps} steps a core takes its 3 buffers in another order than DMA")

    def _copies(self, buffer: SSAValue) -> int:
        """2 for a buffer that lives in a loop: the compiler makes a ping-pong of it, and a third for an odd step."""
        loop = buffer.owner.parent_op() if isinstance(buffer.owner, Operation) else None
        if not self.ping_pong or not isinstance(loop, scf.ForOp):
            return 1
        return 2 + analysis.trip_count(loop, self.where) % 2

    def _l1_bytes(self, herd: HerdOp) -> int:
        """Every allocation has its own place for as long as the herd runs."""
        return sum(self._all_bytes(buffer) for buffer in analysis.allocations(herd, L1))

    def _all_bytes(self, buffer: SSAValue) -> int:
        return analysis.buffer_bytes(buffer) * self._copies(buffer)

    def _check_l2(self) -> None:
        used = sum(map(self._all_bytes, analysis.allocations(self.op, L2)))
        self._require("L2 bytes", used, limits.L2_BYTES * limits.COLUMNS)
        streams: dict[str, dict[Stream, int]] = {"in": {}, "out": {}}
        moved: dict[object, dict[str, int]] = defaultdict(lambda: {"in": 0, "out": 0})
        descriptors = 0
        for transfer in self.transfers:
            found = transfer.side(L2)
            if found is None:
                continue
            times = analysis.executions(transfer.op, self.where) * (self.streams(transfer) if transfer.herd else 1)
            moved[found[0].key][found[1]] += found[0].bytes * times
            if transfer.herd is None:
                part = self._all_bytes(analysis.root(found[0].value)) // self.streams(transfer)
                self._require("bytes of one memory tile", part, limits.L2_BYTES)
            streams[found[1]][transfer.stream()] = self.streams(transfer)
            descriptors += self.streams(transfer)
        for way, found_streams in streams.items():
            available = limits.MEMTILE_CHANNELS * limits.COLUMNS
            self._require(f"memory tile DMA channels {way}", sum(found_streams.values()), available)
        self._require("memory tile descriptors", descriptors, limits.MEMTILE_DESCRIPTORS * limits.COLUMNS)
        for buffer, ways in moved.items():
            if ways["out"] > ways["in"] > 0 and self._taken_in_a_loop(buffer):
                self._require("bytes out of a buffer of L2, which sends what it is given once", ways["out"], ways["in"])

    def _taken_in_a_loop(self, buffer: object) -> bool:
        """Whether a loop of the segment that does not hold the buffer takes from it. The compiler's locks count who
        takes a buffer and not how often, so that who takes it again waits for ever."""
        assert isinstance(buffer, SSAValue) and isinstance(buffer.owner, Operation)
        taking = [t for t in self.transfers if (found := t.side(L2)) and found[1] == "out" and found[0].key is buffer]
        loops = (enclosing(transfer.herd or transfer.op, scf.ForOp) for transfer in taking)
        return any(loop is not None and not loop.is_ancestor(buffer.owner) for loop in loops)

    def streams(self, transfer: _Transfer) -> int:
        """Streams of a transfer: one per group of tiles that sees other data. L2 <-> DDR: one per memory tile that the
        buffer can be spread over, because the herd cuts it and the transfer names that dimension first."""
        if transfer.herd is not None:
            shape = transfer.herd.shape()
            return math.prod(shape[axis] for axis in transfer.far(L1).axes())
        l2, ddr = transfer.far(L3), transfer.side(L3)
        if ddr is None:
            return 1
        cuts = {axis: herd.shape()[axis] for herd in self.herds for axis in self._herd_axes(herd, l2.key)}
        parts = cuts[min(cuts)] if cuts else 1
        named = next((size for size in ddr[0].sizes if size != 1), 1) == parts
        return parts if named else 1

    def _herd_axes(self, herd: HerdOp, buffer: object) -> frozenset[int]:
        """Tile axes by which a herd cuts an L2 buffer into parts."""
        cuts: frozenset[int] = frozenset()
        for transfer in self.transfers:
            found = transfer.side(L2) if transfer.herd is herd else None
            if found is not None and found[0].key is buffer:
                cuts |= found[0].axes()
        return cuts

    def _check_shim(self) -> None:
        """Streams between DDR and the same tiles can take turns on their shim channels; those of L2 cannot."""
        staged: dict[str, dict[Stream, int]] = {"in": {}, "out": {}}
        direct: dict[str, dict[Stream, int]] = {"in": {}, "out": {}}
        tasks: dict[Stream, int] = defaultdict(int)
        descriptors = 0
        for transfer in self.transfers:
            found = transfer.side(L3)
            if found is None:
                continue
            self._check_loops(transfer)
            kind = direct if transfer.herd is not None else staged
            kind["in" if found[1] == "out" else "out"][transfer.stream()] = self.streams(transfer)
            tasks[transfer.stream()] += self._tasks(transfer, found[0])
            descriptors += self.streams(transfer) * self._pieces(transfer, found[0])
        for way in ("in", "out"):
            most = sorted(direct[way].values())[-limits.TILE_CHANNELS :]
            used = sum(staged[way].values()) + sum(most)
            self._require(f"shim DMA channels {way}", used, limits.SHIM_CHANNELS * limits.COLUMNS)
        self._require("shim descriptors", descriptors, limits.SHIM_DESCRIPTORS * limits.COLUMNS)
        for stream, count in tasks.items():
            waiting = PING_PONG_TASKS if any(stream in kind for kind in staged.values()) else 0
            self._require("queue entries of a shim channel per launch step", count, limits.QUEUE_DEPTH + waiting)

    def _check_loops(self, transfer: _Transfer) -> None:
        """The compiler folds the loops around a transfer of DDR into descriptors, in pieces."""
        parent = transfer.op.parent_op()
        while parent is not None:
            if isinstance(parent, scf.ForOp) and not limits.cuttable(steps := analysis.trip_count(parent, self.where)):
                raise UserError(
                    f"{self.where}: a loop of {steps} steps around a DMA, which has no divisor below "
                    f"{limits.ITERATIONS} to be cut by"
                )
            parent = parent.parent_op()

    def _pieces(self, transfer: _Transfer, side: Side) -> int:
        """Descriptors for one execution: what is longer than a descriptor's dimensions is cut."""
        return math.prod(size for size, _ in self._one_part(transfer, side)[:-SHIM_DIMENSIONS])

    def _tasks(self, transfer: _Transfer, side: Side) -> int:
        """Descriptors pushed per launch step: a loop folds into one as long as the descriptor has dimensions left."""
        free = SHIM_DIMENSIONS - len(self._one_part(transfer, side))
        pushed = self._pieces(transfer, side)
        parent = transfer.op.parent_op()
        while isinstance(parent, scf.ForOp):
            if free > 0:
                free -= 1
            else:
                pushed *= analysis.trip_count(parent, self.where)
            parent = parent.parent_op()
        return pushed
