"""Answers that come piece by piece, and what ends when their reader goes away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from llama_npu2.serve.failures import GoneError

Result = TypeVar("Result")

HEARTBEAT = 5.0
"""Seconds of silence after which a stream says that it is alive: prompts may take longer than clients wait."""
COMMENT = b": ping\n\n"
"""What a stream says then, if its API has no event for that: readers pass over it."""
SLOWEST = 60.0
"""Seconds after which a reader that takes nothing is given up."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Return what a coroutine returns. It is cancelled, and GoneError raised, if the client closes the connection."""

    async def closed() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(closed())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise GoneError
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _kept_alive(events: AsyncIterator[bytes], heartbeat: bytes) -> AsyncGenerator[bytes]:
    """Yield events, and a heartbeat whenever none has come for a while."""
    coming: asyncio.Future[bytes] | None = None
    try:
        while True:
            coming = asyncio.ensure_future(anext(events))
            while not (await asyncio.wait({coming}, timeout=HEARTBEAT))[0]:
                yield heartbeat
            try:
                yield coming.result()
            except StopAsyncIteration:
                return
    finally:
        if coming and not coming.done():
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)


EVENTS = "text/event-stream"
"""The media type of server-sent events."""


class EventStream(Response):
    """Events that a generator makes."""

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        close: Callable[[], None],
        heartbeat: bytes = COMMENT,
        media_type: str = EVENTS,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Set it up.

        Args:
            events: makes them.
            close: is called once nobody reads any more, however that comes.
            heartbeat: what is sent whenever no event has come for a while.
            media_type: of the events together.
            headers: further ones.
        """
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})}
        super().__init__(media_type=media_type, headers=headers)
        del self.headers["content-length"]
        self._events, self._close, self._heartbeat = events, close, heartbeat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._sent(send))
        finally:
            self._close()

    async def _sent(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async with aclosing(self._events), aclosing(_kept_alive(self._events, self._heartbeat)) as chunks:
                async for chunk in chunks:
                    async with asyncio.timeout(SLOWEST):
                        await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except TimeoutError:
            raise GoneError from None
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def event(value: Any, name: str = "") -> bytes:
    """Return a server-sent event with a JSON value, and with a name if there is one."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: ".encode() + line(value) + b"\n"


def line(value: Any) -> bytes:
    """Return a line with a JSON value."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n"
