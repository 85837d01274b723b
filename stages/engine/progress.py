"""Carries what steps say of themselves while they run to what shows it (`display`).

A step may run in a process of its own (`doit -n`), so it sends messages through a pipe that was opened before. Where
nothing is shown, text is printed as usual, bars draw themselves on a terminal, and other messages are dropped.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Protocol, TextIO

from llama_npu2.frozen import frozen

Say = Callable[[str], None]

_LONGEST = 600
"""Characters of a line in one message, of up to 6 bytes each: the kernel writes up to 4096 bytes as a whole."""


@frozen
class Channel:
    """A pipe of messages: JSON objects, one in a line."""

    read: int
    write: int
    owner: int
    """The process that shows the messages."""

    @classmethod
    def open(cls) -> Channel:
        read, write = os.pipe()
        return cls(read, write, os.getpid())

    def send(self, **message: Any) -> None:
        with contextlib.suppress(OSError):  # the process that shows them is gone
            os.write(self.write, json.dumps(message, ensure_ascii=False).encode(errors="replace") + b"\n")

    def messages(self) -> Iterator[dict[str, Any]]:
        with os.fdopen(self.read, "rb") as lines:
            yield from map(json.loads, lines)


class Shows(Protocol):
    """Shows messages, on a terminal."""

    channel: Channel

    def waiting(self, text: str) -> contextlib.AbstractContextManager[None]:
        """Show, within the context, that this process waits for what `text` says."""


_shown: Shows | None = None
_step: ContextVar[str | None] = ContextVar("step", default=None)


def show_on(display: Shows | None) -> None:
    """Show messages of this process, and of those that it forks from here on, on `display`."""
    global _shown
    _shown = display


def _is_elsewhere(display: Shows) -> bool:
    """Tell whether another process shows the messages, which has not replaced this one's streams."""
    return display.channel.owner != os.getpid()


class Lines(io.TextIOBase):
    """A stream whose lines are printed above what is shown."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._rest = ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            for start in range(0, max(len(line), 1), _LONGEST):
                self._channel.send(line=line[start : start + _LONGEST])
        return len(text)


@contextlib.contextmanager
def running(step: str) -> Iterator[None]:
    """Note, within the context, that this thread runs a step."""
    token = _step.set(step)
    try:
        with taken(_shown.channel) if _shown and _is_elsewhere(_shown) else contextlib.nullcontext():
            yield
    finally:
        _step.reset(token)


@contextlib.contextmanager
def taken(channel: Channel) -> Iterator[None]:
    """Print, within the context, what this process writes to standard error above what is shown, on a terminal."""
    with contextlib.redirect_stderr(Lines(channel)) if sys.stderr.isatty() else contextlib.nullcontext():
        yield


def speaker() -> Say | None:
    """Return a function that says, from any thread, what this thread's step is doing; None if nothing is shown."""
    display, step = _shown, _step.get()
    if display is None or step is None:
        return None
    return lambda text: display.channel.send(step=step, doing=text[:_LONGEST])


def say(text: str) -> None:
    """Say what this thread's step is doing now, or waits for."""
    if speak := speaker():
        speak(text)


@contextlib.contextmanager
def waiting(text: str) -> Iterator[None]:
    """Say, within the context, that this process waits for another one."""
    if _shown is None or _is_elsewhere(_shown):
        print(f"{text}\n", end="", file=sys.stderr, flush=True)
        yield
    else:
        with _shown.waiting(text):
            yield


def is_terminal(stream: TextIO) -> bool:
    """Tell whether text of a stream can be overwritten."""
    return stream.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")
