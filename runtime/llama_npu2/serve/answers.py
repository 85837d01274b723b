"""How a request for replies is answered: whole, or as events while they come."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from functools import wraps
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from llama_npu2.serve.body import checked, read_json
from llama_npu2.serve.events import COMMENT, EVENTS, EventStream, unless_gone
from llama_npu2.serve.failures import RequestError
from llama_npu2.serve.fields import Fields, closed
from llama_npu2.serve.model import Model
from llama_npu2.serve.models import Models
from llama_npu2.serve.replies import Replies


class Answer(Protocol):
    """One request and its replies."""

    replies: Replies
    stream: bool
    """Whether the client wants events."""

    async def start(self) -> None:
        """Ask for the replies. Raises RequestError."""

    async def whole(self) -> dict[str, Any]:
        """Return the answer once all replies have come. Raises RequestError."""

    def events(self) -> AsyncGenerator[bytes]:
        """Yield the answer as events, which say errors, too."""


async def answered(request: Request, answer: Answer, heartbeat: bytes, media_type: str = EVENTS) -> Response:
    """Return the response. What goes wrong before the first event has a status. Raises RequestError, GoneError.

    Args:
        request: what is answered.
        answer: of the request.
        heartbeat: as for `answering`.
        media_type: of a stream.
    """
    request.scope["noted"] = answer.replies.noted
    try:
        await unless_gone(request.receive, answer.start())
        if not answer.stream:
            whole = await unless_gone(request.receive, answer.whole())
            found = JSONResponse(whole, headers=answer.replies.headers)
            answer.replies.close()
            return found
    except BaseException:
        answer.replies.close()
        raise
    return EventStream(answer.events(), answer.replies.close, heartbeat, media_type, answer.replies.headers)


Respond = Callable[[Request], Awaitable[Response]]
RespondTo = Callable[[Request, Model, dict[str, Any]], Awaitable[Response]]
"""Responds to a request. It gets the model, which may not be loaded (see `ready`), and the fields that are not null."""


Demand = Callable[[Model], None]
"""Raises RequestError for a model that cannot answer the requests to a path."""


def any_model(model: Model) -> None:
    """Accept every model."""


def must_write(model: Model) -> None:
    """Refuse models that write no text. Raises RequestError."""
    if model.embeds:
        raise RequestError(400, f"{model.name} makes embeddings and writes no text: use /v1/embeddings", "model")


def must_chat(model: Model) -> None:
    """Refuse models that take part in no conversation. Raises RequestError."""
    must_write(model)
    if not model.chats:
        raise RequestError(400, f"{model.name} has no chat template: use /v1/completions", "model")


def must_embed(model: Model) -> None:
    """Refuse models that make no embeddings. Raises RequestError."""
    if not model.embeds:
        raise RequestError(400, f"{model.name} is no embedding model: serve one to ask for embeddings", "model")


def meets(model: Model, demand: Demand) -> bool:
    """Return whether a model can answer what `demand` lets pass."""
    try:
        demand(model)
    except RequestError:
        return False
    return True


def takes(
    fields: Callable[[int], Fields],
    demand: Demand = any_model,
    asks: Callable[[Mapping[str, Any]], bool] = lambda asked: True,
    newer: Callable[[Any], Any] = lambda value: value,
) -> Callable[[RespondTo], Respond]:
    """Return a decorator that has a request read and checked before the function is called that responds to it.

    `/openapi.json` describes a path by the same checks and the same demand.

    Args:
        fields: the checks of a request, for a model with so many tokens in its vocabulary.
        demand: of the model that a request names.
        asks: returns whether a request has anything for the model to do. Others load or unload it, whichever it is.
        newer: returns the body of a request with its model where newer requests have it.
    """

    def wrap(respond: RespondTo) -> Respond:
        @wraps(respond)
        async def answer(request: Request) -> Response:
            value = newer(await read_json(request, request.app.most_bytes))
            model = of_request(request, value, demand)
            asked = checked(value, closed(*fields(model.vocabulary)))
            if asks(asked):
                demand(model)
            return await respond(request, model, asked)

        vars(answer).update(fields=fields, demand=demand)
        return answer

    return wrap


def answering(
    fields: Callable[[int], Fields],
    make: Callable[[Model, dict[str, Any]], Answer],
    summary: str,
    heartbeat: bytes = COMMENT,
    demand: Demand = must_chat,
) -> Respond:
    """Return what answers the requests to one path.

    Args:
        fields: as for `takes`.
        make: makes the answer to the fields of a request. Raises RequestError.
        summary: what a request does, in a sentence.
        heartbeat: what a stream says whenever no event has come for a while.
        demand: as for `takes`.
    """

    @takes(fields, demand)
    async def answer(request: Request, model: Model, asked: dict[str, Any]) -> Response:
        await ready(request, model)
        return await answered(request, make(model, asked), heartbeat)

    answer.__doc__ = summary
    return answer


async def ready(request: Request, model: Model, keep_alive: float | None = None) -> None:
    """Have a model loaded until the request is answered. Raises RequestError, GoneError.

    Args:
        keep_alive: as for `Model.hold`.
    """

    async def held() -> None:
        await model.hold(keep_alive)
        request.scope["held"].callback(model.release)

    await unless_gone(request.receive, held())


def of_request(request: Request, value: Any, demand: Demand = any_model) -> Model:
    """Return the model that a request's body names, which may not be loaded: see `ready`. Raises RequestError.

    If it names none, it is the first that meets the demand, or the first of all if none does.
    """
    models: Models = request.app.models
    name = value.get("model") if isinstance(value, dict) else None
    if isinstance(name, str) and name:
        return models.named(name)
    return next((model for model in models if meets(model, demand)), next(iter(models)))
