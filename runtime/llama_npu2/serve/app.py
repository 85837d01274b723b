"""The application: which path is answered by what, and how errors look in each API."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from typing import Any

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from llama_npu2.errors import printable
from llama_npu2.serve import metrics, openapi, page, rerank, tokenize
from llama_npu2.serve.anthropic import common as anthropic
from llama_npu2.serve.anthropic import messages
from llama_npu2.serve.failures import RequestError
from llama_npu2.serve.gate import Door, Gate
from llama_npu2.serve.keys import Keys
from llama_npu2.serve.models import Models
from llama_npu2.serve.ollama import chat as ollama_chat
from llama_npu2.serve.ollama import common as ollama
from llama_npu2.serve.ollama import embed, generate
from llama_npu2.serve.ollama import models as ollama_models
from llama_npu2.serve.openai import chat, completions, embeddings, responses
from llama_npu2.serve.openai import common as openai
from llama_npu2.serve.openai import models as openai_models

_ERRORS: Mapping[str, Callable[[RequestError], dict[str, Any]]] = {
    "/": openai.error_of,
    messages.PATH: anthropic.error_of,
    "/api/": ollama.error_of,
}
"""What makes the body of an error, by the beginning of an API's paths; the longest beginning counts."""

_LONGEST_MESSAGE = 500
"""Most characters of a message about a request, which may repeat names that the request chose."""


class Application:
    """Finds what answers a path. Requests reach it as `request.app`."""

    def __init__(self, models: Models, most_bytes: int, keeps_billing_header: bool = False) -> None:
        """Set it up.

        Args:
            models: which answer.
            most_bytes: of a request's body.
            keeps_billing_header: as for `anthropic.messages.routes`.
        """
        self.models, self.most_bytes = models, most_bytes
        routes = [Route("/health", health, methods=["GET"])]
        of_openai = (openai_models, chat, completions, responses, embeddings)
        of_ollama = (ollama_chat, generate, embed, ollama_models)
        for api in (*of_openai, *of_ollama, rerank, tokenize, metrics):
            routes += api.ROUTES
        self.routes = [*routes, *messages.routes(keeps_billing_header)]
        self._router = Router([*page.ROUTES, *self.routes, *openapi.ROUTES], redirect_slashes=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self
        with ExitStack() as scope["held"]:
            await self._router(scope, receive, send)


async def health(request: Request) -> Response:
    """Say whether replies can be asked for, of some model at least."""
    failed = all(model.failed for model in request.app.models)
    return JSONResponse({"status": "error" if failed else "ok"}, 503 if failed else 200)


def guarded(
    application: Application, keys: Keys, hosts: Collection[str] = (), origins: Collection[str] = ()
) -> ASGIApp:
    """Return an application behind what every request passes first.

    Args:
        application: what answers.
        keys: of which clients have to send one.
        hosts: as for `Gate`.
        origins: as for `Gate`.
    """
    app: ASGIApp = Door(application, keys, refused)
    if origins:
        app = CORSMiddleware(app, allow_origins=[*origins], allow_methods=["GET", "POST"], allow_headers=["*"])
    return Gate(app, hosts, origins, refused)


def refused(path: str, error: RequestError) -> Response:
    """Return the response to a request that is refused, in the form of the path's API."""
    if len(error.message) > _LONGEST_MESSAGE:
        error.message = f"{error.message[:_LONGEST_MESSAGE]}..."
    error.message, error.field = printable(error.message), error.field and printable(error.field)
    beginning = max((each for each in _ERRORS if path.startswith(each)), key=len, default="/")
    return JSONResponse(_ERRORS[beginning](error), error.status, error.headers)
