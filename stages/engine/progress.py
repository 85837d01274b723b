"""What steps say of themselves while they run, to whoever shows it (`display`).

A step may run in a process of its own (`doit -n`), so it speaks through a pipe that was opened before. Where nobody
shows anything, what is printed is printed, bars are drawn on a terminal by themselves, and the rest is not said.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, TextIO

from tqdm import tqdm

Say = Callable[[str], None]

_LONGEST = 600
"""Characters of a line in one message, of up to 6 bytes each: what is not longer than 4096 bytes is written whole."""


@dataclass(frozen=True)
class Channel:
    """A pipe of messages, a JSON object each, in a line. `owner`: the process that shows them."""

    read: int
    write: int
    owner: int

    @classmethod
    def open(cls) -> Channel:
        read, write = os.pipe()
        return cls(read, write, os.getpid())

    def send(self, **message: Any) -> None:
        with contextlib.suppress(OSError):  # who shows them is gone
            os.write(self.write, json.dumps(message, ensure_ascii=False).encode(errors="replace") + b"\n")

    def messages(self) -> Iterator[dict[str, Any]]:
        with os.fdopen(self.read, "rb") as lines:
            yield from map(json.loads, lines)


class Shows(Protocol):
    """Where what is said is shown."""

    channel: Channel

    def wait(self, text: str | None) -> None:
        """This process waits for what `text` says, or no longer for anything."""


_shown: Shows | None = None
_step: ContextVar[str | None] = ContextVar("step", default=None)


def show_on(display: Shows | None) -> None:
    """From here on, in this process and those that it forks."""
    global _shown
    _shown = display


def _is_elsewhere(display: Shows) -> bool:
    """Whether another process shows it, and has not taken this one's streams."""
    return display.channel.owner != os.getpid()


class Lines(io.TextIOBase):
    """A stream whose lines stand above what is shown."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._begun = ""

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            for start in range(0, max(len(line), 1), _LONGEST):
                self._channel.send(line=line[start : start + _LONGEST])
        return len(text)


@contextlib.contextmanager
def running(step: str) -> Iterator[None]:
    """While a step runs in this thread."""
    token = _step.set(step)
    try:
        with taken(_shown.channel) if _shown and _is_elsewhere(_shown) else contextlib.nullcontext():
            yield
    finally:
        _step.reset(token)


@contextlib.contextmanager
def taken(channel: Channel) -> Iterator[None]:
    """While what this process says on the terminal, which is standard error, stands above what is shown."""
    with contextlib.redirect_stderr(Lines(channel)) if sys.stderr.isatty() else contextlib.nullcontext():
        yield


def speaker() -> Say | None:
    """What says, from any thread, what the step that runs in this one is doing; None if nobody shows that."""
    display, step = _shown, _step.get()
    if display is None or step is None:
        return None
    return lambda text: display.channel.send(step=step, doing=text[:_LONGEST])


def say(text: str) -> None:
    """What the step that runs in this thread is doing now, or waits for."""
    if speak := speaker():
        speak(text)


@contextlib.contextmanager
def waiting(text: str) -> Iterator[None]:
    """While this process waits for another one."""
    if _shown is None or _is_elsewhere(_shown):
        print(text, file=sys.stderr, flush=True)
        yield
        return
    _shown.wait(text)
    try:
        yield
    finally:
        _shown.wait(None)


class _Hidden(io.StringIO):
    """A terminal that nobody sees."""

    def isatty(self) -> bool:
        return True


class Bar(tqdm):
    """tqdm's, drawn on a terminal by itself only where nobody shows what the step of this thread is doing."""

    def __init__(self, *args: Any, **given: Any) -> None:
        self._speak = speaker()
        silent: dict[str, TextIO] = {"file": _Hidden()} if self._speak else {}
        super().__init__(*args, **{"disable": None, **given, **silent})

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        if self._speak is None:
            super().display(msg, pos)
            return
        told = self.format_dict
        scaled = tqdm.format_sizeof if told["unit_scale"] else str
        of = f" of {scaled(told['total'])}" if told["total"] else ""
        unit = told["unit"] if told["unit_scale"] else ""
        self._speak(f"{told['prefix'].removesuffix(': ')}: {scaled(told['n'])}{of}{unit}")
