"""Derives the work of a launch from its operations.

The program decides which transfers and calls wait for one another: those that share a buffer. Where the compiler makes
two of a buffer, it is filled while it is read (`occupancy.Segment.copies` says of which). A buffer of a launch step is
one. Steps of a launch grid that share descriptors are issued together, and the next ones wait for them. The cost of a
tile function's call is given by the tiling of its kernel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from xdsl.dialects import func, scf
from xdsl.ir import Block, Operation, SSAValue

from stages.air import analysis, limits
from stages.air.dialect import L2, ChannelPutOp, HerdOp, LaunchOp
from stages.air.occupancy import Segment
from stages.air.traffic import Traffic, count_launch
from stages.estimate.work import (
    CALL,
    CODE,
    CONFIGURATION,
    DDR,
    ELEMENTWISE,
    NOTHING,
    SCHEDULED,
    STEP,
    STREAM,
    Amount,
    Overlap,
    Repeat,
    Serial,
    Work,
    multiply,
)
from stages.kernels import Cost


def launch_work(
    launch: LaunchOp, costs: Mapping[str, Cost], shared_steps: Sequence[int], code_bytes: int | None = None
) -> tuple[Work, Traffic]:
    """Return the work of one launch and its DDR traffic.

    Args:
        costs: By tile function.
        shared_steps: How many steps of each dimension of the grid are issued together at most.
        code_bytes: The code that it loads into all its cores; None: not known.
    """
    return _Launch(launch, costs).work(shared_steps, code_bytes)


def call_work(cost: Cost) -> Work:
    """Return the work of one call of a tile function."""
    products = multiply(cost.macs, cost.mode) if cost.macs else NOTHING
    vectors = Amount(ELEMENTWISE, cost.vectors), Amount(SCHEDULED, cost.scheduled)
    return Serial(products, *vectors, Amount(CALL, 1))


class _Launch:
    def __init__(self, launch: LaunchOp, costs: Mapping[str, Cost]) -> None:
        self.launch, self.costs = launch, costs
        self.segment = analysis.segment_of(launch)
        self.name = analysis.name_of(self.segment, "launch")
        self.counts = Segment(self.segment, self.name)
        self.streams = self.counts.streams_of_ddr()
        self.cascades = analysis.cascades(launch)

    def work(self, shared_steps: Sequence[int], code_bytes: int | None) -> tuple[Work, Traffic]:
        traffic = count_launch(self.launch)
        cores = max((math.prod(herd.shape()) for herd in analysis.walk_ops(self.segment, HerdOp)), default=0)
        loading = Amount(CONFIGURATION, cores) if code_bytes is None else Amount(CODE, code_bytes / 1024)
        steps = Repeat(math.prod(self.launch.shape()), self._chained(list(self._parts(self.segment.body.block))))
        # The compiler cuts steps into the longest equal parts that are no longer than it is told.
        grid = zip(self.launch.shape(), shared_steps, strict=True)
        awaited = math.prod(size // limits.divisors(size, 1, most)[0] for size, most in grid) - 1
        moved = Overlap(Amount(DDR, traffic.bytes), steps)
        return Serial(loading, moved, Amount(STEP, awaited)), traffic

    @staticmethod
    def _chained(parts: Sequence[tuple[Operation, Work, set[SSAValue]]]) -> Work:
        """Return the work of one pass over single buffers.

        Parts that touch the same buffer run one after another, and a buffer is filled again only when all of them are
        done.
        """
        # A fixed order, so that the same limit is named when chains take equally long.
        buffers = list(dict.fromkeys(buffer for _, _, touched in parts for buffer in touched))
        chains = [Serial(*(work for _, work, touched in parts if buffer in touched)) for buffer in buffers]
        return Overlap(*chains, *(work for _, work, touched in parts if not touched))

    def _parts(self, block: Block) -> Iterator[tuple[Operation, Work, set[SSAValue]]]:
        """Yield what takes time in a block of a segment, in order: (operation, work, outer L2 buffers it touches)."""
        for op in block.ops:
            if isinstance(op, scf.ParallelOp):
                yield from self._parts(op.body.block)
            elif isinstance(op, analysis.Move | HerdOp | scf.ForOp):
                yield op, self._part(op), self._touched(op)

    def _part(self, op: Operation) -> Work:
        if isinstance(op, HerdOp):
            return self._core(op.body.block)
        if isinstance(op, scf.ForOp):
            return self._pipeline(analysis.trip_count(op, self.name), list(self._parts(op.body.block)))
        return Amount(STREAM, self._bytes(op) / self.streams.get(op, 1))

    def _pipeline(self, times: int, parts: Sequence[tuple[Operation, Work, set[SSAValue]]]) -> Work:
        """Return the work of passes over buffers.

        Of buffers that the compiler doubles, the first pass goes part by part, then all parts run at the same time. Of
        others each pass goes part by part.
        """
        buffers = {buffer for _, _, touched in parts for buffer in touched}
        if buffers and not any(self.counts.copies(buffer) > 1 for buffer in buffers):
            return Repeat(times, self._chained(parts))
        return Serial(self._chained(parts), Repeat(times - 1, Overlap(*(work for _, work, _ in parts))))

    def _touched(self, op: Operation) -> set[SSAValue]:
        inside = {result for inner in op.walk() for result in inner.results}
        ends = [side for move in analysis.moves(op) for side in self._sides(move)]
        return {buffer for side in ends if side.space == L2 and (buffer := analysis.root(side.value)) not in inside}

    def _core(self, block: Block) -> Work:
        """Return the work of a core's program, in whose loops transfers and computation overlap."""
        parts: list[Work] = []
        for op in block.ops:
            if isinstance(op, scf.ForOp):
                parts.append(self._loop(op))
            elif isinstance(op, analysis.Move):
                parts.append(self._moved(op))
            elif isinstance(op, func.CallOp):
                parts.append(call_work(self._cost(op)))
        conditional = [op for op in block.ops if isinstance(op, scf.IfOp)]
        return Serial(*parts, *([self._handed_on(conditional)] if conditional else []))

    def _handed_on(self, conditional: Sequence[scf.IfOp]) -> Work:
        """Return the work that only some tiles do, each with the result of the previous tile, part by part.

        The first part passes through all tiles, the others follow in a pipeline.
        """
        herd = conditional[0].parent_op()
        assert isinstance(herd, HerdOp)
        tiles = analysis.tiles(herd)
        works = {op: self._core(op.true_region.block) for op in conditional}
        by_tile = [Serial(*(works[op] for op in conditional if analysis.holds_on(op, *tile))) for tile in tiles]
        moves = (move for op in conditional for move in analysis.walk_ops(op, ChannelPutOp))
        puts = [move for move in moves if analysis.is_one_of(move, self.cascades)]
        parts = max(sum(analysis.runs_on(put, *tile) for put in puts) for tile in tiles) or 1
        return Serial(Repeat(1 / parts, Serial(*by_tile)), Repeat(1 - 1 / parts, Overlap(*by_tile)))

    def _moved(self, op: analysis.Move) -> Work:
        """Return the work of a transfer, by the core's DMA or by the core itself through the cascade.

        The cascade takes a load or store and a cascade step for each vector.
        """
        if analysis.is_one_of(op, self.cascades):
            return Amount(ELEMENTWISE, 2 * self._bytes(op) // limits.ALIGNMENT_BYTES)
        return Amount(STREAM, self._bytes(op))

    def _loop(self, op: scf.ForOp) -> Work:
        block, times = op.body.block, analysis.trip_count(op, self.name)
        if any(isinstance(inner, scf.ForOp) for inner in block.ops):
            return Repeat(times, self._core(block))
        moves = [Amount(STREAM, self._bytes(inner)) for inner in block.ops if isinstance(inner, analysis.Move)]
        costs = [self._cost(inner) for inner in block.ops if isinstance(inner, func.CallOp)]
        share = min(1.0, *(cost.share for cost in costs))
        active = Overlap(Serial(*map(call_work, costs)), *moves)
        return Serial(Repeat(times * share, active), Repeat(times * (1 - share), Overlap(*moves)))

    def _cost(self, op: func.CallOp) -> Cost:
        symbol = op.callee.string_value()
        functions = [function for function in self.costs if symbol.startswith(f"{function}_")]
        if not functions:
            raise TypeError(f"{self.name}: no tiling says what {symbol} costs")
        return self.costs[max(functions, key=len)]

    def _sides(self, op: Operation) -> tuple[analysis.Side, ...]:
        assert isinstance(op, analysis.Move)
        return tuple(side for side, _ in analysis.ends(op, self.name))

    def _bytes(self, op: Operation) -> int:
        return self._sides(op)[0].bytes
