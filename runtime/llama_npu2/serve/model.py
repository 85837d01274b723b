"""A model that answers requests: its text work in threads, its replies in the engine, and how many there may be."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

from llama_npu2.engine.completion import Stats
from llama_npu2.engine.llama import Llama, Prompt
from llama_npu2.engine.serving import Serving, Stream
from llama_npu2.errors import UserError
from llama_npu2.options import Sampling
from llama_npu2.serve.failures import RequestError, TooLongError
from llama_npu2.serve.tokens import Pieces

_TEXT_THREADS = 2
"""How many prompts are rendered and tokenised at a time: it takes far more memory than their text."""


FIRST_TOKEN = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
EACH_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


class Times:
    """How many times are at most as long as each of some bounds, in seconds."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.within = dict.fromkeys(bounds, 0)
        self.count, self.sum = 0, 0.0

    def add(self, seconds: float) -> None:
        """Add a time."""
        self.count += 1
        self.sum += seconds
        for bound in self.within:
            self.within[bound] += seconds <= bound


class Counters:
    """How many tokens there were since the server started, and how many requests were told to come again."""

    def __init__(self) -> None:
        self.prompt_tokens = self.cached_tokens = self.generated_tokens = self.replies = self.put_off = 0
        self.first, self.each = Times(FIRST_TOKEN), Times(EACH_TOKEN)
        """Times to the first token, and of each one after it, of replies that had these."""

    def add(self, replies: Iterable[Stats]) -> str:
        """Add those of replies; return them in words."""
        before = self.prompt_tokens, self.cached_tokens, self.generated_tokens
        for stats in replies:
            self.prompt_tokens += stats.prompt_tokens
            self.cached_tokens += stats.reused_tokens
            self.generated_tokens += stats.generated_tokens
            self.replies += 1
            if stats.generated_tokens:
                self.first.add(stats.ttft)
            if stats.generated_tokens > 1:
                self.each.add(stats.tpot)
        prompt, cached, generated = (
            now - then
            for now, then in zip((self.prompt_tokens, self.cached_tokens, self.generated_tokens), before, strict=True)
        )
        return f"tokens: {prompt} processed, {cached} cached, {generated} generated"


class Model:
    """A loaded model and its engine. Belongs to one event loop."""

    def __init__(self, llm: Llama, engine: Serving, most_replies: int) -> None:
        """Args: `most_replies` may be under way at a time, others are told to come again."""
        self.llm, self.engine, self.most_replies = llm, engine, most_replies
        self.name: str = llm.manifest.model["name"]
        self.vocabulary: int = llm.manifest.model["vocab"]
        self.created = int(time.time())
        self.fingerprint = f"fp_{hashlib.sha256(llm.manifest.content).hexdigest()[:12]}"
        """Says which weights and programs answer: the same one, with the same seed, gives the same replies."""
        self.pieces = Pieces(llm.tokenizer)
        self.under_way = 0
        self.counters = Counters()
        self._threads = ThreadPoolExecutor(_TEXT_THREADS, "llama-npu2 text")
        self._longest = llm.context_length * self.pieces.longest

    @property
    def chats(self) -> bool:
        """Whether the model has a chat template."""
        return self.llm.chat_template is not None

    @contextmanager
    def claim(self, replies: int) -> Iterator[None]:
        """Count replies as under way. Raises RequestError if there would be too many."""
        if replies > self.most_replies:
            raise RequestError(
                400, f"{replies} replies are asked for, at most {self.most_replies} may be under way: ask for fewer"
            )
        if self.under_way + replies > self.most_replies:
            self.counters.put_off += 1
            raise RequestError(
                429,
                f"{self.under_way} replies are under way: come again soon",
                code="rate_limit_exceeded",
                headers={"retry-after": "1"},
            )
        self.under_way += replies
        try:
            yield
        finally:
            self.under_way -= replies

    async def encode(self, prompt: Prompt, field: str, **how: Any) -> list[int]:
        """Return the tokens of a prompt, with room for a reply. Raises RequestError, which names `field`.

        Args:
            prompt: as for `Llama.encode`.
            **how: `raw` and `template` of it.
        """
        if _characters(prompt) > self._longest:
            raise self._too_long(None, field)
        try:
            ids = await self.in_thread(partial(self.llm.encode, prompt, **how))
        except UserError as error:
            raise RequestError.of(error, field) from None
        if len(ids) >= self.llm.context_length:
            raise self._too_long(len(ids), field)
        if not ids:
            raise RequestError(400, "the prompt has no tokens: give at least one", field)
        if bad := next((token for token in ids if not 0 <= token < self.vocabulary), None):
            raise RequestError(400, f"token {bad} is not in the vocabulary", field)
        return ids

    async def prepare(self, sampling: Sampling, field: str) -> None:
        """Compile what replies have to follow, if anything. Raises RequestError, which names `field`."""
        if sampling.schema or sampling.grammar:
            try:
                await self.in_thread(partial(self.llm.constraint, sampling))
            except UserError as error:
                raise RequestError(400, str(error), field) from None

    def _too_long(self, tokens: int | None, field: str) -> TooLongError:
        return TooLongError(tokens, self.llm.context_length, self.llm.shorter, field)

    async def in_thread(self, function: Callable[[], Any]) -> Any:
        """Return what a function returns that takes time."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)

    def submit(self, ids: Sequence[int], sampling: Sampling, number: int) -> Stream:
        """Return the reply to a prompt. Raises RequestError."""
        try:
            return self.engine.submit(ids, number=number, **vars(sampling))
        except UserError as error:
            if self.engine.closed:
                raise RequestError(503, str(error)) from None
            raise RequestError.of(error) from None

    def close(self) -> None:
        """End the threads, once they have done what they do."""
        self._threads.shutdown(cancel_futures=True)


def _characters(value: Any) -> int:
    """Return how many characters the texts of a prompt have."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_characters, value.values()))
    return sum(map(_characters, value)) if isinstance(value, list) else 0
