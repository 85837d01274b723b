"""Checks an AIR module for what the hardware would refuse, without running it.

This module knows the IR and the limits, not the builders: everything is counted from the operations. The counts are
necessary conditions; placement by the real compiler may need more, never less.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from xdsl.dialects import scf
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation, SSAValue

from llama_npu2.errors import UserError
from stages.air import analysis, limits
from stages.air.analysis import Fifo, Side
from stages.air.dialect import L1, L2, L3, HerdOp, SegmentOp, constant_of, enclosing, parents
from stages.air.occupancy import Segment, Transfer, Use

MEMTILE_DIMENSIONS = 4
TILE_DIMENSIONS = 3


def check(module: ModuleOp) -> None:
    """Raise UserError if a limit is broken, in one line that names launch, limit and count."""
    name = analysis.public_function(module).sym_name.data
    for position, launch in enumerate(analysis.launches(module)):
        segments = [op for op in launch.body.block.ops if isinstance(op, SegmentOp)]
        where = f"{name} launch {position}"
        if len(segments) != 1:
            raise UserError(f"{where}: has {len(segments)} segments; a launch of several needs exactly one")
        _Checked(segments[0], f"{where} ({analysis.name_of(segments[0], 'segment')})").check()


def _check_words(side: Side, where: str) -> None:
    """Refuse single smaller elements: DMA moves words of 32 bits."""
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


class _Checked(Segment):
    """A segment that is checked."""

    def check(self) -> None:
        """Raise UserError for whatever the hardware would refuse."""
        for transfer in self.transfers:
            for side in transfer.buffers:
                _check_words(side, self.where)
                self._check_dimensions(transfer, side)
                self._check_cut(transfer, side)
            self._check_race(transfer)
            self._check_loops(transfer)
        for end in self.cascades:
            self._check_cascade(analysis.end(end, self.where))
        for use in self.uses():
            self._require(use)
        for herd in self.herds:
            self._check_turns(herd)
        self._check_sent_once()
        self._check_memory_tiles()

    def _require(self, use: Use) -> None:
        limits.require(self.where, use.limit, use.used, use.available)

    def _check_cascade(self, side: Side) -> None:
        """Refuse parts of buffers between cores: the compiler cuts a buffer itself."""
        if side.offsets or side.bytes % limits.ALIGNMENT_BYTES:
            raise UserError(f"{self.where}: a cascade takes whole buffers of {limits.ALIGNMENT_BYTES} bytes each time")

    def _check_dimensions(self, transfer: Transfer, side: Side) -> None:
        if side.space == L3:
            return  # the compiler cuts longer ones into several descriptors
        most, memory = (MEMTILE_DIMENSIONS, "L2") if side.space == L2 else (TILE_DIMENSIONS, "L1")
        dims = self.one_part(transfer, side)
        self._require(Use(f"DMA dimensions on the {memory} side", len(dims), most))
        if len(dims) > 1:
            what = f"steps in one DMA dimension on the {memory} side"
            self._require(Use(what, max(size for size, _ in dims), limits.WRAP))

    def _check_cut(self, transfer: Transfer, side: Side) -> None:
        """Refuse dimensions of one element where the compiler cuts a transfer between DDR and several memory tiles.

        It tells dimensions by their strides, and a dimension of one element has its neighbour's: each part then moves
        all of the transfer, in silence (mlir-air, `air-split-l2-memref`).
        """
        if transfer.herd is not None or transfer.side(L3) is None or self.streams(transfer) == 1:
            return
        dimensions = zip(side.sizes, side.offsets, strict=False)
        idle = [size for size, offset in dimensions if size == 1 and constant_of(offset) == 0]
        if idle or (side.space == L2 and 1 in side.kind.get_shape()):
            raise UserError(
                f"{self.where}: a dimension of one element between DDR and L2, which the compiler takes for another"
            )

    def _check_race(self, transfer: Transfer) -> None:
        """Refuse tiles that write the same bytes."""
        if transfer.herd is None or transfer.dst.space == L1:
            return
        places = zip(*analysis.tiles_of(transfer.op, transfer.herd), strict=True)
        missing = {axis for axis, place in enumerate(places) if len({*place}) > 1} - transfer.dst.axes()
        if missing:
            axis = "column" if 0 in missing else "row"
            raise UserError(f"{self.where}: tiles that differ only in their {axis} write the same bytes")

    def _check_turns(self, herd: HerdOp) -> None:
        """Refuse loops in which DMA goes through the buffers in another order than the core: see `limits.in_turn`."""
        for buffer in analysis.allocations(herd, L1):
            loop = buffer.owner.parent_op() if isinstance(buffer.owner, Operation) else None
            steps = analysis.trip_count(loop, self.where) if isinstance(loop, scf.ForOp) else 1
            if not limits.in_turn(steps):
                raise UserError(f"{self.where}: in {steps} steps a core takes its 3 buffers in another order than DMA")

    def _check_sent_once(self) -> None:
        """Refuse buffers of L2 that send more than they receive, in a loop."""
        moved: dict[object, dict[str, int]] = defaultdict(lambda: {"in": 0, "out": 0})
        for transfer in self.transfers:
            if end := transfer.side(L2):
                side, way = end
                times = analysis.executions(transfer.op, self.where) * (self.streams(transfer) if transfer.herd else 1)
                moved[side.key][way] += side.bytes * times
        for buffer, ways in moved.items():
            if ways["out"] > ways["in"] > 0 and self._is_read_in_a_loop(buffer):
                what = "bytes out of a buffer of L2, which sends what it is given once"
                self._require(Use(what, ways["out"], ways["in"]))

    def _is_read_in_a_loop(self, buffer: object) -> bool:
        """Return whether a loop of the segment that does not contain the buffer reads it.

        The compiler's locks count who reads a buffer, and not how often, so a second read waits for ever.
        """
        assert isinstance(buffer, SSAValue) and isinstance(buffer.owner, Operation)
        reads = (t for t in self.transfers if (end := t.side(L2)) and end[1] == "out" and end[0].key is buffer)
        loops = (enclosing(transfer.herd or transfer.op, scf.ForOp) for transfer in reads)
        return any(loop is not None and not loop.is_ancestor(buffer.owner) for loop in loops)

    def _check_memory_tiles(self) -> None:
        """Refuse buffers of L2 whose channels the compiler would divide, and channels that it would give two ends.

        A channel ends in one memory tile. The compiler goes through the buffers in order and puts each beside the first
        that shares a channel with it (mlir-air, `air-to-aie`), so one that joins the channels of two earlier buffers
        comes too late: of a channel with ends in two memory tiles, all but one are left out, in silence. A buffer that
        comes as one and leaves in parts, on several channels, ends it abnormally (`air-split-l2-memref`). Both are of
        2026-05-08.
        """
        channels: dict[SSAValue, dict[str, dict[str, Side]]] = {
            buffer: {"in": {}, "out": {}} for buffer in analysis.allocations(self.op, L2)
        }
        for transfer in self.transfers:
            end, channel = transfer.side(L2), transfer.far(L2)
            if end and isinstance(channel, Fifo) and not transfer.tiles:
                side, way = end
                channels[analysis.root(side.value)][way][channel.key] = side
        tiles: list[set[str]] = []
        for ways in channels.values():
            if len(ways["in"]) == 1 < len(ways["out"]) and any(side.offsets for side in ways["out"].values()):
                raise UserError(f"{self.where}: parts of a buffer of L2 leave on {len(ways['out'])} channels")
            own = {*ways["in"], *ways["out"]}
            first = next((tile for tile in tiles if tile & own), None)
            if first is None:
                tiles.append(own)
            else:
                first |= own
        ends = Counter(channel for tile in tiles for channel in tile)
        for name, memory_tiles in ends.items():
            self._require(Use(f"memory tiles with ends of channel {name}", memory_tiles, 1))

    def _check_loops(self, transfer: Transfer) -> None:
        """Refuse loops around a transfer of DDR that the compiler cannot cut into descriptors."""
        if transfer.side(L3) is None:
            return
        for parent in parents(transfer.op):
            if isinstance(parent, scf.ForOp) and not limits.cuttable(steps := analysis.trip_count(parent, self.where)):
                raise UserError(
                    f"{self.where}: a loop of {steps} steps around a DMA, which has no divisor below "
                    f"{limits.ITERATIONS} to be cut by"
                )
