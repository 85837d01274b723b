"""Measures what a build and a run take, for `doit fit measure=1`. The build is its own, and is removed again."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llama_npu2.cli.peak import PRINT_PEAK
from llama_npu2.errors import UserError
from stages.engine.places import ROOT, python_environment
from stages.graph import Build
from stages.graph.needs import RUN_IMPORTS, Needs, process_memory
from stages.graph.options import parse_options

_LOOK = 0.01
"""Seconds between two looks at a build's processes."""

_RUN = f"""{RUN_IMPORTS}
import sys
import numpy as np
from llama_npu2 import load
llm, context = load(sys.argv[1]), int(sys.argv[2])
llm.encode("x", raw=True)
llm.prefill(np.random.default_rng(0).integers(llm.manifest.model["vocab"], size=context - 1))
llm.decode(0)
{PRINT_PEAK}
"""
"""Tokens from all over the vocabulary: of an embedding that is not the head, a run holds what its tokens are in."""


@dataclass(frozen=True)
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
        options = build.options
        given = {
            "model": options.model,
            "revision": options.revision,
            "target": build.target.name,
            "weights": needs.policy.text,
            "kv": options.kv,
            "npu.buckets": options.buckets,
            "context": str(options.context),
            "artifacts": root,
        }
        command = [sys.executable, "-m", "doit", "compile", *(f"{name}={value}" for name, value in given.items())]
        memory = peak_memory(command)
        disk = sum(path.stat().st_size for path in Path(root).rglob("*") if path.is_file())
        run = [sys.executable, "-c", _RUN, str(Build(parse_options(given)).directory), str(context)]
        done = subprocess.run(run, env=python_environment(), capture_output=True, text=True, check=False)
        if done.returncode:
            raise UserError(f"the run failed: {done.stderr.strip().splitlines()[-1]}")
        return Took(disk, memory, int(done.stdout) << 10, context)


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
