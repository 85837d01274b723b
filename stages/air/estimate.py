"""What a program moves and computes, counted from the program itself: DMA sizes times trip counts.

A DMA of a herd whose DDR side does not depend on the tile's row (or column) is one broadcast stream, counted once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from xdsl.dialects import func, scf
from xdsl.dialects.builtin import MemRefType
from xdsl.ir import BlockArgument, Operation, SSAValue

from stages.air.builder import Program
from stages.air.dialect import L3, DmaMemcpyNdOp, HerdOp, LaunchOp, SegmentOp, constant_of, memory_space

BANDWIDTH = 60e9
"""Bytes per second of DDR that the NPU sees."""

MACS_PER_SECOND = 32 * 128 * 1.8e9
"""bf16 multiply-accumulates: 32 cores, 128 a cycle (`mmul` 4x8x8), 1.8 GHz."""


@dataclass
class Traffic:
    """One launch: sizes of the slots it is given, DDR bytes by slot, tile function calls and MACs."""

    name: str
    slots: dict[str, int]
    read: Counter[str] = field(default_factory=Counter)
    written: Counter[str] = field(default_factory=Counter)
    calls: int = 0
    macs: int = 0

    def add(self, other: Traffic) -> None:
        """Count `other`, a launch over the same slots, into this one."""
        self.read += other.read
        self.written += other.written
        self.calls += other.calls
        self.macs += other.macs

    @property
    def minimum(self) -> int:
        """The least that any plan could move: outputs once, inputs at most once."""
        return sum(self.written.values()) + sum(min(n, self.slots[slot]) for slot, n in self.read.items())

    @property
    def bytes(self) -> int:
        return sum(self.read.values()) + sum(self.written.values())

    @property
    def seconds(self) -> float:
        """The longer of moving at `BANDWIDTH` and computing at `MACS_PER_SECOND`."""
        return max(self.bytes / BANDWIDTH, self.macs / MACS_PER_SECOND)


def count(program: Program) -> list[Traffic]:
    """Traffic of every launch, in order."""
    return [_count_launch(launch) for launch in program.launches]


def _count_launch(launch: LaunchOp) -> Traffic:
    segment = next(op for op in launch.body.block.ops if isinstance(op, SegmentOp))
    sizes = {str(arg.name_hint): _bytes(arg) for arg in launch.args}
    traffic = Traffic(segment.sym_name.data if segment.sym_name else "launch", sizes)
    for op in launch.walk():
        if isinstance(op, DmaMemcpyNdOp):
            _count_dma(op, traffic)
        elif isinstance(op, func.CallOp):
            _count_call(op, traffic)
    return traffic


def _count_dma(op: DmaMemcpyNdOp, traffic: Traffic) -> None:
    for buffer, offsets, side in ((op.dst, op.dst_offsets, traffic.written), (op.src, op.src_offsets, traffic.read)):
        if memory_space(buffer.type) == L3:
            trips = math.prod(size for size, ids in _surrounding(op) if ids is None or _depends(offsets, ids))
            slot = str(_origin(buffer).name_hint)
            side[slot] += op.elements() * trips * _element_bytes(buffer)


def _count_call(op: func.CallOp, traffic: Traffic) -> None:
    traffic.calls += math.prod(size for size, _ in _surrounding(op))
    name = op.callee.string_value()
    for prefix, macs in _MACS.items():
        if name.startswith(prefix):
            traffic.macs += macs([a for a in op.arguments if isinstance(a.type, MemRefType)]) * _effective(op, prefix)


def _effective(op: func.CallOp, prefix: str) -> int:
    """Executions that do arithmetic: attention steps return at once where causality masks the whole tile."""
    if prefix != "fa_step":
        return math.prod(size for size, _ in _surrounding(op))
    query, key, tile = op.arguments[0], op.arguments[1], op.arguments[2]
    last = math.prod(tile.type.get_shape()[i] for i in (0, 2)) - 1  # type: ignore[attr-defined]
    return sum(_value(key, at) <= _value(query, at) + last for at in _positions(op))


_MACS: dict[str, Callable[[list[SSAValue]], int]] = {
    "gemm_step": lambda m: _elements(m[0]) * _elements(m[1]) // (m[0].type.get_shape()[1] * 8),  # type: ignore[attr-defined]
    "gemv_step": lambda m: _elements(m[0]),
    "fa_step": lambda m: _elements(m[0]) * m[1].type.get_shape()[0] * 2,  # type: ignore[attr-defined]
}
"""Multiply-accumulates of one call, from its memrefs."""


def _elements(value: SSAValue) -> int:
    assert isinstance(value.type, MemRefType)
    return math.prod(value.type.get_shape())


def _element_bytes(value: SSAValue) -> int:
    assert isinstance(value.type, MemRefType)
    return value.type.element_type.size


def _bytes(value: SSAValue) -> int:
    return _elements(value) * _element_bytes(value) if isinstance(value.type, MemRefType) else 0


def _surrounding(op: Operation) -> Iterator[tuple[int, SSAValue | None]]:
    """(trip count, tile coordinate or None) of every loop, grid dimension and herd dimension around `op`."""
    parent = op.parent_op()
    while parent is not None:
        if isinstance(parent, scf.ForOp):
            yield _trips(parent), None
        elif isinstance(parent, LaunchOp):
            yield from ((size, None) for size in parent.shape())
        elif isinstance(parent, HerdOp):
            yield from zip(parent.shape(), parent.ids, strict=True)
        parent = parent.parent_op()


def _trips(loop: scf.ForOp) -> int:
    bounds = [constant_of(value) for value in (loop.lb, loop.ub, loop.step)]
    first, last, step = (0 if bound is None else bound for bound in bounds)
    return (last - first) // step


def _depends(values: Sequence[SSAValue], on: SSAValue) -> bool:
    """Whether any of `values` is computed from `on`, within one isolated block."""
    return any(v is on or (isinstance(v.owner, Operation) and _depends(v.owner.operands, on)) for v in values)


def _origin(value: SSAValue) -> SSAValue:
    """The function argument that a block argument of the hierarchy stands for."""
    while isinstance(value, BlockArgument) and isinstance(op := value.block.parent_op(), LaunchOp | SegmentOp | HerdOp):
        value = op.args[op.body_args.index(value)]
    return value


def _positions(op: Operation) -> Iterator[dict[SSAValue, int]]:
    """Every combination of loop variables, grid positions and tile coordinates around `op`."""
    axes: list[tuple[SSAValue, int]] = []
    parent = op.parent_op()
    while parent is not None:
        if isinstance(parent, scf.ForOp):
            axes.append((parent.body.block.args[0], _trips(parent)))
        elif isinstance(parent, LaunchOp | HerdOp):
            axes += zip(parent.ids, parent.shape(), strict=True)
        parent = parent.parent_op()
    for index in range(math.prod(size for _, size in axes)):
        at = {}
        for value, size in axes:
            index, at[value] = divmod(index, size)
        yield at


_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "arith.addi": lambda a, b: a + b,
    "arith.muli": lambda a, b: a * b,
    "arith.divui": lambda a, b: a // b,
    "arith.remui": lambda a, b: a % b,
}


def _value(value: SSAValue, at: dict[SSAValue, int]) -> int:
    """Evaluate an index expression."""
    if value in at:
        return at[value]
    constant = constant_of(value)
    if constant is not None:
        return constant
    if isinstance(value, BlockArgument):
        op = value.block.parent_op()
        assert isinstance(op, LaunchOp | SegmentOp | HerdOp)
        return _value(op.args[op.body_args.index(value)], at)
    assert isinstance(value.owner, Operation)
    operands = [_value(operand, at) for operand in value.owner.operands]
    return operands[0] if value.owner.name == "arith.index_cast" else _ARITHMETIC[value.owner.name](*operands)
