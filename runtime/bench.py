"""Measures an artifact directory against what the machine can do: `python -m runtime DIR --bench`.

Reading weights bounds decode, multiplying bounds prefill; both limits are measured in the same run, around every test,
because machines change speed from minute to minute. Rates are quoted as mean and standard deviation.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from runtime.devices.cpu import CpuDevice
from runtime.errors import UserError
from runtime.llama import Llama, load

PROMPTS = (128, 512, 2048)
DEPTHS = (0, 512, 2048)
GENERATED = 32
COLD_PROMPT_TOKENS = 16
PEAK_ITERATIONS = 2_000_000


@dataclass
class Result:
    """One test. `values`: one per repeat, in `unit`; `limit`: the median of the machine's limit beside it."""

    test: str
    unit: str
    values: list[float] = field(default_factory=list)
    limits: list[float] = field(default_factory=list)

    @property
    def share(self) -> float | None:
        """Median of the part of the limit that was reached, run by run; None where no limit applies."""
        pairs = zip(self.values, self.limits, strict=True) if self.limits else ()
        shares = [value / limit for value, limit in pairs]
        return statistics.median(shares) if shares else None

    def row(self) -> str:
        spread = statistics.stdev(self.values) if len(self.values) > 1 else 0.0
        share = "" if self.share is None else f"{self.share:.0%}"
        rate = f"{statistics.mean(self.values):10.2f} ± {spread:<8.2f}"
        return f"| {self.test:18} | {statistics.median(self.values):10.2f} | {rate} | {self.unit:8} | {share:>5} |"


def run_bench(directory: str, threads: int, repeats: int, as_json: bool) -> None:
    """Print the table, or one JSON object. Raises UserError for targets other than `cpu`."""
    with contextlib.closing(load(directory, threads)) as llm:
        if not isinstance(llm.device, CpuDevice):
            raise UserError(f"{directory}: --bench measures the cpu target only")
        results = []
        if not as_json:
            print(header(llm), flush=True)
        for result in Bench(llm, repeats).results():
            results.append(result)
            if not as_json:
                print(result.row(), flush=True)
        for result in cold_start(directory, llm, repeats):
            results.append(result)
            if not as_json:
                print(result.row(), flush=True)
        if as_json:
            print(json.dumps({"machine": machine(llm), "results": [asdict(r) | {"share": r.share} for r in results]}))


def machine(llm: Llama) -> dict[str, Any]:
    names = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    cpu = names[0] if names else platform.processor()
    return {
        "cpu": cpu,
        "device": llm.device.description,
        "model": llm.manifest.model["name"],
        "python": platform.python_version(),
    }


def _lines(path: str) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(path).read_text().splitlines()
    return []


def header(llm: Llama) -> str:
    about = machine(llm)
    size = sum(entry["size"] for name, entry in llm.manifest.files.items() if name.startswith("weights/"))
    return (
        f"{about['model']}, {size / 2**30:.2f} GiB of weights; {about['device']}; {about['cpu']}\n\n"
        f"| {'test':18} | {'median':>10} | {'mean ± deviation':>21} | {'unit':8} | limit |\n"
        f"|{'-' * 20}|{'-' * 11}:|{'-' * 22}:|{'-' * 10}|------:|"
    )


class Bench:
    """The tests that run inside one process, on a loaded model."""

    def __init__(self, llm: Llama, repeats: int) -> None:
        self.llm, self.repeats = llm, repeats
        self.device: CpuDevice = llm.device
        self.generator = np.random.default_rng(0)
        self.config = llm.manifest.model
        self.weights = _matrix_bytes(llm)
        self.largest = max(self.weights, key=lambda name: self.weights[name])

    def results(self) -> Iterator[Result]:
        """Limits first, then prefill and decode, each repeat with its limit measured right beside it."""
        self.read_bandwidth()
        yield self._repeat("read bandwidth", "GB/s", lambda: self.read_bandwidth() / 1e9)
        yield self._repeat("bf16 peak", "GFLOP/s", lambda: self.device.measure_peak("bf16", PEAK_ITERATIONS) / 1e9)
        yield self._repeat("f32 peak", "GFLOP/s", lambda: self.device.measure_peak("f32", PEAK_ITERATIONS) / 1e9)
        room = self.llm.context_length
        for rows in (rows for rows in PROMPTS if rows <= room):
            yield self.prefill(rows)
        for depth in (depth for depth in DEPTHS if depth + GENERATED < room):
            yield self.decode(depth)

    def _repeat(self, test: str, unit: str, measure: Callable[[], float]) -> Result:
        return Result(test, unit, [measure() for _ in range(self.repeats)])

    def read_bandwidth(self) -> float:
        """Bytes per second of reading the weights themselves."""
        return max(self.device.measure_read(self.llm.buffer(self.largest)) for _ in range(2))

    def tokens(self, count: int) -> list[int]:
        return self.generator.integers(0, self.config["vocab"], count).tolist()

    def prefill(self, rows: int) -> Result:
        """Tokens per second of a prompt; the limit is the bf16 peak over the arithmetic of one token."""
        result = Result(f"pp{rows}", "tokens/s")
        flop = self._prefill_flop(rows)
        for repeat in range(self.repeats + 1):
            peak = self.device.measure_peak("bf16", PEAK_ITERATIONS)
            self.llm.reset()
            seconds = _timed(lambda: self.llm.prefill(self.tokens(rows)))
            if repeat:
                result.values.append(rows / seconds)
                result.limits.append(rows * peak / flop)
        return result

    def decode(self, depth: int) -> Result:
        """Tokens per second behind `depth` tokens; the limit is the read bandwidth over the bytes of one token."""
        result = Result(f"tg{GENERATED} @ {depth}", "tokens/s")
        read = (
            sum(self.weights.values())
            + 4 * self.config["layers"] * depth * self.config["kv_heads"] * self.config["head_dim"]
        )
        self.llm.reset()
        if depth:
            self.llm.prefill(self.tokens(depth))
        for repeat in range(self.repeats + 1):
            bandwidth = self.read_bandwidth()
            self.llm.rewind(depth)
            seconds = _timed(partial(self._generate, self.tokens(GENERATED)))
            if repeat:
                result.values.append(GENERATED / seconds)
                result.limits.append(bandwidth / read)
        return result

    def _generate(self, ids: list[int]) -> None:
        for token in ids:
            self.llm.decode(token)

    def _prefill_flop(self, rows: int) -> float:
        """Two per weight and row (the LM head's for one row), four per head element and attended pair."""
        head = self.weights[self.largest] if self.largest in ("model.embed_tokens.weight", "lm_head.weight") else 0
        products = (sum(self.weights.values()) - head) * rows + head
        pairs = rows * (rows + 1) / 2
        return products + 4 * self.config["layers"] * self.config["heads"] * self.config["head_dim"] * pairs


def _matrix_bytes(llm: Llama) -> dict[str, int]:
    """Bytes of every weight that a decoded token reads in full; the embedding only if the LM head shares it."""
    calls = [call for call in llm.manifest.plans["decode"] if call["program"] != "embed_tokens"]
    names = {reference for call in calls for reference in call["buffers"]}
    specs = {name: llm.manifest.buffers[name] for name in names if "@" not in name}
    return {name: 2 * math.prod(spec["shape"]) for name, spec in specs.items() if spec["kind"] == "weight"}


def _timed(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def cold_start(directory: str, llm: Llama, repeats: int) -> Iterator[Result]:
    """New processes, page cache warm: until the first piece of text, and the most memory that one held."""
    count = max(1, COLD_PROMPT_TOKENS - 1)
    prompt = llm.tokenizer.decode([int(i) for i in np.arange(40, 40 + count)]) or "hello"
    command = [
        sys.executable,
        "-m",
        "runtime",
        directory,
        prompt,
        "--raw",
        "--max-tokens=2",
        f"--threads={llm.device.threads}",
    ]
    first, loaded = Result("cold start", "s"), Result("load", "s")
    for _ in range(repeats):
        started = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            assert process.stdout is not None
            os.read(process.stdout.fileno(), 1)
            first.values.append(time.perf_counter() - started)
            process.stdout.read()

        def reload() -> None:
            load(directory, llm.device.threads).close()

        loaded.values.append(_timed(reload))
    yield loaded
    yield first
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**10
    weights = sum(entry["size"] for name, entry in llm.manifest.files.items() if name.startswith("weights/")) / 2**20
    yield Result("peak memory", "MiB", [peak], [weights])
