"""The cost of a cache hit: `python -m tests.support.cache_hit [DIRECTORY [MEGABYTES [FILES]]]`, on the disk of it.

A step with outputs as large as packed layers is fetched from a `file://` remote: looked up, received, verified,
flushed, put in place, with a receipt. Beside it, in turn, `cp`, `sync` and `sha256sum` of the same files.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from stages.engine.digests import Digests
from stages.engine.lock import ProcessLock
from stages.engine.project import Project
from stages.engine.steps import Step
from stages.sharing.cache import Cache

ROUNDS = 10


def step(directory: Path, remote: Path, make: Callable[[Path], None]) -> Step:
    """With one output, a directory that `make` fills."""
    shared = Cache(remote.as_uri(), lambda step: True)
    project = Project(directory, Digests(directory / ".digests"), ProcessLock(directory / "lock"), shared)
    return Step(project, "weights", "", make, (directory / "weights",))


def hit(scratch: Path) -> float:
    def refuse(work: Path) -> None:
        raise AssertionError("it is not in the cache")

    return timed(lambda: ran(step(scratch / "here", scratch / "remote", refuse)))


def by_hand(scratch: Path) -> float:
    script = 'cp -r "$1" "$2" && sync "$2"/* && sha256sum "$2"/* > /dev/null'
    command = ["sh", "-c", script, "sh", scratch / "there/weights", scratch / "here"]
    return timed(lambda: subprocess.run(list(map(str, command)), check=True))


def timed(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def ran(made: Step) -> None:
    assert made.run() is None


def main(directory: str = ".", megabytes: str = "512", files: str = "8") -> None:
    size = int(megabytes) * 1_000_000 // int(files)

    def make(work: Path) -> None:
        (work / "weights").mkdir()
        for number in range(int(files)):
            (work / f"weights/{number}").write_bytes(os.urandom(size))

    with tempfile.TemporaryDirectory(dir=directory) as name:
        scratch = Path(name)
        os.environ["LLAMA_NPU2_CONFIG"] = str(scratch / "trust")
        ran(step(scratch / "there", scratch / "remote", make))
        seconds: dict[Callable[[Path], float], list[float]] = {by_hand: [], hit: []}
        for _ in range(ROUNDS):
            for measure, found in seconds.items():
                found.append(measure(scratch))
                shutil.rmtree(scratch / "here")
    for measure, found in seconds.items():
        what = "cp, sync, sha256sum" if measure is by_hand else "cache hit"
        print(f"{what:20} {statistics.median(found):.2f} s ({min(found):.2f} to {max(found):.2f})")
    ratios = [ours / theirs for theirs, ours in zip(*seconds.values(), strict=True)]
    print(f"{'ratio':20} {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main(*sys.argv[1:])
