"""Computes which elements of its arguments (slots) a launch reads and writes, and how often.

Every transfer is evaluated for every step, tile and loop. The audit compares the compiler's output with this.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import numpy as np
from xdsl.dialects import arith, scf
from xdsl.ir import BlockArgument, Operation, SSAValue

from llama_npu2.errors import UserError
from llama_npu2.frozen import frozen
from stages.air import analysis
from stages.air.analysis import Dims, Side
from stages.air.dialect import L3, HerdOp, Hierarchy, LaunchOp, constant_of, enclosing, parents

_ARITHMETIC: dict[type[Operation], Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    arith.AddiOp: np.add,
    arith.SubiOp: np.subtract,
    arith.MuliOp: np.multiply,
    arith.DivUIOp: np.floor_divide,
    arith.RemUIOp: np.mod,
}


@frozen(eq=False)
class Runs:
    """Contiguous runs of elements."""

    starts: np.ndarray
    """int64: the first element of each run."""
    length: int
    """Elements of each run."""
    times: int = 1
    """How often each run is walked."""

    @property
    def elements(self) -> int:
        return len(self.starts) * self.length * self.times


def walk(base: np.ndarray, dims: Dims, times: int = 1) -> Runs:
    """Return the runs that a pattern of (size, stride), outermost first, walks from each element of `base`."""
    *outer, (size, stride) = analysis.fold(dims)
    if stride != 1:
        outer, size = [*outer, (size, stride)], 1
    starts = np.asarray(base, np.int64).ravel()
    for count, step in outer:
        starts = (starts[:, None] + np.arange(count, dtype=np.int64) * step).ravel()
    return Runs(starts, size, times)


@frozen(eq=False)
class Coverage:
    """How often each element is walked: `counts[i]` times from element `edges[i]` to `edges[i + 1]`, 0 outside."""

    edges: np.ndarray
    counts: np.ndarray

    @staticmethod
    def of(pieces: Iterable[Runs]) -> Coverage:
        all_runs = list(pieces)
        if not all_runs:
            return Coverage(np.zeros(0, np.int64), np.zeros(0, np.int64))
        ends = np.concatenate([end for runs in all_runs for end in (runs.starts, runs.starts + runs.length)])
        changes = np.concatenate([np.full(len(r.starts), sign * r.times) for r in all_runs for sign in (1, -1)])
        edges, places = np.unique(ends, return_inverse=True)
        counts = np.cumsum(np.bincount(places, weights=changes, minlength=len(edges)).astype(np.int64))
        differs = np.diff(counts, prepend=0) != 0
        return Coverage(edges[differs], counts[differs])

    @property
    def elements(self) -> int:
        """The sum of how often each element is walked."""
        return int(np.sum(np.diff(self.edges) * self.counts[:-1]))

    @property
    def most(self) -> int:
        """How often the most walked element is walked."""
        return int(self.counts.max(initial=0))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Coverage)
            and np.array_equal(self.edges, other.edges)
            and np.array_equal(self.counts, other.counts)
        )

    def at(self, element: int) -> int:
        """Return how often one element is walked."""
        place = int(np.searchsorted(self.edges, element, side="right")) - 1
        return int(self.counts[place]) if place >= 0 else 0

    def first_difference(self, other: Coverage) -> int | None:
        """Return the first element of which the counts differ; None if there is none."""
        edges = np.union1d(self.edges, other.edges)
        return next((int(edge) for edge in edges if self.at(int(edge)) != other.at(int(edge))), None)


@frozen(eq=False)
class Way:
    """A set of streams that may carry a transfer. Its runs are made only where they are asked for: some are many."""

    bases: np.ndarray
    """int64 (streams, patterns): from which elements each stream walks the pattern, in order."""
    dims: Dims
    """The pattern, outermost dimension first."""

    def __len__(self) -> int:
        return len(self.bases)

    def streams(self) -> Iterator[Runs]:
        """Yield the runs of each stream, in order."""
        return (walk(row, self.dims) for row in self.bases)


@frozen(eq=False)
class Access:
    """The elements of a slot that one transfer of a launch walks."""

    slot: str
    written: bool
    runs: Runs
    """Over all executions of the transfer."""
    ways: tuple[Way, ...]
    """Sets of streams that may carry it: a stream for each part that goes to other cores or memory tiles, or one stream
    with all of it to one memory tile."""


def in_order(pieces: Iterable[Runs]) -> tuple[np.ndarray, np.ndarray]:
    """Return the first elements and the lengths of the runs of a stream, in order. Adjacent runs are joined."""
    starts, lengths = [], []
    for runs in pieces:
        starts += [runs.starts] * runs.times
        lengths += [np.full(len(runs.starts), runs.length)] * runs.times
    first, length = np.concatenate(starts), np.concatenate(lengths)
    begins = np.flatnonzero(np.concatenate([[True], first[1:] != (first + length)[:-1]]))
    return first[begins], np.add.reduceat(length, begins)


def accesses(launch: LaunchOp, where: str) -> list[Access]:
    """Return the accesses of all transfers to or from DDR. Tiles that get the same elements share one stream.

    UserError if a transfer cannot be evaluated. `where` names the launch in messages.
    """
    result = []
    for op in analysis.moves(launch):
        for side, written in analysis.ends(op, where):
            if side.space == L3:
                result.append(_access(op, side, written, where))
    return result


def _access(op: Operation, side: Side, written: bool, where: str) -> Access:
    slot = str(analysis.root(side.value).name_hint)
    variables = _variables(op, side, where)
    places = {
        value: np.arange(count).reshape([-1 if other is value else 1 for other in variables])
        for value, count in variables.items()
    }
    base = np.zeros(list(variables.values()), np.int64)
    for offset, stride in zip(side.offsets, side.strides, strict=True):
        base = base + _evaluate(offset, places, where) * stride
    herd = enclosing(op, HerdOp)
    if herd is not None:
        tiles = [axis for axis, value in enumerate(variables) if value in herd.ids]
        streams = np.moveaxis(base, tiles, range(len(tiles))).reshape(math.prod(base.shape[axis] for axis in tiles), -1)
        return Access(slot, written, walk(base, side.dims), (Way(streams, side.dims),))
    bases, dims = base.reshape(1, -1), [d for d in zip(side.sizes, side.strides, strict=True) if d[0] != 1]
    ways = [Way(bases, side.dims)]
    if dims:
        (parts, stride), *inner = dims
        ways.append(Way(bases + np.arange(parts)[:, None] * stride, tuple(inner) or ((1, 1),)))
    return Access(slot, written, walk(base, side.dims), tuple(ways))


def stride_of_steps(op: Operation, side: Side, where: str) -> int | None:
    """Return how many elements of a slot lie between what a transfer walks in a step of the launch and in the next one.

    Steps are those of the second dimension of the launch's grid. None: they are not all as far from one another.
    """
    launch = enclosing(op, LaunchOp)
    assert launch is not None
    places = {value: np.asarray(0) for value in _variables(op, side, where)}
    places[launch.ids[1]] = np.arange(launch.shape()[1])
    offsets = zip(side.offsets, side.strides, strict=True)
    base = sum((_evaluate(offset, places, where) * stride for offset, stride in offsets), np.asarray(0))
    apart = np.unique(np.diff(np.broadcast_to(base, places[launch.ids[1]].shape)))
    return int(apart[0]) if len(apart) == 1 else None


def _variables(op: Operation, side: Side, where: str) -> dict[SSAValue, int]:
    """Return the variables of an operation's executions, each with how many values it takes.

    The slowest comes first: steps of the launch, loops, and the coordinates of tiles that get different elements.
    """
    variables: dict[SSAValue, int] = {}
    for parent in parents(op):
        if isinstance(parent, LaunchOp):
            variables |= reversed(dict(zip(parent.ids, parent.shape(), strict=True)).items())
        elif isinstance(parent, scf.ForOp):
            if constant_of(parent.lb) != 0 or constant_of(parent.step) != 1:
                raise UserError(f"{where}: a loop does not count from 0 in steps of 1")
            variables[parent.body.block.args[0]] = analysis.trip_count(parent, where)
        elif isinstance(parent, HerdOp):
            shape = parent.shape()
            variables |= {parent.ids[axis]: shape[axis] for axis in side.axes()}
    return dict(reversed(variables.items()))


def _outer_value(value: SSAValue) -> SSAValue | None:
    """Return the value that is passed to a launch, segment or herd as this argument of its body; None for others."""
    if isinstance(value, BlockArgument):
        parent = value.block.parent_op()
        if isinstance(parent, Hierarchy):
            if value in parent.body_args:
                return parent.args[parent.body_args.index(value)]
            if value in parent.size_args:
                return parent.sizes[parent.size_args.index(value)]
    return None


def _evaluate(value: SSAValue, places: dict[SSAValue, np.ndarray], where: str) -> np.ndarray:
    """Return a value in all executions, given those of the variables."""
    constant = constant_of(value)
    if constant is not None:
        return np.asarray(constant, np.int64)
    if value in places:
        return places[value]
    outer = _outer_value(value)
    if outer is not None:
        return _evaluate(outer, places, where)
    if isinstance(value.owner, Operation) and type(value.owner) in _ARITHMETIC:
        left, right = (_evaluate(operand, places, where) for operand in value.owner.operands)
        return np.asarray(_ARITHMETIC[type(value.owner)](left, right))
    raise UserError(f"{where}: an offset in DDR is not a number that can be known")
