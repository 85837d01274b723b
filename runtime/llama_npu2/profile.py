"""Where the time of a prompt and of a token goes, program by program: `llama-npu2 DIR --profile`.

Every call of a phase is submitted alone and timed, in order, so that each finds the caches as the phase leaves them.
The host's part of a submission is in each figure, so the sum is a little more than the phase as a whole takes.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

import numpy as np

from llama_npu2.llama import Llama, decode_phase, load
from llama_npu2.table import Column, Table

PROMPT = 512
DEPTH = 512
FLOP_PER_VALUE = 2
"""A weight is multiplied and added."""


TABLE = Table(
    [
        Column("phase", 14),
        Column("program", 20),
        Column("calls", 5, right=True),
        Column("ms", 9, right=True),
        Column("share", 5, right=True),
        Column("weights GB/s", right=True),
        Column("GFLOP/s", 8, right=True),
    ],
    markdown=True,
)


@dataclass
class Line:
    """One program in one phase, all its calls together: the bytes of the matrices that they read, the values that they
    multiply, counted once per row; `seconds`: one figure per repeat."""

    phase: str
    program: str
    calls: int = 0
    weight_bytes: int = 0
    values: int = 0
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def row(self, total: float) -> str:
        milliseconds, share = f"{self.median * 1e3:.3f}", f"{self.median / total:.1%}"
        rates = (self.weight_bytes, FLOP_PER_VALUE * self.values)
        shown = (f"{rate / self.median / 1e9:.1f}" if self.values else "" for rate in rates)
        return TABLE.row(self.phase, self.program, self.calls, milliseconds, share, *shown)


def run_profile(directory: str, threads: int, repeats: int, as_json: bool) -> None:
    """Print a table, or one JSON object. Raises UserError."""
    with contextlib.closing(load(directory, threads)) as llm:
        phases = [list(profile(llm, *phase, repeats)) for phase in _phases(llm)]
        if as_json:
            print(json.dumps({"device": llm.description, "lines": [asdict(x) for part in phases for x in part]}))
            return
        print(f"{llm.manifest.model['name']}; {llm.description}\n")
        print(TABLE.header())
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
    depth = min(DEPTH, llm.context_length - 1)
    yield decode_phase(llm.windows, depth), 1, depth


def profile(llm: Llama, phase: str, rows: int, position: int, repeats: int) -> Iterator[Line]:
    """One line per program of a phase that processes `rows` tokens from `position` on, in order of appearance."""
    llm.reset()
    llm.prefill(np.arange(max(rows, position)) % llm.manifest.model["vocab"])
    submissions = [llm.device.prepare([call]) for call in llm.calls[phase]]
    plan = llm.manifest.plans[phase]
    lines: dict[str, Line] = {}
    for call in plan:
        name = call["program"]
        line = lines.setdefault(name, Line(f"{phase} @ {position}", name))
        line.calls += 1
        for matrix in (weight for weight in llm.manifest.weights_read(call).values() if weight.values):
            line.weight_bytes += matrix.nbytes
            line.values += matrix.values * llm.manifest.rows(name, rows)
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
