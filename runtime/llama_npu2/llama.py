"""The model at run time: prefill, decode, the position in the KV cache, and text generation on top of them.

Knows phases by name and buffers by name; what they compute and where is the manifest's and the device's business.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from llama_npu2.chat import ChatTemplate
from llama_npu2.devices import Submission, open_device
from llama_npu2.errors import UserError
from llama_npu2.manifest import Manifest
from llama_npu2.memory import Memory, bind_calls
from llama_npu2.options import Sampling
from llama_npu2.sampling import sampler
from llama_npu2.text import TextStream, Tokenizer
from llama_npu2.trace import Watch, traced_phases
from llama_npu2.validation import sizes

MAX_STEPPED_TOKENS = 16
"""On devices with buckets: with more new tokens than this, prefilling all again beats decoding the new ones singly."""


@dataclass
class Stats:
    """Counts and times of the last generation. Times in seconds."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    ttft: float = 0.0
    """Time to first token: from the call to the first sampled token."""
    decode_time: float = 0.0
    """Time of all tokens after the first."""
    finish_reason: str = ""
    """`stop` (end token or stop string) or `length`."""

    @property
    def tpot(self) -> float:
        """Time per output token after the first."""
        return self.decode_time / (self.generated_tokens - 1) if self.generated_tokens > 1 else 0.0

    @property
    def prefill_rate(self) -> float:
        return self.prompt_tokens / self.ttft if self.ttft else 0.0

    @property
    def decode_rate(self) -> float:
        return 1 / self.tpot if self.tpot else 0.0


def load(artifact_dir: str | Path, threads: int = 0) -> Llama:
    """Open an artifact directory. `threads=0`: all CPUs of this process. Raises UserError."""
    return Llama(Manifest.open(artifact_dir), threads)


class Llama:
    """One loaded model with one KV cache. Not thread-safe."""

    def __init__(self, manifest: Manifest, threads: int = 0) -> None:
        self.manifest = manifest
        self.device: Any = open_device(manifest, threads)
        self.memory = Memory(manifest, self.device)
        self.calls = bind_calls(manifest, self.device, self.memory)
        self._phases: dict[str, Submission] = {phase: self.device.prepare(calls) for phase, calls in self.calls.items()}
        self._tokens = self.memory.array("tokens")
        self._logits = self.memory.array("logits")[: manifest.model["vocab"]]
        self.buckets, self.windows = (sizes(self._phases, phase) for phase in ("prefill", "decode"))
        self._decoding = decode_phase(self.windows, 0)
        for window in self.windows[1:]:
            self._phases[f"decode@{window}"].rest()
        self.context_length: int = manifest.model["max_seq"]
        self.eos = frozenset(manifest.model["eos"])
        self.stats = Stats()
        self.notify: Callable[[str], object] = lambda line: None
        """Gets a line when something takes longer than it must. The command line prints it."""
        self._history: list[int] = []

    @property
    def description(self) -> str:
        """What runs, on what."""
        about = self.manifest.model
        calibrated = " calibrated" if "calibration" in about else ""
        cache = f", {about['kv']} KV cache" if about.get("kv", "bf16") != "bf16" else ""
        return f"{about['weights']}{calibrated} weights{cache}, {self.device.description}"

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
        return self.memory.bind(name).buffer

    @contextlib.contextmanager
    def trace(self, watch: Watch) -> Iterator[None]:
        """While it is entered, `watch` gets every call (`trace.TracedCall`) of prefill, decode and generate once it
        ran, and may read what the call's slots hold. Results are what they are without. Raises UserError on an NPU."""
        whole = self._phases
        self._phases = dict(traced_phases(self.manifest, self.device, self.memory, self.calls, watch))
        try:
            yield
        finally:
            self._phases = whole

    def prefill(self, token_ids: Sequence[int]) -> np.ndarray:
        """Append tokens to the context; returns float32 logits `[vocab]` of the last one. Raises UserError."""
        ids = self._checked(token_ids)
        if self.buckets:
            self._prefill_bucket(ids)
        else:
            self._prefill_chunks(ids)
        return self._logits.copy()

    def _prefill_chunks(self, ids: list[int]) -> None:
        rows = len(self._tokens)
        for start in range(0, len(ids), rows):
            chunk = ids[start : start + rows]
            self._run("prefill" if start + rows >= len(ids) else "prefill_chunk", chunk)

    def _prefill_bucket(self, ids: list[int]) -> None:
        """Programs of static shape start at position 0: the smallest bucket that holds the tokens, else the largest and
        the rest one by one. Rows past the tokens are computed and never read."""
        if self.position == 0:
            bucket = next((b for b in self.buckets if b >= len(ids)), self.buckets[-1])
            if bucket < len(ids):
                self.notify(self._too_long(len(ids)))
            self._run(f"prefill@{bucket}", ids[:bucket])
            ids = ids[bucket:]
        for token in ids:
            self._step([token])

    def _too_long(self, tokens: int) -> str:
        wanted = ",".join(map(str, [*self.buckets, 1 << (tokens - 1).bit_length()]))
        return (
            f"the prompt has {tokens} tokens, the largest bucket is {self.buckets[-1]}: "
            f"{tokens - self.buckets[-1]} go one by one; doit compile buckets={wanted} makes a larger one"
        )

    def decode(self, token_id: int) -> np.ndarray:
        """Append one token; returns float32 logits `[vocab]`. Raises UserError."""
        self._step(self._checked([token_id]))
        return self._logits.copy()

    def _step(self, ids: list[int]) -> None:
        """One token, attending through the smallest window that holds all that are there."""
        phase = decode_phase(self.windows, self.position)
        if phase != self._decoding:
            self._phases[self._decoding].rest()
            self._decoding = phase
        self._run(phase, ids)

    def _checked(self, token_ids: Sequence[int]) -> list[int]:
        ids = [int(i) for i in token_ids]
        vocab = self.manifest.model["vocab"]
        if not ids:
            raise UserError("the prompt has no tokens: give at least one")
        if bad := [i for i in ids if not 0 <= i < vocab]:
            raise UserError(f"token id {bad[0]} is outside the vocabulary of {vocab}")
        if self.position + len(ids) > self.context_length:
            raise UserError(
                f"{self.position + len(ids)} tokens exceed the context of {self.context_length}: {self._shorter}"
            )
        return ids

    @property
    def _shorter(self) -> str:
        """What to do about too many tokens."""
        longest = self.manifest.model.get("longest", self.context_length)
        more = f", or compile with context= up to {longest}" if longest > self.context_length else ""
        return f"shorten the prompt{more}"

    def _run(self, phase: str, ids: list[int]) -> None:
        self._tokens[: len(ids)] = ids
        self._phases[phase].run(len(ids), self.position)
        self._history += ids

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.open(self.manifest.storage)

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        """The checkpoint's chat template; None for base models."""
        return ChatTemplate.open(self.manifest.storage)

    def encode(self, prompt: str | Sequence[dict[str, str]], raw: bool = False) -> list[int]:
        """Token ids of a prompt. A string goes through the chat template if there is one and `raw` is false;
        a list of `{"role", "content"}` messages always does. Raises UserError."""
        if not prompt:
            raise UserError("the prompt is empty: give some text")
        if isinstance(prompt, str) and (raw or self.chat_template is None):
            return self.tokenizer.encode(prompt, special_tokens=True)
        if self.chat_template is None:
            raise UserError("this model has no chat template: give a plain text prompt")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        return self.tokenizer.encode(self.chat_template.render(messages), special_tokens=False)

    def generate(
        self,
        prompt: str | Sequence[dict[str, str]],
        *,
        raw: bool = False,
        keep_context: bool = False,
        **sampling: Any,
    ) -> Iterator[str]:
        """Yield the reply in pieces of whole UTF-8 characters; `stats` is complete once the iterator is.

        `keep_context`: keep the part of the KV cache that the new prompt begins with (chat) instead of starting afresh.
        `sampling`: fields of `options.Sampling`, which are greedy and end a reply after 256 tokens if not given.
        Raises UserError.
        """
        started = time.perf_counter()
        options = Sampling(**sampling)
        ids = self.encode(prompt, raw)
        if len(ids) >= self.context_length:
            raise UserError(f"the prompt has {len(ids)} tokens, the context is {self.context_length}: {self._shorter}")
        shared = _common_prefix(self._history, ids[:-1]) if keep_context else 0
        if self.buckets and len(ids) - shared > MAX_STEPPED_TOKENS:
            shared = 0
        del self._history[shared:]
        self.stats = Stats(prompt_tokens=len(ids) - shared)
        yield from self._reply(ids[shared:], options, started)

    def _reply(self, ids: list[int], options: Sampling, started: float) -> Iterator[str]:
        stats, stream, choose = self.stats, TextStream(self.tokenizer, options.stop), sampler(options)
        token = choose(self.prefill(ids))
        stats.ttft = time.perf_counter() - started
        first = time.perf_counter()
        while True:
            stats.generated_tokens += 1
            if token in self.eos:
                stats.finish_reason = "stop"
                break
            if piece := stream.push(token):
                yield piece
            if stream.stopped:
                stats.finish_reason = "stop"
                return
            if stats.generated_tokens >= options.max_tokens or self.position >= self.context_length:
                stats.finish_reason = "length"
                break
            token = choose(self.decode(token))
            stats.decode_time = time.perf_counter() - first
        if piece := stream.flush():
            yield piece

    def close(self) -> None:
        """Release the device."""
        self.device.close()


def decode_phase(windows: Sequence[int], position: int) -> str:
    """Of a token at a position: the smallest of the windows that holds it, where there are any."""
    return f"decode@{next(size for size in windows if size > position)}" if windows else "decode"


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    count = 0
    for left, right in zip(a, b, strict=False):
        if left != right:
            break
        count += 1
    return count
