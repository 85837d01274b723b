"""Runs the phases of a model: prefill, decode, score, and the position in the KV cache.

Knows phases by their kind and size and buffers by name; the manifest and the device know what they compute and where.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import repeat
from math import inf
from operator import setitem
from threading import get_ident
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from llama_npu2.artifact.manifest import Manifest
from llama_npu2.artifact.plan import (
    DECODE,
    PREFILL,
    PREFILL_CHUNK,
    SEQUENCES,
    TOKENS,
    Phase,
    Positions,
    first_of,
    sizes,
)
from llama_npu2.devices import Call, Submission, open_device
from llama_npu2.devices.spans import Recorder, Timer
from llama_npu2.engine.chunks import Chunk, Chunks, decode_phase
from llama_npu2.engine.completion import Logprob
from llama_npu2.engine.memory import (
    Memory,
    bind_calls,
    bind_plans,
    blocks_within,
    cache_blocks,
    context_within,
    load_programs,
)
from llama_npu2.engine.row_logits import RowLogits, SeveralRows, logits_phase
from llama_npu2.engine.trace import Watch, traced_phases
from llama_npu2.errors import REMEDY, UserError

if TYPE_CHECKING:
    from llama_npu2.engine.native_steps import NativeSteps
    from llama_npu2.engine.turns import TurnSteps

_HIDDEN = "final_normed"
"""The buffer of the last norm's output."""


class Engine:
    """One loaded model with one KV cache. It is for one thread at a time: another one meanwhile gets a UserError."""

    def __init__(self, manifest: Manifest, threads: int = 0, second_copy: bool = False, kv_memory: int = 0) -> None:
        if not manifest.plans:
            raise UserError(f"{manifest.directory}/manifest.json has programs and no model: {REMEDY}")
        manifest, unpacking = manifest.with_second_copy() if second_copy else (manifest, [])
        self.manifest, self.second_copy = manifest, second_copy
        self.device: Any = open_device(manifest, threads)
        try:
            blocks = blocks_within(kv_memory, manifest) if kv_memory else 0
            self.memory = Memory(manifest, self.device, blocks=blocks)
            self._programs = load_programs(manifest, self.device)
            self.calls = bind_plans(manifest, self._programs, self.memory)
            if unpacking:
                self.device.prepare(bind_calls(manifest, self._programs, self.memory, unpacking)).run(1, 0)
            self._phases: dict[Phase, Submission] = {
                phase: self.device.prepare(calls) for phase, calls in self.calls.items()
            }
            self._tokens = self.memory.array("tokens")
            self._logits = self.memory.array("logits")[: manifest.model["vocab"]]
            self.buckets, self.windows = (sizes(self._phases, phase.kind) for phase in (PREFILL, DECODE))
            self._chunks = Chunks(manifest.milliseconds, self.windows)
            self._active = {phase.kind: phase for phase in sorted(self._phases, reverse=True)}
            for phase in self._phases.keys() - self._active.values():
                self._phases[phase].suspend()
            self._blocks = blocks or self.memory.blocks
            self.context_length = context_within(manifest, blocks)
        except BaseException:
            self.device.close()  # at once: the error keeps what it has loaded until Python collects it
            raise
        self._without_head: dict[Phase, Submission] = {}
        self._cached: list[int] = []
        """The tokens whose K and V the KV cache holds."""
        self._timed = Timer()
        self._traced = False
        self._thread: dict[int, int] = {}
        """The thread that has the context, by process: a forked one does not have the threads of its parent."""

    @property
    def description(self) -> str:
        """The formats of weights and KV cache, and the device."""
        model = self.manifest.model
        calibrated = " calibrated" if "calibration" in model else ""
        cache = f", {model['kv']} KV cache" if model.get("kv", "bf16") != "bf16" else ""
        activations = ", 8-bit activations" if model.get("activations") == "int8" else ""
        copied = " and a second copy for prompts" if self.second_copy else ""
        together = f", {most} at once" if (most := self._chunks.most_sequences) > 1 else ""
        turns = "" if self.holds_many else f", where sequences take turns{together}"
        return f"{model['weights']}{calibrated} weights{copied}{activations}{cache}, {self.device.description}{turns}"

    @property
    def position(self) -> int:
        """Number of tokens in the KV cache."""
        return len(self._cached)

    def reset(self) -> None:
        """Forget all tokens. Raises UserError while another thread has the context."""
        self.rewind(0)

    def rewind(self, position: int) -> None:
        """Forget the tokens from `position` on. Raises UserError while another thread has the context."""
        with self._alone():
            self._rewind(position)

    def _rewind(self, position: int) -> None:
        del self._cached[position:]

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other threads out of the context inside the `with` block, in which it changes. Raises UserError.

        Blocks are not nested, because the inner one would let others in.
        """
        self._check_unserved()
        # Ctrl-C may keep the block from ending. A lock would then refuse its own thread as well; a number lets it in.
        thread = get_ident()
        if self._thread.setdefault(os.getpid(), thread) != thread:
            raise UserError("the model is at work in another thread: llm.engine() makes many replies at a time")
        try:
            yield
        finally:
            self._thread.clear()

    def _check_unserved(self) -> None:
        """Raise UserError while something else has the caches."""

    def buffer(self, name: str) -> Any:
        """Return the device's buffer of that name in the manifest."""
        return self.memory.buffer(name)

    @cached_property
    def holds_many(self) -> bool:
        """Whether the device's caches hold many sequences, which `steps` process. Elsewhere sequences take turns."""
        return bool(cache_blocks(self.manifest))

    @cached_property
    def steps(self) -> NativeSteps:
        """What processes rows of many sequences, over this engine's caches.

        Raises UserError if the device's programs take the rows of one sequence alone.
        """
        if not self.holds_many:
            where = self.manifest.directory
            raise UserError(f"{where}: on its device sequences take turns: choose target=cpu for steps of several rows")
        from llama_npu2.engine.native_steps import NativeSteps, Whole  # for the CPU alone

        prepared: dict[Phase, Any] = {**self._phases}
        whole = [Whole(prepared[DECODE], self._logits[None])]
        if several := logits_phase(self.manifest):
            calls = [*self.calls[PREFILL_CHUNK], *self.calls[several]]
            whole.append(Whole(self.device.prepare(calls), self._several_logits))
        layers, row_logits = prepared[PREFILL_CHUNK], self._row_logits(PREFILL)
        return NativeSteps(self.memory, layers, row_logits, self._row_hidden, whole, self._blocks)

    @cached_property
    def turns(self) -> TurnSteps:
        """What processes one sequence after the other, or a token of each of some, where programs have fixed shapes."""
        from llama_npu2.engine.turns import TurnSteps

        def process(phase: Phase, tokens: Sequence[int], position: Positions) -> np.ndarray:
            if phase.kind == TOKENS and isinstance(position, int):
                return self._run_tokens(phase, tokens, position)
            self._run_at(phase, tokens, position)
            return self._several_logits if phase.kind == SEQUENCES else self._logits[None]

        return TurnSteps(self.manifest, self.memory, self._blocks, self._chunks, process, timed=self._timed)

    @cached_property
    def unaliased(self) -> tuple[Memory, dict[Phase, list[Call]]]:
        """Memory in which every buffer keeps its content until it is written again, and the calls of every phase on it.

        The KV cache is the same one.
        """
        memory = self.memory.unaliased()
        return memory, self.calls if memory is self.memory else bind_plans(self.manifest, self._programs, memory)

    @contextlib.contextmanager
    def trace(self, watch: Watch) -> Iterator[None]:
        """Run prefill, decode and generate call by call inside the `with` block, with the same results.

        Args:
            watch: gets each call (`trace.TracedCall`) after it ran, and may read what the call's slots hold.
        """
        untraced, (memory, calls) = (self._phases, self.calls), self.unaliased
        traced = traced_phases(self.manifest, self.device, memory, calls, watch)
        self._phases, self.calls, self._traced = dict(traced), calls, True
        try:
            yield
        finally:
            (self._phases, self.calls), self._traced = untraced, False
            for phase in traced.values():
                phase.suspend()

    @contextlib.contextmanager
    def profile(self) -> Iterator[Recorder]:
        """Record spans (`spans.Span`) inside the `with` block: of the phases, the runtime's own work and each launch.

        Results are the same. Raises UserError for artifacts of an older version.
        """
        recorder = Recorder()
        self.device.record(recorder)
        self._timed.recorder = recorder
        try:
            yield recorder
        finally:
            self._timed.recorder = None
            self.device.record(None)

    def prefill(self, token_ids: Sequence[int], chunks: Sequence[Chunk] = ()) -> np.ndarray:
        """Append tokens to the context.

        Args:
            token_ids: at least one.
            chunks: with buckets, the calls that process them; by default those that take the least time.

        Returns:
            Float32 logits `[vocab]` after the last token.

        Raises:
            UserError: if there are no tokens, or too many, or one is outside the vocabulary.
        """
        with self._alone():
            return self._copied(self._prefill(token_ids, chunks))

    def _prefill(self, token_ids: Sequence[int], chunks: Sequence[Chunk] = ()) -> np.ndarray:
        """Append tokens; return the logits after the last one, which are valid until the next token."""
        for phase, part in self._cut(self._checked(token_ids), chunks):
            self._run(phase, part)
        return self._logits

    def decode(self, token_id: int, copy: bool = True) -> np.ndarray:
        """Append one token; return float32 logits `[vocab]` after it. Raises UserError.

        Args:
            token_id: of the vocabulary.
            copy: whether the logits are the caller's. Else they are the engine's own, which the next token overwrites.
        """
        with self._alone():
            logits = self._decode(token_id)
            return self._copied(logits) if copy else logits

    def _decode(self, token_id: int) -> np.ndarray:
        """Append one token; return the logits after it, which are valid until the next token."""
        ids = self._checked([token_id])
        self._run(decode_phase(self.windows, self.position), ids)
        return self._logits

    def _logits_after(self, ids: list[int]) -> np.ndarray:
        """Return float32 logits `[vocab]` after `ids`, whose beginning the KV cache may hold. Raises UserError.

        They are valid until the next token.
        """
        kept = self._keep(ids)
        return self._decode(ids[-1]) if 0 < kept == len(ids) - 1 else self._prefill(ids[kept:])

    def _hidden_after(self, ids: list[int]) -> np.ndarray:
        """Return the last norm's output after `ids`, `[hidden size]`. The LM head is not computed. Raises UserError."""
        start = self._keep(ids)
        for phase, part in self._cut(self._checked(ids[start:]), self._prompts(start, len(ids))):
            calls = None if phase == PREFILL_CHUNK else self._headless(phase)
            self._run(phase, part, calls)
            if calls:
                calls.suspend()
        return self.memory.latest(_HIDDEN)

    def _prompts(self, start: int, end: int) -> list[Chunk]:
        """Return the chunks of a text without phases of tokens, whose last norm may be inside of a larger program."""
        if not self.buckets:
            return []
        times = self.manifest.milliseconds.items()
        prompts = {phase: inf if phase.kind == DECODE.kind else time for phase, time in times}
        return Chunks(prompts, self.windows).cheapest(start, end)

    def _headless(self, phase: Phase) -> Submission:
        """Return the calls of a prefill up to the last norm, after which its output is where it was written."""
        if phase not in self._without_head:
            self._without_head[phase] = self.device.prepare(self.calls[phase][: self._last_norm(phase) + 1])
        return self._without_head[phase]

    def _last_norm(self, phase: Phase) -> int:
        """Return which call of a phase computes the last norm. Raises UserError if the host computes it in none."""
        plan = self.manifest.plans[phase]
        found = next((number for number, call in enumerate(plan) if _HIDDEN in call.names), None)
        if found is None or not self.manifest.programs[plan[found].program]["host"]:
            raise UserError(f"{phase}: no program of the host computes the last norm: {REMEDY}")
        return found

    def _after_layers(self, phase: Phase) -> int:
        """Return which call of a phase is the first one after those of its layers."""
        layers = [number for number, call in enumerate(self.manifest.plans[phase]) if call.layer is not None]
        return max(layers, default=-1) + 1

    @cached_property
    def _norm_of_row(self) -> Submission:
        calls = slice(self._after_layers(PREFILL), self._last_norm(PREFILL) + 1)
        return self.device.prepare(self.calls[PREFILL][calls])

    def _row_hidden(self, row: int) -> np.ndarray:
        """Return the last norm's output of a row that a prompt's layers have processed, `[hidden size]`."""
        self._norm_of_row.run(row + 1, 0)
        return self.memory.latest(_HIDDEN)

    def _keep(self, ids: list[int]) -> int:
        """Forget the cached tokens that `ids` does not begin with, and those that are not worth keeping.

        The last token of `ids` is never kept, because its logits are wanted. With buckets, processing all of `ids` at
        once may take less time than what follows the kept tokens; then none are kept.

        Returns:
            The number of tokens that are kept.
        """
        before = ids[:-1]
        kept = len(before) if self._cached == before else common_prefix(self._cached, before)
        cost = self._chunks.cost
        if self.buckets and 0 < kept < len(before) and cost(0, len(ids)) < cost(kept, len(ids)):
            kept = 0
        self._rewind(kept)
        return kept

    def score(self, token_ids: Sequence[int], first: int = 1, top: int = 0) -> list[Logprob]:
        """Return log-probabilities of the tokens from number `first` on, each given all tokens before it.

        On the CPU they follow from the very logits that `prefill` of the tokens before gives, and `decode`, too; with
        buckets from those of the same chunks. The cost is a prefill of the tokens that the KV cache does not hold yet,
        and products of their rows with the vocabulary matrix.

        Args:
            token_ids: a whole text, or a context and its continuation.
            first: 1 or more, because nothing comes before token 0.
            top: how many of the most likely alternatives to return with each.

        Raises:
            UserError: if `first` is out of range, or as `prefill`.
        """
        ids = [int(i) for i in token_ids]
        if not 0 < first < len(ids):
            raise UserError(f"score: first={first}: must be from 1 to {len(ids) - 1}, as there are {len(ids)} tokens")
        self._check_vocabulary(ids)
        with self._alone():
            shared = common_prefix(self._cached, ids[: first - 1])
            self._rewind(shared)
            logits = self._logits_from(ids[shared:-1], first - 1 - shared)
            return [Logprob.of(token, row, top) for token, row in zip(ids[first:], logits, strict=True)]

    def _logits_from(self, token_ids: list[int], first: int) -> Iterator[np.ndarray]:
        """Append tokens; yield the logits after each from number `first` on.

        They are the device's own array, so each is valid until the next one is asked for. Raises UserError.
        """
        ids = self._checked(token_ids)
        wanted = self.position + max(first, 0)
        for phase, chunk in self._cut(ids):
            position = self.position
            self._run(phase, chunk)
            rows = range(max(wanted - position, 0), len(chunk))
            wanted = max(wanted, self.position)
            if len(rows) == 1 and phase != PREFILL_CHUNK:
                yield self._logits
            elif rows:
                yield from self._row_logits(phase).of(rows, position)

    def _row_logits(self, phase: Phase) -> RowLogits:
        """Return what computes the logits of the rows that a prefill has processed.

        A prefill's calls after its layers are final norm and LM head. They process the last of the rows that they are
        given, so a run with fewer rows gives an earlier row's logits.
        """
        phase = PREFILL if phase == PREFILL_CHUNK else phase
        last = self.device.prepare(self.calls[phase][self._after_layers(phase) :])
        several = logits_phase(self.manifest)
        return RowLogits(
            last,
            self._logits,
            SeveralRows(self.manifest, self.memory, several, self._phases[several]) if several else None,
        )

    def _cut(self, ids: list[int], chunks: Sequence[Chunk] = ()) -> Iterator[tuple[Phase, list[int]]]:
        """Yield the phases that append tokens, each with the tokens that it appends.

        With buckets a chunk may begin with tokens that are cached already, and rows after its tokens are computed and
        never read.
        """
        if self.buckets:
            text = self._cached + ids
            for chunk in chunks or self._chunks.cheapest(self.position, len(text)):
                self._rewind(chunk.start)
                yield chunk.phase, text[chunk.start : chunk.end]
            return
        rows = len(self._tokens)
        for start in range(0, len(ids), rows):
            yield PREFILL if start + rows >= len(ids) else PREFILL_CHUNK, ids[start : start + rows]

    def _run(self, phase: Phase, ids: list[int], calls: Submission | None = None) -> None:
        """Append tokens. `calls`: instead of the phase's."""
        self._run_at(phase, ids, self.position, calls)
        self._cached += ids

    def _run_at(self, phase: Phase, ids: Sequence[int], position: Positions, calls: Submission | None = None) -> None:
        if calls or self._active[phase.kind] != phase:
            self._phases[self._active[phase.kind]].suspend()
            self._active[phase.kind] = phase
        about = {"rows": len(ids), "position": first_of(position)}
        self._timed("host", "copy tokens", setitem, self._tokens, slice(len(ids)), ids)
        run = (calls or self._phases[phase]).run
        self._timed("phase", phase, run, len(ids), position, about=about)

    def _run_tokens(self, phase: Phase, ids: Sequence[int], position: int) -> np.ndarray:
        """Process tokens with a phase of several; return the logits after each, `[tokens, vocab]`.

        Those that the phase takes besides are computed and never read.
        """
        self._run_at(phase, [*ids, *repeat(ids[-1], phase.rows - len(ids))], position)
        return self._several_logits[: len(ids)]

    @cached_property
    def _several_logits(self) -> np.ndarray:
        rows: np.ndarray = self.memory.array("row_logits")[:, : self.manifest.model["vocab"]]
        return rows

    @property
    def most_tokens(self) -> int:
        """The most tokens of one text that a step takes with logits after each, so that drafts can be checked."""
        return self.steps.rows if self.holds_many else self._chunks.most_tokens

    def _copied(self, logits: np.ndarray) -> np.ndarray:
        copied: np.ndarray = self._timed("host", "copy logits", logits.copy)
        return copied

    def _checked(self, token_ids: Sequence[int]) -> list[int]:
        ids = [int(i) for i in token_ids]
        if not ids:
            raise UserError("the prompt has no tokens: give at least one")
        self._check_vocabulary(ids)
        if self.position + len(ids) > self.context_length:
            raise UserError(
                f"{self.position + len(ids)} tokens exceed the context of {self.context_length}: {self.shorter}"
            )
        return ids

    def _check_vocabulary(self, ids: list[int]) -> None:
        vocab = self.manifest.model["vocab"]
        if bad := [i for i in ids if not 0 <= i < vocab]:
            raise UserError(f"token id {bad[0]} is outside the vocabulary of {vocab}")

    @property
    def shorter(self) -> str:
        """The remedy that messages name when there are too many tokens."""
        longest = self.manifest.model.get("longest", self.context_length)
        more = f", or compile with context= up to {longest}" if longest > self.context_length else ""
        return f"shorten the prompt{more}"

    def close(self) -> None:
        """Release the device. Whoever generates afterwards gets a UserError."""
        self.device.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return with how many of the same tokens two texts begin."""
    count = 0
    for left, right in zip(a, b, strict=False):
        if left != right:
            break
        count += 1
    return count
