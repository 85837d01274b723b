"""The replies to one request: several may come at once, and all end with it."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack, aclosing

from llama_npu2.engine.completion import Logprob
from llama_npu2.engine.serving import Stream
from llama_npu2.errors import UserError
from llama_npu2.frozen import frozen
from llama_npu2.options import OptionError, Sampling
from llama_npu2.serve.failures import RequestError, engine_failed, server_failed
from llama_npu2.serve.model import Model
from llama_npu2.text.replies import Piece


@frozen
class Usage:
    """How many tokens a request took."""

    prompt: int
    cached: int
    """Tokens of the prompt that the KV cache held."""
    generated: int
    """Tokens of replies, their end tokens included."""
    reasoning: int = 0
    """Tokens of replies in which the model thought."""


class Replies:
    """Streams of a model. They count as under way from `__init__` to `close`."""

    def __init__(self, model: Model, count: int) -> None:
        """Args: `count` of replies. Raises RequestError if there would be too many."""
        self.model = model
        self.streams: list[Stream] = []
        self._noted = [0] * count
        self._open = ExitStack()
        self._open.enter_context(model.claim(count))
        self.noted: list[str] = []
        """What the log says of them once they are closed: counts of tokens, no text."""
        self.headers: dict[str, str] = {}
        """Headers that the response has besides."""

    def start(self, prompts: Sequence[Sequence[int]], sampling: Sampling, n: int) -> None:
        """Ask for `n` replies to each prompt. Raises RequestError."""
        for prompt in prompts:
            for number in range(n):
                self.streams.append(self.model.submit(prompt, sampling, number))

    def close(self) -> None:
        """Cancel what has not ended. Does nothing the second time."""
        for stream in self.streams:
            if not stream.finished:
                stream.cancel()
        if self.streams:
            self.noted.append(self.model.counters.add(stream.completion.stats for stream in self.streams))
        self.streams = []
        self._open.close()

    async def pieces(self) -> AsyncGenerator[tuple[int, Piece | None]]:
        """Yield pieces of replies, each with its reply's number, and None at its end. Raises RequestError."""
        try:
            if len(self.streams) == 1:
                async for piece in self.streams[0].pieces():
                    yield 0, piece
                yield 0, None
                return
            async with aclosing(self._together()) as together:
                async for found in together:
                    yield found
        except OptionError as error:
            raise RequestError.of(error) from None
        except UserError as error:
            raise (engine_failed() if self.model.engine.closed else RequestError(500, str(error))) from None
        except Exception:
            traceback.print_exc()
            raise (engine_failed() if self.model.engine.closed else server_failed()) from None

    async def _together(self) -> AsyncGenerator[tuple[int, Piece | None]]:
        came: asyncio.Queue[tuple[int, Piece | Exception | None]] = asyncio.Queue()

        async def forward(number: int, stream: Stream) -> None:
            try:
                async for piece in stream.pieces():
                    came.put_nowait((number, piece))
                came.put_nowait((number, None))
            except Exception as error:
                came.put_nowait((number, error))

        tasks = [asyncio.ensure_future(forward(*each)) for each in enumerate(self.streams)]
        try:
            left = len(tasks)
            while left:
                number, found = await came.get()
                if isinstance(found, Exception):
                    raise found
                left -= found is None
                yield number, found
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def new_logprobs(self, number: int, with_end: bool = False) -> list[Logprob] | None:
        """Return the log-probabilities that a reply got since this was asked; None if none were asked for.

        Args:
            number: of the reply.
            with_end: whether that of the end token is among them.
        """
        completion = self.streams[number].completion
        if completion.logprobs is None:
            return None
        first, self._noted[number] = self._noted[number], len(completion.logprobs)
        ends = set() if with_end else self.model.llm.eos
        return [each for each in completion.logprobs[first : self._noted[number]] if each.token not in ends]

    def usage(self, prompts: Sequence[Sequence[int]]) -> Usage:
        """Return counts of tokens; each prompt is counted once."""
        n = len(self.streams) // len(prompts)
        return Usage(
            sum(map(len, prompts)),
            sum(stream.completion.stats.reused_tokens for stream in self.streams[::n]),
            sum(stream.completion.stats.generated_tokens for stream in self.streams),
            sum(stream.completion.stats.reasoning_tokens for stream in self.streams),
        )
