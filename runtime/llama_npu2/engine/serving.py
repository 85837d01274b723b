"""Replies to many at once: an async API over a thread that runs the steps."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from llama_npu2.engine.batch import sequence
from llama_npu2.engine.batch.saved import load, save
from llama_npu2.engine.batch.scheduler import Scheduler
from llama_npu2.engine.completion import Completion
from llama_npu2.engine.generation import Generation
from llama_npu2.errors import UserError
from llama_npu2.text.replies import Kind, Piece

_CLOSED = "the engine is closed: open another one with llm.engine()"


Result = TypeVar("Result")


@dataclass
class Read(Generic[Result]):
    """What a text was read for."""

    found: list[Result] = field(default_factory=list)
    processed: int = 0
    """Tokens that were processed: blocks held the others."""


class Receiver(Protocol):
    """A stream, or a text that is read: the thread of the steps sends it what it brings."""

    loop: asyncio.AbstractEventLoop
    """The event loop that it belongs to."""
    sequence: sequence.Sequence | None
    """Its sequence, once the scheduler has added it."""

    def receive(self, sent: Any) -> None:
        """Take what was sent. Called in the event loop."""


class Stream(AsyncIterator[str]):
    """A reply as it comes. Iterating yields the pieces of the answer, of whole UTF-8 characters.

    What has come is in `completion`. Belongs to the event loop in which it was made.
    """

    replies, hidden = True, False

    def __init__(self, serving: Serving, generation: Generation) -> None:
        self.completion: Completion = generation.completion
        self.ids = generation.ids
        self.loop = asyncio.get_running_loop()
        self.sequence: sequence.Sequence | None = None
        self._serving, self._generation = serving, generation
        self._sent: asyncio.Queue[Piece | Exception | None] = asyncio.Queue()
        self._ended = False

    async def __anext__(self) -> str:
        async for piece in self.pieces():
            if piece.kind is Kind.TEXT:
                return piece.text
        raise StopAsyncIteration

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield the pieces of all of it, also those that are not the answer. Raises UserError."""
        while not self._ended:
            sent = await self._sent.get()
            if isinstance(sent, Piece):
                self.completion.add(sent)
                yield sent
                continue
            self._ended = True
            self.completion.end()
            if sent is not None:
                raise sent

    async def whole(self) -> Completion:
        """Return the reply once all of it has come. Raises UserError."""
        async for _ in self.pieces():
            pass
        return self.completion

    def cancel(self) -> None:
        """Ask for no more. The stream ends with what has come."""
        self._serving.cancel(self)
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody waits
            self.loop.call_soon_threadsafe(self.receive, None)

    @property
    def finished(self) -> bool:
        """Whether the last token was chosen."""
        return self._generation.finished

    @property
    def wanted_from(self) -> int:
        """The last token so far: what follows it is chosen next."""
        return len(self.ids) - 1

    def start(self, processed: int) -> None:
        """Note how many tokens of the prompt were processed."""
        stats = self.completion.stats
        stats.prompt_tokens, stats.reused_tokens = processed, max(len(self.ids) - processed, 0)

    def take(self, logits: np.ndarray) -> None:
        """Choose the next token and send its pieces, from the thread of the steps."""
        pieces = self._generation.take(logits)
        if self._generation.finished:
            pieces += self._generation.flush()
        for piece in pieces:
            self._serving.send(self, piece)

    def end(self, error: Exception | None) -> None:
        """Send the end."""
        self._serving.send(self, error)

    def receive(self, sent: Piece | Exception | None) -> None:
        """Queue a piece, or the end, for whoever iterates. Called in the event loop."""
        self._sent.put_nowait(sent)


class _Reading(Generic[Result]):
    """A text that is processed and not continued: something is computed from what follows its tokens."""

    replies = False

    def __init__(
        self, serving: Serving, ids: list[int], compute: Callable[[int, np.ndarray], Result], first: int, hidden: bool
    ) -> None:
        self.ids, self.hidden = ids, hidden
        self.read = Read[Result]()
        self.loop = asyncio.get_running_loop()
        self.sequence: sequence.Sequence | None = None
        self.ended: asyncio.Future[None] = self.loop.create_future()
        self._serving, self._compute, self._first = serving, compute, first

    @property
    def wanted_from(self) -> int:
        return self._first + len(self.read.found)

    @property
    def finished(self) -> bool:
        return self.wanted_from == len(self.ids)

    def take(self, row: np.ndarray) -> None:
        self.read.found.append(self._compute(self.wanted_from, row))

    def start(self, processed: int) -> None:
        self.read.processed = processed

    def end(self, error: Exception | None) -> None:
        self._serving.send(self, error)

    def receive(self, sent: Exception | None) -> None:
        if not self.ended.done():
            if sent is None:
                self.ended.set_result(None)
            else:
                self.ended.set_exception(sent)


class Serving:
    """A thread that runs the steps of a scheduler, and takes sequences from any event loop."""

    def __init__(
        self,
        scheduler: Scheduler,
        generation: Callable[..., Generation],
        checked: Callable[[Sequence[int]], list[int]],
        key: Mapping[str, Any] | None,
        closed: Callable[[], Any],
    ) -> None:
        """Start the thread.

        Args:
            scheduler: whose steps it runs.
            generation: makes a reply to a prompt.
            checked: returns the tokens of a text that is only read, or raises UserError.
            key: of contexts on disk; None where the cache does not know texts by their tokens alone.
            closed: called once the thread has ended.
        """
        self._scheduler, self._generation, self._checked = scheduler, generation, checked
        self._key, self._closed = key, closed
        self._asked: list[Callable[[], Any]] = []
        self._unsent: defaultdict[asyncio.AbstractEventLoop, list[tuple[Receiver, Any]]] = defaultdict(list)
        """What is to be sent to the receivers of each event loop."""
        self._changed, self._closing = threading.Condition(), False
        self._thread = threading.Thread(target=self._run, name="llama-npu2 steps", daemon=True)
        self._thread.start()

    @property
    def counts(self) -> sequence.Counts:
        """How often sequences gave way, shared blocks, and more."""
        return self._scheduler.cache.counts

    @property
    def closed(self) -> bool:
        """Whether nothing can be submitted any more: it was closed, or its device failed."""
        return self._closing

    def submit(self, prompt: Any, *, namespace: str = "", **options: Any) -> Stream:
        """Return the reply to a prompt, which comes as it is iterated. Must be called in an event loop.

        Args:
            prompt: as for `Llama.generate`.
            namespace: the KV cache of a text is used for others of the same namespace alone, so that how long a reply
                takes says nothing of those of other namespaces.
            **options: `raw`, `number`, `template` and fields of `options.Sampling`, as for `Llama.generate`; besides,
                `logprobs` may be asked for.

        Raises:
            UserError: for a prompt or an option that cannot be used, or if the engine is closed.
        """
        stream = Stream(self, self._generation(prompt, **options))
        self._add(stream, namespace)
        return stream

    def _add(self, growing: Stream | _Reading[Any], namespace: str = "") -> None:
        def add() -> None:
            growing.sequence = self._scheduler.add(growing, namespace)

        if not self._ask(add):
            raise UserError(_CLOSED)

    async def read(
        self,
        ids: Sequence[int],
        compute: Callable[[int, np.ndarray], Result],
        first: int = -1,
        hidden: bool = False,
        namespace: str = "",
    ) -> Read[Result]:
        """Return what a function computes of what follows the tokens of a text, beside replies and other texts.

        Who cancels this ends it before the next step.

        Args:
            ids: the text's tokens.
            compute: gets, in the thread of the steps, the number of each token from `first` on, and the float32 logits
                `[vocab]` after it, which are valid during the call.
            first: the number of a token; -1: the last one.
            hidden: whether the function gets the last norm's output `[hidden size]` instead. Only of the last token.
            namespace: as for `submit`.

        Raises:
            UserError: if there are no tokens or too many, if one is outside the vocabulary, if the engine is closed, or
                for other rows than the last one's logits where sequences take turns.
        """
        checked = self._checked(ids)
        first = first if first >= 0 else len(checked) - 1
        if not (first == len(checked) - 1 if hidden else first < len(checked)):
            raise UserError(f"first={first}: must be a token of {len(checked)}, the last one for its hidden state")
        if self._key is None and (hidden or first < len(checked) - 1):
            raise UserError("this device gives the logits after a text's last token alone: choose target=cpu")
        reading = _Reading(self, checked, compute, first, hidden)
        self._add(reading, namespace)
        try:
            await reading.ended
        except asyncio.CancelledError:
            self.cancel(reading)
            raise
        return reading.read

    def cancel(self, receiver: Receiver) -> None:
        """Forget the sequence of a stream, or of a text that is read, before the next step."""

        def cancel() -> None:
            if receiver.sequence:
                self._scheduler.cancel(receiver.sequence)

        self._ask(cancel)

    def send(self, receiver: Receiver, what: Any) -> None:
        """Send something to a receiver together with all else that a step brings. Called in the thread of the steps."""
        self._unsent[receiver.loop].append((receiver, what))

    def _deliver(self) -> None:
        """Wake each event loop once for all that was sent to its receivers.

        A loop that wakes takes Python's lock. The thread of the steps needs that to choose tokens and to plan, so it
        wakes loops when the device is about to work.
        """
        unsent, self._unsent = self._unsent, defaultdict(list)
        for loop, parts in unsent.items():
            try:
                loop.call_soon_threadsafe(_receive, parts)
            except RuntimeError:  # the event loop is closed: nobody waits
                for receiver, _ in parts:
                    self.cancel(receiver)

    def save_context(self, path: str | Path, ids: Sequence[int], namespace: str = "") -> int:
        """Write the longest beginning of a text that the cache remembers to a file; return its number of tokens.

        Raises UserError if it is empty, the file cannot be written, or sequences take turns.
        """
        cache, key = self._scheduler.cache, self._kept()
        return int(self._between_steps(lambda: save(cache, Path(path), key, ids, namespace)))

    def load_context(self, path: str | Path, namespace: str = "") -> int:
        """Remember what `save_context` wrote, until others need its blocks; return its number of tokens.

        Raises UserError if the file cannot be used, is of another namespace, has no room beside the sequences that run,
        or sequences take turns.
        """
        cache, key = self._scheduler.cache, self._kept()
        return int(self._between_steps(lambda: load(cache, Path(path), key, namespace)))

    def pin(self, ids: Sequence[int], keep: bool = True, namespace: str = "") -> int:
        """Keep the beginning of a text that the cache remembers, or no longer; return its number of tokens.

        Raises UserError if sequences take turns.
        """
        self._kept()
        tree = self._scheduler.cache.tree
        return int(self._between_steps(lambda: tree.pin(ids, 1 if keep else -1, namespace)))

    def _kept(self) -> Mapping[str, Any]:
        """Return the key of contexts on disk. Raises UserError where a text's tokens do not say what is cached."""
        if self._key is None:
            raise UserError("sequences take turns on this device, which keeps no contexts of texts: choose target=cpu")
        return self._key

    def _between_steps(self, function: Callable[[], Any]) -> Any:
        """Return what a function returns that the thread of the steps calls. Raises UserError if this is closed."""
        done, results = threading.Event(), list[Any]()

        def answer() -> None:
            try:
                results.append(function())
            except Exception as error:
                results.append(error)
            done.set()

        if not self._ask(answer):
            raise UserError(_CLOSED)
        done.wait()
        if isinstance(results[0], Exception):
            raise results[0]
        return results[0]

    def __enter__(self) -> Serving:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End all streams and the thread, after the step that runs."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _ask(self, function: Callable[[], Any]) -> bool:
        with self._changed:
            if not self._closing:
                self._asked.append(function)
                self._changed.notify()
            return not self._closing

    def _run(self) -> None:
        error: Exception = UserError(_CLOSED)
        try:
            while self._wait():
                self._scheduler.step(self._deliver)
        except Exception as failure:  # of the device: nothing that is cached can be trusted
            error = failure
        with self._changed:
            self._closing, asked, self._asked = True, self._asked, []
        for function in asked:
            function()
        self._scheduler.fail(error)
        self._deliver()
        self._closed()

    def _wait(self) -> bool:
        """Do what was asked for, once there is a sequence or something to do. Return whether to go on."""
        if not self._scheduler.busy:  # no step follows that would
            self._deliver()
        with self._changed:
            while not (self._asked or self._closing or self._scheduler.busy):
                self._changed.wait()
            asked, self._asked = self._asked, []
        for function in asked:
            function()
        return not self._closing


def _receive(parts: Iterable[tuple[Receiver, Any]]) -> None:
    for receiver, sent in parts:
        receiver.receive(sent)
