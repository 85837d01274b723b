"""The text that `doit estimate` prints: the headline first, then every launch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from llama_npu2.cli.table import Table, amount, fitted
from stages.estimate.constants import Constant, Machine, constants
from stages.estimate.price import Priced
from stages.estimate.ranges import Range, between, per_second
from stages.estimate.systems import FITTED, KERNELS, PREDICTED, Row
from stages.estimate.work import Time
from stages.reports.estimated import DEPTH, TAKE_TURNS, TOKEN, Estimate, Sizes, total

MIB = 1 << 20


def print_estimates(figures: Mapping[str, Any], estimate: Estimate, locked: str) -> None:
    """Print the estimate of one grouping, and the times of the others.

    Args:
        figures: The figures of all groupings (`estimate_figures.figures`).
        estimate: The grouping whose launches are printed.
        locked: The line about memory.
    """
    moved, weights = estimate.traffic()
    rate, token = estimate.machine.ddr_gbps, estimate.token()
    found = estimate.ranges
    print(
        f"{figures['model']} on the NPU, by arithmetic, not measured: weights {figures['weights']}, "
        f"grouping {estimate.name}\n"
        f"  token after {DEPTH} others: {_sum(token, found[TOKEN])}; {_per_second(found[TOKEN])}"
    )
    for phase, sizes in estimate.phases():
        time = estimate.time(sizes)
        if sizes.several:
            print(
                f"  {phase} after {DEPTH} others: {_sum(time, found[phase])}; "
                f"{time.seconds / token.seconds:.2f} times a token"
            )
        elif sizes.of_prompt:
            print(f"  {phase}: {_sum(time, found[phase])}")
        elif sizes.after:
            print(f"  {phase}: {_sum(time, found[phase])}; {_per_second(found[phase])}")
    for name, phases in figures["groupings"].items():
        if name != estimate.name:
            times = ", ".join(f"{phase} {milliseconds:.1f} ms" for phase, milliseconds in phases.items())
            print(f"  with grouping {name} instead: {times}")
    if found_turns := figures["streams"]:
        print(f"\n{TAKE_TURNS}:")
        for turns in found_turns:
            low, high, sequences = turns["low"], turns["high"], turns["sequences"]
            at_once = f", {turns['together']} at once" if turns["together"] > 1 else ""
            print(
                f"  {sequences} at a time: {between(low, high)} ms from token to token of each, middle "
                f"{turns['middle']:.1f}; {per_second(low, high, sequences)} tokens/s together; turns of "
                f"{turns['tokens']} tokens{at_once}; {amount(turns['host_bytes'])} of the host for their caches"
            )
    print(
        f"\nA token moves {moved / MIB:.1f} MiB through DDR, {moved / weights:.4f}x its weights, "
        f"{moved / rate / 1e6:.1f} ms at {rate:.0f} GB/s."
    )
    for phase, size in estimate.host_traffic(estimate.buckets[-1]).items():
        print(f"A {phase} moves {size / 1024:.1f} KiB between host and device.")
    print(f"{locked}\n{_rates(estimate)}{_open_rates(figures['ranges'][TOKEN])}\n")
    print(f"One call of each program of grouping {estimate.name}:")
    table = Table(_WIDTHS.items())
    print(table.header())
    stretches = (*estimate.stretches(Sizes(estimate.buckets[-1])), *estimate.stretches())
    detailed = {name for stretch in stretches for name in stretch.device}
    for name, rows in estimate.rows.items():
        print(table.row(*_cells(name, rows)))
        if name in detailed:
            print(*(table.row(*_cells(f"  {row.title}", [row])) for row in rows), sep="\n")


def locked_line(sizes: Mapping[str, int], positions: int) -> str:
    """Return a line about locked memory, by bytes of each kind.

    The multiple of the weights leaves out KV caches, which are as large as the positions that they have room for, and
    the driver, which takes the same for every model.
    """
    own = sum(sizes.values()) - sizes["KV cache"] - sizes["driver"]
    parts = ", ".join(f"{kind} {amount(size)}" for kind, size in sizes.items())
    return (
        f"It locks {amount(sum(sizes.values()))} of memory: {parts}. Without the cache of {positions} positions and "
        f"the driver's part this is {own / sizes['weights']:.2f}x its weights."
    )


def _rates(estimate: Estimate) -> str:
    """Return where the rates come from, and how the loading of cores is priced if their code is known."""
    compiled = len(estimate.code_bytes.keys() & {program.name for program in estimate.programs})
    loading = f" Loading cores takes as long as the code of {compiled} compiled programs says." if compiled else ""
    if not (measured := estimate.machine.measured):
        return f"Rates: published ones, none measured on this machine (doit estimate published=1 shows them).{loading}"
    return f"Rates measured by the selftest: {', '.join(sorted(measured))}; all others as published.{loading}"


_WIDTHS = {"": 26, ">ms": 9, "limit": 13, ">of it": 0, ">MiB": 8, ">x least": 0, ">GMAC": 8}


def _cells(name: str, rows: Sequence[Priced]) -> Iterator[str]:
    """Yield the cells of a program with these launches, or of one of them."""
    time, moved, macs = total(rows), sum(row.traffic.bytes for row in rows), sum(row.macs for row in rows)
    yield from (name, f"{time.milliseconds:.3f}", time.limit, f"{time.by[time.limit] / time.seconds:.0%}")
    yield from (f"{moved / MIB:.1f}", f"{moved / sum(row.traffic.minimum for row in rows):.2f}", f"{macs / 1e9:.2f}")


def _sum(time: Time, found: Range) -> str:
    largest = sorted(time.by.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{limit} {1e3 * seconds:.1f}" for limit, seconds in largest if seconds >= 5e-5)
    return f"{between(found.low, found.high)} ms, middle {time.milliseconds:.1f} ({parts})"


def _per_second(found: Range) -> str:
    return f"{per_second(found.low, found.high)} tokens/s, middle {1e3 / found.middle:.1f}"


_OPEN_RATES = 3
"""How many of the rates that leave a time open are named."""


def _open_rates(found: Mapping[str, Any]) -> str:
    """Return a line on what a selftest would narrow first; nothing if it has measured all that it can."""
    rates = [rate for rate in found["rates"] if rate["measured_by_selftest"]][:_OPEN_RATES]
    swings = ", ".join(f"{rate['rate']} ({rate['low']:.1f}-{rate['high']:.1f} ms a token)" for rate in rates)
    return f"\nWhat doit selftest would narrow first on an NPU: {swings}." if swings else ""


def print_check(machine: Machine, as_json: bool = False) -> None:
    """Print the table of rates, and other projects' plans estimated with it."""
    plans = (("fitted", FITTED), ("single kernels", KERNELS), ("predicted", PREDICTED))
    if as_json:
        rates = [asdict(rate) for rate in constants(machine)]
        compared = {title: [_described_row(row, machine) for row in rows] for title, rows in plans}
        print(json.dumps({"rates": rates, "measured here": sorted(machine.measured), "plans": compared}))
        return
    columns = "rate", ">value", "published", "unit", "source"
    print(fitted(columns, (list(_constant_cells(rate, rate.name in machine.measured)) for rate in constants(machine))))
    numbers = [f">{name}" for name in ("measured ms", "model ms", "error")]
    for title, rows in plans:
        cells = (list(_row_cells(row, machine)) for row in rows)
        print(f"\n{fitted([title, *numbers, 'note'], cells)}")


def _described_row(row: Row, machine: Machine) -> dict[str, Any]:
    return {"what": row.what, "measured": row.measured, "model": row.model(machine), "note": row.note}


def _row_cells(row: Row, machine: Machine) -> Iterator[str]:
    yield from (row.what, f"{row.measured:.3f}", f"{row.model(machine):.3f}", f"{row.error(machine):+.0%}", row.note)


def _constant_cells(rate: Constant, measured: bool) -> Iterator[str]:
    yield from (rate.name, f"{rate.value:g}", f"{rate.low:g}-{rate.high:g}", rate.unit)
    yield "measured by the selftest" if measured else rate.source
