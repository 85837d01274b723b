"""`doit fit`: what a model will need before anything is downloaded or built, by format, and what fits this machine.

`measure=1` builds and runs each row below `artifacts/` instead, one after the other, and shows what it really took.
"""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from llama_npu2.cli.table import Table, amount
from stages.commands.fit_check import Took, measure
from stages.graph import Build
from stages.graph.needs import Needs
from stages.model.plan import with_context
from stages.model.policy import Policy, matrix_formats, parse_policy
from stages.model.sources import config_of

CONTEXT = 2048
"""Positions of a short run."""

CHECKED = 512
"""Positions of the run that `measure=1` measures."""


@dataclass(frozen=True)
class Machine:
    """The free disk and memory of this machine, in bytes."""

    disk: int
    memory: int
    locked: int | None
    """None: no limit."""

    @classmethod
    def here(cls, artifacts: Path) -> Machine:
        existing = next(path for path in (artifacts, *artifacts.parents) if path.is_dir())
        available = next(
            int(line.split()[1]) << 10
            for line in Path("/proc/meminfo").read_text().splitlines()
            if line.startswith("MemAvailable")
        )
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        return cls(shutil.disk_usage(existing).free, available, None if limit == resource.RLIM_INFINITY else limit)

    def lacks(self, needs: Needs, context: int) -> list[str]:
        """Return the names of the resources that do not suffice to build, or to run with `context` positions."""
        short = {
            "disk": needs.disk > self.disk,
            "memory to build": needs.build > self.memory,
            "memory to run": needs.resident(context) > self.memory,
            "locked memory": self.locked is not None and needs.pinned > self.locked,
        }
        return [what for what, lacking in short.items() if lacking]


def run(build: Build) -> None:
    """Raises UserError."""
    rows = [needs for policy in policies(build) if (needs := needs_of(build, policy))]
    if build.options.measure:
        print_check(build, rows)
    else:
        print_needs(rows, Machine.here(build.artifacts), build.options.json)
        if build.options.calibrate and not build.options.json:
            more = max(needs.calibration for needs in rows)
            print(f"calibrate= leaves up to {amount(more)} besides (doit gc calibration=1); its memory is not counted")


def policies(build: Build) -> list[Policy]:
    """Return the policy of `weights=`, or one for each format that the target has kernels for."""
    if build.options.weights:
        return [build.policy]
    formats = (name for name in matrix_formats() if build.target.runs(name))
    return [build.multiplied(parse_policy(name, build.options.kv)) for name in formats]


def needs_of(build: Build, policy: Policy) -> Needs:
    source = build.source
    config = with_context(config_of(source), build.context)
    return Needs(source, config, build.target, policy, build.buckets, source.inventory(), build.options.second_copy)


def room(build: Build) -> int:
    """Bytes of disk that a build takes, besides what comes from a hub. Raises UserError, OSError."""
    needs = needs_of(build, build.policy)
    return needs.disk - needs.download


def print_needs(rows: Sequence[Needs], machine: Machine, as_json: bool) -> None:
    described = [_described(needs, machine) for needs in rows]
    if as_json:
        print(json.dumps({"machine": vars(machine), "formats": described}))
        return
    contexts = sorted(described[0]["resident"])
    titles = ["download", "disk", "build", *(f"run, {context}" for context in contexts), "locked"]
    table = Table([("weights", 12), *((f">{title}", 9) for title in titles), ("fits", 0)])
    print(table.header())
    for row in described:
        amounts = [row["download"], row["disk"], row["build"], *row["resident"].values(), row["pinned"]]
        fits = "yes" if not row["lacks"] else f"no: {', '.join(row['lacks'])}"
        print(table.row(row["weights"], *map(amount, amounts), fits))
    locked = "unlimited" if machine.locked is None else amount(machine.locked)
    print(
        "\ndisk: weights and programs; int4 needs the programs of int6, too, as its vocabulary is in int6\n"
        "build: memory of a build; run: memory of a run with a context of so many tokens\n"
        "locked: of that, memory that the NPU pins"
    )
    print(f"here: {amount(machine.disk)} of disk free, {amount(machine.memory)} of memory, locked memory {locked}")


def _described(needs: Needs, machine: Machine) -> dict:
    longest = needs.config.max_seq
    contexts = sorted({min(CONTEXT, longest), longest})
    return {
        "weights": needs.policy.text,
        "download": needs.download,
        "disk": needs.disk,
        "build": needs.build,
        "resident": {context: needs.resident(context) for context in contexts},
        "pinned": needs.pinned,
        "calibration": needs.calibration,
        "lacks": machine.lacks(needs, contexts[0]),
    }


def print_check(build: Build, rows: Sequence[Needs]) -> None:
    numbers = ((f">{title}", 9) for title in ("needs", "took", "%"))
    table = Table([("weights", 12), ("", 8), *numbers])
    if build.options.json:
        found = ((needs.policy.text, *row) for needs in rows for row in compared(needs, measure(build, needs, CHECKED)))
        print(json.dumps([dict(zip(("weights", "what", "needs", "took"), row, strict=True)) for row in found]))
        return
    print(table.header(), flush=True)
    for needs in rows:
        for what, needed, took in compared(needs, measure(build, needs, CHECKED)):
            print(table.row(needs.policy.text, what, amount(needed), amount(took), f"{100 * (needed / took - 1):+.1f}"))


def compared(needs: Needs, took: Took) -> Iterator[tuple[str, int, int]]:
    yield "disk", needs.disk, took.disk
    yield "build", needs.build, took.build
    yield "run", needs.resident(took.context), took.resident
