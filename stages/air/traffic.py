"""Counts the bytes that a program moves to and from DDR, and its calls of tile functions, from its operations.

A DMA of a herd whose DDR side does not depend on the tile's row (or column) is one broadcast stream, counted once.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from xdsl.dialects import func
from xdsl.dialects.builtin import MemRefType

from stages.air import analysis
from stages.air.builder import AirModule
from stages.air.dialect import L3, HerdOp, LaunchOp, enclosing


@dataclass
class Traffic:
    """The traffic of one launch."""

    name: str
    slots: dict[str, int]
    """Bytes of each argument (slot)."""
    read: Counter[str] = field(default_factory=Counter)
    """Bytes read from DDR by slot."""
    written: Counter[str] = field(default_factory=Counter)
    """Bytes written to DDR by slot."""
    calls: int = 0
    """Calls of tile functions."""

    def add(self, other: Traffic) -> None:
        """Add the traffic of another launch of the same program."""
        self.slots |= other.slots
        self.read += other.read
        self.written += other.written
        self.calls += other.calls

    @property
    def minimum(self) -> int:
        """The fewest bytes that any tiling could move: outputs once, inputs at most once."""
        return sum(self.written.values()) + sum(min(n, self.slots[slot]) for slot, n in self.read.items())

    @property
    def bytes(self) -> int:
        return sum(self.read.values()) + sum(self.written.values())


def count(module: AirModule) -> list[Traffic]:
    """Return the traffic of every launch, in order."""
    return [count_launch(launch) for launch in module.launches]


def count_launch(launch: LaunchOp) -> Traffic:
    """Return the traffic of one launch."""
    segment = analysis.segment_of(launch)
    sizes = {str(arg.name_hint): analysis.buffer_bytes(arg) for arg in launch.args if isinstance(arg.type, MemRefType)}
    traffic = Traffic(analysis.name_of(segment, "launch"), sizes)
    for transfer in analysis.moves(launch):
        _count_transfer(transfer, traffic)
    for call in analysis.walk_ops(launch, func.CallOp):
        herd = enclosing(call, HerdOp)
        tiles = 1 if herd is None else len(analysis.tiles_of(call, herd))
        traffic.calls += analysis.executions(call, traffic.name) * tiles
    return traffic


def _count_transfer(op: analysis.Move, traffic: Traffic) -> None:
    herd = enclosing(op, HerdOp)
    for side, written in analysis.ends(op, traffic.name):
        counter = traffic.written if written else traffic.read
        if side.space == L3:
            streams = 1 if herd is None else math.prod(herd.shape()[axis] for axis in side.axes())
            slot = str(analysis.root(side.value).name_hint)
            counter[slot] += side.bytes * analysis.executions(op, traffic.name) * streams
