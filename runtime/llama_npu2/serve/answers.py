"""How a request for replies is answered: whole, or as events while they come."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from operator import attrgetter
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from llama_npu2.schema import Check
from llama_npu2.serve.body import checked, read_json
from llama_npu2.serve.events import COMMENT, EVENTS, EventStream, unless_gone
from llama_npu2.serve.fields import closed
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


Fields = tuple[Mapping[str, Check], Mapping[str, Check]]
"""Checks of the fields that a request must have, and of those that it may have."""


Respond = Callable[[Request], Awaitable[Response]]


Suits = Callable[[Model], bool]
"""Whether requests to a path may name a model."""
chats: Suits = attrgetter("chats")
writes: Suits = attrgetter("writes")
embeds: Suits = attrgetter("embeds")


def takes(fields: Callable[[int], Fields], suits: Suits = lambda model: True) -> Callable[[Respond], Respond]:
    """Return a decorator that notes which fields the requests have that a function answers, and of which models."""

    def note(respond: Respond) -> Respond:
        vars(respond).update(fields=fields, suits=suits)
        return respond

    return note


def answering(
    fields: Callable[[int], Fields],
    make: Callable[[Model, dict[str, Any]], Answer],
    heartbeat: bytes = COMMENT,
    suits: Suits = chats,
) -> Respond:
    """Return what answers the requests to one path.

    Args:
        fields: the checks of a request, for a model with so many tokens in its vocabulary.
        make: makes the answer to the fields of a request. Raises RequestError.
        heartbeat: what a stream says whenever no event has come for a while.
        suits: returns whether a model can answer.
    """

    @takes(fields, suits)
    async def answer(request: Request) -> Response:
        model, asked = await asked_of(request, fields)
        await ready(request, model)
        return await answered(request, make(model, asked), heartbeat)

    return answer


async def asked_of(request: Request, fields: Callable[[int], Fields]) -> tuple[Model, dict[str, Any]]:
    """Return the model that a request names, which may not be loaded, and the fields of its body that are not null.

    Raises RequestError, GoneError.

    Args:
        request: what is asked.
        fields: as for `answering`.
    """
    value = await read_json(request, request.app.most_bytes)
    model = of_request(request, value)
    return model, checked(value, closed(*fields(model.vocabulary)))


async def ready(request: Request, model: Model, keep_alive: float | None = None) -> None:
    """Have a model loaded until the request is answered. Raises RequestError, GoneError.

    Args:
        keep_alive: as for `Model.hold`.
    """

    async def held() -> None:
        await model.hold(keep_alive)
        request.scope["held"].callback(model.release)

    await unless_gone(request.receive, held())


def of_request(request: Request, value: Any) -> Model:
    """Return the model that a request's body names; the first, if it names none. Raises RequestError.

    It may not be loaded: see `ready`.
    """
    models: Models = request.app.models
    name = value.get("model") if isinstance(value, dict) else None
    return models.named(name) if isinstance(name, str) and name else next(iter(models))
