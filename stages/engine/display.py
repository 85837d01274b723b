"""What a build is doing, on a terminal: the steps that run, for how long, what each waits for, and how many are done.

Below what is printed; gone when nothing runs, so that a command has the terminal to itself.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from stages.engine.durations import clock
from stages.engine.progress import Channel, taken

_PER_SECOND = 4
"""Times that it is drawn anew."""
_PATIENCE = 1.0
"""Seconds until what is shown says how long it took last."""


@dataclass
class _Task:
    """What runs or waits, and since when, in seconds of the monotonic clock."""

    shown: Spinner
    since: float = field(default_factory=time.monotonic)

    @classmethod
    def named(cls, text: str) -> _Task:
        return cls(Spinner("dots", Text(text)))

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.since


class Display:
    """On the terminal `stream`. `total`: steps there are; `before`: seconds that they took last, by name."""

    def __init__(self, stream: TextIO, total: int, before: Mapping[str, float]) -> None:
        self.channel = Channel.open()
        self._console = Console(file=stream, highlight=False)
        self._total, self._before = total, before
        self._running: dict[str, _Task] = {}
        self._doing: dict[str, str] = {}  # a step in a process of its own may speak before it is known to run
        self._waiting: _Task | None = None
        self._done = 0
        self._live: Live | None = None
        self._taken = contextlib.ExitStack()
        self._listener: threading.Thread | None = None
        self._lock = threading.RLock()
        self._heard = threading.Condition()
        self._marks = 0

    def begin(self, step: str) -> None:
        with self._lock:
            self._running[step] = _Task.named(step)
            self._draw()

    def end(self, step: str, done: bool = True) -> None:
        """It runs no more; of one that is `done`, a line says for how long it ran."""
        self._drain()
        with self._lock:
            self._done += done
            task = self._running.pop(step, None)
            if task and self._live:
                self._live.refresh()
                if done:
                    self._console.print(Text(step), Text(clock(task.seconds), style="dim"), soft_wrap=True)

    def skip(self) -> None:
        """A step is current."""
        self._done += 1

    def wait(self, text: str | None) -> None:
        """As `progress.Shows` says."""
        with self._lock:
            self._waiting = _Task.named(text) if text else None
            self._draw()
        if not text and not self._running:
            self.rest()

    def rest(self) -> None:
        """Leave the terminal to others."""
        self._drain()
        with self._lock:
            if self._live:
                self._taken.close()
                self._live.stop()
                self._live = None

    def _draw(self) -> None:
        """From here on. Not before there is something to show: a process that draws should not fork."""
        if self._listener is None:
            self._listener = threading.Thread(target=self._listen, daemon=True)
            self._listener.start()
        if self._live is None:
            self._live = Live(
                get_renderable=self._shown,
                console=self._console,
                refresh_per_second=_PER_SECOND,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
            self._taken.enter_context(taken(self.channel))

    def _listen(self) -> None:
        for message in self.channel.messages():
            match message:
                case {"line": str(text)}:
                    self._console.print(Text(text), soft_wrap=True)
                case {"step": str(step), "doing": str(text)}:
                    self._doing[step] = text
                case {"mark": int(mark)}:
                    with self._heard:
                        self._marks = mark
                        self._heard.notify_all()

    def _drain(self) -> None:
        """Wait until all that was said so far is shown."""
        if self._listener:
            with self._heard:
                mark = self._marks + 1
                self.channel.send(mark=mark)
                self._heard.wait_for(lambda: self._marks >= mark, timeout=1)

    def _shown(self) -> RenderableType:
        table = Table.grid(padding=(0, 1))
        table.add_column(no_wrap=True)
        table.add_column(justify="right", no_wrap=True)
        table.add_column(no_wrap=True, overflow="ellipsis")
        if self._waiting:
            table.add_row(self._waiting.shown, clock(self._waiting.seconds))
        for step, task in list(self._running.items()):
            last = self._before.get(step, 0.0)
            said = [self._doing.get(step, ""), f"last time {clock(last)}" if last > _PATIENCE < task.seconds else ""]
            table.add_row(task.shown, clock(task.seconds), Text(", ".join(filter(None, said)), style="dim"))
        table.add_row(Text(f"{self._done} of {self._total} steps"), "", ProgressBar(self._total, self._done, width=30))
        return table


def is_terminal(stream: Any) -> bool:
    """Whether lines can be drawn over."""
    return bool(stream.isatty()) and not Console(file=stream).is_dumb_terminal
