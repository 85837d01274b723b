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
from typing import Any, NamedTuple, Protocol

import numpy as np

from llama_npu2.artifact.attended import layers_seen, pairs_attended, positions_read
from llama_npu2.artifact.manifest import Manifest, Weight
from llama_npu2.artifact.plan import BLOCK_POSITIONS, PREFILL
from llama_npu2.cli.peak import PRINT_PEAK
from llama_npu2.cli.table import Table
from llama_npu2.cli.turns import steps_of
from llama_npu2.devices.cpu import CpuDevice
from llama_npu2.engine.batch.sequence import Counts
from llama_npu2.engine.chunks import decode_phase
from llama_npu2.engine.llama import Llama, load
from llama_npu2.engine.memory import memory_of_blocks
from llama_npu2.engine.step import Run
from llama_npu2.options import OptionError, Running, to_arguments

PROMPTS = (128, 512, 2048)
DEPTHS = (0, 512, 2048)
GENERATED = 32
LONGEST = max(*PROMPTS, max(DEPTHS) + GENERATED)
"""Most positions that a test needs."""
COLD_PROMPT_TOKENS = 16
PEAK_ITERATIONS = 10_000_000
READ_PASSES = 9
LEGEND = (
    "limit: the share reached of what the machine allows, measured next to each test: of the bf16 peak (pp) or of the\n"
    "read bandwidth (tg). Above 100 %, data came from a cache. For several sequences (tg x): of the bandwidth, or of\n"
    "the rate of our prompts' products. For peak memory: its size relative to the weights'."
)
TURNS_LEGEND = (
    "Here sequences take turns (tg x): limit is the share of the rate of the programs alone, without copies of K and\n"
    "V between sequences and the host's own work. joined: steps that make a token of each of several sequences at once."
)
SETTLE = 0.1
"""Seconds of rest after an engine ran: its threads that still spin would take cores from the next measurement."""


@dataclass
class Result:
    """The result of one test."""

    test: str
    unit: str
    values: list[float] = field(default_factory=list)
    """One per repeat."""
    limits: list[float] = field(default_factory=list)
    """The machine's limit, measured with each value; empty where none applies."""
    peers: dict[str, list[float]] = field(default_factory=dict)
    """The values of other engines in the same repeats, by name."""
    peer_limits: dict[str, list[float]] = field(default_factory=dict)
    """The limits of other engines, by name."""

    @property
    def share(self) -> float | None:
        """Median over the repeats of value / limit; None where no limit applies."""
        return _median_ratio(self.values, self.limits)

    @property
    def ratios(self) -> dict[str, float | None]:
        """Median over the repeats of value / the peer's value, by peer."""
        return {name: _median_ratio(self.values, values) for name, values in self.peers.items()}

    @property
    def peer_shares(self) -> dict[str, float | None]:
        """The share of each peer; its limit differs where it reads other weights."""
        return {name: _median_ratio(values, self.peer_limits.get(name, ())) for name, values in self.peers.items()}

    def cells(self, peers: Sequence[str]) -> list[str]:
        """Return the cells of a row of `table(peers)`, empty for a peer that takes no part in the test."""
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
    """Return the table of results.

    It ends with a column for each of `peers`: its rate, how many times that we reach, and its share of the limit.
    """
    ours = [("test", 18), (">median", 10), (">mean ± deviation", 21), ("unit", 10), (">limit", 6)]
    return Table([*ours, *((f">{name}", 21) for name in peers)], markdown=True)


def _median_ratio(values: Sequence[float], others: Sequence[float]) -> float | None:
    if not others:
        return None
    return statistics.median(value / other for value, other in zip(values, others, strict=True))


class Engine(Protocol):
    """An engine that runs the same checkpoint."""

    name: str
    token_bytes: int
    """Bytes of weights that a decoded token reads."""

    def prefill(self, ids: Sequence[int]) -> float:
        """Process a prompt from an empty context; return the seconds that it took."""

    def decode(self, depth: int, ids: Sequence[int]) -> float:
        """Process tokens one by one after the first `depth` of the context; return the seconds that it took."""

    takes_streams: bool
    """Whether it has `decode_streams`."""

    note: str
    """What a reader of its figures has to know; may be empty."""

    def decode_streams(self, streams: Sequence[Sequence[int]]) -> float:
        """Process a token of each of some sequences at a time, with logits for all; return the seconds that it took.

        Args:
            streams: tokens of each sequence, as many of one as of another. All begin with an empty context.
        """


OpenPeers = Callable[[Llama], contextlib.AbstractContextManager[Sequence[Engine]]]


class Taken(NamedTuple):
    """What sequences took that take turns."""

    counts: Counts
    limit: float
    """Tokens per second of the programs alone."""


class Ours:
    """The runtime as an `Engine`."""

    name = "llama-npu2"
    takes_streams = True
    note = ""

    def __init__(self, llm: Llama) -> None:
        self._llm = llm
        self.token_bytes = sum(_token_bytes(llm).values())
        self.turns: list[Taken] = []
        """What each `decode_streams` took, where sequences take turns."""

    def prefill(self, ids: Sequence[int]) -> float:
        self._llm.reset()
        return _timed(lambda: self._llm.prefill(ids))

    def decode(self, depth: int, ids: Sequence[int]) -> float:
        self._llm.rewind(depth)
        return _timed(lambda: self._decode(ids))

    def _decode(self, ids: Sequence[int]) -> None:
        """Decode tokens and keep no logits, as generating does."""
        for token in ids:
            self._llm.decode(token, copy=False)

    def decode_streams(self, streams: Sequence[Sequence[int]]) -> float:
        if not self._llm.holds_many:
            return _timed(lambda: self._decode_in_turns(streams))
        self._llm.reset()  # its context is lost by the first step
        return _timed(lambda: self._decode_streams(streams))

    def _decode_in_turns(self, streams: Sequence[Sequence[int]]) -> None:
        before = self._llm.turns.processing
        *_, counts = steps_of(self._llm, streams)
        self.turns.append(Taken(counts, sum(map(len, streams)) / (self._llm.turns.processing - before)))

    def _decode_streams(self, streams: Sequence[Sequence[int]]) -> None:
        steps, blocks = self._llm.steps, blocks_of(len(streams[0]))
        for position, tokens in enumerate(zip(*streams, strict=True)):
            steps.step(token_each(tokens, position, blocks))


def token_each(tokens: Sequence[int], position: int, blocks: int) -> list[Run]:
    """Return a step that has a token of each of several sequences, at the same position.

    Args:
        tokens: ids, one for each sequence.
        position: of all of them.
        blocks: number of blocks that each sequence has. Those of one follow those of another.
    """
    return [Run([token], position, range(i * blocks, (i + 1) * blocks)) for i, token in enumerate(tokens)]


def run_bench(
    directory: str,
    running: Running,
    as_json: bool,
    open_peers: OpenPeers | None = None,
    more: Callable[[Llama, Sequence[Any]], Iterable[Result]] = lambda llm, peers: (),
) -> None:
    """Print the table, or one JSON object.

    Args:
        directory: the artifacts.
        running: threads, repeats and the second copy.
        as_json: whether to print JSON.
        open_peers: opens other engines, which are measured in turn with ours.
        more: makes the rows with which the table ends, from the model and the other engines.

    Raises:
        UserError: if the artifacts cannot be used.
    """
    with opened(directory, running) as llm:
        with open_peers(llm) if open_peers else contextlib.nullcontext([]) as peers:
            bench = Bench(llm, running.repeats, peers)
            names = [peer.name for peer in bench.peers]
            lines = table(names)
            if not as_json:
                print(f"{heading(llm)}\n\n{lines.header()}", flush=True)
            results = []
            rows = (bench.results(running.stream_list()), cold_start(directory, llm, running), more(llm, peers))
            for result in itertools.chain(*rows):
                results.append(result)
                if not as_json:
                    print(lines.row(*result.cells(names)), flush=True)
        notes = {peer.name: peer.note for peer in bench.peers if peer.note}
        if not as_json:
            turns = [] if llm.holds_many or not running.streams else [TURNS_LEGEND]
            print("\n".join(["", LEGEND, *turns, *(f"{name}: {note}." for name, note in notes.items())]), flush=True)
        else:
            encoded = [_encoded(result) for result in results]
            print(json.dumps({"machine": machine(llm), "results": encoded, "notes": notes}))


@contextlib.contextmanager
def opened(directory: str, running: Running) -> Iterator[Llama]:
    """Open artifacts, with a KV cache for a context and for the sequences that `streams` asks for. Raises UserError."""
    manifest, most = Manifest.open(directory), max(running.stream_list(), default=0)
    blocks = max(most * blocks_of(GENERATED), blocks_of(manifest.model["max_seq"]))
    kv_memory = memory_of_blocks(manifest, blocks) if most else 0
    with contextlib.closing(Llama(manifest, running.threads, running.second_copy, kv_memory)) as llm:
        if llm.holds_many and most > llm.steps.rows:
            raise OptionError("streams", most, f"a step of {manifest.directory} has {llm.steps.rows} rows at most")
        yield llm


def blocks_of(positions: int) -> int:
    """Return how many blocks of the KV cache hold so many positions."""
    return -(-positions // BLOCK_POSITIONS)


def _encoded(result: Result) -> dict[str, Any]:
    return asdict(result) | {"share": result.share, "ratios": result.ratios, "peer_shares": result.peer_shares}


def machine(llm: Llama) -> dict[str, Any]:
    """Return the names of CPU, device, model and Python version."""
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
    """Return the line that names the model, the device and the CPU."""
    about = machine(llm)
    return f"{about['model']}, {_weight_bytes(llm) / 2**30:.2f} GiB of weights; {about['device']}; {about['cpu']}"


def _weight_bytes(llm: Llama) -> int:
    """Return the bytes of the files with weights."""
    return sum(entry["size"] for name, entry in llm.manifest.files.items() if name.startswith("weights/"))


class Bench:
    """The tests on a loaded model, and on its peers in turn. There are limits for the target `cpu` only."""

    def __init__(self, llm: Llama, repeats: int, peers: Sequence[Engine] = ()) -> None:
        self.llm, self.repeats, self.peers = llm, repeats, peers
        self.device = llm.device
        self.limited = isinstance(llm.device, CpuDevice)
        self.generator = np.random.default_rng(0)
        self.config = llm.manifest.model
        self.ours = Ours(llm)
        self.engines: Sequence[Engine] = (self.ours, *peers)
        self.weights = [llm.buffer(name) for name in _token_bytes(llm)]

    def results(self, streams: Sequence[int] = ()) -> Iterator[Result]:
        """Yield the limits, then prefill and decode, whose limits are measured again in each repeat.

        Args:
            streams: numbers of sequences to decode with at a time.
        """
        yield self.read_per_token()
        if self.limited:
            yield from self._limits()
        for rows in (rows for rows in PROMPTS if rows <= self.llm.context_length):
            yield self.prefill(rows)
        for depth in (depth for depth in DEPTHS if depth + GENERATED < self.llm.context_length):
            yield self.decode(depth)
        for count in streams:
            yield from self.decode_streams(count)
        if self.limited:
            yield self.host_overhead()

    def _limits(self) -> Iterator[Result]:
        self.read_bandwidth()
        yield self._repeat("read bandwidth", "GB/s", lambda: self.read_bandwidth() / 1e9)
        yield self._repeat("bf16 peak", "GFLOP/s", lambda: self.device.measure_peak("bf16", PEAK_ITERATIONS) / 1e9)
        yield self._repeat("f32 peak", "GFLOP/s", lambda: self.device.measure_peak("f32", PEAK_ITERATIONS) / 1e9)

    def read_per_token(self) -> Result:
        """Return the bytes of weights; a token also reads K and V of the positions before it."""
        ours, *others = ([engine.token_bytes / 1e9] for engine in self.engines)
        return Result("read per token", "GB", ours, peers=dict(zip((p.name for p in self.peers), others, strict=True)))

    def _repeat(self, test: str, unit: str, measure: Callable[[], float]) -> Result:
        return Result(test, unit, [measure() for _ in range(self.repeats)])

    def read_bandwidth(self) -> float:
        """Return the bytes per second of reading all of the weights.

        So no cache holds them from one pass to the next, unless it does so for tokens too.
        """
        return statistics.median(self.device.measure_read(self.weights) for _ in range(READ_PASSES))

    def prompt_products(self) -> float:
        """Return the operations per second of our shortest prompt."""
        rows = min(PROMPTS[0], self.llm.context_length)
        return self._prefill_flop(rows) / self.engines[0].prefill(self.tokens(rows))

    def tokens(self, count: int) -> list[int]:
        """Return random token ids."""
        return self.generator.integers(0, self.config["vocab"], count).tolist()

    def prefill(self, rows: int) -> Result:
        """Measure tokens per second of a prompt; the limit is the bf16 peak / operations of one token."""
        return self._compare(
            f"pp{rows}",
            lambda: self.device.measure_peak("bf16", PEAK_ITERATIONS),
            lambda engine: self._prefill_flop(rows) / rows,
            lambda engine, ids: engine.prefill(ids),
            rows,
        )

    def decode(self, depth: int) -> Result:
        """Measure tokens per second after `depth` tokens; the limit is the read bandwidth / bytes of one token."""
        if depth:
            prompt = self.tokens(depth)
            for engine in self.engines:
                engine.prefill(prompt)
        return self._compare(
            f"tg{GENERATED} @ {depth}",
            self.read_bandwidth,
            lambda engine: engine.token_bytes + self._cache_bytes(engine.name, depth),
            lambda engine, ids: engine.decode(depth, ids),
            GENERATED,
        )

    def decode_streams(self, count: int) -> Iterator[Result]:
        """Measure tokens per second of `count` sequences together, a token of each at a time.

        The limit is what reading weights once for all of them allows, or multiplying for each at the rate of our
        prompts, whichever is less. Where sequences take turns, it is what programs take alone; then follow the share
        of steps that are joined, and how many sequences take part in one of those.
        """
        flop = 2 * sum(weight.values * share for weight, share in _token_weights(self.llm).values())
        result = self._compare(
            f"tg{GENERATED} x {count}",
            lambda: np.array([self.read_bandwidth(), self.prompt_products()]),
            lambda engine: np.array([engine.token_bytes / count, flop]),
            lambda engine, ids: engine.decode_streams([ids[i::count] for i in range(count)]),
            GENERATED * count,
            [engine for engine in self.engines if engine.takes_streams],
        )
        taken = self.ours.turns[-self.repeats :]
        if taken:
            result.limits = [each.limit for each in taken]
        yield result
        if taken and min(count, self.llm.turns.recipe.chunks.most_sequences) > 1:
            counts = [each.counts for each in taken]
            yield Result(f"joined x {count}", "% of steps", [100 * each.joined / each.steps for each in counts])
            if all(each.joined for each in counts):
                yield Result(f"in joined x {count}", "sequences", [each.joined_tokens / each.joined for each in counts])

    def _compare(
        self,
        test: str,
        speed: Callable[[], Any],
        need: Callable[[Engine], Any],
        run: Callable[[Engine, list[int]], float],
        count: int,
        engines: Sequence[Engine] = (),
    ) -> Result:
        """Measure the rates of all engines, one after the other in every repeat; the first repeat only warms up.

        The machine's speed is measured before and after each, and the mean of both counts, because it changes.

        Args:
            speed: measures the machine's speed, per second; or several, as an array.
            need: returns how much of that a token takes. The limit is that of the speed which allows least.
            run: processes tokens and returns the seconds that it took.
            count: number of tokens.
            engines: those that take part, unless it is all.
        """
        engines = engines or self.engines
        rates: dict[str, list[float]] = {engine.name: [] for engine in engines}
        limits: dict[str, list[float]] = {engine.name: [] for engine in engines}
        for repeat in range(self.repeats + 1):
            ids = self.tokens(count)
            after = speed() if self.limited else 0.0
            for engine in engines:
                before, rate = after, count / run(engine, ids)
                time.sleep(SETTLE)
                after = speed() if self.limited else 0.0
                if repeat:
                    rates[engine.name].append(rate)
                    limits[engine.name] += [float(np.min((before + after) / 2 / need(engine)))] if self.limited else []
        return Result(test, "tokens/s", rates.pop(Ours.name), limits.pop(Ours.name), rates, limits)

    def host_overhead(self) -> Result:
        """Measure the percentage of a generated token's time outside of kernels: sampling, text, binding, Python."""
        result = Result("host per token", "%")
        for _ in range(self.repeats):
            pieces = self.llm.generate("Once upon a time", raw=True, max_tokens=GENERATED)
            next(pieces, None)
            native = self.device.native_seconds
            seconds = _timed(partial(list, pieces))
            result.values.append(100 * (1 - (self.device.native_seconds - native) / seconds))
        return result

    def _cache_bytes(self, engine: str, depth: int) -> float:
        """Return the bytes of K and V that a token reads of the `depth` positions before it, in all layers.

        Ours are as they are stored, peers' in 16 bits. Of a convolution's history a token reads a few rows, wherever
        it is.
        """
        layers = layers_seen(self.config)
        positions = sum(positions_read(depth, 1, sees) - 1 for sees in layers)
        if engine != Ours.name:
            return positions * 4 * self.config["kv_heads"] * self.config["head_dim"]
        manifest = self.llm.manifest
        caches = (
            manifest.nbytes(name) / spec.get("sequences", 1)
            for name, spec in manifest.buffers.items()
            if spec["kind"] == "cache" and "history" not in name
        )
        return positions * sum(caches) / self.llm.context_length / max(1, len(layers))

    def _prefill_flop(self, rows: int) -> float:
        """Return the operations of a prompt.

        There are two per weight and row that it is multiplied with, and four per head element and attended pair.
        """
        manifest = self.llm.manifest
        products = sum(
            weight.values * manifest.share(name) * manifest.rows(call.program, rows)
            for call in manifest.plans[PREFILL]
            for name, weight in manifest.weights_read(call).items()
        )
        pairs = sum(pairs_attended(0, rows, sees) for sees in layers_seen(self.config))
        return 2 * products + 4 * self.config["heads"] * self.config["head_dim"] * pairs


def _token_weights(llm: Llama) -> dict[str, tuple[Weight, float]]:
    """Return every weight that a decoded token reads, and the share of it: of experts the chosen ones.

    The embedding is among them only if the LM head shares it.
    """
    manifest = llm.manifest
    calls = manifest.plans[decode_phase(llm.windows, 0)]
    read = {name: weight for call in calls for name, weight in manifest.weights_read(call).items()}
    return {name: (weight, manifest.share(name)) for name, weight in read.items()}


def _token_bytes(llm: Llama) -> dict[str, int]:
    """Return the bytes that a decoded token reads of every weight (`_token_weights`)."""
    return {name: round(weight.nbytes * share) for name, (weight, share) in _token_weights(llm).items()}


def _timed(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


_RUN = f"""from llama_npu2.__main__ import main
if status := main():
    raise SystemExit(status)
{PRINT_PEAK}
"""
"""The command line of the runtime, which prints its peak memory in KiB after the reply."""


def cold_start(directory: str, llm: Llama, running: Running) -> Iterator[Result]:
    """Yield the times of new processes, with a warm page cache: to load, and to the first piece of text.

    Last comes the peak memory of one of these processes, which is left out if none of them printed it.
    """
    count = max(1, COLD_PROMPT_TOKENS - 1)
    prompt = llm.tokenizer.decode([int(i) for i in np.arange(40, 40 + count)]) or "hello"
    path = f"{Path(__file__).parents[2]}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(os.pathsep)
    environment = os.environ | {"PYTHONPATH": path}
    command = [sys.executable, "-c", _RUN, "run", directory, prompt, "--raw", "--max-tokens=2"]
    command += to_arguments(running, Running, command="run")
    first, loaded, pipe = Result("cold start", "s"), Result("load", "s"), subprocess.PIPE
    peaks: list[int] = []
    for _ in range(running.repeats):
        started = time.perf_counter()
        with subprocess.Popen(command, stdout=pipe, stderr=subprocess.DEVNULL, env=environment) as process:
            assert process.stdout is not None
            os.read(process.stdout.fileno(), 1)
            first.values.append(time.perf_counter() - started)
            output = process.stdout.read()
        if not process.returncode:
            peaks.append(int(output.split()[-1]))

        def reload() -> None:
            load(directory, running.threads, running.second_copy).close()

        loaded.values.append(_timed(reload))
    yield loaded
    yield first
    if peaks:
        yield Result("peak memory", "MiB", [max(peaks) / 2**10], [_weight_bytes(llm) / 2**20])
