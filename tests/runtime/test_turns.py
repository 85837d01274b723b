"""Sequences that take turns in one contiguous cache, on a device whose every bit says how it came about."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llama_npu2.artifact.plan import BLOCK_POSITIONS, DECODE, PREFILL, SEQUENCES, TOKENS, Phase, Positions
from llama_npu2.devices import HostBuffer
from llama_npu2.engine.batch.scheduler import Scheduler
from llama_npu2.engine.batch.sequence import Counts
from llama_npu2.engine.chunks import Chunks, Cut, decode_phase
from llama_npu2.engine.memory import CacheRows
from llama_npu2.engine.step import Run
from llama_npu2.engine.turns import TurnSteps
from tests.support.schedule_faults import freed_early, off_by_one
from tests.support.schedules import Noted, all_back, prompts, run, total

CONTEXT, VOCAB, TAPS = 1000, 50, 3
"""The context is no multiple of a block's positions, nor of a bucket's rows."""
_ODD = np.random.default_rng(1).integers(-(1 << 62), 1 << 62, CONTEXT) | 1


class Device:
    """A model whose keys follow from all keys before them, and from the phase and the chunk that computes them.

    It has a cache of keys, and one of a convolution: position p is in row p + TAPS - 1. The TAPS rows up to it count.
    Each has places for as many sequences as programs take at once.
    """

    def __init__(self, drafts: bool = False, places: int = 1) -> None:
        self.places = places
        self.keys = np.full((places * CONTEXT, 1), -1, np.int64)
        self.history = np.zeros((places * (CONTEXT + TAPS - 1), 1), np.int64)
        self.calls = self.together = 0
        windows = [400, CONTEXT]
        milliseconds = {
            **{DECODE._replace(context=size): 3.0 for size in windows},
            **{PREFILL._replace(rows=rows, context=context): 5.0 + rows / 40 + context / 900
               for rows in (32, 128, 256) for context in (0, 512, CONTEXT) if not context or context > rows},
        }  # fmt: skip
        several = {Phase(TOKENS, 4, size): 3.5 for size in (512, CONTEXT)} if drafts else {}
        several |= {Phase(SEQUENCES, places, size): 3 + 0.9 * places for size in (512, CONTEXT)} if places > 1 else {}
        self.chunks = Chunks(milliseconds | several, windows)

    def process(self, phase: Phase, tokens: Sequence[int], position: Positions) -> np.ndarray:
        self.calls += 1
        if not isinstance(position, int):
            assert phase.kind == SEQUENCES and len(tokens) == len(position) == self.places
            assert max(position) < phase.context
            self.together += 1
            rows = enumerate(zip(tokens, position, strict=True))
            return np.concatenate(
                [self._one([token], decode_phase(self.chunks.windows, at), at, place) for place, (token, at) in rows]
            )
        assert position + len(tokens) <= (phase.positions or CONTEXT) and len(tokens) <= (phase.rows or 1)
        if phase.kind == TOKENS:
            assert position + phase.rows <= phase.context
            phases = [(decode_phase(self.chunks.windows, at), at) for at in range(position, position + len(tokens))]
            return np.concatenate([self._one([token], *each) for token, each in zip(tokens, phases, strict=True)])
        return self._one(tokens, phase, position)

    def _one(self, tokens: Sequence[int], phase: Phase, position: int, place: int = 0) -> np.ndarray:
        keys, history = (cache.reshape(self.places, -1, 1)[place] for cache in (self.keys, self.history))
        code = hash((phase.rows, phase.context, 0 if phase.kind == DECODE.kind else position)) & 0xFFFF
        end = position + len(tokens)
        before = _mixed(keys[:position, 0])
        history[position + TAPS - 1 : end + TAPS - 1, 0] = np.array(tokens) + 1
        for at, token in enumerate(tokens, position):
            keys[at] = _mixed(np.array([before, code, token, at, *history[at : at + TAPS, 0]]))
        draws = np.random.default_rng(abs(int(_mixed(keys[:end, 0]))))
        return draws.random((1, VOCAB)).astype(np.float32)


def _mixed(numbers: np.ndarray) -> np.int64:
    """Return a number that follows from all of some numbers and their order."""
    return np.sum((numbers ^ numbers >> 29) * _ODD[: len(numbers)]) >> np.int64(1)


class Reply(Noted):
    """Takes the most likely token, up to a number of them."""

    def __init__(self, prompt: list[int], count: int) -> None:
        super().__init__(list(prompt))
        self._count = count

    @property
    def finished(self) -> bool:
        return len(self.rows) >= self._count

    def take(self, logits: np.ndarray) -> None:
        super().take(logits)
        self.ids.append(int(logits.argmax()))


def alone(prompt: list[int], count: int) -> Reply:
    """What the reply is on a device that nothing else uses."""
    device, reply = Device(), Reply(prompt, count)
    for chunk in device.chunks.cheapest(0, len(prompt)):
        logits = device.process(chunk.phase, prompt[chunk.start : chunk.end], chunk.start)
    while True:
        reply.take(logits[-1])
        if reply.finished:
            return reply
        position = len(reply.ids) - 1
        logits = device.process(decode_phase(device.chunks.windows, position), reply.ids[-1:], position)


def steps_of(device: Device, blocks: int, clock: Callable[[], float] = time.perf_counter) -> TurnSteps:
    buffers = {"keys": device.keys, "history": device.history}
    manifest: Any = SimpleNamespace(
        buffers={
            name: {"kind": "cache", "shape": cache.shape, "sequences": device.places} for name, cache in buffers.items()
        },
        nbytes=lambda name: buffers[name].nbytes,
        model={"vocab": VOCAB, "max_seq": CONTEXT},
    )
    memory: Any = SimpleNamespace(buffer=lambda name: HostBuffer(buffers[name].view(np.uint8).reshape(-1)))
    return TurnSteps(manifest, memory, blocks, device.chunks, device.process, clock)


def schedule(seed: int, drafts: bool = False, places: int = 1) -> Counts:
    draw = random.Random(seed)
    device = Device(drafts, places)
    asked = [
        (text, min(draw.choice([1, 6, 150]), CONTEXT - len(text)))
        for text in prompts(draw, draw.randint(2, 7), VOCAB, draw.choice([300, 980]))
    ]
    least = 1 + max(len(text) + count for text, count in asked) // BLOCK_POSITIONS
    # The lengths of turns follow from the seed: one token each, or what tokens and copies of unlike times ask for.
    times = random.Random(seed)
    seconds = itertools.accumulate(times.choice([0.1, 1, 10]) * (seed % 2) for _ in itertools.count())
    steps = steps_of(device, draw.choice([least, least + 3, 60]), seconds.__next__)
    work = Scheduler(
        steps,
        BLOCK_POSITIONS,
        steps.rows,
        CONTEXT,
        turns=steps,
        least_shared=draw.choice([1, 8]),
        clock=itertools.count().__next__,  # steps take as long whatever their rows, so that drafts pay
    )
    replies = [Reply(*each) for each in asked]
    cancelled = run(draw, work, replies)
    all_back(work.cache)
    for number, (each, reply) in enumerate(zip(asked, replies, strict=True)):
        expected = alone(*each).rows[: len(reply.rows)]
        assert np.array_equal(reply.rows, expected), f"sequence {number} of {seed}"
        assert number in cancelled or (reply.finished and reply.errors == [None])
    counts = work.cache.counts
    assert counts.joined == device.together and 2 * counts.joined <= counts.joined_tokens <= places * counts.joined
    return work.cache.counts


def test_every_sequence_has_the_bits_that_it_has_alone() -> None:
    counts = total(schedule, range(25))
    print(counts)
    assert counts.swaps and counts.shared and counts.copies and counts.evicted and not counts.drafted + counts.joined


@pytest.mark.parametrize(("places", "drafts"), [(2, False), (4, True)])
def test_tokens_of_several_sequences_come_at_once(places: int, drafts: bool) -> None:
    counts = total(lambda seed: schedule(seed, drafts, places), range(8))
    print(counts)
    assert counts.swaps and counts.shared and counts.copies and counts.joined and bool(counts.drafted) == drafts


def test_drafts_are_checked_in_a_sequence_s_turn() -> None:
    counts = total(lambda seed: schedule(seed, drafts=True), range(15))
    print(counts)
    assert counts.swaps and counts.shared and counts.copies and counts.drafted > counts.rejected > 0


def by_tokens_alone(patch: pytest.MonkeyPatch) -> None:
    """Whoever begins with the same tokens shares K and V, however they came about."""
    patch.setattr(Cut, "keys", lambda self, ids: list(ids))


def within_a_chunk(patch: pytest.MonkeyPatch) -> None:
    """A chunk goes on where shared tokens end, not where it began."""
    patch.setattr(Cut, "resumed", lambda self, matched: matched)
    patch.setattr(Cut, "settled", lambda self, done: done)


def no_extra_rows(patch: pytest.MonkeyPatch) -> None:
    """What a convolution sees of the positions before is left behind."""
    patch.setattr(CacheRows, "range", lambda self, first, end: (first * self.row, end * self.row))


FAULTS = [by_tokens_alone, within_a_chunk, no_extra_rows, freed_early, off_by_one]


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_show(fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    with pytest.raises((AssertionError, ValueError)):
        total(schedule, range(40))


def another_place(patch: pytest.MonkeyPatch) -> None:
    """What a token appends is copied back from its neighbour's place."""
    store = TurnSteps._store
    patch.setattr(
        TurnSteps, "_store", lambda self, run, place: store(self, run, place ^ 1 if len(run.tokens) == 1 else 0)
    )


def idle_places_begin_anew(patch: pytest.MonkeyPatch) -> None:
    """A program's token in a place that is left is written over the first one there."""
    together = TurnSteps._run_together

    def run(self: TurnSteps, phase: Phase, runs: Sequence[Run]) -> np.ndarray:
        idle, process = {*range(phase.rows)}.difference(self._places(runs)), self._process

        def anew(phase: Phase, tokens: Sequence[int], positions: Positions) -> np.ndarray:
            assert not isinstance(positions, int)
            return process(phase, tokens, [0 if place in idle else at for place, at in enumerate(positions)])

        self._process = anew
        found = together(self, phase, runs)
        self._process = process
        return found

    patch.setattr(TurnSteps, "_run_together", run)


@pytest.mark.parametrize("fault", [another_place, idle_places_begin_anew])
def test_faults_of_places_show(fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    with pytest.raises((AssertionError, ValueError)):
        total(lambda seed: schedule(seed, places=4), range(40))


def test_who_is_alone_or_takes_longer_together_comes_alone() -> None:
    chunks = Device(places=4).chunks
    assert chunks.sequences_phase([5, 399]) is None, "twice 3 ms are less than 6.6"
    assert chunks.sequences_phase([5, 399, 400]) == Phase(SEQUENCES, 4, 512)
    assert chunks.sequences_phase([5, 399, 512]) == Phase(SEQUENCES, 4, CONTEXT)
    assert chunks.sequences_phase([1, 2, 3, 4, 5]) is None


@pytest.mark.parametrize("written", ["copied", "restored"])
def test_a_block_that_was_written_since_is_loaded_again(written: str) -> None:
    """The device holds what block 0 was; the next token follows from what block 0 is."""
    device, expected = Device(), Device()
    steps = steps_of(device, 2)
    for block, text in ((1, [5, 6, 7]), (0, [1, 2, 3])):
        steps.step([Run([token], at, [block], 0, phase=DECODE) for at, token in enumerate(text)])
    if written == "copied":
        steps.copy_blocks([(1, 0)])
    else:
        steps.write_block(0, steps.read_block(1))
    steps.step([Run([4], 3, [0], 1, phase=DECODE)])
    for at, token in enumerate([5, 6, 7, 4]):
        expected.process(DECODE, [token], at)
    assert device.keys[:4].tolist() == expected.keys[:4].tolist()


def test_what_two_prompts_share_is_processed_once() -> None:
    device = Device()
    steps = steps_of(device, 40)
    work = Scheduler(steps, BLOCK_POSITIONS, steps.rows, CONTEXT, turns=steps)
    text = [token % VOCAB for token in range(700)]
    for count, end in enumerate(([1], [2, 3])):
        before = device.calls
        work.add(reply := Reply(text + end, 1))
        while work.busy:
            work.step()
        chunks = device.chunks.cheapest(0, len(reply.ids) - 1)
        assert device.calls - before == (len(chunks) if not count else 1), "the last chunk alone is another one"


def test_a_turn_is_as_long_as_changing_over_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    device = Device()
    steps = steps_of(device, 40, lambda: clock[0])
    process, load = device.process, steps._load

    def slow(phase: Phase, tokens: Sequence[int], position: Positions) -> np.ndarray:
        clock[0] += 0.05
        served.append(tokens[0])
        return process(phase, tokens, position)

    def copied(run: Run, place: int) -> bool:
        found = load(run, place)
        clock[0] += 0.02 * found
        return found

    served: list[int] = []
    monkeypatch.setattr(steps, "_process", slow)
    monkeypatch.setattr(steps, "_load", copied)
    assert steps.turn == 1
    work = Scheduler(steps, BLOCK_POSITIONS, steps.rows, CONTEXT, turns=steps)
    replies = [Reply([number] * 40, 100) for number in (1, 2)]
    for reply in replies:
        work.add(reply)
    order = []
    while work.busy:
        before = [len(reply.rows) for reply in replies]
        work.step()
        order += [number for number, reply in enumerate(replies) if len(reply.rows) > before[number]]
    assert steps.turn == 4, "20 ms are a tenth of 4 tokens of 50 ms"
    lengths = [len(part) for part in "".join(map(str, order[40:160])).replace("01", "0 1").replace("10", "1 0").split()]
    assert set(lengths[1:-1]) == {4}


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (Run([1], 0, [0], 1), "a run of 1 rows from 0 on in None"),
        (Run([], 0, [0], 0, phase=DECODE), "a run of 0 rows"),
        (Run([1], 0, [0], 2, phase=DECODE), "a run of 1 rows"),
        (Run([1], 128, [0], 1, phase=DECODE), "a run up to 129 has no table of blocks below 3"),
        (Run([1], 0, [3], 1, phase=DECODE), "a run up to 1 has no table of blocks below 3"),
        (Run([VOCAB], 0, [0], 1, phase=DECODE), "a token is outside the vocabulary of 50"),
        (Run([1, 2], 0, [0], 1, phase=Phase(SEQUENCES, 2, 512)), "a run of 2 rows"),
        (Run([1], 0, [0], 0, phase=Phase(SEQUENCES, 2, 512)), "a run of 1 rows"),
    ],
    ids=str,
)
def test_runs_that_are_refused(run: Run, message: str) -> None:
    device = Device()
    with pytest.raises(ValueError, match=message):
        steps_of(device, 3).step([run])
    assert not device.calls
