"""The page to chat with: the files beside this module.

They hold no secrets, and a browser asks for them before it can send a key, so none is needed. The page talks to the API
of its own server and to nobody else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import PurePath

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

_TYPES = {".css": "text/css", ".html": "text/html", ".js": "text/javascript", ".svg": "image/svg+xml"}
_FIRST = "index.html"

_POLICY = (
    "default-src 'none'",
    "script-src 'self'",
    "style-src 'self'",
    "img-src 'self'",
    "connect-src 'self'",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
    "require-trusted-types-for 'script'",  # text never becomes HTML or a script
    "trusted-types 'none'",
)
_HEADERS = {
    "cache-control": "no-cache",  # kept, and asked for anew each time: all files are of one version
    "content-security-policy": "; ".join(_POLICY),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "vary": "accept",
    "x-content-type-options": "nosniff",
}


def _answering(content: bytes, suffix: str) -> Callable[[Request], Awaitable[Response]]:
    """Return what answers requests for a file: with its content, or with status 304 if the client has it."""
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {**_HEADERS, "etag": tag}

    async def answer(request: Request) -> Response:
        known = [each.strip().removeprefix("W/") for each in request.headers.get("if-none-match", "").split(",")]
        if tag in known or "*" in known:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=_TYPES[suffix])

    return answer


class _ForBrowsers(Route):
    """Leaves requests of others than browsers to other routes of the path: clients of some APIs ask for it, too."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        return super().matches(scope) if "text/html" in Headers(scope=scope).get("accept", "") else (Match.NONE, {})


def _routes(folder: Traversable) -> Iterator[Route]:
    for file in sorted(folder.iterdir(), key=lambda each: each.name):
        if (suffix := PurePath(file.name).suffix) in _TYPES:
            answer = _answering(file.read_bytes(), suffix)
            if file.name == _FIRST:
                yield _ForBrowsers("/", answer, methods=["GET"])
            else:
                yield Route(f"/page/{file.name}", answer, methods=["GET"])


ROUTES = [*_routes(files(__package__))]
PATHS = {route.path for route in ROUTES}
