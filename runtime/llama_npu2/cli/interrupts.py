"""Ctrl-C in a conversation: it stops an answer, and nothing else."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Any


class Interrupts:
    """A handler of SIGINT: it raises KeyboardInterrupt inside of `raised` alone, once, and remembers SIGINT elsewhere.

    Python's own handler raises wherever the program is: while a module is imported, which then stays half imported;
    while the terminal is given back; or where nobody catches it. C code drops what is raised while it imports a module.
    """

    def __init__(self) -> None:
        self._raises = self._came = False
        self._before: Any = None

    def __enter__(self) -> Interrupts:
        """Take SIGINT over. Raises ValueError outside of the main thread."""
        self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _on_signal(self, *_: object) -> None:
        self._came = True
        if self._raises:
            self._raises = False
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def raised(self) -> Iterator[None]:
        """Raises KeyboardInterrupt for the first SIGINT that comes within, or has come since `forget`."""
        self._raises = True
        try:
            self.check()
            yield
        finally:
            self._raises = self._came = False

    def check(self) -> None:
        """Raise KeyboardInterrupt if a SIGINT has come: what the handler raised may have been dropped."""
        if self._came:
            raise KeyboardInterrupt

    def forget(self) -> None:
        """Forget a SIGINT that has come: what it was to stop is over."""
        self._came = False
