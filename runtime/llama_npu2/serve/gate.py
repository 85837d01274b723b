"""What every request passes first: is it for this server, from whom, and what is noted of it."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llama_npu2.errors import printable
from llama_npu2.serve import page
from llama_npu2.serve.failures import GoneError, RequestError, server_failed
from llama_npu2.serve.keys import Key, Keys, namespace

Refusal = Callable[[str, RequestError], Response]
"""Makes the response to a request that is refused, of its path."""

_OPEN = {"/health", *page.PATHS}
"""Paths that need no key: a supervisor asks for them, and browsers before they can send one."""
_LONGEST = 120
"""Most characters of a path that are noted."""
_CLOSED = 499
"""The status that is noted where the client closed the connection (as nginx does)."""


class Gate:
    """Refuses what a browser sends in the name of another site, and logs a line for each request."""

    def __init__(self, app: ASGIApp, hosts: Collection[str], origins: Collection[str], refusal: Refusal) -> None:
        """Set it up.

        Args:
            app: what answers.
            hosts: names by which clients may reach this server, in small letters; empty: any.
            origins: sites whose pages may use it, besides its own.
            refusal: makes responses to what is refused.
        """
        self._app, self._hosts, self._origins, self._refusal = app, hosts, origins, refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started, status = time.perf_counter(), 0

        async def noted(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            self._check(Headers(scope=scope))
            await self._app(scope, receive, noted)
        except RequestError as error:
            await self._refusal(scope["path"], error)(scope, receive, noted)
        except GoneError:
            status = _CLOSED
        except Exception:
            traceback.print_exc()
            if not status:
                await self._refusal(scope["path"], server_failed())(scope, receive, noted)
        finally:
            _note(scope, status or _CLOSED, time.perf_counter() - started)

    def _check(self, headers: Headers) -> None:
        """Raises RequestError for a request of another site's page, to another host, or with two lengths."""
        if "content-length" in headers and "transfer-encoding" in headers:
            # A proxy that goes by the other length would take the rest of the body for a request (smuggling).
            message = "the body has two lengths: send either Content-Length or Transfer-Encoding"
            raise RequestError(400, message, headers={"connection": "close"})
        given = headers.getlist("host")
        host = given[0].lower() if len(given) == 1 else ""
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        if self._hosts and name not in self._hosts:
            # The page of a site may give its own name the address of this machine (DNS rebinding).
            raise RequestError(403, "the request is for another host: use the address that the server printed")
        origin = headers.get("origin")
        if origin is not None and origin not in {*self._origins, f"http://{host}", f"https://{host}"}:
            raise RequestError(403, "pages of other sites may not use this server: allow this one by --origin")


class Door:
    """Refuses requests without a key, and makes responses of the errors that an application raises."""

    def __init__(self, app: ASGIApp, keys: Keys, refusal: Refusal) -> None:
        """Args: `keys` of which clients have to send one."""
        self._app, self._keys, self._refusal = app, keys, refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if self._keys and scope["path"] not in _OPEN:
                key = self._key(Headers(scope=scope))
                if self._keys.several:
                    scope["key"] = key.name
                    namespace.set(key.name)
            await self._app(scope, receive, send)
        except RequestError as error:
            await self._refusal(scope["path"], error)(scope, receive, send)
        except HTTPException as error:  # of the router
            what = {404: "there is no such path", 405: f"this path does not take {scope['method']}"}
            found = RequestError(error.status_code, what.get(error.status_code, error.detail), headers=error.headers)
            await self._refusal(scope["path"], found)(scope, receive, send)

    def _key(self, headers: Mapping[str, str]) -> Key:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        if key := self._keys.found(given):
            return key
        raise RequestError(
            401,
            "the key is wrong or missing: send the header Authorization: Bearer KEY",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )


def _note(scope: Mapping[str, Any], status: int, seconds: float) -> None:
    path = printable(scope["path"][:_LONGEST])
    of = [f"key {scope['key']}"] if "key" in scope else []
    more = "".join(f", {what}" for what in [*of, *scope.get("noted", ())])
    print(f"{scope['method']} {path} {status}, {seconds:.3f} s{more}", file=sys.stderr, flush=True)
