"""What the launches of a program cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from stages.estimate.constants import Machine
from stages.estimate.work import Time, spend
from stages.kernels import Kernel, Tiling

if TYPE_CHECKING:
    from stages.air import AirModule
    from stages.air.dialect import LaunchOp
    from stages.air.traffic import Traffic


class Described(Protocol):
    """A program for the array: its operations, kernel and tiling of each launch that a part describes; so many steps
    of each dimension of a launch grid are issued before one is awaited."""

    @property
    def air(self) -> AirModule: ...
    @property
    def kernels(self) -> Sequence[Kernel]: ...
    @property
    def tilings(self) -> Sequence[Tiling]: ...
    @property
    def shared_steps(self) -> int: ...


@dataclass
class Priced:
    """One described launch: how many launches of the array it takes (partitions of a vocabulary), what they move to and
    from DDR, multiply-accumulates, time. A launch that the compiler needs and no part describes has its own name."""

    name: str
    tiling: str
    launches: int
    traffic: Traffic
    macs: int
    time: Time
    launch: LaunchOp
    """The first of them."""

    @property
    def title(self) -> str:
        return self.name if self.launches == 1 else f"{self.name} x {self.launches}"


def price(module: Described, machine: Machine) -> list[Priced]:
    """Every described launch of one call, in order, without the submission."""
    # xDSL takes a third of a second to import, and a build that is up to date asks for no price.
    from stages.air.stitching import part_of
    from stages.estimate.flow import launch_work

    rows: dict[int, Priced] = {}
    for launch in module.air.launches:
        position = part_of(launch)
        tiling = module.tilings[position] if position < len(module.tilings) else None
        work, traffic = launch_work(launch, tiling.costs if tiling else {}, module.shared_steps)
        time = spend(work, machine)
        if position in rows:
            row = rows[position]
            row.launches, row.time = row.launches + 1, row.time + time
            row.traffic.add(traffic)
        elif tiling:
            rows[position] = Priced(module.kernels[position].name, str(tiling), 1, traffic, tiling.macs, time, launch)
        else:
            rows[position] = Priced(traffic.name, "", 1, traffic, 0, time, launch)
    return [rows[position] for position in sorted(rows)]


def program_milliseconds(module: Described, machine: Machine | None = None) -> float:
    """Of one call, without its submission."""
    return sum(row.time.milliseconds for row in price(module, machine or Machine()))


def description(module: Described) -> dict[str, Any]:
    """What lies beside a module: milliseconds of one call and of each launch, with the limit that sets most of them."""
    rows = price(module, Machine())
    launches = [
        {"kernel": row.name, "launches": row.launches, "milliseconds": row.time.milliseconds, "limit": row.time.limit}
        for row in rows
    ]
    return {"milliseconds": sum(row.time.milliseconds for row in rows), "launches": launches}
