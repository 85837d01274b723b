"""Prices the launches of a program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from stages.engine.files import read_json
from stages.estimate.constants import Machine
from stages.estimate.work import Serial, Time, Work, spend
from stages.kernels import Kernel, Tiling

if TYPE_CHECKING:
    from stages.air import AirModule
    from stages.air.dialect import LaunchOp
    from stages.air.traffic import Traffic


class Described(Protocol):
    """A program for the array, as `stages.targets.npu2.modules.Module`."""

    @property
    def air(self) -> AirModule:
        """Its operations."""

    @property
    def kernels(self) -> Sequence[Kernel]:
        """The kernel of each launch that a part describes."""

    @property
    def tilings(self) -> Sequence[Tiling]:
        """The tiling of each of these launches."""

    @property
    def shared_steps(self) -> tuple[int, int]:
        """How many steps of each dimension of a launch grid are issued before one is awaited."""

    @property
    def code_bytes(self) -> Sequence[int]:
        """The bytes of code that each launch loads, in order; fewer, or none, where that is not known."""


def compiled_code(directory: Path) -> dict[str, list[int]]:
    """Return the bytes of code that each launch loads, by the name of a program that is compiled in this directory."""
    described = {path.stem: read_json(path) for path in sorted((directory / "elf").glob("*.json"))}
    return {name: facts["code_bytes"] for name, facts in described.items() if facts.get("code_bytes")}


@dataclass
class Priced:
    """The price of one launch of a part, or of a launch that only the compiler needs."""

    name: str
    """The kernel's name; the launch's own name if no part describes it."""
    tiling: str
    launches: int
    """Launches of the array that it takes: several for partitions of a vocabulary."""
    traffic: Traffic
    """Bytes to and from DDR."""
    macs: int
    """Multiply-accumulates."""
    work: Work
    time: Time
    """How long the work takes."""
    launch: LaunchOp
    """The first launch of the array."""

    @property
    def title(self) -> str:
        return self.name if self.launches == 1 else f"{self.name} x {self.launches}"

    def at(self, machine: Machine) -> Priced:
        """Return the same launch with the rates of another machine."""
        return replace(self, time=spend(self.work, machine))


def price(module: Described, machine: Machine) -> list[Priced]:
    """Return the price of every launch of one call, in order, without the submission."""
    # xDSL takes a third of a second to import, and a build that is up to date asks for no price.
    from stages.air.stitching import part_of
    from stages.estimate.flow import launch_work

    rows: dict[int, Priced] = {}
    for launch, code in zip_longest(module.air.launches, module.code_bytes[: len(module.air.launches)]):
        position = part_of(launch)
        tiling = module.tilings[position] if position < len(module.tilings) else None
        work, traffic = launch_work(launch, tiling.costs if tiling else {}, module.shared_steps, code)
        time = spend(work, machine)
        if position in rows:
            row = rows[position]
            row.launches, row.work, row.time = row.launches + 1, Serial(row.work, work), row.time + time
            row.traffic.add(traffic)
        elif tiling:
            name = module.kernels[position].name
            rows[position] = Priced(name, str(tiling), 1, traffic, tiling.macs, work, time, launch)
        else:
            rows[position] = Priced(traffic.name, "", 1, traffic, 0, work, time, launch)
    return [rows[position] for position in sorted(rows)]


def description(module: Described) -> dict[str, Any]:
    """Return the JSON next to a module: milliseconds of one call and of each launch, with its largest limit."""
    rows = price(module, Machine())
    launches = [
        {"kernel": row.name, "launches": row.launches, "milliseconds": row.time.milliseconds, "limit": row.time.limit}
        for row in rows
    ]
    return {"milliseconds": sum(row.time.milliseconds for row in rows), "launches": launches}
