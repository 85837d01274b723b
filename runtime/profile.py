"""Where the time of a prompt and of a token goes, program by program: `python -m runtime DIR --profile`.

Every call of a phase is submitted alone and timed, in order, so that each finds the caches as the phase leaves them.
The host's part of a submission is in each figure, so the sum is a little more than the phase as a whole takes.
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

import numpy as np

from runtime.llama import Llama, load

PROMPT = 512
DEPTH = 512


@dataclass
class Line:
    """One program in one phase. `seconds`: of all its calls together, one figure per repeat."""

    phase: str
    program: str
    calls: int = 0
    weight_bytes: int = 0
    rows: int = 1
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def row(self, total: float) -> str:
        read = f"{self.weight_bytes / self.median / 1e9:8.1f}" if self.weight_bytes else ""
        rate = f"{self.weight_bytes * self.rows / self.median / 1e9:8.1f}" if self.weight_bytes else ""
        return (
            f"| {self.phase:14} | {self.program:20} | {self.calls:5} | {self.median * 1e3:9.3f} | "
            f"{self.median / total:5.1%} | {read:>8} | {rate:>8} |"
        )


def run_profile(directory: str, threads: int, repeats: int, as_json: bool) -> None:
    """Print a table, or one JSON object. Raises UserError."""
    with contextlib.closing(load(directory, threads)) as llm:
        phases = [list(profile(llm, *phase, repeats)) for phase in _phases(llm)]
        if as_json:
            print(json.dumps({"device": llm.device.description, "lines": [asdict(x) for part in phases for x in part]}))
            return
        print(f"{llm.manifest.model['name']}; {llm.device.description}\n")
        print("| phase          | program              | calls |        ms | share | weights GB/s | GFLOP/s |")
        print("|----------------|----------------------|------:|----------:|------:|---------:|---------:|")
        for part in phases:
            total = sum(line.median for line in part)
            for line in part:
                print(line.row(total), flush=True)


def _phases(llm: Llama) -> Iterator[tuple[str, int, int]]:
    """(phase, rows, first position): a prompt, and a token behind as many."""
    rows = min(PROMPT, llm.context_length - 1)
    if llm.buckets:
        rows = max((b for b in llm.buckets if b <= rows), default=llm.buckets[0])
    yield (f"prefill@{rows}" if llm.buckets else "prefill"), rows, 0
    yield "decode", 1, min(DEPTH, llm.context_length - 1)


def profile(llm: Llama, phase: str, rows: int, position: int, repeats: int) -> Iterator[Line]:
    """One line per program of a phase that processes `rows` tokens from `position` on, in order of appearance."""
    llm.reset()
    llm.prefill(np.arange(max(rows, position)) % llm.manifest.model["vocab"])
    submissions = [llm.device.prepare([call]) for call in llm.calls[phase]]
    plan = llm.manifest.plans[phase]
    lines: dict[str, Line] = {}
    for call in plan:
        name = call["program"]
        line = lines.setdefault(name, Line(f"{phase} @ {position}", name, rows=_rows(llm, name, rows)))
        line.calls += 1
        matrices = (shape for shape in llm.manifest.weights_read(call).values() if len(shape) > 1)
        line.weight_bytes += sum(2 * math.prod(shape) for shape in matrices)
    for repeat in range(repeats + 1):
        spent = dict.fromkeys(lines, 0.0)
        for call, submission in zip(plan, submissions, strict=True):
            started = time.perf_counter()
            submission.run(rows, position)
            spent[call["program"]] += time.perf_counter() - started
        for name, seconds in spent.items():
            if repeat:
                lines[name].seconds.append(seconds)
    yield from lines.values()


def _rows(llm: Llama, program: str, rows: int) -> int:
    """Rows that a program multiplies its weights with."""
    shapes = [slot["shape"] for slot in llm.manifest.programs[program]["slots"]]
    return rows if any(shape[0] in ("seq", rows) for shape in shapes) else 1
