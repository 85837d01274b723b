"""Texts that a request has read: they are processed beside replies, and not continued."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import Any, TypeVar

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from llama_npu2.errors import UserError
from llama_npu2.serve.answers import Demand, Respond, ready, takes
from llama_npu2.serve.events import unless_gone
from llama_npu2.serve.failures import RequestError, engine_failed
from llama_npu2.serve.fields import Fields
from llama_npu2.serve.keys import namespace
from llama_npu2.serve.model import Model

Item = TypeVar("Item")
Result = TypeVar("Result")

_ABREAST = 32
"""Texts of a request that are processed at a time: as many rows share a step, and others need not wait for all."""


class Readings:
    """The texts of one request, which count as under way from `__init__` to `close`."""

    def __init__(self, model: Model, replies: int = 1) -> None:
        """Initialise them.

        Args:
            model: reads them.
            replies: how many replies they count for; 0 for a request whose replies count already.

        Raises:
            RequestError: if too many replies are under way.
        """
        self.model = model
        self.tokens = 0
        """Number of tokens of all texts so far."""
        self.processed = 0
        """Number of these tokens that the cache did not hold."""
        self._open = ExitStack()
        self._open.enter_context(model.claim(replies))
        self.noted: list[str] = []
        """What the log says of them once they are closed."""

    def close(self) -> None:
        """Count their tokens."""
        self.noted.append(self.model.counters.read(self.processed, self.tokens - self.processed))
        self._open.close()

    async def read(
        self, ids: Sequence[int], field: str, compute: Callable[[int, np.ndarray], Result], **how: Any
    ) -> list[Result]:
        """Return what a function computes of a text, as for `Serving.read`. Raises RequestError."""
        engine = self.model.engine
        try:
            read = await engine.read(ids, compute, namespace=namespace.get(), **how)
        except UserError as error:
            raise (engine_failed() if engine.closed else RequestError.of(error, field)) from None
        self.tokens += len(ids)
        self.processed += read.processed
        return read.found

    async def each(self, items: Sequence[Item], read: Callable[[int, Item], Awaitable[Result]]) -> list[Result]:
        """Return what `read` returns for the number of each item and the item, some at a time. Raises RequestError."""
        found: dict[int, Result] = {}
        left = iter([*enumerate(items)])

        async def work() -> None:
            for number, item in left:
                found[number] = await read(number, item)

        tasks = [asyncio.ensure_future(work()) for _ in items[:_ABREAST]]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return [found[number] for number in range(len(items))]


def reading(
    fields: Callable[[int], Fields],
    answer: Callable[[Readings, dict[str, Any]], Coroutine[Any, Any, dict[str, Any]]],
    summary: str,
    demand: Demand,
) -> Respond:
    """Return what answers the requests to a path, whose texts are read.

    Args:
        fields: as for `answers.takes`.
        answer: returns the answer to the fields of a request. Raises RequestError.
        summary: what a request does, in a sentence.
        demand: as for `answers.takes`.
    """

    @takes(fields, demand)
    async def respond(request: Request, model: Model, asked: dict[str, Any]) -> Response:
        await ready(request, model)
        return await read_for(request, model, lambda readings: answer(readings, asked))

    respond.__doc__ = summary
    return respond


async def read_for(
    request: Request, model: Model, answer: Callable[[Readings], Coroutine[Any, Any, dict[str, Any]]]
) -> Response:
    """Return the response to a request whose model is ready. Raises RequestError, GoneError.

    Args:
        request: what is answered.
        model: which reads.
        answer: returns the answer. Raises RequestError.
    """
    with closing(Readings(model)) as readings:
        request.scope["noted"] = readings.noted
        found = await unless_gone(request.receive, answer(readings))
        # Thousands of embeddings as JSON take seconds to write.
        response: Response = await model.in_thread(lambda: JSONResponse(found))
        return response


async def embedded(
    readings: Readings,
    texts: Sequence[str | list[int]],
    field: Callable[[int], str],
    dimensions: int = 0,
    instruction: str = "",
) -> list[np.ndarray]:
    """Return the embeddings of texts, or of tokens as they are. Raises RequestError.

    Args:
        readings: of the request.
        texts: what is embedded.
        field: returns where the request has the text of a number.
        dimensions: as for `Llama.embed`.
        instruction: as for `Llama.embed`.
    """
    model = readings.model
    try:
        embedding = model.llm.embedding(dimensions, instruction)
    except UserError as error:
        raise RequestError.of(error, "model") from None

    async def embed(number: int, text: str | list[int]) -> np.ndarray:
        taken = embedding.text(text) if isinstance(text, str) else text
        ids = await model.tokens_of(partial(model.llm.encode, taken, raw=True), taken, field(number))
        (found,) = await readings.read(ids, field(number), lambda _, hidden: embedding.of(hidden), hidden=True)
        return found

    return await readings.each(texts, embed)
