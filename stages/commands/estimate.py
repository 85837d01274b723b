"""`doit estimate`: time of every launch on the NPU and what sets it, per program, per token and per prompt.

`measured=FILE`: by the rates in a report of `doit selftest`, as far as it has them. `published=1`: other projects'
plans by the same arithmetic, next to what they measured. The arithmetic is `stages.estimate`'s. `target=npu2-sim`:
next to what the simulator counted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from llama_npu2.cli.table import Column, Table, amount, fitted
from stages.engine.files import write_json
from stages.estimate.constants import Constant, Machine, constants
from stages.estimate.price import Priced
from stages.estimate.systems import FITTED, KERNELS, PREDICTED, Row
from stages.estimate.work import Time
from stages.graph import Build
from stages.graph.needs import locked_memory
from stages.model.plan import make_plan, with_context
from stages.model.sources import config_of
from stages.reports.estimated import DEPTH, Estimate, total
from stages.targets.npu2.groupings import GROUPINGS

MIB = 1 << 20


def run(build: Build) -> None:
    options = build.options
    machine = Machine.from_report(Path(options.measured)) if options.measured else Machine()
    if options.published:
        print_check(machine, options.json)
        return
    if not build.target.static:
        # Which target this machine would run does not matter.
        build = Build(replace(options, target="npu2"))
    _report(build, machine)


def _report(build: Build, machine: Machine) -> None:
    from stages.reports.estimate_figures import counted, figures
    from stages.reports.estimate_page import page

    options, config = build.options, config_of(build.source)
    chosen = options.bucket_list(), machine, build.policy
    estimates = {
        name: Estimate(config, name, *chosen, positions=build.positions, second_copy=options.second_copy)
        for name in GROUPINGS
    }
    grouping = build.grouping_name
    composed = build.target.grouping(grouping)
    found = figures(build.source.name, estimates, grouping)
    if build.target.device == "sim":
        found["counted"] = counted(build.directory, estimates[grouping])
    stored = with_context(config, build.context)
    plan = make_plan(stored, composed, build.target.kernel_set, build.buckets, build.policy)
    found["locked"] = locked_memory(plan, stored, composed, build.buckets, build.policy, options.second_copy)
    if options.json:
        print(json.dumps(found))
    else:
        print_estimates(list(estimates.values()))
        print(f"\nnpu.grouping={grouping}: {_locked(found['locked'], stored.max_seq)}")
    where = build.report("estimate")
    write_json(where / "estimate.json", found)
    page(found).write(where / "estimate.html")
    if not options.json:
        print(f"\n{where / 'estimate.html'}")


def print_estimates(estimates: Sequence[Estimate]) -> None:
    print(_rates(estimates[0].machine))
    for estimate in estimates:
        print(f"\nnpu.grouping={estimate.name}, per call:")
        table = Table(_COLUMNS)
        print(table.header())
        stretches = (*estimate.stretches(estimate.buckets[-1]), *estimate.stretches())
        told = {name for stretch in stretches for name in stretch.device}
        for name, rows in estimate.rows.items():
            print(table.row(*_program_cells(name, rows)))
            if name in told:
                print(*(table.row(*_launch_cells(row)) for row in rows), sep="\n")
        _print_phases(estimate)


def _print_phases(estimate: Estimate) -> None:
    moved, weights = estimate.traffic()
    rate, token = estimate.machine.ddr_gbps, estimate.token()
    print(
        f"\nnpu.grouping={estimate.name}: a token moves {moved / MIB:.1f} MiB through DDR, {moved / weights:.4f}x its "
        f"weights, {moved / rate / 1e6:.1f} ms at {rate:.0f} GB/s"
    )
    print(f"  token behind {DEPTH}: {_sum(token)}; {1 / token.seconds:.1f} tokens/s")
    for what, *sizes in estimate.prompts():
        print(f"  {what}: {_sum(estimate.prompt(*sizes))}")
    for what, size in estimate.host_traffic(estimate.buckets[-1]).items():
        print(f"  {what}: {size / 1024:.1f} KiB between host and device")


def _locked(held: Mapping[str, int], positions: int) -> str:
    """In one line. KV caches are as large as the positions that they have room for, and the driver takes the same for
    every model: neither counts as a multiple of the weights."""
    own = sum(held.values()) - held["KV cache"] - held["driver"]
    parts = ", ".join(f"{what} {amount(size)}" for what, size in held.items())
    return (
        f"locks {amount(sum(held.values()))} of memory: {parts}; without the cache of {positions} positions and the "
        f"driver's {own / held['weights']:.2f}x its weights"
    )


def _rates(machine: Machine) -> str:
    if not machine.measured:
        return "Rates: published ones, none measured on this machine (doit estimate published=1 shows them)."
    return f"Rates measured by the selftest: {', '.join(sorted(machine.measured))}; all others as published."


_COLUMNS = (
    Column("", 26),
    Column("ms", 9, right=True),
    Column("limit", 13),
    Column("of it", right=True),
    Column("MiB", 8, right=True),
    Column("x least", right=True),
    Column("GMAC", 8, right=True),
)


def _program_cells(name: str, rows: Sequence[Priced]) -> Iterator[str]:
    moved, minimum, macs = (
        sum(row.traffic.bytes for row in rows),
        sum(row.traffic.minimum for row in rows),
        sum(row.macs for row in rows),
    )
    yield from _cells(name, total(rows), moved, minimum, macs)


def _launch_cells(row: Priced) -> Iterator[str]:
    yield from _cells(f"  {row.title}", row.time, row.traffic.bytes, row.traffic.minimum, row.macs)


def _cells(name: str, time: Time, moved: int, minimum: int, macs: int) -> Iterator[str]:
    yield from (name, f"{time.milliseconds:.3f}", time.limit, f"{time.by[time.limit] / time.seconds:.0%}")
    yield from (f"{moved / MIB:.1f}", f"{moved / minimum:.2f}", f"{macs / 1e9:.2f}")


def _sum(time: Time) -> str:
    largest = sorted(time.by.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{limit} {1e3 * seconds:.1f}" for limit, seconds in largest if seconds >= 5e-5)
    return f"{time.milliseconds:.1f} ms ({parts})"


# others


def print_check(machine: Machine, as_json: bool = False) -> None:
    """The table of rates, and other projects' plans by it."""
    plans = (("fitted", FITTED), ("single kernels", KERNELS), ("predicted", PREDICTED))
    if as_json:
        rates = [asdict(each) for each in constants(machine)]
        compared = {title: [_described_row(row, machine) for row in rows] for title, rows in plans}
        print(json.dumps({"rates": rates, "measured here": sorted(machine.measured), "plans": compared}))
        return
    columns = Column("rate"), Column("value", right=True), Column("published"), Column("unit"), Column("source")
    print(fitted(columns, (list(_constant_cells(each, each.name in machine.measured)) for each in constants(machine))))
    numbers = [Column(name, right=True) for name in ("measured ms", "model ms", "error")]
    for title, rows in plans:
        cells = (list(_row_cells(row, machine)) for row in rows)
        print(f"\n{fitted([Column(title), *numbers, Column('note')], cells)}")


def _described_row(row: Row, machine: Machine) -> dict[str, Any]:
    return {"what": row.what, "measured": row.measured, "model": row.model(machine), "note": row.note}


def _row_cells(row: Row, machine: Machine) -> Iterator[str]:
    yield from (row.what, f"{row.measured:.3f}", f"{row.model(machine):.3f}", f"{row.error(machine):+.0%}", row.note)


def _constant_cells(each: Constant, measured: bool) -> Iterator[str]:
    yield from (each.name, f"{each.value:g}", f"{each.low:g}-{each.high:g}", each.unit)
    yield "measured by the selftest" if measured else each.source
