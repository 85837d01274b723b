"""Feed a parser with damaged files until its count or its seconds of CPU are up: `python -m tests.fuzz.run gguf
seconds=600 seed=1`.

Inputs are numbered, and a number is always the same input of a seed: `gguf seed=1 first=1234 count=1` runs one again.
They are run in a process of their own, so that a crash, a hang or memory without end is a finding like a traceback.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import resource
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import RawArray
from pathlib import Path
from typing import Any

from llama_npu2.errors import UserError
from tests.fuzz.parsers import PARSERS, Parser, Run

LONGEST_INPUT = 20
"""Seconds of CPU that one input may take."""
MEMORY = 2 << 30
"""Bytes that a process may add to what it has mapped."""

Tell = Callable[[int, str], object]


@dataclass
class Result:
    """What became of the inputs: how many ran or were refused in one line; and for each that did neither, why."""

    outcomes: Counter[str] = field(default_factory=Counter)
    findings: dict[int, str] = field(default_factory=dict)
    counted: Counter[str] = field(default_factory=Counter)
    """Sums of what the inputs counted."""

    @property
    def count(self) -> int:
        return sum(self.outcomes.values())


def fuzz(
    parser: Parser, seed: int, first: int, count: int, seconds: float, tell: Tell = lambda number, why: None
) -> Result:
    """Run the inputs of a parser from number `first` on, in one child process after another. `seconds`: of CPU.
    `tell`: gets each finding at once."""
    result, before = Result(), _seconds(resource.RUSAGE_CHILDREN)
    shared: Any = RawArray("q", 3 + len(parser.counted))
    """The child notes here which input it runs, how many ran and were refused, and sums of what they counted."""
    number, end = first, first + count
    while number < end and (left := seconds + before - _seconds(resource.RUSAGE_CHILDREN)) > 0:
        shared[:] = [number, 0, 0, *(0 for _ in parser.counted)]
        with tempfile.TemporaryDirectory() as scratch:
            if why := in_child(partial(_run, parser, seed, number, end, left, shared, Path(scratch))):
                result.findings[shared[0]] = why
                tell(shared[0], why)
        number = shared[0] + 1
        result.outcomes += Counter(ran=shared[1], refused=shared[2], found=bool(why))
        result.counted += Counter(dict(zip(parser.counted, shared[3:], strict=True)))
    return result


def in_child(work: Callable[[], object]) -> str:
    """Do work in a process of its own; returns how that failed, if it did."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        faulthandler.disable()
        try:
            work()
            os._exit(0)
        except BaseException:
            os.write(writer, traceback.format_exc().encode(errors="backslashreplace")[-1 << 15 :])
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader) as file:
        told = file.read()
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    ended = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    return told or (ended if code else "")


def _seconds(of: int) -> float:
    """Of CPU that a process took, or its children did."""
    return sum(resource.getrusage(of)[:2])


def _run(parser: Parser, seed: int, first: int, end: int, seconds: float, shared: Any, scratch: Path) -> None:
    """Inputs until one is a finding, which is raised."""
    _limit_memory()
    with Path(os.devnull).open("w") as nowhere, parser.opened(scratch) as run:
        for stream in (1, 2):
            os.dup2(nowhere.fileno(), stream)
        for shared[0] in range(first, end):
            if _seconds(resource.RUSAGE_SELF) > seconds:
                break
            _limit_time()
            ran, returned = _outcome(run, *parser.case(seed, shared[0]))
            shared[1 if ran else 2] += 1
            for at, count in enumerate(returned if ran and parser.counted else (), 3):
                shared[at] += count


def _outcome(run: Run, name: str, content: bytes) -> tuple[bool, Any]:
    """Whether it ran, and what it returned; else it was refused in one line."""
    try:
        return True, run(name, content)
    except UserError as error:
        if not str(error).isprintable() or len(str(error)) > 2000:
            raise
        return False, None


def _limit_time() -> None:
    # No RLIMIT_CPU: the kernel holds it against ticks, which on a shared host run ahead of what it reports.
    signal.setitimer(signal.ITIMER_PROF, LONGEST_INPUT)
    signal.alarm(10 * LONGEST_INPUT)


def _limit_memory() -> None:
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main(arguments: list[str]) -> int:
    """0 if nothing was found."""
    options = argparse.ArgumentParser(prog="python -m tests.fuzz.run", description=__doc__)
    options.add_argument("parser", choices=PARSERS)
    options.add_argument("settings", nargs="*", metavar="seconds=600 seed=0 first=0 count=N")
    given = options.parse_args(arguments)
    values = {"seconds": 600, "seed": 0, "first": 0, "count": 1 << 31}
    for text in given.settings:
        name, _, value = text.partition("=")
        if name not in values or not value.isdecimal():
            options.error(f"{text}: must be one of {', '.join(values)}, = and a whole number")
        values[name] = int(value)
    chosen = (values[name] for name in ("seed", "first", "count", "seconds"))
    try:
        parser = PARSERS[given.parser]
        parser.seeds()
    except UserError as error:
        options.exit(2, f"{error}\n")
    again = f"{given.parser} seed={values['seed']} count=1 first="
    result = fuzz(parser, *chosen, lambda number, why: print(f"{again}{number}\n{why}", flush=True))
    told = ", ".join(f"{count} {what}" for what, count in sorted(result.outcomes.items()))
    if parser.counted:
        told += "; " + ", ".join(f"{result.counted[what]} {what}" for what in parser.counted)
    cpu = _seconds(resource.RUSAGE_CHILDREN)
    print(f"{given.parser}: {result.count} inputs in {cpu:.0f} s of CPU: {told or 'none'}")
    return bool(result.findings)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
