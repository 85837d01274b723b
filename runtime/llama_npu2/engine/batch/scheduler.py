"""Decides which rows come in the next step: tokens of replies first, then chunks of prompts in turn."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, islice

import numpy as np

from llama_npu2.artifact.plan import DECODE, Phase
from llama_npu2.engine.batch.drafts import Drafts, Wanted
from llama_npu2.engine.batch.pace import Pace
from llama_npu2.engine.batch.sequence import Cache, Growing, Sequence
from llama_npu2.engine.batch.small_model import SmallModel
from llama_npu2.engine.step import Run, Steps, Turns
from llama_npu2.errors import UserError

_GAP, _LEAST_CHUNK = 0.15, 16
"""Seconds that a step may take while replies wait for their next token, and rows of prompts in it, however slow."""
_LONG_GAP, _LONG_CHUNK = 1.0, 128
"""The same where no reply waits, but somebody may come or cancel."""
_MOST_WANTED = 64
"""How many rows of prompts in a step may have logits, where texts are scored: those of a row have the vocabulary's
size."""


@dataclass
class Planned:
    """The rows of a sequence in the next step: its next tokens, and drafts behind its last one."""

    sequence: Sequence
    rows: int
    """Without drafts."""
    drafts: list[int]
    phase: Phase | None = None
    """What processes them, where programs have fixed shapes."""

    @property
    def completes(self) -> bool:
        """Whether the sequence's last token is among the rows."""
        return self.rows == self.sequence.pending

    @property
    def wanted(self) -> int:
        """After how many of the rows, the last ones, something is wanted."""
        done = self.sequence.done
        return max(done + self.rows - max(self.sequence.wanted_from, done), 0)

    def run(self) -> Run:
        """Return the rows."""
        sequence = self.sequence
        tokens = sequence.ids[sequence.done : sequence.done + self.rows] + self.drafts
        wanted = self.wanted + len(self.drafts)
        hidden = sequence.growing.hidden and wanted > 0
        return Run(tokens, sequence.done, sequence.table, 0 if hidden else wanted, hidden, self.phase)


class Scheduler:
    """Sequences that share steps. Which others there are changes no token of a sequence. Not thread-safe."""

    def __init__(
        self,
        steps: Steps,
        positions: int,
        rows: int,
        context: int,
        speculate: bool = True,
        least_shared: int = 8,
        clock: Callable[[], float] = time.perf_counter,
        model: SmallModel | None = None,
        turns: Turns | None = None,
    ) -> None:
        """Make a scheduler without sequences.

        Args:
            steps: what processes rows.
            positions: in a block.
            rows: the most in a step.
            context: the most positions of a sequence.
            speculate: whether to draft tokens.
            least_shared: how many tokens of a block must be shared for it to be worth a copy.
            clock: seconds, to measure steps by.
            model: drafts what is not found in a text itself.
            turns: the steps, where a step has rows of one sequence alone.
        """
        self._steps, self._rows, self._context, self._clock = steps, rows, context, clock
        self.cache = Cache(steps, positions, least_shared)
        self._waiting: deque[Sequence] = deque()
        self._running: deque[Sequence] = deque()
        self._numbers, self._pace = count(), Pace()
        self._turns, self._turn = turns, 0
        self._checked = turns.recipe.chunks.most_tokens if turns else rows
        self._model = model
        self._drafts = Drafts(self._pace, model) if speculate and self._checked > 1 else None

    @property
    def busy(self) -> bool:
        """Whether there is a sequence."""
        return bool(self._waiting or self._running)

    def add(self, growing: Growing, namespace: str = "") -> Sequence:
        """Add a sequence, whose turn comes when there are blocks for it.

        Args:
            namespace: of the prefix tree, as for `PrefixTree`.
        """
        cut = self._turns.recipe.cut(len(growing.ids)) if self._turns else None
        sequence = Sequence(growing.ids, growing, next(self._numbers), namespace=namespace, cut=cut)
        self._waiting.append(sequence)
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        """Forget a sequence, at any moment between two steps. One that has ended is gone already."""
        for queue in (self._waiting, self._running):
            if sequence in queue:
                queue.remove(sequence)
                self.cache.give_up(sequence)
                self._forget(sequence)

    def step(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Process rows of the sequences that run, and give each the logits after its last token.

        Args:
            meanwhile: is called once the rows are planned, so that threads which it wakes run while the device works.
                Where a small model makes drafts, it is called before that, too.
        """
        self._admit()
        if self._model:  # its drafts are part of the plan, and take as long as steps of its own
            meanwhile()
        plan = self._plan()
        runs = [planned.run() for planned in plan]
        meanwhile()
        if not runs:
            return
        started = self._clock()
        logits = self._steps.step(runs)
        rows, wanted = sum(len(run.tokens) for run in runs), sum(run.logits for run in runs)
        self._pace.note(rows, wanted, self._clock() - started)
        self.cache.counts.steps += 1
        rows_of_logits, rows_of_hidden = iter(logits), iter(self._steps.hidden)
        for planned, run in zip(plan, runs, strict=True):
            self._advance(planned, [*islice(rows_of_logits, run.logits), *islice(rows_of_hidden, run.hidden)])

    def fail(self, error: Exception) -> None:
        """End all sequences with an error."""
        for sequence in [*self._waiting, *self._running]:
            self._end(sequence, error)

    def _admit(self) -> None:
        """Let sequences run, the first one always, others as there are blocks for their texts so far."""
        while self._waiting:
            sequence = self._waiting[0]
            held = self.cache.held(sequence)
            missing = sum(self._missing(running, running.table) for running in self._running)
            if self._running and missing + self._missing(sequence, held) > self.cache.room(apart_from=held):
                return
            self.cache.reuse(sequence)
            self._running.append(self._waiting.popleft())

    def _missing(self, sequence: Sequence, table: list[int]) -> int:
        """Return how many more blocks than `table` has a sequence's text so far and its next token take."""
        return max(self.cache.blocks_of(len(sequence.ids) + 1) - len(table), 0)

    def _plan(self) -> list[Planned]:
        if self._turns:
            return self._plan_turn(self._turns.turn)
        plan: list[Planned] = []
        replies = [sequence for sequence in self._running if sequence.pending == 1]
        prompts = [sequence for sequence in self._running if sequence.pending > 1]
        for sequence in replies[: self._rows]:
            self._place(plan, sequence, 1)
        self._draft(plan)
        left = self._chunk(plan)
        for sequence in prompts:
            wanted = sum(planned.wanted for planned in plan if not planned.sequence.growing.replies)
            most = min(left, max(sequence.wanted_from - sequence.done, 0) + _MOST_WANTED - wanted)
            if most > 0:
                left -= self._place(plan, sequence, most)
        for planned in plan:  # who was not served is first the next time
            self._running.remove(planned.sequence)
            self._running.append(planned.sequence)
        return plan

    def _plan_turn(self, tokens: int) -> list[Planned]:
        """Plan a step of the sequence whose turn it is: a chunk of its prompt, or one of `tokens` tokens in a row.

        With the latter come tokens of others, where programs take them at once and that takes less time.
        """
        plan: list[Planned] = []
        for sequence in [*self._running]:
            if self._place(plan, sequence, self._rows):
                break
            self._turn = 0
        if plan and not self._join(plan):
            self._draft(plan)
        self._turn += bool(plan)
        if not all(planned.completes for planned in plan) or self._turn >= tokens:
            self._turn = 0
            for planned in plan:
                self._running.remove(planned.sequence)
                self._running.append(planned.sequence)
        return plan

    def _join(self, plan: list[Planned]) -> bool:
        """Add tokens of other replies to that of a step, and say what takes them at once. Return whether any came."""
        assert self._turns
        chunks, first = self._turns.recipe.chunks, plan[0]
        if not self._replies(first.sequence):
            return False
        others = (other for other in self._running if other is not first.sequence and self._replies(other))
        replies = [first.sequence, *islice(others, chunks.most_sequences - 1)]
        if len(replies) == 1 or not chunks.sequences_phase([reply.done for reply in replies]):
            return False
        for reply in replies[1:]:
            self._place(plan, reply, 1)
        phase = chunks.sequences_phase([planned.sequence.done for planned in plan])
        if len(plan) == 1 or not phase:
            del plan[1:]
            return False
        for planned in plan:
            planned.phase = phase
        self.cache.counts.joined += 1
        self.cache.counts.joined_tokens += len(plan)
        return True

    def _replies(self, sequence: Sequence) -> bool:
        """Return whether a reply's last token so far comes next, as a token's programs process it."""
        cut = sequence.cut if sequence.growing.replies and sequence.pending == 1 else None
        return cut is not None and cut.next(sequence.done).phase.kind == DECODE.kind

    def _chunk(self, plan: list[Planned]) -> int:
        """Return how many rows of prompts the step may have, so that replies do not wait for long."""
        left = self._rows - sum(planned.rows + len(planned.drafts) for planned in plan)
        gap, least = (_GAP, _LEAST_CHUNK) if plan else (_LONG_GAP, _LONG_CHUNK)
        return min(left, max(self._pace.rows_within(gap), least))

    def _place(self, plan: list[Planned], sequence: Sequence, most: int) -> int:
        """Plan up to `most` rows of a sequence; return how many. Later sequences give up their blocks for it."""
        if sequence not in self._running:
            return 0
        if sequence.pending > 1:
            self.cache.reuse(sequence)
        if self._follows(sequence):
            return 0
        if sequence.cut:
            self.cache.rewind(sequence, sequence.settled)
        self.cache.own_last(sequence)
        chunk = sequence.cut.next(sequence.done) if sequence.cut else None
        rows = chunk.end - sequence.done if chunk else min(sequence.pending, most)
        while not self.cache.reach(sequence, rows):
            if not self._swap_out(plan, sequence):
                return 0
        plan.append(Planned(sequence, rows, [], chunk.phase if chunk else None))
        return rows

    def _follows(self, sequence: Sequence) -> bool:
        """Return whether an earlier prompt is about to fill the very block that comes next in this one: it waits."""
        end = self.cache.blocks_of(sequence.done + 1) * self.cache.positions
        if end > sequence.wanted_from:
            return False
        ahead = (other for other in self._running if other.order < sequence.order and other.pending > 1)
        same = (other for other in ahead if other.namespace == sequence.namespace)
        return any(other.done < end and other.ids[:end] == sequence.ids[:end] for other in same)

    def _swap_out(self, plan: list[Planned], wanting: Sequence) -> bool:
        """Take the blocks of the sequence that came last. Return whether `wanting` still runs."""
        victim = max(self._running, key=lambda sequence: sequence.order)
        if len(self._running) == 1:
            self._end(wanting, UserError("the KV cache has no room for this text beside pinned ones: unpin some"))
            return False
        plan[:] = [planned for planned in plan if planned.sequence is not victim]
        self._running.remove(victim)
        self._waiting.appendleft(victim)
        self.cache.give_up(victim)
        if self._drafts:
            self._drafts.release(victim)
        self.cache.counts.swaps += 1
        return victim is not wanting

    def _draft(self, plan: list[Planned]) -> None:
        """Add drafts to the tokens of replies, as far as blocks are at hand."""
        replies = [planned for planned in plan if planned.completes and planned.sequence.growing.replies]
        if not self._drafts or not replies:
            return
        texts = [planned.sequence for planned in replies]
        wanted = [Wanted(text, text.ids, self._context - len(text.ids), text.namespace) for text in texts]
        for planned, drafts in zip(replies, self._drafts.draft(wanted, self._checked - len(plan)), strict=True):
            phase = self._phase_of(planned, drafts)
            if drafts and (phase or not self._turns) and self.cache.reach(planned.sequence, 1 + len(drafts)):
                planned.drafts, planned.phase = drafts, phase

    def _phase_of(self, planned: Planned, drafts: list[int]) -> Phase | None:
        """Return what processes a token and its drafts where programs have fixed shapes, if something does.

        A prompt's last rows keep the bits of their own phase, so that nothing is drafted after them.
        """
        if not self._turns or not planned.phase or planned.phase.kind != DECODE.kind:
            return None
        return self._turns.recipe.chunks.tokens_phase(planned.sequence.done, 1 + len(drafts))

    def _advance(self, planned: Planned, wanted: list[np.ndarray]) -> None:
        """Note that a sequence's rows are processed; give it the rows that it wants, as far as drafts came true."""
        sequence, completes = planned.sequence, planned.completes
        full = sequence.done // self.cache.positions
        sequence.done += planned.rows
        sequence.processed += planned.rows
        if completes and len(sequence.ids) == sequence.prompt:
            sequence.growing.start(sequence.processed)
            self.cache.remember(sequence, partly=True)
        try:
            if not sequence.growing.replies:
                for row in wanted:
                    sequence.growing.take(row)
            elif completes:
                self._choose(sequence, planned.drafts, wanted)
        except Exception as error:  # what takes the rows has failed, and not the device: other sequences go on
            self._end(sequence, error)
            return
        if sequence.done // self.cache.positions > full:
            self.cache.remember(sequence)
        if sequence.growing.finished:
            self._end(sequence, None)

    def _choose(self, sequence: Sequence, drafts: list[int], logits: list[np.ndarray]) -> None:
        accepted = 0
        for row, draft in zip(logits, [*drafts, None], strict=True):
            sequence.growing.take(row)
            if sequence.growing.finished or sequence.ids[-1] != draft:
                break
            sequence.done += 1
            accepted += 1
        if drafts and self._drafts:
            self._drafts.note(sequence, len(drafts), accepted)
        self.cache.counts.drafted += len(drafts)
        self.cache.counts.rejected += len(drafts) - accepted

    def _end(self, sequence: Sequence, error: Exception | None) -> None:
        for queue in (self._waiting, self._running):
            if sequence in queue:
                queue.remove(sequence)
        self.cache.give_up(sequence, remember=error is None)
        self._forget(sequence)
        sequence.growing.end(error)

    def _forget(self, sequence: Sequence) -> None:
        if self._drafts:
            self._drafts.forget(sequence)

    def sequences(self) -> Iterator[Sequence]:
        """Yield the sequences that run and those that wait."""
        yield from self._running
        yield from self._waiting
