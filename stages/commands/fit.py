"""`doit fit`: what a model will need before anything is downloaded or built, by format, and what fits this machine.

`measure=1` builds and runs each row below `artifacts/` instead, one after the other, and shows what it really took.
"""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from llama_npu2.cli.table import Table, amount
from llama_npu2.errors import UserError
from llama_npu2.frozen import frozen
from llama_npu2.machine import available_memory
from stages.engine.files import write_json
from stages.engine.places import CONFIG, ROOT
from stages.engine.steps import Step
from stages.graph import Build, trial
from stages.graph.needs import Needs, process_memory
from stages.graph.options import parse_options
from stages.model.policy import Policy, matrix_formats, parse_policy
from stages.model.sources import config_fields, config_of
from stages.sharing.census import Count, count
from stages.sharing.remotes import open_remote
from stages.sharing.store import Store

CONTEXT = 2048
"""Positions of a short run."""

CHECKED = 512
"""Positions of the run that `measure=1` measures."""


@frozen
class Machine:
    """The free disk and memory of this machine, in bytes."""

    disk: int
    memory: int
    locked: int | None
    """None: no limit."""

    @classmethod
    def here(cls, artifacts: Path) -> Machine:
        existing = next(path for path in (artifacts, *artifacts.parents) if path.is_dir())
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        free = shutil.disk_usage(existing).free
        return cls(free, available_memory(), None if limit == resource.RLIM_INFINITY else limit)

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
        programs = [programs_there(build, needs.policy) for needs in rows] if build.options.cache else []
        print_needs(rows, Machine.here(build.artifacts), build.options.json, programs)
        if build.options.calibrate and not build.options.json:
            more = max(needs.calibration for needs in rows)
            print(f"calibrate= leaves up to {amount(more)} besides (doit gc calibration=1); its memory is not counted")


def policies(build: Build) -> list[Policy]:
    """Return the policy of `weights=`, or one for each format that the target has kernels for."""
    if build.options.weights:
        return [build.policy]
    options = build.options
    return [
        build.multiplied(parse_policy(name, options.kv, activations=options.activations))
        for name in matrix_formats()
        if build.target.runs(name)
    ]


def needs_of(build: Build, policy: Policy) -> Needs:
    source = build.source
    config = config_of(source).within(build.context)
    return Needs(source, config, build.target, policy, build.buckets, source.inventory(), build.options.second_copy)


def room(build: Build) -> int:
    """Bytes of disk that a build takes, besides what comes from a hub. Raises UserError, OSError."""
    needs = needs_of(build, build.policy)
    return needs.disk - needs.download


def programs_there(build: Build, policy: Policy) -> Count:
    """Count the programs of a build in a policy that `cache=` has. Raises UserError.

    Their sources are derived in a temporary directory, as they decide which programs they are.
    """
    with tempfile.TemporaryDirectory() as root:
        given = {**build.variables(policy, checkpoint=True), "cache": build.options.cache, "artifacts": root}
        other = Build(parse_options(given))
        write_json(other.directory / CONFIG, config_fields(build.source)[0])
        of: dict[str, list[Step]] = {}
        for name, step in other.steps.items():
            of.setdefault(name.partition(":")[0], []).append(step)
        for number, step in enumerate(of["module"]):
            work = Path(root, str(number))
            work.mkdir()
            step.action(work)
            shutil.copytree(work, other.directory, dirs_exist_ok=True)
        return count(Store(open_remote(build.options.cache), other.project.digests), of["elf"], of["object"])


def print_needs(rows: Sequence[Needs], machine: Machine, as_json: bool, programs: Sequence[Count] = ()) -> None:
    described = [_described(needs, machine) for needs in rows]
    for row, counted in zip(described, programs, strict=False):
        row["programs"] = vars(counted)
    if as_json:
        print(json.dumps({"machine": vars(machine), "formats": described}))
        return
    contexts = sorted(described[0]["resident"])
    titles = ["download", "disk", "build", *(f"run, {context}" for context in contexts), "locked"]
    table = Table([("weights", 12), *((f">{title}", 9) for title in titles), *_THERE[: len(programs)], ("fits", 0)])
    print(table.header())
    for row in described:
        amounts = [row["download"], row["disk"], row["build"], *row["resident"].values(), row["pinned"]]
        fits = "yes" if not row["lacks"] else f"no: {', '.join(row['lacks'])}"
        there = [f"{row['programs']['there']} of {row['programs']['all']}"] if programs else []
        print(table.row(row["weights"], *map(amount, amounts), *there, fits))
    locked = "unlimited" if machine.locked is None else amount(machine.locked)
    print(
        "\ndisk: weights and programs; int4 needs the programs of int6, too, as its vocabulary is in int6\n"
        "build: memory of a build; run: memory of a run with a context of so many tokens\n"
        "locked: of that, memory that the NPU pins"
    )
    if programs:
        print("programs: those that cache= has already, of all")
    print(f"here: {amount(machine.disk)} of disk free, {amount(machine.memory)} of memory, locked memory {locked}")


_THERE = ((">programs", 9),)


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


_LOOK = 0.01
"""Seconds between two looks at a build's processes."""


@frozen
class Took:
    """Bytes. `build`: anonymous memory of all processes at most; `resident`: of a run with `context` positions."""

    disk: int
    build: int
    resident: int
    context: int


def measure(build: Build, needs: Needs, context: int) -> Took:
    """Build below `artifacts/`, run, remove. Raises UserError."""
    context = min(context, needs.config.max_seq)
    build.artifacts.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=build.artifacts, prefix=".fit-") as root:
        given = {**build.variables(needs.policy, checkpoint=True), "artifacts": root}
        command = [sys.executable, "-m", "doit", "compile", *(f"{name}={value}" for name, value in given.items())]
        memory = peak_memory(command)
        disk = sum(path.stat().st_size for path in Path(root).rglob("*") if path.is_file())
        return Took(disk, memory, trial.resident(Build(parse_options(given)).directory, context), context)


def peak_memory(command: list[str]) -> int:
    """Anonymous memory that a command and all that it starts hold at most at a time. Raises UserError if it fails."""
    peak = 0
    # Nobody reads what it says before it ends: a pipe could be full by then.
    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=said) as process,
    ):
        while process.poll() is None:
            peak = max(peak, sum(map(_anonymous, (process.pid, *_descendants(process.pid)))))
            time.sleep(_LOOK)
        said.seek(0)
        if process.returncode:
            raise UserError(f"the build failed: {(said.read().strip().splitlines() or ['no message'])[-1]}")
    return peak


def _descendants(pid: int) -> Iterator[int]:
    """But for those that still are what started them: until it runs its program a child is in its parent's memory."""
    try:
        command = _command(pid)
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in (thread / "children").read_text().split():
                if _command(int(child)) != command:
                    yield int(child)
                yield from _descendants(int(child))
    except OSError:
        return  # it ended


def _command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def _anonymous(pid: int) -> int:
    try:
        return process_memory(pid).get("RssAnon", 0)
    except OSError:
        return 0
