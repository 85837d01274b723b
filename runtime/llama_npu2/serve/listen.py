"""Listens on a port until it is told to stop, and then finishes what is under way."""

from __future__ import annotations

import asyncio
import ipaddress
import math
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from llama_npu2.artifact.manifest import Manifest
from llama_npu2.engine.llama import Llama
from llama_npu2.errors import UserError, printable, reason
from llama_npu2.machine import available_memory
from llama_npu2.options import Listening, OptionError
from llama_npu2.serve.app import Application, guarded
from llama_npu2.serve.keys import Keys
from llama_npu2.serve.models import Keeping, Models

_HEAD_TIMEOUT = 10.0
"""Seconds that the head of a request may take to come."""
_GRACE_PERIOD = 30
"""Seconds that replies have to end once the server is told to stop."""
_IDLE_TIMEOUT = 65
"""Seconds that a connection is kept without a request: longer than clients keep it, so none asks on a closed one."""
_KEEP_ALIVE = 300.0
"""Seconds that each of several models stays loaded without requests: as in Ollama."""
_BACKLOG = 128
_MOST_HEAD = 64 << 10
"""Most bytes of a request's head."""
_LOCAL = ("localhost", "127.0.0.1", "[::1]")


class _Protocol(H11Protocol):
    """Closes connections on which the head of a request does not come in time."""

    _due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._due = self.loop.call_later(_HEAD_TIMEOUT, self._give_up)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._forget()
        elif self._due is None and self.conn.trailing_data[0]:
            self._due = self.loop.call_later(_HEAD_TIMEOUT, self._give_up)

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def _forget(self) -> None:
        if self._due:
            self._due.cancel()
        self._due = None

    def _give_up(self) -> None:
        self._due = None
        if self.conn.their_state is h11.IDLE:
            self.transport.close()


class Place:
    """Where a server listens, and for whom: what can be wrong about that is found before a model is loaded."""

    def __init__(self, options: Listening) -> None:
        """Raises UserError."""
        self.options, self.keys = options, _keys(options)
        self._socket = _bound(options)
        self.shown = f"[{options.host}]" if ":" in options.host else options.host
        self.port: int = self._socket.getsockname()[1]
        loopback = _is_loopback(options.host)
        self.hosts = {*_LOCAL, self.shown.lower()} if loopback else set()
        """The names by which clients may ask for it; empty: any name."""
        if not self.keys and not loopback:
            print("note: whoever reaches this machine may use the model: give a file of API keys", file=sys.stderr)

    def serve(self, directories: Sequence[Path], load: Callable[[Path], Llama]) -> None:
        """Answer requests until SIGINT or SIGTERM comes. Raises UserError.

        Args:
            directories: artifacts. The first one is loaded at once, another when a request names them.
            load: opens such a directory. Raises UserError.
        """
        others = [Manifest.open(directory) for directory in directories[1:]]
        for manifest in others:
            manifest.check_trusted()
        keeping = self._keeping(load, bool(others))  # by the memory that is available before a model has some of it
        llm = load(directories[0])
        try:
            asyncio.run(self._serve(llm, others, keeping))
        finally:
            llm.close()  # again, if all went well

    def _keeping(self, load: Callable[[Path], Llama], several: bool) -> Keeping:
        options, patience = self.options, self.options.keep_alive_seconds()
        return Keeping(
            load,
            options.memory << 20 or (available_memory() if several else math.inf),
            (_KEEP_ALIVE if several else math.inf) if patience is None else patience,
            options.queue,
            options.kv_memory << 20,
        )

    async def _serve(self, llm: Llama, others: Sequence[Manifest], keeping: Keeping) -> None:
        options = self.options
        async with Models([llm.manifest, *others], keeping) as models:
            models.use(next(iter(models)), llm)
            application = Application(models, options.body << 20, options.keep_billing_header)
            app = guarded(application, self.keys, self.hosts, options.origin)
            more = f"; on demand: {', '.join(model.name for model in [*models][1:])}" if others else ""
            where = f"http://{self.shown}:{self.port}/v1, a page to chat with is at /"
            server = _Server(_config(app), f"listening on {where} ({llm.description}{more})")
            # Uvicorn raises the signals that ended it once more when all is finished: then they have done their work.
            before = {each: signal.signal(each, lambda *_: None) for each in (signal.SIGINT, signal.SIGTERM)}
            try:
                await server.serve([self._socket])
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)

    def close(self) -> None:
        """Listen no more."""
        self._socket.close()


def _config(app: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=_Protocol,
        ws="none",
        lifespan="off",
        loop="asyncio",
        access_log=False,
        log_config=None,
        log_level="critical",
        proxy_headers=False,
        server_header=False,
        backlog=_BACKLOG,
        timeout_keep_alive=_IDLE_TIMEOUT,
        timeout_graceful_shutdown=_GRACE_PERIOD,
        h11_max_incomplete_event_size=_MOST_HEAD,
    )


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, announcement: str) -> None:
        super().__init__(config)
        self._announcement = announcement

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(self._announcement, file=sys.stderr, flush=True)


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _keys(options: Listening) -> Keys:
    """Return the keys in the file that the options name. Raises UserError."""
    if not options.api_key_file:
        return Keys()
    path = Path(options.api_key_file)
    try:
        keys, mode = Keys.parsed(path.read_text(encoding="utf-8-sig")), path.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError("api_key_file", path, f"{reason(error)}: give a text file") from None
    except ValueError as error:
        raise OptionError("api_key_file", path, str(error)) from None
    if mode & 0o077:
        print(printable(f"note: others may read {path}: chmod 600 it"), file=sys.stderr)
    return keys


def _bound(options: Listening) -> socket.socket:
    """Return the socket to listen on. Raises UserError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family, kind, protocol)
    except OSError as error:
        raise OptionError("host", options.host, f"{error.strerror}: give an address of this machine") from None
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind(address)
    except OSError as error:
        found.close()
        raise UserError(f"{options.host}:{options.port}: {error.strerror}: choose another port or host") from None
    return found
