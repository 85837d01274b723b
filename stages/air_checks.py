"""What the hardware would refuse in an AIR module, found without running it.

Knows the IR and the limits, not the builders: everything is counted from the operations. The counts are necessary
conditions; placement by the real compiler may need more, never less.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from xdsl.dialects import func, memref, scf
from xdsl.dialects.builtin import BFloat16Type, MemRefType, ModuleOp
from xdsl.ir import BlockArgument, Operation, SSAValue

from runtime.errors import UserError
from stages.air import limits
from stages.air.dialect import (
    L1,
    L2,
    L3,
    ChannelGetOp,
    ChannelPutOp,
    DmaMemcpyNdOp,
    HerdOp,
    LaunchOp,
    SegmentOp,
    constant_of,
    memory_space,
)

Stream = tuple[object, object]

SHIM_DIMENSIONS = 4
MEMTILE_DIMENSIONS = 4
TILE_DIMENSIONS = 3
PING_PONG_TASKS = 2
"""Tasks that wait in an L2 ping-pong on top of a shim channel's queue."""


def element_bytes(kind: MemRefType) -> int:
    return 2 if isinstance(kind.element_type, BFloat16Type) else 4


def buffer_bytes(value: SSAValue) -> int:
    kind = value.type
    assert isinstance(kind, MemRefType)
    return math.prod(kind.get_shape()) * element_bytes(kind)


def root(value: SSAValue) -> SSAValue:
    """The allocation or function argument behind a buffer that was handed into launches, segments and herds."""
    while isinstance(value, BlockArgument):
        parent = value.block.parent_op()
        if not isinstance(parent, LaunchOp | SegmentOp | HerdOp):
            return value
        value = parent.args[parent.body_args.index(value)]
    return value


def tile_axes(value: SSAValue) -> frozenset[int]:
    """Which tile coordinates (0 column, 1 row) of the enclosing herd a value depends on."""
    if isinstance(value, BlockArgument):
        parent = value.block.parent_op()
        if isinstance(parent, HerdOp):
            return frozenset(axis for axis, tile in enumerate(parent.ids) if tile is value)
        return frozenset()
    assert isinstance(value.owner, Operation)
    return frozenset().union(*(tile_axes(operand) for operand in value.owner.operands))


@dataclass(frozen=True)
class Side:
    """One side of a DMA, outermost dimension first, in elements.

    `sizes`, `strides`: as written; `dims`: (size, stride) after folding, ones dropped.
    """

    value: SSAValue
    offsets: tuple[SSAValue, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dims: tuple[tuple[int, int], ...]

    @property
    def kind(self) -> MemRefType:
        assert isinstance(self.value.type, MemRefType)
        return self.value.type

    @property
    def space(self) -> int:
        return memory_space(self.kind)

    @property
    def run(self) -> int:
        """Bytes that lie together."""
        size, stride = self.dims[-1] if self.dims else (1, 1)
        return element_bytes(self.kind) * (size if stride == 1 else 1)

    @property
    def key(self) -> object:
        """What other transfers share with this end."""
        return root(self.value)

    def axes(self) -> frozenset[int]:
        return frozenset().union(*(tile_axes(offset) for offset in self.offsets))

    @staticmethod
    def of(where: str, value: SSAValue, offsets: object, sizes: object, strides: object) -> Side:
        lists = [[constant_of(v) for v in part] for part in (sizes, strides)]  # type: ignore[attr-defined]
        if None in lists[0] or None in lists[1]:
            raise UserError(f"{where}: DMA sizes and strides must be constants")
        kind = value.type
        assert isinstance(kind, MemRefType)
        if not lists[0]:
            shape = tuple(kind.get_shape())
            return Side(value, (), shape, (), ((math.prod(shape), 1),))
        dims = tuple(zip(lists[0], lists[1], strict=True))
        return Side(value, tuple(offsets), tuple(lists[0]), tuple(lists[1]), _fold(dims))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Fifo:
    """The end of a transfer that is a channel; `space` is the memory behind it."""

    key: str
    space: int

    def axes(self) -> frozenset[int]:
        return frozenset()


def _fold(dims: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """Drop dimensions of one element and join those that continue each other."""
    folded: list[tuple[int, int]] = []
    for size, stride in (d for d in dims if d[0] != 1):
        if folded and folded[-1][1] == size * stride:
            folded[-1] = (folded[-1][0] * size, stride)
        else:
            folded.append((size, stride))
    return tuple(folded) or ((1, 1),)


def sides(op: DmaMemcpyNdOp, where: str) -> tuple[Side, Side]:
    """Destination and source."""
    return (
        Side.of(where, op.dst, op.dst_offsets, op.dst_sizes, op.dst_strides),
        Side.of(where, op.src, op.src_offsets, op.src_sizes, op.src_strides),
    )


def end(op: ChannelPutOp | ChannelGetOp, where: str) -> Side:
    """The buffer at a channel."""
    return Side.of(where, op.buffer, op.offsets, op.sizes, op.strides)


def check_words(side: Side, where: str) -> None:
    """DMA moves 32-bit words: a bf16 has no address of its own."""
    size = element_bytes(side.kind)
    if size % limits.GRANULARITY_BYTES == 0:
        return
    if side.dims[-1][1] != 1:
        raise UserError(f"{where}: innermost stride {side.dims[-1][1]} of bf16; DMA cannot take single bf16 apart")
    strides = [stride for _, stride in side.dims[:-1]]
    for what, number in (("run", side.dims[-1][0]), *(("stride", stride) for stride in strides)):
        if number * size % limits.GRANULARITY_BYTES:
            raise UserError(f"{where}: {what} of {number * size} bytes is not a multiple of 4 bytes")


def name_of(op: Operation, fallback: str) -> str:
    name = getattr(op, "sym_name", None)
    return fallback if name is None else name.data


def public_function(module: ModuleOp) -> func.FuncOp:
    found = [op for op in module.body.block.ops if isinstance(op, func.FuncOp) and not op.is_declaration]
    if len(found) != 1:
        raise UserError(f"the module has {len(found)} functions with a body; one ELF has one")
    return found[0]


def launches(module: ModuleOp) -> list[LaunchOp]:
    return [op for op in public_function(module).body.block.ops if isinstance(op, LaunchOp)]


def walk_ops(op: Operation, *kinds: type) -> Iterator[Operation]:
    return (inner for inner in op.walk() if isinstance(inner, kinds))


def check(module: ModuleOp, ping_pong: bool = True) -> None:
    """Refuse what breaks a limit, in one line that names launch, limit and count.

    `ping_pong`: whether the compiler may double the L1 buffers that live in a loop.
    """
    name = public_function(module).sym_name.data
    for position, launch in enumerate(launches(module)):
        segments = [op for op in launch.body.block.ops if isinstance(op, SegmentOp)]
        where = f"{name} launch {position}"
        if len(segments) != 1:
            raise UserError(f"{where}: has {len(segments)} segments; a launch of several needs exactly one")
        _Segment(segments[0], f"{where} ({name_of(segments[0], 'segment')})", ping_pong).check()


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
            return _Transfer(op, herd, *sides(op, where))
        assert isinstance(op, ChannelPutOp | ChannelGetOp)
        name = op.chan_name.string_value()
        if isinstance(op, ChannelPutOp):
            return _Transfer(op, herd, Fifo(name, L1), end(op, where))
        return _Transfer(op, herd, end(op, where), Fifo(name, L2))


class _Segment:
    """Counts of one segment. Herds of one segment share the array."""

    def __init__(self, op: SegmentOp, where: str, ping_pong: bool) -> None:
        self.op, self.where, self.ping_pong = op, where, ping_pong
        self.herds = [h for h in walk_ops(op, HerdOp) if isinstance(h, HerdOp)]
        self.transfers = [
            _Transfer.of(moving, next((h for h in self.herds if h.is_ancestor(moving)), None), where)
            for moving in walk_ops(op, DmaMemcpyNdOp, ChannelPutOp, ChannelGetOp)
        ]

    def check(self) -> None:
        for transfer in self.transfers:
            for side in transfer.buffers:
                check_words(side, self.where)
                self._check_dimensions(transfer, side)
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
        # The outermost size is no field of a descriptor; the innermost counts words.
        words = element_bytes(side.kind) / limits.GRANULARITY_BYTES
        inner = [*(size for size, _ in dims[1:-1]), *(int(size * words) for size, _ in dims[1:][-1:])]
        self._require(f"steps in one DMA dimension on the {memory} side", max(inner, default=0), limits.WRAP)

    def _one_part(self, transfer: _Transfer, side: Side) -> tuple[tuple[int, int], ...]:
        """Folded dimensions of what one memory tile takes of a transfer."""
        spread = self._streams(transfer) if transfer.herd is None else 1
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
        descriptors = 0
        far: dict[tuple[str, int], set[object]] = defaultdict(set)
        for transfer in self.transfers:
            found = transfer.side(L1) if transfer.herd is herd else None
            if found is not None:
                descriptors += self._copies(root(found[0].value))
                other = transfer.far(L1)
                far[found[1], other.space].add(other.key)
        self._require("compute tile descriptors", descriptors, limits.TILE_DESCRIPTORS)
        for way in ("in", "out"):
            # Streams of one shim take turns on a channel; those of memory tiles cannot.
            used = len(far[way, L2]) + min(len(far[way, L3]), limits.TILE_CHANNELS)
            self._require(f"compute tile DMA channels {way}", used, limits.TILE_CHANNELS)

    def _copies(self, buffer: SSAValue) -> int:
        """2 for a buffer that lives in a loop: the compiler makes a ping-pong of it, and a third for an odd step."""
        loop = buffer.owner.parent_op() if isinstance(buffer.owner, Operation) else None
        if not self.ping_pong or not isinstance(loop, scf.ForOp):
            return 1
        return 2 + trip_count(loop, self.where) % 2

    def _l1_bytes(self, herd: HerdOp) -> int:
        """Every allocation has its own place for as long as the herd runs."""
        allocs = [a.results[0] for a in walk_ops(herd, memref.AllocOp)]
        return sum(self._all_bytes(a) for a in allocs if memory_space(a.type) == L1)

    def _all_bytes(self, buffer: SSAValue) -> int:
        return buffer_bytes(buffer) * self._copies(buffer)

    def _check_l2(self) -> None:
        allocs = [a.results[0] for a in walk_ops(self.op, memref.AllocOp) if memory_space(a.results[0].type) == L2]
        self._require("L2 bytes", sum(map(self._all_bytes, allocs)), limits.L2_BYTES * limits.COLUMNS)
        streams: dict[str, dict[Stream, int]] = {"in": {}, "out": {}}
        descriptors = 0
        for transfer in self.transfers:
            found = transfer.side(L2)
            if found is None:
                continue
            if transfer.herd is None:
                part = self._all_bytes(root(found[0].value)) // self._streams(transfer)
                self._require("bytes of one memory tile", part, limits.L2_BYTES)
            streams[found[1]][transfer.stream()] = self._streams(transfer)
            descriptors += self._streams(transfer)
        for way, found_streams in streams.items():
            available = limits.MEMTILE_CHANNELS * limits.COLUMNS
            self._require(f"memory tile DMA channels {way}", sum(found_streams.values()), available)
        self._require("memory tile descriptors", descriptors, limits.MEMTILE_DESCRIPTORS * limits.COLUMNS)

    def _streams(self, transfer: _Transfer) -> int:
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
            kind = direct if transfer.herd is not None else staged
            kind["in" if found[1] == "out" else "out"][transfer.stream()] = self._streams(transfer)
            tasks[transfer.stream()] += self._tasks(transfer, found[0])
            descriptors += self._streams(transfer) * self._pieces(transfer, found[0])
        for way in ("in", "out"):
            most = sorted(direct[way].values())[-limits.TILE_CHANNELS :]
            used = sum(staged[way].values()) + sum(most)
            self._require(f"shim DMA channels {way}", used, limits.SHIM_CHANNELS * limits.COLUMNS)
        self._require("shim descriptors", descriptors, limits.SHIM_DESCRIPTORS * limits.COLUMNS)
        for stream, count in tasks.items():
            waiting = PING_PONG_TASKS if any(stream in kind for kind in staged.values()) else 0
            self._require("queue entries of a shim channel per launch step", count, limits.QUEUE_DEPTH + waiting)

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
                pushed *= trip_count(parent, self.where)
            parent = parent.parent_op()
        return pushed


def trip_count(loop: scf.ForOp, where: str) -> int:
    bounds = [constant_of(v) for v in (loop.lb, loop.ub, loop.step)]
    if None in bounds:
        raise UserError(f"{where}: loop bounds must be constants")
    low, high, step = (b for b in bounds if b is not None)
    return max(0, -(-(high - low) // step))
