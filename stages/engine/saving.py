"""Saves what only spares time, now and then: a file that is rewritten after each step takes longer than many steps."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable

_PAUSE = 1.0
"""Seconds between two times."""


class Saving:
    """Calls a function that saves something, at most once a second, and at last when the process ends.

    A process that is killed loses what it learned in its last second. A fork, without exit handlers, does not wait.
    """

    def __init__(self, save: Callable[[], None]) -> None:
        self._save, self._lock, self._owner = save, threading.Lock(), os.getpid()
        self._last, self._waits = -_PAUSE, False

    def soon(self) -> None:
        """Save, or if that was done within the last second, save before the process ends."""
        with self._lock:
            if time.monotonic() - self._last >= _PAUSE or os.getpid() != self._owner:
                self._now()
            elif not self._waits:
                self._waits = True
                atexit.register(self.now)

    def now(self) -> None:
        """Save."""
        with self._lock:
            self._now()

    def _now(self) -> None:
        if self._waits:
            self._waits = False
            atexit.unregister(self.now)
        self._save()
        self._last = time.monotonic()
