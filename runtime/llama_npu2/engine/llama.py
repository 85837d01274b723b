"""The model at run time: prefill, decode, the position in the KV cache, and text generation on top of them.

Knows phases by name and buffers by name; what they compute and where is the manifest's and the device's business.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral
from operator import setitem
from pathlib import Path
from typing import Any, cast

import numpy as np

from llama_npu2.artifact.manifest import Manifest
from llama_npu2.artifact.plan import DECODE, PREFILL, PREFILL_CHUNK, Phase, sizes
from llama_npu2.devices import Call, Submission, open_device
from llama_npu2.devices.spans import Recorder, Timer
from llama_npu2.engine.chunks import Chunk, Chunks, decode_phase
from llama_npu2.engine.completion import Completion, Logprob, Stats
from llama_npu2.engine.memory import Memory, bind_calls, bind_plans, load_programs
from llama_npu2.engine.sampling import sampler
from llama_npu2.engine.trace import Watch, traced_phases
from llama_npu2.errors import REMEDY, UserError
from llama_npu2.options import Sampling
from llama_npu2.text.chat_template import ChatTemplate
from llama_npu2.text.tokenizer import TextStream, Tokenizer

Prompt = str | Sequence[dict[str, str]] | Sequence[int]
"""Text, messages with `role` and `content`, or token ids."""


def load(artifact_dir: str | Path, threads: int = 0, second_copy: bool = False) -> Llama:
    """Open an artifact directory. `threads=0`: all CPUs of this process. `second_copy`: of the weights, as an NPU
    multiplies prompts with them, instead of making it for every prompt. Raises UserError."""
    return Llama(Manifest.open(artifact_dir), threads, second_copy)


class Llama:
    """One loaded model with one KV cache. Not thread-safe."""

    def __init__(self, manifest: Manifest, threads: int = 0, second_copy: bool = False) -> None:
        if not manifest.plans:
            raise UserError(f"{manifest.directory}/manifest.json has programs and no model: {REMEDY}")
        manifest, once = manifest.with_second_copy() if second_copy else (manifest, [])
        self.manifest, self.second_copy = manifest, second_copy
        self.device: Any = open_device(manifest, threads)
        self.memory = Memory(manifest, self.device)
        self._programs = load_programs(manifest, self.device)
        self.calls = bind_plans(manifest, self._programs, self.memory)
        if once:
            self.device.prepare(bind_calls(manifest, self._programs, self.memory, once)).run(1, 0)
        self._phases: dict[Phase, Submission] = {
            phase: self.device.prepare(calls) for phase, calls in self.calls.items()
        }
        self._tokens = self.memory.array("tokens")
        self._logits = self.memory.array("logits")[: manifest.model["vocab"]]
        self.buckets, self.windows = (sizes(self._phases, phase.kind) for phase in (PREFILL, DECODE))
        self._chunked = Chunks(manifest.milliseconds, self.windows)
        self._awake = {phase.kind: phase for phase in sorted(self._phases, reverse=True)}
        for phase in self._phases.keys() - self._awake.values():
            self._phases[phase].rest()
        self.context_length: int = manifest.model["max_seq"]
        self.eos = frozenset(manifest.model["eos"])
        self.stats = Stats()
        self._history: list[int] = []
        self._timed = Timer()

    def __repr__(self) -> str:
        return f"<Llama {self.manifest.model['name']}: {self.description}, context of {self.context_length} tokens>"

    @property
    def description(self) -> str:
        """What runs, on what."""
        about = self.manifest.model
        calibrated = " calibrated" if "calibration" in about else ""
        cache = f", {about['kv']} KV cache" if about.get("kv", "bf16") != "bf16" else ""
        copied = " and a second copy for prompts" if self.second_copy else ""
        return f"{about['weights']}{calibrated} weights{copied}{cache}, {self.device.description}"

    @property
    def position(self) -> int:
        """Number of tokens in the KV cache."""
        return len(self._history)

    def reset(self) -> None:
        """Forget all tokens."""
        self._history.clear()

    def rewind(self, position: int) -> None:
        """Forget the tokens from `position` on."""
        del self._history[position:]

    def buffer(self, name: str) -> Any:
        """The device's buffer of that name in the manifest."""
        return self.memory.buffer(name)

    @cached_property
    def apart(self) -> tuple[Memory, dict[Phase, list[Call]]]:
        """Memory in which every buffer holds what it holds until it is written again, and the calls of every phase on
        it. What runs there leaves K and V where all calls have them."""
        memory = self.memory.apart()
        return memory, self.calls if memory is self.memory else bind_plans(self.manifest, self._programs, memory)

    @contextlib.contextmanager
    def trace(self, watch: Watch) -> Iterator[None]:
        """While it is entered, `watch` gets every call (`trace.TracedCall`) of prefill, decode and generate once it
        ran, and may read what the call's slots hold. Results are what they are without."""
        whole, (memory, calls) = (self._phases, self.calls), self.apart
        traced = traced_phases(self.manifest, self.device, memory, calls, watch)
        self._phases, self.calls = dict(traced), calls
        try:
            yield
        finally:
            self._phases, self.calls = whole
            for phase in traced.values():
                phase.rest()

    @contextlib.contextmanager
    def profile(self) -> Iterator[Recorder]:
        """While it is entered, spans of what prefill, decode and generate do are noted, down to launches of kernels
        (`spans.Span`). Results are what they are without. Raises UserError for artifacts of an older version."""
        recorder = Recorder()
        self.device.record(recorder)
        self._timed.recorder = recorder
        try:
            yield recorder
        finally:
            self._timed.recorder = None
            self.device.record(None)

    def prefill(self, token_ids: Sequence[int], chunks: Sequence[Chunk] = ()) -> np.ndarray:
        """Append tokens to the context; returns float32 logits `[vocab]` of the last one. `chunks`: with buckets, how
        they are processed, the cheapest way if nothing is said. Raises UserError."""
        ids = self._checked(token_ids)
        for phase, part in self._cut(ids, chunks):
            self._run(phase, part)
        return self._copied_logits()

    def score(self, token_ids: Sequence[int], first: int = 1, top: int = 0) -> list[Logprob]:
        """Log-probabilities of the tokens from number `first` on, 1 or more, each given all before it, with the `top`
        most likely alternatives: of a continuation, or of a whole text but for its first token. Raises UserError.

        On the CPU by the very logits that `prefill` of what is before a token gives, and `decode`, too; with buckets by
        those that come behind the same chunks. It costs a prefill of what is not in the KV cache yet, and for each
        token one product with the vocabulary matrix.
        """
        ids = [int(i) for i in token_ids]
        if not 0 < first < len(ids):
            raise UserError(f"score: first={first}: must be from 1 to {len(ids) - 1}, as there are {len(ids)} tokens")
        self._in_vocabulary(ids)
        shared = _common_prefix(self._history, ids[: first - 1])
        self.rewind(shared)
        logits = self._logits_from(self._checked(ids[shared:-1]), first - 1 - shared)
        return [Logprob.of(token, row, top) for token, row in zip(ids[first:], logits, strict=True)]

    def _logits_from(self, ids: list[int], first: int) -> Iterator[np.ndarray]:
        """Append tokens; the logits of each from number `first` on, where the device has them, until the next ones."""
        wanted = self.position + max(first, 0)
        for phase, chunk in self._cut(ids):
            position = self.position
            self._run(phase, chunk)
            rows = range(max(wanted - position, 0), len(chunk))
            wanted = max(wanted, self.position)
            if len(rows) == 1 and phase != PREFILL_CHUNK:
                yield self._logits
            elif rows:
                logits_of_last = self._behind_layers(phase)
                for row in rows:
                    logits_of_last.run(row + 1, position)
                    yield self._logits

    def _behind_layers(self, phase: Phase) -> Submission:
        """What makes a prompt's logits of the last of the rows that the layers left: of fewer rows, so of any."""
        phase = PREFILL if phase == PREFILL_CHUNK else phase
        layers = [number for number, call in enumerate(self.manifest.plans[phase]) if call.layer is not None]
        return self.device.prepare(self.calls[phase][max(layers, default=-1) + 1 :])

    def _cut(self, ids: list[int], chunks: Sequence[Chunk] = ()) -> Iterator[tuple[Phase, list[int]]]:
        """Phases that append tokens, and what each appends. With buckets one may begin with tokens that are there
        already, and rows past the tokens are computed and never read."""
        if self.buckets:
            text = self._history + ids
            for chunk in chunks or self._chunked.cheapest(self.position, len(text)):
                self.rewind(chunk.start)
                yield chunk.phase, text[chunk.start : chunk.end]
            return
        rows = len(self._tokens)
        for start in range(0, len(ids), rows):
            yield PREFILL if start + rows >= len(ids) else PREFILL_CHUNK, ids[start : start + rows]

    def decode(self, token_id: int) -> np.ndarray:
        """Append one token; returns float32 logits `[vocab]`. Raises UserError."""
        ids = self._checked([token_id])
        self._run(decode_phase(self.windows, self.position), ids)
        return self._copied_logits()

    def _copied_logits(self) -> np.ndarray:
        logits: np.ndarray = self._timed("host", "copy logits", self._logits.copy)
        return logits

    def _checked(self, token_ids: Sequence[int]) -> list[int]:
        ids = [int(i) for i in token_ids]
        if not ids:
            raise UserError("the prompt has no tokens: give at least one")
        self._in_vocabulary(ids)
        if self.position + len(ids) > self.context_length:
            raise UserError(
                f"{self.position + len(ids)} tokens exceed the context of {self.context_length}: {self.shorter}"
            )
        return ids

    def _in_vocabulary(self, ids: list[int]) -> None:
        vocab = self.manifest.model["vocab"]
        if bad := [i for i in ids if not 0 <= i < vocab]:
            raise UserError(f"token id {bad[0]} is outside the vocabulary of {vocab}")

    @property
    def shorter(self) -> str:
        """What to do about too many tokens, for messages."""
        longest = self.manifest.model.get("longest", self.context_length)
        more = f", or compile with context= up to {longest}" if longest > self.context_length else ""
        return f"shorten the prompt{more}"

    def _run(self, phase: Phase, ids: list[int]) -> None:
        if self._awake[phase.kind] != phase:
            self._phases[self._awake[phase.kind]].rest()
            self._awake[phase.kind] = phase
        about = {"rows": len(ids), "position": self.position}
        self._timed("host", "copy tokens", setitem, self._tokens, slice(len(ids)), ids)
        self._timed("phase", str(phase), self._phases[phase].run, len(ids), self.position, about=about)
        self._history += ids

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.open(self.manifest.storage)

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        """The checkpoint's chat template, whose process is then started; None for base models."""
        return ChatTemplate.open(self.manifest.storage)

    def encode(self, prompt: Prompt, raw: bool = False) -> list[int]:
        """Token ids of a prompt. A string goes through the chat template if there is one and `raw` is false;
        a list of `{"role", "content"}` messages always does; token ids are those already. Raises UserError."""
        if not len(prompt):
            raise UserError("the prompt is empty: give some text")
        if isinstance(prompt[0], Integral):
            return [int(token) for token in cast(Sequence[int], prompt)]
        if isinstance(prompt, str) and (raw or self.chat_template is None):
            return self._tokenised(prompt, special_tokens=True)
        if self.chat_template is None:
            raise UserError("this model has no chat template: give a plain text prompt")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        _ = self.tokenizer  # it is read while the template's process starts
        text = self._timed("host", "template", self.chat_template.render, messages)
        return self._tokenised(text, special_tokens=False)

    def _tokenised(self, text: str, special_tokens: bool) -> list[int]:
        ids: list[int] = self._timed("host", "tokenise", self.tokenizer.encode, text, special_tokens)
        return ids

    def generate(
        self,
        prompt: Prompt,
        *,
        raw: bool = False,
        keep_context: bool = False,
        number: int = 0,
        **sampling: Any,
    ) -> Iterator[str]:
        """Yield the reply in pieces of whole UTF-8 characters; `stats` is complete once the iterator is.

        `keep_context`: keep the part of the KV cache that the new prompt begins with (chat) instead of starting afresh.
        `number`: which of the replies to a seed, as `complete` numbers them. `sampling`: fields of `options.Sampling`,
        which are greedy and end a reply after 256 tokens if not given.
        Raises UserError.
        """
        options = Sampling.given(sampling)
        options.check_one_text()
        self._check_prompt(prompt)
        return self._pieces(prompt, raw, keep_context, options, number)

    def _pieces(self, prompt: Prompt, raw: bool, keep_context: bool, options: Sampling, number: int) -> Iterator[str]:
        yield from self._reply(self._read(prompt, raw, keep_context), options, Completion(), number)

    def chat(self, messages: Sequence[dict[str, str]], **sampling: Any) -> Iterator[str]:
        """Yield the answer to the last of a conversation's messages, as `generate` does.

        What an earlier call processed of the same conversation is not processed again.

        Args:
            messages: `{"role", "content"}` each: `system` or none, then `user` and `assistant` in turn.
            sampling: fields of `options.Sampling`.
        """
        return self.generate(list(messages), keep_context=True, **sampling)

    def _check_prompt(self, prompt: Prompt) -> None:
        """Check that a prompt is what `encode` takes. Raises TypeError, UserError."""
        if isinstance(prompt, str) or all(isinstance(each, Integral) for each in prompt):
            return
        if not all(isinstance(each, Mapping) and {"role", "content"} <= each.keys() for each in prompt):
            raise TypeError("a prompt is a text, a list of token ids, or a list of messages with role and content")
        if self.chat_template is None:
            raise UserError("this model has no chat template: give a plain text prompt")

    def complete(
        self,
        prompt: Prompt,
        *,
        raw: bool = False,
        keep_context: bool = False,
        **sampling: Any,
    ) -> Iterator[Completion]:
        """Yield `n` replies, each when it is whole. The prompt is processed once. A reply to a seed depends on its
        number alone, not on `n`. Arguments are those of `generate`; `prompt_logprobs` processes all of the prompt, at
        the cost of `score`. Raises UserError."""
        options = Sampling.given(sampling)
        self._check_prompt(prompt)
        read = self._read(prompt, raw, keep_context, options.prompt_logprobs)
        for number in range(options.n):
            made = Completion(prompt_logprobs=read.logprobs)
            made.text = "".join(self._reply(read, options, made, number))
            yield made
            read = replace(read, started=time.perf_counter(), reused=len(read.ids))

    def _read(self, prompt: Prompt, raw: bool, keep_context: bool, logprobs: int | None = None) -> _Prompt:
        """Process a prompt. `logprobs`: also say how likely it is, with so many alternatives."""
        started, self.stats = time.perf_counter(), Stats()
        ids = self.encode(prompt, raw)
        if len(ids) >= self.context_length:
            raise UserError(f"the prompt has {len(ids)} tokens, the context is {self.context_length}: {self.shorter}")
        if not keep_context or logprobs is not None:
            self.reset()
        reused = self._keep(ids)
        if logprobs is None:
            return _Prompt(ids, self._behind(ids), started, reused)
        rows = self._logits_from(self._checked(ids), 0)
        known = [Logprob.of(token, next(rows), logprobs) for token in ids[1:]]
        return _Prompt(ids, next(rows).copy(), started, reused, known)

    def _reply(self, prompt: _Prompt, options: Sampling, made: Completion, number: int) -> Iterator[str]:
        stream, choose = TextStream(self.tokenizer, options.stop), sampler(options, prompt.ids, number)
        logits, ids, first = prompt.logits, list(prompt.ids), 0.0
        made.logprobs = None if options.logprobs is None else []
        self.stats = stats = made.stats
        stats.prompt_tokens, stats.reused_tokens = len(ids) - prompt.reused, prompt.reused
        while not stats.finish_reason:
            if made.tokens:
                ids.append(made.tokens[-1])
                logits = self._behind(ids)
            token = self._timed("host", "sample", choose, logits)
            now = time.perf_counter()
            first = first or now
            stats.ttft, stats.decode_time = first - prompt.started, now - first
            made.tokens.append(token)
            stats.generated_tokens += 1
            if made.logprobs is not None:
                made.logprobs.append(Logprob.of(token, logits, options.logprobs or 0))
            piece = "" if token in self.eos else self._timed("host", "detokenise", stream.push, token)
            if token in self.eos or stream.stopped:
                stats.finish_reason = "stop"
            elif stats.generated_tokens >= options.max_tokens or len(ids) >= self.context_length:
                stats.finish_reason = "length"
            if piece := piece + (stream.flush() if stats.finish_reason else ""):
                yield piece

    def _behind(self, ids: list[int]) -> np.ndarray:
        """Logits behind `ids`, of which the KV cache keeps what it holds, whatever used it in the meantime."""
        kept = self._keep(ids)
        return self.decode(ids[-1]) if 0 < kept == len(ids) - 1 else self.prefill(ids[kept:])

    def _keep(self, ids: list[int]) -> int:
        """Forget what is not the beginning of `ids`, or not worth keeping; the last of them is always processed again.
        Returns how many are kept."""
        before = ids[:-1]
        kept = len(before) if self._history == before else _common_prefix(self._history, before)
        cost = self._chunked.cost
        if self.buckets and 0 < kept < len(before) and cost(0, len(ids)) < cost(kept, len(ids)):
            kept = 0
        self.rewind(kept)
        return kept

    def close(self) -> None:
        """Release the device, and end the chat template's process."""
        if template := self.__dict__.get("chat_template"):
            template.close()
        self.device.close()


@dataclass(frozen=True)
class _Prompt:
    """What replies go on from. `logits`: behind `ids`; `started`: when the reply was asked for, by `perf_counter`;
    `reused`: how many of the tokens the KV cache held."""

    ids: list[int]
    logits: np.ndarray
    started: float
    reused: int
    logprobs: list[Logprob] | None = None


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    count = 0
    for left, right in zip(a, b, strict=False):
        if left != right:
            break
        count += 1
    return count
