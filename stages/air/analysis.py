"""Facts about an AIR module, counted from its operations: loops, buffers, tiles, and the elements of transfers.

Checks, traffic and the simulator's lowering all use these facts, so that they cannot disagree.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import field

from xdsl.dialects import arith, func, memref, scf
from xdsl.dialects.builtin import FixedBitwidthType, MemRefType, ModuleOp
from xdsl.ir import BlockArgument, Operation, SSAValue

from llama_npu2.errors import UserError
from llama_npu2.frozen import frozen
from stages.air.dialect import (
    ChannelEnd,
    ChannelGetOp,
    ChannelOp,
    ChannelPutOp,
    DmaMemcpyNdOp,
    HerdOp,
    Hierarchy,
    LaunchOp,
    Op,
    SegmentOp,
    constant_of,
    enclosing,
    memory_space,
    parents,
)

Move = DmaMemcpyNdOp | ChannelEnd
"""A transfer, or one end of it."""

Dims = tuple[tuple[int, int], ...]
"""(size, stride) per dimension, outermost first, in elements."""


# modules


def public_function(module: ModuleOp) -> func.FuncOp:
    """Return the function with a body. UserError if there is not exactly one."""
    functions = [op for op in module.body.block.ops if isinstance(op, func.FuncOp) and not op.is_declaration]
    if len(functions) != 1:
        raise UserError(f"the module has {len(functions)} functions with a body; a program has one")
    return functions[0]


def launches(module: ModuleOp) -> list[LaunchOp]:
    return [op for op in public_function(module).body.block.ops if isinstance(op, LaunchOp)]


def segment_of(launch: LaunchOp) -> SegmentOp:
    """Return the segment of a launch that has one."""
    return next(op for op in launch.body.block.ops if isinstance(op, SegmentOp))


def walk_ops(op: Operation, *kinds: type[Op]) -> Iterator[Op]:
    return (inner for inner in op.walk() if isinstance(inner, kinds))


def moves(op: Operation) -> Iterator[Move]:
    return (inner for inner in op.walk() if isinstance(inner, Move))


def cascades(op: Operation) -> set[str]:
    """Return the names of the cascades, of all channels of the module that contains the operation."""
    *_, module = parents(op)
    assert isinstance(module, ModuleOp)
    return {
        inner.sym_name.data for inner in module.body.block.ops if isinstance(inner, ChannelOp) and inner.channel_type
    }


def is_one_of(move: Move, channels: Container[str]) -> bool:
    """Return whether a transfer is an end of one of these channels."""
    return isinstance(move, ChannelEnd) and move.chan_name.string_value() in channels


def name_of(op: Operation, fallback: str) -> str:
    name = getattr(op, "sym_name", None)
    return fallback if name is None else name.data


# loops


def trip_count(loop: scf.ForOp, where: str) -> int:
    return _steps((loop.lb, loop.ub, loop.step), where)


def _steps(loop: Sequence[SSAValue], where: str) -> int:
    bounds = [constant_of(v) for v in loop]
    if None in bounds:
        raise UserError(f"{where}: loop bounds must be constants")
    low, high, step = (b for b in bounds if b is not None)
    return max(0, -(-(high - low) // step))


def grid(loops: scf.ParallelOp) -> tuple[int, ...]:
    """Return the steps in each dimension."""
    bounds = zip(loops.lowerBound, loops.upperBound, loops.step, strict=True)
    return tuple(_steps(dimension, "a parallel loop") for dimension in bounds)


def tile_grid(op: Operation) -> tuple[int, ...]:
    """Return the columns and rows of tiles for each of which an operation is made; nothing if it is made once."""
    if herd := enclosing(op, HerdOp):
        return herd.shape()
    loops = enclosing(op, scf.ParallelOp)
    return grid(loops) if loops else ()


def executions(op: Operation, where: str) -> int:
    """Return how often launch grids and loops run an operation; if it is in a herd, how often each tile runs it."""
    times = 1
    for parent in parents(op):
        if isinstance(parent, scf.ForOp):
            times *= trip_count(parent, where)
        elif isinstance(parent, scf.ParallelOp):
            times *= math.prod(grid(parent))
        elif isinstance(parent, LaunchOp):
            times *= math.prod(parent.shape())
    return times


# buffers


def element_bytes(kind: MemRefType) -> int:
    if not isinstance(kind.element_type, FixedBitwidthType):
        raise UserError(f"{kind}: elements of a buffer need a fixed width")
    return kind.element_type.size


def buffer_bytes(value: SSAValue) -> int:
    assert isinstance(value.type, MemRefType)
    return math.prod(value.type.get_shape()) * element_bytes(value.type)


def allocations(op: Operation, space: int) -> list[SSAValue]:
    """Return the buffers that an operation's body allocates in a memory space, in order."""
    return [a.memref for a in walk_ops(op, memref.AllocOp) if memory_space(a.memref.type) == space]


def root(value: SSAValue) -> SSAValue:
    """Return the allocation or function argument of a buffer that is passed into launches, segments and herds."""
    while isinstance(value, BlockArgument):
        parent = value.block.parent_op()
        if not isinstance(parent, Hierarchy):
            return value
        value = parent.args[parent.body_args.index(value)]
    return value


def tile_axes(value: SSAValue) -> frozenset[int]:
    """Return the tile coordinates (0 column, 1 row) that a value depends on.

    The tiles are those of the enclosing herd, or of a segment's parallel loop over a herd's tiles.
    """
    if isinstance(value, BlockArgument):
        parent = value.block.parent_op()
        tiles: Sequence[SSAValue] = ()
        if isinstance(parent, HerdOp | scf.ParallelOp):
            tiles = parent.ids if isinstance(parent, HerdOp) else parent.body.block.args
        return frozenset(axis for axis, tile in enumerate(tiles) if tile is value)
    assert isinstance(value.owner, Operation)
    return frozenset().union(*(tile_axes(operand) for operand in value.owner.operands))


def runs_on(op: Operation, column: int, row: int) -> bool:
    """Return whether a tile of the enclosing herd executes an operation: conditions compare its coordinates."""
    inside = itertools.takewhile(lambda parent: not isinstance(parent, HerdOp), parents(op))
    return all(holds_on(parent, column, row) for parent in inside if isinstance(parent, scf.IfOp))


RELATIONS: Mapping[int, tuple[str, Callable[[int, int], bool]]] = {0: ("==", operator.eq), 1: ("!=", operator.ne)}
"""Number of a predicate of `arith.cmpi` -> its operator in C++, and its function."""


def holds_on(condition: scf.IfOp, column: int, row: int) -> bool:
    """Return whether a condition is true on a tile."""
    compared = condition.cond.owner
    assert isinstance(compared, arith.CmpiOp)
    (axis,), other = tile_axes(compared.lhs), constant_of(compared.rhs)
    assert other is not None
    _, holds = RELATIONS[compared.predicate.value.data]
    return holds((column, row)[axis], other)


def tiles(herd: HerdOp) -> list[tuple[int, int]]:
    """Return the column and row of each tile of a herd."""
    columns, rows = herd.shape()
    return list(itertools.product(range(columns), range(rows)))


def tiles_of(op: Operation, herd: HerdOp) -> list[tuple[int, int]]:
    """Return the tiles that execute an operation of a herd."""
    return [tile for tile in tiles(herd) if runs_on(op, *tile)]


# transfers


def fold(dims: Dims) -> Dims:
    """Drop dimensions of one element and join those that continue each other."""
    folded: list[tuple[int, int]] = []
    for size, stride in (d for d in dims if d[0] != 1):
        if folded and folded[-1][1] == size * stride:
            folded[-1] = (folded[-1][0] * size, stride)
        else:
            folded.append((size, stride))
    return tuple(folded) or ((1, 1),)


@frozen
class Side:
    """One side of a transfer: a buffer, and the pattern in which it is walked."""

    value: SSAValue
    offsets: tuple[SSAValue, ...]
    """The offsets as written; nothing for the whole buffer in order. `strides` alike."""
    sizes: tuple[int, ...]
    """The sizes as written; the buffer's shape for the whole buffer in order."""
    strides: tuple[int, ...]
    dims: Dims
    """The pattern after folding."""

    @property
    def kind(self) -> MemRefType:
        assert isinstance(self.value.type, MemRefType)
        return self.value.type

    @property
    def space(self) -> int:
        return memory_space(self.kind)

    @property
    def bytes(self) -> int:
        """Bytes of one execution."""
        return math.prod(self.sizes) * element_bytes(self.kind)

    @property
    def run(self) -> int:
        """Bytes of a contiguous run."""
        size, stride = self.dims[-1]
        return element_bytes(self.kind) * (size if stride == 1 else 1)

    @property
    def key(self) -> object:
        """Identifies the buffer: equal for transfers of one buffer."""
        return root(self.value)

    def axes(self) -> frozenset[int]:
        """Return the tile coordinates that the walked elements depend on."""
        return frozenset().union(*(tile_axes(offset) for offset in self.offsets))


@frozen
class Fifo:
    """The end of a transfer that is a channel, or one entry of it."""

    key: str
    """Identifies it."""
    space: int
    """The memory space of the buffer at the channel's other end."""
    of_tiles: frozenset[int] = field(default=frozenset(), compare=False)
    """The coordinates of a tile that say which entry it is."""

    @staticmethod
    def of(op: ChannelEnd, spaces: Mapping[tuple[str, type], int]) -> Fifo:
        """Return the channel of an operation.

        Args:
            spaces: The memory space of each end, by the channel's name and the kind of operation.
        """
        name = op.chan_name.string_value()
        entry = [constant_of(index) for index in op.indices]
        suffix = "" if None in entry else f"[{', '.join(map(str, entry))}]"
        other = ChannelGetOp if isinstance(op, ChannelPutOp) else ChannelPutOp
        return Fifo(name + suffix, spaces[name, other], frozenset().union(*map(tile_axes, op.indices)))

    def axes(self) -> frozenset[int]:
        return self.of_tiles


def sides(op: DmaMemcpyNdOp, where: str) -> tuple[Side, Side]:
    """Return destination and source."""
    return (
        _side(op.dst, op.dst_offsets, op.dst_sizes, op.dst_strides, where),
        _side(op.src, op.src_offsets, op.src_sizes, op.src_strides, where),
    )


def end(op: ChannelEnd, where: str) -> Side:
    """Return the buffer at a channel."""
    return _side(op.buffer, op.offsets, op.sizes, op.strides, where)


def ends(op: Move, where: str) -> tuple[tuple[Side, bool], ...]:
    """Return the buffers of a transfer, or of one end of it, each with whether it is written."""
    if isinstance(op, DmaMemcpyNdOp):
        return tuple(zip(sides(op, where), (True, False), strict=True))
    return ((end(op, where), isinstance(op, ChannelGetOp)),)


def _side(
    value: SSAValue, offsets: Sequence[SSAValue], sizes: Sequence[SSAValue], strides: Sequence[SSAValue], where: str
) -> Side:
    if not sizes:
        assert isinstance(value.type, MemRefType)
        shape = value.type.get_shape()
        return Side(value, (), shape, (), fold(((math.prod(shape), 1),)))
    constants = [tuple(n for n in map(constant_of, values) if n is not None) for values in (sizes, strides)]
    if any(len(numbers) != len(sizes) for numbers in constants):
        raise UserError(f"{where}: DMA sizes and strides must be constants")
    return Side(value, tuple(offsets), constants[0], constants[1], fold(tuple(zip(*constants, strict=True))))
