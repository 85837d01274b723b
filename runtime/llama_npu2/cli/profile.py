"""Shows where the time of a prompt and of a token goes: `llama-npu2 profile DIR`.

A prompt is processed several times, the last time with a long reply. A *prompt* lasts from the call to the first
sampled token, a *token* from there to the next one. A *step* has a token of each of several sequences. Each is split
into spans (`llama_npu2.devices.spans`), down to launches of kernels where the device records them, and the time between
spans, which is Python's. So the parts of a prompt, a token or a step add up to it. Figures are means, because those add
up, without the fastest and the slowest quarter; the series of all tokens shows the spread.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from llama_npu2.artifact.plan import Phase
from llama_npu2.cli.bench import GENERATED, PEAK_ITERATIONS, Bench, blocks_of, machine, opened, token_each
from llama_npu2.cli.table import fitted
from llama_npu2.cli.turns import steps_of
from llama_npu2.devices.spans import Span, nested
from llama_npu2.engine.batch.sequence import Counts
from llama_npu2.engine.llama import Llama
from llama_npu2.options import Running, Sampling

FORMAT = 1
"""Version of the JSON's format."""
PROMPT = 512
"""Tokens of the prompt, where none is given."""
TEXT = "The quick brown fox jumps over the lazy dog. "
"""The text that is repeated as a prompt, where none is given."""
BETWEEN = "between spans"
SUMS = ("waited", "busy", "bytes", "operations", "runs")
"""The numbers of spans that can be added up."""


def run_profile(
    directory: str, running: Running, sampling: Sampling, prompt: str | None, raw: bool, as_json: bool
) -> None:
    """Print tables, or one JSON object as `profile` returns it. Raises UserError."""
    with opened(directory, running) as llm:
        result = profile(llm, prompt, raw, sampling.max_tokens, running.repeats, running.stream_list())
    print(json.dumps(result) if as_json else described(result))


def profile(
    llm: Llama, prompt: str | None, raw: bool, max_tokens: int, repeats: int, streams: Sequence[int] = ()
) -> dict[str, Any]:
    """Profile a prompt, the tokens of its reply, and steps of several sequences; return the profile as JSON values.

    - `machine`: as `bench.machine` returns it. `peaks`: of the CPU, the mean of before and after: `read` in bytes,
      `bf16` in operations per second; empty for the NPU.
    - `phases`: `prompt`, `token`, and a `step of N sequences` for each N of `streams`: a token of each, with logits for
      all. Where sequences take turns, these are steps with tokens of several of the N at once, or with a token of one
      of them where there are none, and the phase has `steps`, how many of them were `joined`, and the `joined_tokens`
      of those. Each has `rows` and `position` of the first one, the number of `calls` of each
      program, `seconds` of each one, and of the middle half the `mean` seconds and `parts`. A part has `kind` and
      `name` of its spans, `program`, `layer` and number of a `launch`, and per prompt or token the number of `calls`,
      `seconds` that no other part has, nanoseconds `waited` and `busy`, `bytes`, `operations`, `runs`. On the NPU a
      phase has `alone`: the seconds of each program's calls, submitted one by one. On the simulator it has `counted`:
      the bytes and multiplications of each program's launches.
    - `series`: for each token its position, its seconds, and those of them in phases.
    - `timeline`: the last prompt and its reply. `names` lists (kind, name, layer, launch). `spans` lists the number of
      the name, the thread, beginning and length in nanoseconds, and how many of those the thread waited. Threads other
      than the first are listed in the prompt and in the token `shown`, which has the median time. `edges` lists where
      the prompt, and each token, begins and ends.
    """
    text = _text(llm, raw) if prompt is None else prompt
    counted = _counted(llm, llm.encode(text, raw))

    def phase(name: str, windows: Sequence[Window]) -> dict[str, Any]:
        more = {"alone": _alone(llm, windows[-1]), "counted": counted.get(name)}
        plan = llm.manifest.plans[Phase.parse(windows[-1].phase.name)]
        calls = Counter(call.program for call in plan)
        return _phase(name, windows, calls) | {key: value for key, value in more.items() if value}

    def step(count: int) -> dict[str, Any]:
        if not llm.holds_many:
            windows, counts = _in_turns(llm, count, min(tokens, GENERATED))
            joined = {"steps": counts.steps, "joined": counts.joined, "joined_tokens": counts.joined_tokens}
            return phase(f"step of {count} sequences", windows) | joined
        windows = _stepped(llm, count, min(tokens, GENERATED))
        programs = Counter(span.name for span in windows[-1].spans if span.kind == "program")
        return _phase(f"step of {count} sequences", windows, programs)

    tokens = min(max(max_tokens, 2), llm.context_length - llm.position + 2)
    before = _peaks(llm)
    with _endless(llm):
        prompts = [_generated(llm, text, raw, 1)[0] for _ in range(repeats - 1)]
        first, *following = _generated(llm, text, raw, tokens)
    stepped = [step(count) for count in streams]
    after = _peaks(llm)
    return {
        "format": FORMAT,
        "machine": machine(llm),
        "peaks": {name: (before[name] + after[name]) / 2 for name in before},
        "phases": [phase("prompt", [*prompts, first]), phase("token", following), *stepped],
        "series": [_point(window) for window in following],
        "timeline": _timeline(first, following),
    }


def _text(llm: Llama, raw: bool) -> str:
    """Return a text of about `PROMPT` tokens, of fewer where the context has no room for them and a reply.

    With buckets it fills one, so that one phase is measured.
    """
    rows = min(PROMPT, llm.context_length // 2)
    if llm.buckets:
        rows = max((bucket for bucket in llm.buckets if bucket <= rows), default=llm.buckets[0])
    once, twice = (len(llm.encode(TEXT * count, raw)) for count in (1, 2))
    return TEXT * max(1, 1 + (rows - once) // (twice - once))


@contextlib.contextmanager
def _endless(llm: Llama) -> Iterator[None]:
    """Let replies go on after end tokens."""
    eos, llm.eos = llm.eos, frozenset()
    try:
        yield
    finally:
        llm.eos = eos


class Window(NamedTuple):
    """The time of a prompt or a token."""

    start: int
    """Nanoseconds."""
    end: int
    spans: list[Span]
    """The spans that begin in it."""

    @property
    def seconds(self) -> float:
        """The length."""
        return (self.end - self.start) / 1e9

    @property
    def phase(self) -> Span:
        """The first run of a phase."""
        return next(span for span in self.spans if span.kind == "phase")


def _generated(llm: Llama, text: str, raw: bool, tokens: int) -> list[Window]:
    """Generate a reply; return the window of the prompt, and of each token after the first."""
    with llm.profile() as recorder:
        started = time.perf_counter_ns()
        for _ in llm.generate(text, raw=raw, max_tokens=tokens):
            pass
    spans = recorder.spans()
    return _windows(spans, [started, *(span.end for span in spans if span.name == "sample")])


def _stepped(llm: Llama, count: int, steps: int) -> list[Window]:
    """Return the windows of steps that have a token of each of `count` sequences, which begin with an empty context."""
    llm.reset()  # its context is lost by the first step
    blocks, edges = blocks_of(steps), []
    with llm.profile() as recorder:
        for position in range(steps):
            runs = token_each([position] * count, position, blocks)
            edges.append(time.perf_counter_ns())
            llm.steps.step(runs)
            about = {"rows": count, "position": position}
            recorder.note(Span("phase", "step", edges[-1], time.perf_counter_ns(), 0, about))
        edges.append(time.perf_counter_ns())
    return _windows(recorder.spans(), edges)


def _in_turns(llm: Llama, count: int, steps: int) -> tuple[list[Window], Counts]:
    """Return the windows of steps of `count` sequences that take turns, and the counts of all steps.

    They are those of joined steps, of the other steps where there are none; all run the program of the last one.
    """
    with llm.profile() as recorder:
        edges, counts = [time.perf_counter_ns()], [Counts()]
        for now in steps_of(llm, [list(range(steps))] * count):
            edges.append(time.perf_counter_ns())
            counts.append(now)
    windows = _windows(recorder.spans(), edges)
    joined = [window for window, (old, new) in zip(windows, pairwise(counts), strict=True) if new.joined > old.joined]
    chosen = joined or windows
    return [window for window in chosen if window.phase.name == chosen[-1].phase.name], counts[-1]


def _windows(spans: Iterable[Span], edges: Sequence[int]) -> list[Window]:
    """Return the time between each two of `edges`, with the spans that begin in it."""
    windows, rest = [], iter(spans)
    span = next(rest, None)
    for start, end in pairwise(edges):
        inside = []
        while span and span.start < end:
            inside.append(span)
            span = next(rest, None)
        windows.append(Window(start, end, inside))
    return windows


def _phase(name: str, windows: Sequence[Window], calls: Mapping[str, int]) -> dict[str, Any]:
    first, quarter = windows[0].phase.about, len(windows) // 4
    middle = sorted(windows, key=lambda window: window.seconds)[quarter : len(windows) - quarter]
    return {
        "name": name,
        "calls": calls,
        "rows": first["rows"],
        "position": first["position"],
        "seconds": [window.seconds for window in windows],
        "mean": statistics.mean(window.seconds for window in middle),
        "parts": _parts(middle),
    }


class _Part(NamedTuple):
    """The identity of a part; `program`, `layer` and `launch` are None where there is none."""

    kind: str
    name: str
    program: str | None = None
    layer: int | None = None
    launch: int | None = None


def _parts(windows: Sequence[Window]) -> list[dict[str, Any]]:
    """Return the parts of the windows, in order of appearance."""
    sums: dict[_Part, Counter[str]] = {}
    for window in windows:
        covered = 0
        parts = nested([span for span in window.spans if span.thread == 0])
        for part in parts:
            span = part.span
            if part.inside < 0:
                covered += span.end - span.start
            program = parts[part.inside].span.name if span.kind == "launch" else None
            key = _Part(span.kind, span.name, program, span.about.get("layer"), span.about.get("launch"))
            more = {name: span.about[name] for name in SUMS if name in span.about}
            sums.setdefault(key, Counter()).update({"calls": 1, "ns": part.alone, **more})
        between = {"calls": 1, "ns": window.end - window.start - covered}
        sums.setdefault(_Part("python", BETWEEN), Counter()).update(between)
    return [_means(part, counts, len(windows)) for part, counts in sums.items()]


def _means(part: _Part, counts: Counter[str], windows: int) -> dict[str, Any]:
    identity = {name: value for name, value in part._asdict().items() if value is not None}
    means = {name: count / windows for name, count in counts.items() if name != "ns"}
    return identity | {"seconds": counts["ns"] / windows / 1e9} | means


def _point(window: Window) -> list[float]:
    phases = [span for span in window.spans if span.kind == "phase"]
    return [window.phase.about["position"], window.seconds, sum(span.end - span.start for span in phases) / 1e9]


def _timeline(first: Window, following: Sequence[Window]) -> dict[str, Any]:
    shown = sorted(range(len(following)), key=lambda index: following[index].seconds)[len(following) // 2]
    names: dict[tuple[Any, ...], int] = {}
    rows = []
    for index, window in enumerate((first, *following)):
        for span in window.spans:
            if span.thread == 0 or index in (0, shown + 1):
                key = (span.kind, span.name, span.about.get("layer"), span.about.get("launch"))
                number = names.setdefault(key, len(names))
                length, waited = span.end - span.start, span.about.get("waited", 0)
                rows.append([number, span.thread, span.start - first.start, length, waited])
    edges = [first.start, *(window.end for window in (first, *following))]
    return {"names": list(names), "spans": rows, "edges": [edge - first.start for edge in edges], "shown": shown}


def _peaks(llm: Llama) -> dict[str, float]:
    bench = Bench(llm, 1)
    if not bench.limited:
        return {}
    return {"read": bench.read_bandwidth(), "bf16": llm.device.measure_peak("bf16", PEAK_ITERATIONS)}


def _alone(llm: Llama, window: Window) -> dict[str, float]:
    """Return the seconds of each program's calls, submitted one by one, in the second of two rounds.

    Returns nothing where the device is not the NPU, whose submissions have many runs.
    """
    if llm.manifest.target["device"] != "xrt":
        return {}
    span = window.phase
    calls = llm.calls[Phase.parse(span.name)]
    submissions = [llm.device.prepare([call]) for call in calls]
    for _ in range(2):
        spent: Counter[str] = Counter()
        for call, submission in zip(calls, submissions, strict=True):
            started = time.perf_counter_ns()
            submission.run(span.about["rows"], span.about["position"])
            spent[call.name] += time.perf_counter_ns() - started
    for submission in submissions:
        submission.suspend()
    return {name: ns / 1e9 for name, ns in spent.items()}


def _counted(llm: Llama, ids: Sequence[int]) -> dict[str, Any]:
    """Warm up with a prompt and a token; return the simulator's counts for each, nothing on other devices.

    The counts of a program list for each launch its name, its multiply-accumulates, and for each slot the bytes that it
    read and wrote.
    """
    counters = getattr(llm.device, "counters", None)
    counts, states = {}, [_state(counters)]
    llm.reset()
    for phase, run in (("prompt", lambda: llm.prefill(ids)), ("token", lambda: llm.decode(ids[-1]))):
        run()
        states.append(_state(counters))
        counts[phase] = _difference(*states[-2:])
    return counts


def _state(counters: Any) -> dict[str, Any]:
    return counters() if counters else {}


def _difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    def launches(name: str) -> Iterator[dict[str, Any]]:
        old, new = before[name], after[name]
        for index, launch in enumerate(new.launches):
            past = old.slots[index]
            slots = {
                slot: [amount - less for amount, less in zip(amounts, past.get(slot, (0, 0)), strict=True)]
                for slot, amounts in new.slots[index].items()
            }
            yield {"name": launch, "macs": new.macs[index] - old.macs[index], "slots": slots}

    return {name: list(launches(name)) for name in after if after[name].submissions > before[name].submissions}


# for people


def described(result: Mapping[str, Any]) -> str:
    """Return a profile as tables of a prompt and of a token, program by program and kernel by kernel."""
    about = result["machine"]
    lines = [f"{about['model']}; {about['device']}; {about['cpu']}"]
    for phase in result["phases"]:
        sample = f"{len(phase['seconds'])} x {phase['rows']} rows from position {phase['position']} on"
        if "joined" in phase:
            sample += f"; {_joined(phase)}"
        lines += ["", f"{phase['name']}: {1e3 * phase['mean']:.3f} ms ({sample})", ""]
        lines.append(fitted(COLUMNS, (cells(row, phase["mean"], result["peaks"]) for row in summed(phase["parts"]))))
    if result["peaks"]:
        lines += ["", LEGEND]
    return "\n".join(lines)


def _joined(phase: Mapping[str, Any]) -> str:
    """Say how many steps had tokens of several sequences, where sequences take turns."""
    if not phase["joined"]:
        return f"none of {phase['steps']} steps was joined, sequences took turns"
    each = phase["joined_tokens"] / phase["joined"]
    return f"{phase['joined']} of {phase['steps']} steps were joined, {each:.1f} sequences each"


LEGEND = (
    "roofline: the share of this machine's measured peak, of reading or of multiplying. Above 100 %, a launch read "
    "from a cache,\nor ran faster than the machine did when the peak was measured."
)
COLUMNS = ("part", ">calls", ">ms", ">share", ">waiting", ">GB/s", ">GFLOP/s", ">roofline")


class _RowKey(NamedTuple):
    program: str
    kind: str
    name: str


def summed(parts: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the parts with all layers added up: programs, each followed by its launches, then the rest.

    A program's `seconds` and other sums include those of its launches; the time that it has alone is `waited`.
    """
    rows: dict[_RowKey, dict[str, Any]] = {}
    for part in parts:
        program = part["name"] if part["kind"] == "program" else part.get("program", "")
        own = _RowKey(program, part["kind"], part["name"])
        for key in {own, _RowKey(program, "program", program)} if program else {own}:
            row = rows.setdefault(key, {**key._asdict(), "calls": 0, "seconds": 0})
            row["calls"] += part["calls"] if key == own else 0
            for name in ("seconds", *SUMS):
                row[name] = row.get(name, 0) + part.get(name, 0)
    _note_waiting(rows)
    order = {name: number for number, name in enumerate(dict.fromkeys(key.program for key in rows))}
    return [
        rows[key] for key in sorted(rows, key=lambda key: (not key.program, order[key.program], key.kind != "program"))
    ]


def _note_waiting(rows: Mapping[_RowKey, dict[str, Any]]) -> None:
    """Count the time that a program has besides its launches as waiting: for other threads after each launch."""
    for key, row in rows.items():
        launches = [row for other, row in rows.items() if (other.program, other.kind) == (key.program, "launch")]
        if key.kind == "program" and launches:
            row["waited"] += 1e9 * (row["seconds"] - sum(launch["seconds"] for launch in launches))


def cells(row: Mapping[str, Any], total: float, peaks: Mapping[str, float]) -> list[str]:
    """Return the cells of `COLUMNS` for a row of `summed`."""
    name, seconds = f"  {row['name']}" if row["kind"] == "launch" else row["name"], row["seconds"]
    rates = [f"{row[what] / seconds / 1e9:.1f}" if row[what] and seconds else "" for what in ("bytes", "operations")]
    share = roofline(row, peaks)
    return [
        name,
        f"{row['calls']:g}",
        f"{1e3 * seconds:.3f}" if seconds >= 1e-5 else f"{1e3 * seconds:.5f}",
        f"{seconds / total:.1%}",
        f"{row['waited'] / 1e9 / seconds:.1%}" if row["waited"] and seconds else "",
        *rates,
        f"{share:.0%}" if share else "",
    ]


def roofline(row: Mapping[str, Any], peaks: Mapping[str, float]) -> float:
    """Return the share of the time that a row needs at the least, 0 where the peaks are not known.

    It is `max(bytes / read peak, operations / bf16 peak) / seconds` (Williams et al. 2009).
    """
    if not peaks or not row["seconds"]:
        return 0.0
    return max(row.get("bytes", 0) / peaks["read"], row.get("operations", 0) / peaks["bf16"]) / row["seconds"]
