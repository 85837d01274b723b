"""Shows on a terminal what a build is doing: one line with the steps that run, for how long, and how many are done.

The line stands below what is printed, and is gone when nothing runs, so that a command has the terminal to itself.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TextIO
from unicodedata import east_asian_width

from stages.engine.durations import clock
from stages.engine.progress import Channel, taken

_PATIENCE = 1.0
"""Seconds after which a step that runs is shown with the time that is probably left."""
_REDRAWN = 0.25
"""Seconds between two drawings of the line."""
_SPINNER, _BAR = "\u280b\u2819\u2839\u2838\u283c\u2834\u2826\u2827\u2807\u280f", 10
_ERASED, _HIDDEN_CURSOR, _CURSOR, _DIM, _NORMAL = "\r\033[2K", "\033[?25l", "\033[?25h", "\033[2m", "\033[0m"


class _Line:
    """The last line of a terminal, which is drawn anew from time to time. Any thread may use it."""

    def __init__(self, stream: TextIO, text: Callable[[], str]) -> None:
        """Prepare it. `text`: returns what it shows now."""
        self._stream, self._text = stream, text
        self._lock = threading.RLock()
        self._stopped = threading.Event()
        self.is_shown = False

    def show(self) -> None:
        self.is_shown, self._stopped = True, threading.Event()
        self._write(_HIDDEN_CURSOR)
        threading.Thread(target=self._draw_until, args=(self._stopped,), daemon=True).start()

    def hide(self) -> None:
        with self._lock:
            if self.is_shown:
                self.is_shown = False
                self._stopped.set()
                self._write(_ERASED + _CURSOR)

    def print(self, text: str) -> None:
        """Print lines above it."""
        with self._lock:
            self._write(f"{_ERASED if self.is_shown else ''}{text}\n")
            self.draw()

    def draw(self) -> None:
        with self._lock:
            if self.is_shown:
                self._write(_ERASED + _fitted(self._text(), shutil.get_terminal_size().columns - 1))

    def _draw_until(self, stopped: threading.Event) -> None:
        while not stopped.wait(_REDRAWN):
            self.draw()

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def _fitted(text: str, columns: int) -> str:
    """Return as much of a text as fits into so many columns of a terminal."""
    width = 0
    for at, char in enumerate(text):
        width += 1 + (east_asian_width(char) in "WF")
        if width > columns:
            return text[:at]
    return text


class Display:
    """The line on a terminal, and the text in it."""

    def __init__(self, stream: TextIO, total: int, before: Mapping[str, float]) -> None:
        """Prepare the line. `total`: number of steps. `before`: seconds that steps took when they ran last, by name."""
        self.channel = Channel.open()
        self._before = before
        self._since: dict[str, float] = {}
        self._staying: set[str] = set()
        self._doing: dict[str, str] = {}  # a step in a process of its own may speak before it is known to run
        self._marked = threading.Condition()
        self._marks = 0
        self._listener: threading.Thread | None = None
        self._taken = contextlib.ExitStack()
        self._line = _Line(stream, self._text)
        self._done, self._total = 0, total

    def begin(self, step: str, stays: bool = False) -> None:
        """Show a step, or what this process waits for, from here on. `stays`: leave a line of it when it is done."""
        # Not earlier: a process that draws should not fork.
        if self._listener is None:
            self._listener = threading.Thread(target=self._listen, daemon=True)
            self._listener.start()
        self._since[step] = time.monotonic()
        if stays:
            self._staying.add(step)
        if not self._line.is_shown:
            self._taken.enter_context(taken(self.channel))  # first: steps in threads print meanwhile
            self._line.show()

    def end(self, step: str, done: bool = True) -> None:
        """Show a step no more; if it is `done` and stays, a line says how long it took."""
        self._drain()
        self._line.draw()
        seconds = time.monotonic() - self._since.pop(step, time.monotonic())
        if done:
            self.skip()
        if done and step in self._staying:
            self._line.print(f"{step} {_DIM}{clock(seconds)}{_NORMAL}")

    def skip(self) -> None:
        """Count a step that is up to date."""
        self._done += 1

    @contextlib.contextmanager
    def waiting(self, text: str) -> Iterator[None]:
        """Show what this process waits for."""
        self.begin(text)
        try:
            yield
        finally:
            del self._since[text]
            if not self._since:
                self.rest()

    def rest(self) -> None:
        """Leave the terminal to others."""
        self._drain()
        self._taken.close()
        self._line.hide()

    def _listen(self) -> None:
        for message in self.channel.messages():
            match message:
                case {"line": str(text)}:
                    self._line.print(text)
                case {"step": str(step), "doing": str(text)}:
                    self._doing[step] = text
                case {"mark": int(mark)}:
                    with self._marked:
                        self._marks = mark
                        self._marked.notify_all()

    def _drain(self) -> None:
        """Wait until all messages so far are shown."""
        if self._listener:
            with self._marked:
                mark = self._marks + 1
                self.channel.send(mark=mark)
                self._marked.wait_for(lambda: self._marks >= mark, timeout=1)

    def _text(self) -> str:
        """Return the line: that something runs, the share and number of steps that are done, and those that run."""
        running = "; ".join(self._describe(step, since) for step, since in list(self._since.items()))
        filled = _BAR * self._done // max(self._total, 1)
        bar = "\u2501" * filled + "\u2500" * (_BAR - filled)
        spinner = _SPINNER[int(time.monotonic() / _REDRAWN) % len(_SPINNER)]
        return f"{spinner} {bar} {self._done} of {self._total} steps  {running}"

    def _describe(self, step: str, since: float) -> str:
        seconds = time.monotonic() - since
        left = self._before.get(step, 0.0) - seconds
        words = [f"{step} {clock(seconds)}", self._doing.get(step, "")]
        words += [f"about {clock(left)} left"] if left > 0 and seconds > _PATIENCE else []
        return ", ".join(filter(None, words))
