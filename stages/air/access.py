"""Which elements of its slots a launch reads and writes, and how often: every transfer evaluated for every step, tile
and loop. What the compiler made of a module is held against this.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from xdsl.dialects import arith, scf
from xdsl.ir import BlockArgument, Operation, SSAValue

from llama_npu2.errors import UserError
from stages.air import analysis
from stages.air.analysis import Dims, Side
from stages.air.dialect import (
    L3,
    ChannelGetOp,
    HerdOp,
    LaunchOp,
    SegmentOp,
    constant_of,
    enclosing,
)

_ARITHMETIC: dict[type[Operation], Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    arith.AddiOp: np.add,
    arith.SubiOp: np.subtract,
    arith.MuliOp: np.multiply,
    arith.DivUIOp: np.floor_divide,
    arith.RemUIOp: np.mod,
}


@dataclass(frozen=True, eq=False)
class Runs:
    """Elements that lie together: `length` from every one of `starts` (int64), each walked `times` times."""

    starts: np.ndarray
    length: int
    times: int = 1

    @property
    def elements(self) -> int:
        return len(self.starts) * self.length * self.times


def walk(base: np.ndarray, dims: Dims, times: int = 1) -> Runs:
    """What a pattern of (size, stride), outermost first, walks from each of `base`."""
    *outer, (size, stride) = analysis.fold(dims)
    if stride != 1:
        outer, size = [*outer, (size, stride)], 1
    starts = np.asarray(base, np.int64).ravel()
    for count, step in outer:
        starts = (starts[:, None] + np.arange(count, dtype=np.int64) * step).ravel()
    return Runs(starts, size, times)


@dataclass(frozen=True, eq=False)
class Coverage:
    """How often each element is walked: `counts[i]` from element `edges[i]` to `edges[i + 1]`, 0 outside."""

    edges: np.ndarray
    counts: np.ndarray

    @staticmethod
    def of(pieces: Iterable[Runs]) -> Coverage:
        found = list(pieces)
        if not found:
            return Coverage(np.zeros(0, np.int64), np.zeros(0, np.int64))
        at = np.concatenate([edge for runs in found for edge in (runs.starts, runs.starts + runs.length)])
        step = np.concatenate([np.full(len(r.starts), sign * r.times) for r in found for sign in (1, -1)])
        edges, place = np.unique(at, return_inverse=True)
        counts = np.cumsum(np.bincount(place, weights=step, minlength=len(edges)).astype(np.int64))
        kept = np.diff(counts, prepend=0) != 0
        return Coverage(edges[kept], counts[kept])

    @property
    def elements(self) -> int:
        """Elements walked, as often as they are."""
        return int(np.sum(np.diff(self.edges) * self.counts[:-1]))

    @property
    def most(self) -> int:
        """How often the element that is walked most is."""
        return int(self.counts.max(initial=0))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Coverage)
            and np.array_equal(self.edges, other.edges)
            and np.array_equal(self.counts, other.counts)
        )

    def at(self, element: int) -> int:
        """How often one element is walked."""
        place = int(np.searchsorted(self.edges, element, side="right")) - 1
        return int(self.counts[place]) if place >= 0 else 0

    def first_difference(self, other: Coverage) -> int | None:
        """The first element that the two walk differently often, None if there is none."""
        edges = np.union1d(self.edges, other.edges)
        return next((int(edge) for edge in edges if self.at(int(edge)) != other.at(int(edge))), None)


@dataclass(frozen=True, eq=False)
class Access:
    """What one transfer of a launch walks of a slot: `runs` over all its executions. `ways`: the streams that may carry
    it, each with its runs in order: one for each part that cores or memory tiles are told, or one that tells all of it
    to one memory tile."""

    slot: str
    written: bool
    runs: Runs
    ways: tuple[tuple[Runs, ...], ...]


def in_order(pieces: Iterable[Runs]) -> tuple[np.ndarray, np.ndarray]:
    """(first elements, lengths) of what a stream walks, one after the other, in the fewest runs that say the same."""
    starts, lengths = [], []
    for runs in pieces:
        starts += [runs.starts] * runs.times
        lengths += [np.full(len(runs.starts), runs.length)] * runs.times
    first, length = np.concatenate(starts), np.concatenate(lengths)
    begins = np.flatnonzero(np.concatenate([[True], first[1:] != (first + length)[:-1]]))
    return first[begins], np.add.reduceat(length, begins)


def accesses(launch: LaunchOp, where: str) -> list[Access]:
    """Every transfer to or from DDR, as often as the launch makes it. Tiles that are told the same are one stream.

    UserError where a transfer is not one that can be evaluated; `where` names the launch."""
    found = []
    for op in analysis.moves(launch):
        for side, written in analysis.ends(op, where):
            if side.space == L3 and isinstance(op, ChannelGetOp):
                raise UserError(f"{where}: a channel ends in DDR, whose transfers have no order that can be known")
            if side.space == L3:
                found.append(_access(op, side, written, where))
    return found


def _access(op: Operation, side: Side, written: bool, where: str) -> Access:
    slot = str(analysis.root(side.value).name_hint)
    variables = _variables(op, side, where)
    places = {value: np.arange(count).reshape(_shape(list(variables), value)) for value, count in variables.items()}
    base = np.zeros(list(variables.values()), np.int64)
    for offset, stride in zip(side.offsets, side.strides, strict=True):
        base = base + _evaluate(offset, places, where) * stride
    herd = enclosing(op, HerdOp)
    if herd is not None:
        tiles = [axis for axis, value in enumerate(variables) if value in herd.ids]
        streams = np.moveaxis(base, tiles, range(len(tiles))).reshape(math.prod(base.shape[axis] for axis in tiles), -1)
        return Access(slot, written, walk(base, side.dims), (_streams(streams, side.dims),))
    whole, cut = base.reshape(1, -1), [d for d in zip(side.sizes, side.strides, strict=True) if d[0] != 1]
    ways = [_streams(whole, side.dims)]
    if cut:
        (parts, apart), *inner = cut
        ways.append(_streams(whole + np.arange(parts)[:, None] * apart, tuple(inner) or ((1, 1),)))
    return Access(slot, written, walk(base, side.dims), tuple(ways))


def _streams(bases: np.ndarray, dims: Dims) -> tuple[Runs, ...]:
    """One for each row of `bases`, from which it walks a pattern."""
    return tuple(walk(row, dims) for row in bases)


def _shape(axes: Sequence[SSAValue], value: SSAValue) -> list[int]:
    return [-1 if axis is value else 1 for axis in axes]


def _variables(op: Operation, side: Side, where: str) -> dict[SSAValue, int]:
    """What changes from one execution to the next, the slowest first, and how many values it takes: steps, loops, and
    the tiles that see other data."""
    found: dict[SSAValue, int] = {}
    parent = op.parent_op()
    while parent is not None:
        if isinstance(parent, LaunchOp):
            found |= reversed(dict(zip(parent.ids, parent.shape(), strict=True)).items())
        elif isinstance(parent, scf.ForOp):
            if constant_of(parent.lb) != 0 or constant_of(parent.step) != 1:
                raise UserError(f"{where}: a loop does not count from 0 in steps of 1")
            found[parent.body.block.args[0]] = analysis.trip_count(parent, where)
        elif isinstance(parent, HerdOp):
            shape = parent.shape()
            found |= {parent.ids[axis]: shape[axis] for axis in side.axes()}
        parent = parent.parent_op()
    return dict(reversed(found.items()))


def _handed_in(value: SSAValue) -> SSAValue | None:
    """What a launch, segment or herd was given as this argument of its body, None if it is none."""
    if isinstance(value, BlockArgument):
        parent = value.block.parent_op()
        if isinstance(parent, LaunchOp | SegmentOp | HerdOp):
            if value in parent.body_args:
                return parent.args[parent.body_args.index(value)]
            if value in parent.size_args:
                return parent.sizes[parent.size_args.index(value)]
    return None


def _evaluate(value: SSAValue, places: dict[SSAValue, np.ndarray], where: str) -> np.ndarray:
    known = constant_of(value)
    if known is not None:
        return np.asarray(known, np.int64)
    if value in places:
        return places[value]
    outer = _handed_in(value)
    if outer is not None:
        return _evaluate(outer, places, where)
    if isinstance(value.owner, Operation) and type(value.owner) in _ARITHMETIC:
        left, right = (_evaluate(operand, places, where) for operand in value.owner.operands)
        return np.asarray(_ARITHMETIC[type(value.owner)](left, right))
    raise UserError(f"{where}: an offset in DDR is not a number that can be known")
