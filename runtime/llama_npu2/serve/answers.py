"""How a request for replies is answered: whole, or as events while they come."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from llama_npu2.serve.events import EventStream, unless_gone
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


async def answered(request: Request, answer: Answer) -> Response:
    """Return the response. What goes wrong before the first event has a status. Raises RequestError, GoneError."""
    request.scope["noted"] = answer.replies.noted
    try:
        await unless_gone(request.receive, answer.start())
        if not answer.stream:
            found = JSONResponse(await unless_gone(request.receive, answer.whole()))
            answer.replies.close()
            return found
    except BaseException:
        answer.replies.close()
        raise
    return EventStream(answer.events(), answer.replies.close)
