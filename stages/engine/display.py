"""Shows on a terminal what a build is doing: one line with the steps that run, for how long, and how many are done.

The line stands below what is printed, and is gone when nothing runs, so that a command has the terminal to itself.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from typing import TextIO

from tqdm import tqdm

from stages.engine.durations import clock
from stages.engine.progress import Channel, taken

_PATIENCE = 1.0
"""Seconds after which a step that runs is shown with the time that is probably left."""
_REDRAWN = 0.25
"""Seconds between two drawings of the line."""
_FORMAT, _CHARACTERS = "{bar:10} {n_fmt} of {total_fmt} steps  {desc}", "\u2500\u2501"


def _columns() -> int:
    return shutil.get_terminal_size().columns - 1


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
        self._stream, self._done, self._total = stream, 0, total
        self._bar: tqdm | None = None

    def begin(self, step: str, stays: bool = False) -> None:
        """Show a step, or what this process waits for, from here on. `stays`: leave a line of it when it is done."""
        # Not earlier: a process that draws should not fork.
        if self._listener is None:
            self._listener = threading.Thread(target=self._listen, daemon=True)
            self._listener.start()
        self._since[step] = time.monotonic()
        if stays:
            self._staying.add(step)
        with tqdm.get_lock():  # steps in threads begin at once
            if self._bar is None:
                self._taken.enter_context(taken(self.channel))  # first: steps in threads print meanwhile
                self._show()

    def end(self, step: str, done: bool = True) -> None:
        """Show a step no more; if it is `done` and stays, a line says how long it took."""
        self._drain()
        self._draw()
        seconds = time.monotonic() - self._since.pop(step, time.monotonic())
        if done:
            self.skip()
        if done and step in self._staying:
            tqdm.write(f"{step} {clock(seconds)}", self._stream)

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
        with tqdm.get_lock():
            if bar := self._bar:
                self._bar = None
                bar.close()

    def _listen(self) -> None:
        for message in self.channel.messages():
            match message:
                case {"line": str(text)}:
                    tqdm.write(text, self._stream)
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

    def _show(self) -> None:
        options = {"file": self._stream, "leave": False, "ncols": _columns()}
        self._bar = tqdm(total=self._total, bar_format=_FORMAT, ascii=_CHARACTERS, **options)
        threading.Thread(target=self._draw_while_shown, args=(self._bar,), daemon=True).start()

    def _draw_while_shown(self, bar: tqdm) -> None:
        while self._bar is bar:
            self._draw()
            time.sleep(_REDRAWN)

    def _draw(self) -> None:
        """Draw the line: the share and the number of steps that are done, and those that run."""
        running = "; ".join(self._describe(step, since) for step, since in list(self._since.items()))
        with tqdm.get_lock():
            if bar := self._bar:
                bar.n, bar.ncols = self._done, _columns()
                bar.set_description_str(running)

    def _describe(self, step: str, since: float) -> str:
        seconds = time.monotonic() - since
        left = self._before.get(step, 0.0) - seconds
        words = [f"{step} {clock(seconds)}", self._doing.get(step, "")]
        words += [f"about {clock(left)} left"] if left > 0 and seconds > _PATIENCE else []
        return ", ".join(filter(None, words))
