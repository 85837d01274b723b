"""Measures an artifact directory against what the machine can do: `llama-npu2 bench DIR`.

Reading weights bounds decode, multiplying bounds prefill; both limits are measured in the same run, around every test,
because machines change speed from minute to minute. Rates are quoted as mean and standard deviation.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from llama_npu2.artifact.plan import PREFILL
from llama_npu2.cli.peak import PRINT_PEAK
from llama_npu2.cli.table import Column, Table
from llama_npu2.devices.cpu import CpuDevice
from llama_npu2.engine.chunks import decode_phase
from llama_npu2.engine.llama import Llama, load
from llama_npu2.options import Running, to_arguments

PROMPTS = (128, 512, 2048)
DEPTHS = (0, 512, 2048)
GENERATED = 32
LONGEST = max(*PROMPTS, max(DEPTHS) + GENERATED)
"""Positions that the tests need at most."""
COLD_PROMPT_TOKENS = 16
PEAK_ITERATIONS = 10_000_000
READ_PASSES = 9
SETTLE = 0.1
"""Seconds behind an engine: threads of it that still spin would take the cores from what is measured next."""


@dataclass
class Result:
    """One test. `values`: one per repeat, in `unit`; `limits`: the machine's limit measured beside each; `peers` and
    `peer_limits`: the same of others in the same repeats, by name."""

    test: str
    unit: str
    values: list[float] = field(default_factory=list)
    limits: list[float] = field(default_factory=list)
    peers: dict[str, list[float]] = field(default_factory=dict)
    peer_limits: dict[str, list[float]] = field(default_factory=dict)

    @property
    def share(self) -> float | None:
        """Median of the part of the limit that was reached, repeat by repeat; None where no limit applies."""
        return _median_ratio(self.values, self.limits)

    @property
    def ratios(self) -> dict[str, float | None]:
        """How many times each peer's rate was reached: the median, repeat by repeat."""
        return {name: _median_ratio(self.values, values) for name, values in self.peers.items()}

    @property
    def peer_shares(self) -> dict[str, float | None]:
        """The share of each peer, which has a limit of its own where it reads other weights."""
        return {name: _median_ratio(values, self.peer_limits.get(name, ())) for name, values in self.peers.items()}

    def cells(self, peers: Sequence[str]) -> list[str]:
        """A row of `table(peers)`; a peer that has no part in the test has an empty cell."""
        spread = statistics.stdev(self.values) if len(self.values) > 1 else 0.0
        mean = f"{_figure(statistics.mean(self.values))} ± {_figure(spread):<8}"
        median = _figure(statistics.median(self.values))
        others = [self._peer_cell(name) if name in self.peers else "" for name in peers]
        return [self.test, median, mean, self.unit, _percent(self.share), *others]

    def _peer_cell(self, name: str) -> str:
        share = _percent(self.peer_shares[name])
        return f"{_figure(statistics.median(self.peers[name]))} {self.ratios[name]:5.2f}x {share:>6}"


def _figure(value: float) -> str:
    return f"{value:.2f}" if value >= 1 or not value else f"{value:.3g}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def table(peers: Sequence[str]) -> Table:
    """`peers`: the names of the columns it ends with: a rate, how many times that was reached, its share of the
    limit."""
    ours = [
        Column("test", 18),
        Column("median", 10, right=True),
        Column("mean ± deviation", 21, right=True),
        Column("unit", 8),
        Column("limit", 6, right=True),
    ]
    return Table([*ours, *(Column(name, 21, right=True) for name in peers)], markdown=True)


def _median_ratio(values: Sequence[float], others: Sequence[float]) -> float | None:
    if not others:
        return None
    return statistics.median(value / other for value, other in zip(values, others, strict=True))


class Engine(Protocol):
    """Something that runs the same checkpoint. Both calls return seconds. `token_bytes`: of weights that a decoded
    token reads."""

    name: str
    token_bytes: int

    def prefill(self, ids: Sequence[int]) -> float:
        """Process a prompt from an empty context."""

    def decode(self, depth: int, ids: Sequence[int]) -> float:
        """Process tokens one by one behind the first `depth` of the context."""


OpenPeers = Callable[[Llama], contextlib.AbstractContextManager[Sequence[Engine]]]


class Ours:
    """The runtime as an `Engine`."""

    name = "llama-npu2"

    def __init__(self, llm: Llama) -> None:
        self._llm = llm
        self.token_bytes = sum(_token_bytes(llm).values())

    def prefill(self, ids: Sequence[int]) -> float:
        self._llm.reset()
        return _timed(lambda: self._llm.prefill(ids))

    def decode(self, depth: int, ids: Sequence[int]) -> float:
        self._llm.rewind(depth)
        return _timed(lambda: self._decode(ids))

    def _decode(self, ids: Sequence[int]) -> None:
        """Keeps no logits, as generating does: memory that is new to the process costs more than the copy into it."""
        for token in ids:
            self._llm.decode(token)


def run_bench(
    directory: str,
    running: Running,
    as_json: bool,
    open_peers: OpenPeers | None = None,
    more: Callable[[Llama, Sequence[Any]], Iterable[Result]] = lambda llm, peers: (),
) -> None:
    """Print the table, or one JSON object. `open_peers(llm)`: a context with other engines to measure in turn, of which
    `more` makes rows that the table ends with.

    Raises UserError.
    """
    with contextlib.closing(load(directory, running.threads, running.second_copy)) as llm:
        with open_peers(llm) if open_peers else contextlib.nullcontext([]) as peers:
            bench = Bench(llm, running.repeats, peers)
            names = [peer.name for peer in bench.peers]
            lines = table(names)
            if not as_json:
                print(f"{heading(llm)}\n\n{lines.header()}", flush=True)
            results = []
            rows = (bench.results(), cold_start(directory, llm, running), more(llm, peers))
            for result in itertools.chain(*rows):
                results.append(result)
                if not as_json:
                    print(lines.row(*result.cells(names)), flush=True)
        if as_json:
            print(json.dumps({"machine": machine(llm), "results": [_described(result) for result in results]}))


def _described(result: Result) -> dict[str, Any]:
    return asdict(result) | {"share": result.share, "ratios": result.ratios, "peer_shares": result.peer_shares}


def machine(llm: Llama) -> dict[str, Any]:
    names = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    cpu = names[0] if names else platform.processor()
    return {
        "cpu": cpu,
        "device": llm.description,
        "model": llm.manifest.model["name"],
        "python": platform.python_version(),
    }


def _lines(path: str) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(path).read_text().splitlines()
    return []


def heading(llm: Llama) -> str:
    """What is measured, on what."""
    about = machine(llm)
    return f"{about['model']}, {_weight_bytes(llm) / 2**30:.2f} GiB of weights; {about['device']}; {about['cpu']}"


def _weight_bytes(llm: Llama) -> int:
    """Of the files."""
    return sum(entry["size"] for name, entry in llm.manifest.files.items() if name.startswith("weights/"))


class Bench:
    """The tests on a loaded model, and on its peers in turn. Limits are those of the CPU, for the target `cpu`."""

    def __init__(self, llm: Llama, repeats: int, peers: Sequence[Engine] = ()) -> None:
        self.llm, self.repeats, self.peers = llm, repeats, peers
        self.device = llm.device
        self.limited = isinstance(llm.device, CpuDevice)
        self.generator = np.random.default_rng(0)
        self.config = llm.manifest.model
        self.engines: Sequence[Engine] = (Ours(llm), *peers)
        self.weights = [llm.buffer(name) for name in _token_bytes(llm)]

    def results(self) -> Iterator[Result]:
        """Limits first, then prefill and decode, each repeat with its limit measured right beside it."""
        yield self.read_per_token()
        if self.limited:
            yield from self._limits()
        for rows in (rows for rows in PROMPTS if rows <= self.llm.context_length):
            yield self.prefill(rows)
        for depth in (depth for depth in DEPTHS if depth + GENERATED < self.llm.context_length):
            yield self.decode(depth)
        if self.limited:
            yield self.host_overhead()

    def _limits(self) -> Iterator[Result]:
        self.read_bandwidth()
        yield self._repeat("read bandwidth", "GB/s", lambda: self.read_bandwidth() / 1e9)
        yield self._repeat("bf16 peak", "GFLOP/s", lambda: self.device.measure_peak("bf16", PEAK_ITERATIONS) / 1e9)
        yield self._repeat("f32 peak", "GFLOP/s", lambda: self.device.measure_peak("f32", PEAK_ITERATIONS) / 1e9)

    def read_per_token(self) -> Result:
        """Bytes of weights; a token also reads what the caches hold of the positions before it."""
        ours, *others = ([engine.token_bytes / 1e9] for engine in self.engines)
        return Result("read per token", "GB", ours, peers=dict(zip((p.name for p in self.peers), others, strict=True)))

    def _repeat(self, test: str, unit: str, measure: Callable[[], float]) -> Result:
        return Result(test, unit, [measure() for _ in range(self.repeats)])

    def read_bandwidth(self) -> float:
        """Bytes per second of reading the weights themselves, all of them, so that no cache holds them from one pass to
        the next unless it does so for tokens too."""
        return statistics.median(self.device.measure_read(self.weights) for _ in range(READ_PASSES))

    def tokens(self, count: int) -> list[int]:
        return self.generator.integers(0, self.config["vocab"], count).tolist()

    def prefill(self, rows: int) -> Result:
        """Tokens per second of a prompt; the limit is the bf16 peak over the arithmetic of one token."""
        return self._compare(
            f"pp{rows}",
            lambda: self.device.measure_peak("bf16", PEAK_ITERATIONS),
            lambda engine: self._prefill_flop(rows) / rows,
            lambda engine, ids: engine.prefill(ids),
            rows,
        )

    def decode(self, depth: int) -> Result:
        """Tokens per second behind `depth` tokens; the limit is the read bandwidth over the bytes of one token."""
        if depth:
            prompt = self.tokens(depth)
            for engine in self.engines:
                engine.prefill(prompt)
        return self._compare(
            f"tg{GENERATED} @ {depth}",
            self.read_bandwidth,
            lambda engine: engine.token_bytes + depth * self._position_bytes(engine.name),
            lambda engine, ids: engine.decode(depth, ids),
            GENERATED,
        )

    def _compare(
        self,
        test: str,
        speed: Callable[[], float],
        need: Callable[[Engine], float],
        run: Callable[[Engine, list[int]], float],
        count: int,
    ) -> Result:
        """Rates of all engines, one after the other in every repeat; the first repeat only warms up. `speed`: of the
        machine, per second; `need`: how much of that a token takes.

        The speed is measured before and after each, and the mean of both counts, because machines change theirs.
        """
        rates: dict[str, list[float]] = {engine.name: [] for engine in self.engines}
        limits: dict[str, list[float]] = {engine.name: [] for engine in self.engines}
        for repeat in range(self.repeats + 1):
            ids = self.tokens(count)
            after = speed() if self.limited else 0.0
            for engine in self.engines:
                before, rate = after, count / run(engine, ids)
                time.sleep(SETTLE)
                after = speed() if self.limited else 0.0
                if repeat:
                    rates[engine.name].append(rate)
                    limits[engine.name] += [(before + after) / 2 / need(engine)] if self.limited else []
        return Result(test, "tokens/s", rates.pop(Ours.name), limits.pop(Ours.name), rates, limits)

    def host_overhead(self) -> Result:
        """Percent of a generated token's time that is spent outside of kernels: sampling, text, binding, Python."""
        result = Result("host per token", "%")
        for _ in range(self.repeats):
            pieces = self.llm.generate("Once upon a time", raw=True, max_tokens=GENERATED)
            next(pieces, None)
            native = self.device.native_seconds
            whole = _timed(partial(list, pieces))
            result.values.append(100 * (1 - (self.device.native_seconds - native) / whole))
        return result

    def _position_bytes(self, engine: str) -> float:
        """What an engine's caches hold of one position, K and V of every layer: ours as it is, peers' in 16 bits."""
        if engine != Ours.name:
            return 4 * self.config["layers"] * self.config["kv_heads"] * self.config["head_dim"]
        manifest = self.llm.manifest
        caches = (name for name, spec in manifest.buffers.items() if spec["kind"] == "cache")
        return sum(map(manifest.nbytes, caches)) / self.llm.context_length

    def _prefill_flop(self, rows: int) -> float:
        """Two per weight and row that it is multiplied with, four per head element and attended pair."""
        manifest = self.llm.manifest
        products = sum(
            weight.values * manifest.rows(call.program, rows)
            for call in manifest.plans[PREFILL]
            for weight in manifest.weights_read(call).values()
        )
        pairs = rows * (rows + 1) / 2
        return 2 * products + 4 * self.config["layers"] * self.config["heads"] * self.config["head_dim"] * pairs


def _token_bytes(llm: Llama) -> dict[str, int]:
    """Bytes of every weight that a decoded token reads in full; the embedding only if the LM head shares it."""
    calls = llm.manifest.plans[decode_phase(llm.windows, 0)]
    return {name: weight.nbytes for call in calls for name, weight in llm.manifest.weights_read(call).items()}


def _timed(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


_RUN = f"""from llama_npu2.__main__ import main
if status := main():
    raise SystemExit(status)
{PRINT_PEAK}
"""
"""The command line of the runtime, behind whose reply comes the most memory that it held, in KiB."""


def cold_start(directory: str, llm: Llama, running: Running) -> Iterator[Result]:
    """New processes, page cache warm: until the first piece of text, and the most memory that one of these held, which
    is left out where none could say it."""
    count = max(1, COLD_PROMPT_TOKENS - 1)
    prompt = llm.tokenizer.decode([int(i) for i in np.arange(40, 40 + count)]) or "hello"
    path = f"{Path(__file__).parents[2]}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(os.pathsep)
    environment = os.environ | {"PYTHONPATH": path}
    command = [sys.executable, "-c", _RUN, directory, prompt, "--raw", "--max-tokens=2"]
    command += to_arguments(running, Running)
    first, loaded, pipe = Result("cold start", "s"), Result("load", "s"), subprocess.PIPE
    peaks: list[int] = []
    for _ in range(running.repeats):
        started = time.perf_counter()
        with subprocess.Popen(command, stdout=pipe, stderr=subprocess.DEVNULL, env=environment) as process:
            assert process.stdout is not None
            os.read(process.stdout.fileno(), 1)
            first.values.append(time.perf_counter() - started)
            said = process.stdout.read()
        if not process.returncode:
            peaks.append(int(said.split()[-1]))

        def reload() -> None:
            load(directory, running.threads, running.second_copy).close()

        loaded.values.append(_timed(reload))
    yield loaded
    yield first
    if peaks:
        yield Result("peak memory", "MiB", [max(peaks) / 2**10], [_weight_bytes(llm) / 2**20])
