"""Feed a parser with damaged files until its time or count is up: `python -m tests.fuzz.run gguf seconds=600 seed=1`.

Inputs are numbered, and a number is always the same input of a seed: `gguf seed=1 first=1234 count=1` runs one again.
They are run in a process of their own, so that a crash, a hang or memory without end is a finding like a traceback.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing import RawArray
from pathlib import Path
from typing import Any

from llama_npu2.errors import UserError
from tests.fuzz.parsers import PARSERS, Parser, Run

LONGEST_INPUT = 20
"""Seconds of CPU that one input may take."""
MEMORY = 2 << 30
"""Bytes that a process may add to what it has mapped."""
_MARK = 1 << 40


@dataclass
class Result:
    """What became of the inputs: how many ran or were refused in one line; and for each that did neither, why."""

    outcomes: Counter[str] = field(default_factory=Counter)
    findings: dict[int, str] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return sum(self.outcomes.values())


def fuzz(parser: Parser, seed: int, first: int, count: int, seconds: float) -> Result:
    """Run the inputs of a parser from number `first` on, in one child process after another."""
    result, stop = Result(), time.monotonic() + seconds
    shared: Any = RawArray("q", 3)
    """Of the child: the input it runs; how many ran, how many were refused."""
    number, end = first, first + count
    while number < end and time.monotonic() < stop:
        shared[:] = [number, 0, 0]
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            _child(parser, seed, number, end, stop, shared, writer)
        os.close(writer)
        with os.fdopen(reader) as file:
            told = file.read()
        _, status = os.waitpid(child, 0)
        number = shared[0] + 1
        result.outcomes += Counter(ran=shared[1], refused=shared[2])
        if status:
            how = told or f"ended by {signal.Signals(os.WTERMSIG(status)).name}" if os.WIFSIGNALED(status) else told
            result.findings[shared[0]] = how or f"ended with {status}"
            result.outcomes["found"] += 1
    return result


def _child(parser: Parser, seed: int, first: int, end: int, stop: float, shared: Any, writer: int) -> None:
    """Runs inputs until one is a finding, which it tells; never returns."""
    status = 1
    try:
        _limit_memory()
        with tempfile.TemporaryDirectory() as scratch, Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
            with parser.opened(Path(scratch)) as run:
                for shared[0] in range(first, end):
                    if time.monotonic() > stop:
                        break
                    _limit_time()
                    shared[1 if _outcome(run, *parser.case(seed, shared[0])) else 2] += 1
        status = 0
    except BaseException:
        os.write(writer, traceback.format_exc().encode(errors="backslashreplace")[-1 << 15 :])
    os._exit(status)


def _outcome(run: Run, name: str, content: bytes) -> bool:
    """Whether it ran; else it was refused in one line."""
    try:
        run(name, content)
    except UserError as error:
        if not str(error).isprintable() or len(str(error)) > 2000:
            raise
        return False
    return True


def _limit_time() -> None:
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    resource.setrlimit(resource.RLIMIT_CPU, (int(used) + LONGEST_INPUT, resource.RLIM_INFINITY))
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
    values |= {name: int(value) for name, _, value in (text.partition("=") for text in given.settings)}
    started = time.process_time()
    result = fuzz(PARSERS[given.parser], values["seed"], values["first"], values["count"], values["seconds"])
    for number, what in result.findings.items():
        print(f"{given.parser} seed={values['seed']} first={number} count=1\n{what}")
    told = ", ".join(f"{count} {what}" for what, count in sorted(result.outcomes.items()))
    cpu = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) + time.process_time() - started
    print(f"{given.parser}: {result.count} inputs in {cpu:.0f} s of CPU: {told or 'none'}")
    return bool(result.findings)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
