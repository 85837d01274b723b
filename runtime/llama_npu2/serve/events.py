"""Answers that come piece by piece, and what ends when their reader goes away."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from llama_npu2.serve.failures import GoneError

Result = TypeVar("Result")

HEARTBEAT = 5.0
"""Seconds of silence after which a stream says that it is alive: prompts may take longer than clients wait."""
COMMENT = b": ping\n\n"
"""What a stream says then, if its API has no event for that: readers pass over it."""
READER_TIMEOUT = 60.0
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
        self._since, self._waiting = 0.0, 0
        """When something was sent last, by `time.monotonic`, and how much of it the connection has not taken yet."""
        self._whole = False
        """Whether all was sent."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send, self._since = send, time.monotonic()
        try:
            await unless_gone(receive, unless_gone(self._watched, self._sent()))
        except GoneError:
            if not self._whole:  # servers say of a client who has all that it is gone, too
                raise
        finally:
            self._close()

    async def _sent(self) -> None:
        """Send all events."""
        await self._put({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._events):
            async for chunk in self._events:
                await self._put(_part(chunk))
        await self._put({"type": "http.response.body", "body": b"", "more_body": False})
        self._whole = True

    async def _put(self, message: Message) -> None:
        self._since = time.monotonic()
        self._waiting += 1
        await self._send(message)
        self._waiting -= 1

    async def _watched(self) -> Message:
        """Send a heartbeat whenever no event has come for a while; return once the reader has taken none for long.

        It runs beside the events: a timer for each of these would cost more than the event.
        """
        while True:
            quiet = time.monotonic() - self._since
            if self._waiting:
                if quiet >= READER_TIMEOUT:
                    return _GONE
                await asyncio.sleep(min(HEARTBEAT, READER_TIMEOUT))
            elif quiet < HEARTBEAT:
                await asyncio.sleep(HEARTBEAT - quiet)
            else:
                try:
                    async with asyncio.timeout(READER_TIMEOUT):
                        await self._put(_part(self._heartbeat))
                except TimeoutError:
                    return _GONE


_GONE: Message = {"type": "http.disconnect"}


def _part(chunk: bytes) -> Message:
    return {"type": "http.response.body", "body": chunk, "more_body": True}


def event(value: Any, name: str = "") -> bytes:
    """Return a server-sent event with a JSON value, and with a name if there is one."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: ".encode() + line(value) + b"\n"


def line(value: Any) -> bytes:
    """Return a line with a JSON value."""
    return _ENCODED(value).encode() + b"\n"


_ENCODED = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
