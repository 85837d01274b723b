"""A model that answers requests: its text work in threads, its replies in the engine, and how many there may be."""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import astuple
from typing import Any, Protocol

from llama_npu2.artifact.manifest import Manifest
from llama_npu2.engine.batch.sequence import Counts
from llama_npu2.engine.completion import Stats
from llama_npu2.engine.llama import Llama, Prompt
from llama_npu2.engine.memory import blocks_within, context_within, memory_needed
from llama_npu2.engine.serving import Serving, Stream
from llama_npu2.errors import UserError
from llama_npu2.frozen import frozen
from llama_npu2.options import Sampling
from llama_npu2.serve.failures import RequestError, TooLongError, engine_failed
from llama_npu2.serve.keys import namespace
from llama_npu2.serve.tokens import Pieces
from llama_npu2.text.chat_template import DEFAULT, sources
from llama_npu2.text.pooling import embeds

_TEXT_THREADS = 2
"""How many prompts are rendered and tokenised at a time: it takes far more memory than their text."""


FIRST_TOKEN = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
EACH_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


class Times:
    """A histogram of times: how many are at most as long as each bound, in seconds."""

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
    """Counts of a model since the server started: tokens, replies, and requests that were told to come again."""

    def __init__(self) -> None:
        self.prompt_tokens = self.cached_tokens = self.generated_tokens = self.replies = self.put_off = 0
        self.first, self.each = Times(FIRST_TOKEN), Times(EACH_TOKEN)
        """Times to the first token, and of each one after it, of replies that had these."""

    def add(self, replies: Iterable[Stats]) -> str:
        """Add those of replies; return them in words."""
        prompt = cached = generated = 0
        for stats in replies:
            prompt += stats.prompt_tokens
            cached += stats.reused_tokens
            generated += stats.generated_tokens
            self.replies += 1
            if stats.generated_tokens:
                self.first.add(stats.ttft)
            if stats.generated_tokens > 1:
                self.each.add(stats.tpot)
        self.generated_tokens += generated
        return f"{self.read(prompt, cached)}, {generated} generated"

    def read(self, processed: int, cached: int) -> str:
        """Add tokens of texts; return them in words."""
        self.prompt_tokens += processed
        self.cached_tokens += cached
        return f"tokens: {processed} processed, {cached} cached"


class Keeper(Protocol):
    """What loads models, and decides how long they stay loaded."""

    async def load(self, model: Model) -> None:
        """Load a model. Raises RequestError."""

    def start_idle_timer(self, model: Model) -> None:
        """Unload a model that no request holds any more, once it was kept for long enough."""


@frozen
class Loaded:
    """What a model has while it is loaded."""

    llm: Llama
    engine: Serving
    pieces: Pieces
    longest: int
    """The most characters of a text that may fit into the context."""

    @classmethod
    def of(cls, llm: Llama) -> Loaded:
        """Open the engine, which takes time. Raises UserError."""
        pieces = Pieces(llm.tokenizer)
        return cls(llm, llm.engine(), pieces, llm.context_length * pieces.longest)


class Model:
    """A model that requests can name, whether it is loaded or not. Belongs to one event loop."""

    def __init__(self, name: str, manifest: Manifest, keeper: Keeper, most_replies: int, kv_memory: int = 0) -> None:
        """Describe a model that is not loaded.

        Args:
            name: what requests call it.
            manifest: of its artifacts.
            keeper: what loads it.
            most_replies: may be under way at a time, others are told to come again.
            kv_memory: as for `llama.load`.

        Raises:
            UserError: if it cannot be used.
        """
        self.name, self.manifest, self.most_replies = name, manifest, most_replies
        self._keeper = keeper
        blocks = blocks_within(kv_memory, manifest) if kv_memory else 0
        self.context_length = context_within(manifest, blocks)
        self.memory = memory_needed(manifest, blocks)
        """Bytes that it takes once it is loaded and all of it was used."""
        self.vocabulary: int = manifest.model["vocab"]
        self.templates = sources(manifest.storage)
        """The texts of its chat templates by name."""
        self.created = int(time.time())
        self.fingerprint = f"fp_{hashlib.sha256(manifest.content).hexdigest()[:12]}"
        """Says which weights and programs answer: the same one, with the same seed, gives the same replies."""
        self.embeds = embeds(manifest.storage)
        """Whether the model makes embeddings, and writes no text."""
        self.counters = Counters()
        self.under_way = self.holds = self.waiting = 0
        """Replies that are under way, requests that hold the model, and of them those that wait until it is loaded."""
        self.loaded: Loaded | None = None
        self.failed = False
        """Whether it could not be loaded when that was last tried."""
        self.loads = 0
        """How many times it was loaded."""
        self.used = 0.0
        """When a request held it last, by the clock of the event loop."""
        self.keep_alive: float | None = None
        """Seconds that it stays loaded without requests, where the last one said so."""
        self._counts = Counts()
        self._threads = ThreadPoolExecutor(_TEXT_THREADS, "llama-npu2 text")

    @property
    def usable(self) -> bool:
        """Whether it is loaded, and its engine has not failed."""
        return self.loaded is not None and not self.loaded.engine.closed

    @property
    def state(self) -> str:
        """`loaded`, `loading` or `unloaded`."""
        return "loaded" if self.usable else "loading" if self.waiting else "unloaded"

    @property
    def _parts(self) -> Loaded:
        if self.loaded is None:
            raise RuntimeError(f"{self.name} is not loaded: hold it first")
        return self.loaded

    @property
    def llm(self) -> Llama:
        """The model, while it is loaded."""
        return self._parts.llm

    @property
    def engine(self) -> Serving:
        """Its engine, while it is loaded."""
        return self._parts.engine

    @property
    def pieces(self) -> Pieces:
        """The texts of its tokens, while it is loaded."""
        return self._parts.pieces

    @property
    def chats(self) -> bool:
        """Whether the model takes part in a conversation: it has a chat template, and writes."""
        return not self.embeds and bool(self.templates)

    @property
    def template_names(self) -> set[str]:
        """The names in the tags of its chat template, without those of attributes and in texts."""
        tags = " ".join(re.findall(r"\{[{%](.*?)[%}]\}", self.templates.get(DEFAULT, ""), re.DOTALL))
        return set(re.findall(r"(?<![.\w])[a-z_]+\b", re.sub(r"'[^']*'|\"[^\"]*\"", "", tags)))

    @property
    def takes_tools(self) -> bool:
        """Whether its chat templates take tools."""
        return self.chats and ("tools" in self.template_names or len(self.templates) > 1)

    @property
    def counts(self) -> Counts:
        """What its engines did so far."""
        now = self.loaded.engine.counts if self.loaded else Counts()
        return Counts(*(sum(both) for both in zip(astuple(self._counts), astuple(now), strict=True)))

    def given_up(self) -> Loaded | None:
        """Return what is to be closed: the model is no longer loaded, and its counts are kept."""
        self._counts = self.counts
        parts, self.loaded = self.loaded, None
        return parts

    async def hold(self, keep_alive: float | None = None) -> None:
        """Have the model loaded until `release`.

        Args:
            keep_alive: seconds that it is to stay loaded after that; None: as the server says.

        Raises:
            RequestError: if it cannot be loaded, or too many requests wait for it.
        """
        if not self.usable and self.waiting >= self.most_replies:
            raise self._put_off(f"{self.waiting} requests wait until {self.name} is loaded")
        self.holds += 1
        self.keep_alive = keep_alive
        try:
            if not self.usable:
                self.waiting += 1
                try:
                    await self._keeper.load(self)
                finally:
                    self.waiting -= 1
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Take a hold back."""
        self.holds -= 1
        if not self.holds:
            self._keeper.start_idle_timer(self)

    def _put_off(self, why: str) -> RequestError:
        self.counters.put_off += 1
        return RequestError(429, f"{why}: come again soon", code="rate_limit_exceeded", headers={"retry-after": "1"})

    @contextmanager
    def claim(self, replies: int) -> Iterator[None]:
        """Count replies as under way. Raises RequestError if there would be too many."""
        if replies > self.most_replies:
            raise RequestError(
                400, f"{replies} replies are asked for, at most {self.most_replies} may be under way: ask for fewer"
            )
        if self.under_way + replies > self.most_replies:
            raise self._put_off(f"{self.under_way} replies are under way")
        self.under_way += replies
        try:
            yield
        finally:
            self.under_way -= replies

    async def encode(self, prompt: Prompt, field: str, **how: Any) -> list[int]:
        """Return the tokens of a prompt, with room for a reply. Raises RequestError, which names `field`.

        Args:
            prompt: as for `Llama.encode`.
            field: where the request has it.
            **how: `raw` and `template` of it.
        """
        return await self.tokens_of(lambda: self.llm.encode(prompt, **how), [prompt, *how.values()], field, room=1)

    async def tokens_of(self, encode: Callable[[], list[int]], text: Any, field: str, room: int = 0) -> list[int]:
        """Return the tokens of a text. Raises RequestError, which names `field`.

        Args:
            encode: returns them.
            text: what has the text, whose characters are counted.
            field: where the request has it.
            room: how many tokens of the context must be left.
        """
        try:
            ids: list[int] | None = await self.in_thread(lambda: self._encoded(encode, text))
        except UserError as error:
            raise RequestError.of(error, field) from None
        if ids is None:
            raise self._too_long(None, field)
        if len(ids) + room > self.context_length:
            raise self._too_long(len(ids), field)
        if not ids:
            raise RequestError(400, "the prompt has no tokens: give at least one", field)
        if bad := next((token for token in ids if not 0 <= token < self.vocabulary), None):
            raise RequestError(400, f"token {bad} is not in the vocabulary", field)
        return ids

    def _encoded(self, encode: Callable[[], list[int]], text: Any) -> list[int] | None:
        """Return the tokens of a text; None if it has more than the context can, without tokenising it."""
        return None if _characters(text) > self._parts.longest else encode()

    async def prepare(self, sampling: Sampling, field: str) -> None:
        """Compile what replies have to follow, if anything. Raises RequestError, which names `field`."""
        if sampling.schema or sampling.grammar:
            try:
                await self.in_thread(lambda: self.llm.constraint(sampling))
            except UserError as error:
                raise RequestError(400, str(error), field) from None

    def _too_long(self, tokens: int | None, field: str) -> TooLongError:
        return TooLongError(tokens, self.context_length, self.llm.shorter, field)

    async def in_thread(self, function: Callable[[], Any]) -> Any:
        """Return what a function returns that takes time. The model is loaded as long. Raises RequestError."""
        await self.hold(self.keep_alive)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, function)
        finally:
            self.release()

    def submit(self, ids: Sequence[int], sampling: Sampling, number: int) -> Stream:
        """Return the reply to a prompt. Raises RequestError."""
        try:
            return self.engine.submit(ids, namespace=namespace.get(), number=number, **vars(sampling))
        except UserError as error:
            if self.engine.closed:
                raise engine_failed() from None
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
