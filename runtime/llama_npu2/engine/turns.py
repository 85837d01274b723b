"""Steps on a device with contiguous KV caches: sequences take turns in them. The host's memory has their blocks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from llama_npu2.artifact.manifest import Manifest
from llama_npu2.artifact.plan import BLOCK_POSITIONS, SEQUENCES, TOKENS, Phase, Positions
from llama_npu2.devices.spans import Timer
from llama_npu2.engine.chunks import Chunks, Recipe
from llama_npu2.engine.memory import CacheRows, Memory
from llama_npu2.engine.step import Run

_OVERHEAD = 0.1
"""Share of the time that changing over from one sequence to another may take."""
_LONGEST_TURN = 64
_NEWEST = 0.25
"""How much the last time counts in the mean of times."""


class _Content(NamedTuple):
    """What a block held at some time."""

    block: int
    version: int


def tokens_of_turn(copying: float, token: float) -> int:
    """Return how many tokens of a sequence come before another one's: copying takes a tenth of the time then.

    Args:
        copying: how long it takes to copy a sequence's blocks to the device.
        token: how long a token takes, in the same unit; 0 if that is not known yet.
    """
    return max(1, min(math.ceil(copying / (_OVERHEAD * token)), _LONGEST_TURN)) if token else 1


class TurnSteps:
    """Processes one run after another in the device's caches, and keeps what they append in blocks of the host.

    The device has one place for a sequence, or more where its programs take tokens of several sequences at once. A
    run whose sequence its place does not hold has its blocks copied there first. All others have the first place.
    """

    def __init__(
        self,
        manifest: Manifest,
        memory: Memory,
        blocks: int,
        chunks: Chunks,
        process: Callable[[Phase, Sequence[int], Positions], np.ndarray],
        clock: Callable[[], float] = time.perf_counter,
        timed: Timer | None = None,
    ) -> None:
        """Start with a device whose cache holds nothing.

        Args:
            manifest: the model's.
            memory: the buffers on the device.
            blocks: how many the host holds.
            chunks: the phases that process a prompt.
            process: runs a phase for tokens from a position on, or each at its own; returns f32 logits `[n, vocab]`
                after the last one, or after each of several tokens, valid until the next call.
            clock: returns seconds; how long copies and tokens take decides how long a turn is.
            timed: records copies of blocks.
        """
        self.blocks, self.recipe = blocks, Recipe(chunks)
        self.rows = max(phase.rows or 1 for phase in chunks.milliseconds)
        self._process, self._vocabulary, self._clock = process, manifest.model["vocab"], clock
        self._timed = timed or Timer()
        self._caches = [(memory.buffer(name), rows) for name, rows in CacheRows.of(manifest).items()]
        each = sum(rows.block for _, rows in self._caches)
        self._held = np.empty((blocks, each), np.uint8)
        self._versions = [0] * blocks
        self._loaded: list[list[_Content]] = [[] for _ in range(chunks.most_sequences)]
        """What each block's worth of the device's caches holds, by place."""
        self._copying = self._token = 0.0
        self.hidden = np.empty((0, 0))
        """Nothing: the last norm is inside of a program."""
        self.processing = 0.0
        """Seconds that programs took so far, without copies of blocks."""

    @property
    def turn(self) -> int:
        """How many tokens of a sequence should come before another one's: copying takes a tenth of the time then."""
        return tokens_of_turn(self._copying, self._token)

    def step(self, runs: Sequence[Run]) -> np.ndarray:
        """Process rows, as `Steps.step` says: one run after the other, each by its phase.

        Its last row may have logits, or all of them where the phase is one of several tokens.

        Raises:
            ValueError: if a run says no phase, or names tokens or blocks that are not there. Nothing was stored then.
        """
        for run in runs:
            self._check(run)
        phase = runs[0].phase if runs else None
        if phase and phase.kind == SEQUENCES:
            if len(runs) > phase.rows or any(run.phase != phase for run in runs):
                raise ValueError(f"a step of {len(runs)} runs in {phase}")
            return self._run_together(phase, runs)
        return np.concatenate([np.empty((0, self._vocabulary), np.float32), *map(self._run, runs)])

    def _check(self, run: Run) -> None:
        end = run.position + len(run.tokens)
        reached = run.blocks[: -(-end // BLOCK_POSITIONS)]
        most = len(run.tokens) if run.phase and run.phase.kind == TOKENS else 1
        together = run.phase is not None and run.phase.kind == SEQUENCES and (len(run.tokens), run.logits) != (1, 1)
        wrong = run.phase is None or together or not run.tokens or run.position < 0
        if wrong or not 0 <= run.logits <= most or run.hidden:
            raise ValueError(f"a run of {len(run.tokens)} rows from {run.position} on in {run.phase}")
        if len(reached) * BLOCK_POSITIONS < end or not all(0 <= block < self.blocks for block in reached):
            raise ValueError(f"a run up to {end} has no table of blocks below {self.blocks}")
        if min(run.tokens) < 0 or max(run.tokens) >= self._vocabulary:
            raise ValueError(f"a token is outside the vocabulary of {self._vocabulary}")

    def _run(self, run: Run) -> np.ndarray:
        assert run.phase
        self._fill([run], [0])
        logits = self._processed(run.phase, run.tokens, run.position, token=len(run.tokens) == 1)
        self._timed("host", "copy from places", self._store, run, 0)
        return logits[len(logits) - run.logits :].copy()

    def _run_together(self, phase: Phase, runs: Sequence[Run]) -> np.ndarray:
        """Process a token of each of several sequences.

        The program takes one in each place that is left, too, after what is there, which is kept where that has room.
        """
        places = self._places(runs)
        self._fill(runs, places)
        tokens, positions = [0] * phase.rows, [0] * phase.rows
        for run, place in zip(runs, places, strict=True):
            tokens[place], positions[place] = run.tokens[0], run.position
        for place in {*range(phase.rows)}.difference(places):
            positions[place] = len(self._loaded[place]) * BLOCK_POSITIONS
            if positions[place] >= phase.context:
                positions[place], self._loaded[place] = 0, []
        logits = self._processed(phase, tokens, positions, token=True)
        for run, place in zip(runs, places, strict=True):
            self._timed("host", "copy from places", self._store, run, place)
        return logits[places].copy()

    def _places(self, runs: Sequence[Run]) -> list[int]:
        """Return a place for each run: those that hold most of what it needs first, else the last ones.

        The first place is the last to be taken, since prompts are processed there.
        """
        held = {
            (number, place): self._same(self._wanted(run), place)
            for number, run in enumerate(runs)
            for place in range(len(self._loaded))
        }
        places: dict[int, int] = {}
        for number, place in sorted(held, key=lambda pair: (-held[pair], -pair[1])):
            if number not in places and place not in places.values():
                places[number] = place
        return [places[number] for number in range(len(runs))]

    def _processed(self, phase: Phase, tokens: Sequence[int], position: Positions, token: bool) -> np.ndarray:
        """Run a phase, and note how long it took; `token`: as the time of a token of a sequence."""
        started = self._clock()
        logits = self._process(phase, tokens, position)
        took = self._clock() - started
        self.processing += took
        if token:
            self._token += (_NEWEST if self._token else 1) * (took - self._token)
        return logits

    def _fill(self, runs: Sequence[Run], places: Sequence[int]) -> None:
        """Fill places of the device's caches up to the runs' positions, as far as they hold anything else."""
        started = self._clock()
        copied = [self._timed("host", "copy to places", self._load, *each) for each in zip(runs, places, strict=True)]
        if any(copied):
            self._copying += _NEWEST * (self._clock() - started - self._copying)

    def _wanted(self, run: Run) -> list[_Content]:
        """Return what the place of a run has to hold before it."""
        return [_Content(block, self._versions[block]) for block in run.blocks[: -(-run.position // BLOCK_POSITIONS)]]

    def _same(self, wanted: Sequence[_Content], place: int) -> int:
        """Return with how many of these blocks a place begins."""
        loaded = self._loaded[place]
        return next((at for at, each in enumerate(wanted) if loaded[at : at + 1] != [each]), len(wanted))

    def _load(self, run: Run, place: int) -> bool:
        """Fill a place up to a run's position, as far as it holds anything else. Return whether it did."""
        wanted = self._wanted(run)
        same = self._same(wanted, place)
        for at in range(same, len(wanted)):
            count = min(run.position - at * BLOCK_POSITIONS, BLOCK_POSITIONS)
            for buffer, rows, held in self._parts(wanted[at].block):
                low, high = rows.range(0, count)
                buffer.store((place * rows.each + at * BLOCK_POSITIONS) * rows.row + low, held[low:high])
        self._loaded[place][same:] = wanted[same:]
        return same < len(wanted)

    def _store(self, run: Run, place: int) -> None:
        """Copy what a run has appended in its place to the blocks of its table."""
        first, end = run.position, run.position + len(run.tokens)
        for at in range(first // BLOCK_POSITIONS, -(-end // BLOCK_POSITIONS)):
            start, block = at * BLOCK_POSITIONS, run.blocks[at]
            for buffer, rows, held in self._parts(block):
                low, high = rows.range(max(first - start, 0), min(end - start, BLOCK_POSITIONS))
                begin = (place * rows.each + start) * rows.row
                held[low:high] = buffer.fetch(begin + low, begin + high)
            self._changed(block)
            self._loaded[place][at:] = [_Content(block, self._versions[block])]

    def _parts(self, block: int) -> Iterator[tuple[Any, CacheRows, np.ndarray]]:
        """Yield each of the device's caches, its rows, and the bytes of a block that belong to it."""
        start = 0
        for buffer, rows in self._caches:
            yield buffer, rows, self._held[block, start : start + rows.block]
            start += rows.block

    def _changed(self, block: int) -> None:
        self._versions[block] += 1

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy all of a block, in all layers, from the first to the second block of each pair, in order."""
        for source, target in pairs:
            self._held[target] = self._held[source]
            self._changed(target)

    def read_block(self, block: int) -> bytes:
        """Return the content of a block, in all layers."""
        return self._held[block].tobytes()

    def write_block(self, block: int, content: bytes) -> None:
        """Store what `read_block` has returned, in any block. Raises ValueError if it has another length."""
        if len(content) != self._held.shape[1]:
            raise ValueError(f"a block has {self._held.shape[1]} bytes, not {len(content)}")
        self._held[block] = np.frombuffer(content, np.uint8)
        self._changed(block)
