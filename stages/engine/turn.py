"""One process at a time builds an artifact directory."""

from __future__ import annotations

from pathlib import Path

import filelock

from stages.engine.progress import waiting
from stages.engine.tree import Linked, Tree

_PATIENCE = 1.0
"""Seconds of waiting before somebody is told."""


class Turn:
    """One process at a time: the holder of a lock file. A second one waits, and soon says so."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = filelock.FileLock(path)
        self.held = False
        """Whether this process has it: also seen by its threads, and by what it forks, which run steps for it."""

    def take(self) -> None:
        """Returns at once if this process has it already. Raises UserError if a link lies where the lock file goes."""
        if self.held:
            return
        try:
            try:
                self._acquire()
            except FileNotFoundError:
                self._acquire()  # whose build came to nothing just removed the directory (`stages.engine.leftovers`)
        except filelock.Timeout:
            with waiting(f"waiting for another process that builds {self.path.stem}"):
                self._lock.acquire()
            self.held = True
        except OSError:
            pass  # what cannot be written needs no lock; a step that has to write will say so

    def try_take(self) -> bool:
        """Whether this process has it now, without waiting."""
        try:
            self._make_room()
            self._lock.acquire(blocking=False)
            self.held = True
        except (filelock.Timeout, OSError, Linked):
            return False
        return True

    def _acquire(self) -> None:
        self._make_room()
        self._lock.acquire(timeout=_PATIENCE)
        self.held = True

    def _make_room(self) -> None:
        """Make the lock file's directory. Raises Linked: a lock file is written, so it is reached through no link."""
        folder = self.path.parent
        with Tree(folder.parent).opened(folder.name, create=True):
            if self.path.is_symlink():
                raise Linked(f"{self.path} is a link: remove it")

    def give_up(self) -> None:
        self._lock.release(force=True)
        self.held = False

    def __enter__(self) -> None:
        self.take()

    def __exit__(self, *_: object) -> None:
        self.give_up()
