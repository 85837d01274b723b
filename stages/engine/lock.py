"""A lock file that one process at a time holds, so that one process at a time builds an artifact directory."""

from __future__ import annotations

from pathlib import Path

import filelock

from llama_npu2.errors import reason
from stages.engine.progress import waiting
from stages.engine.tree import Linked, Tree

_PATIENCE = 1.0
"""Seconds of waiting before a message says so."""


class ProcessLock:
    """A lock that one process at a time holds. A second process waits, and soon says so."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = filelock.FileLock(path)
        self.held = False
        """Whether this process holds it. Its threads and forks, which run steps for it, see that as well."""
        self.refused = ""
        """Why `try_acquire` did not acquire it."""

    def acquire(self) -> None:
        """Wait for the lock; return at once if this process holds it. Raises UserError if the lock file is a link."""
        if self.held:
            return
        try:
            try:
                self._acquire()
            except FileNotFoundError:
                self._acquire()  # a build that failed just removed the directory (`stages.engine.leftovers`)
        except filelock.Timeout:
            with waiting(f"waiting for another process that builds {self.path.stem}"):
                self._lock.acquire()
            self.held = True
        except OSError:
            pass  # a directory that cannot be written needs no lock; a step that has to write will say so

    def try_acquire(self) -> bool:
        """Acquire the lock without waiting; return whether this process holds it now. Else `refused` says why not."""
        self.refused = "another process builds it"
        try:
            self._make_directory()
            self._lock.acquire(blocking=False)
            self.held = True
        except filelock.Timeout:
            return False
        except OSError as error:
            self.refused = reason(error)
            return False
        except Linked as error:
            self.refused = str(error)
            return False
        return True

    def _acquire(self) -> None:
        self._make_directory()
        self._lock.acquire(timeout=_PATIENCE)
        self.held = True

    def _make_directory(self) -> None:
        """Make the lock file's directory. Raises Linked, because the file is written, so it must not be a link."""
        folder = self.path.parent
        with Tree(folder.parent).opened(folder.name, create=True):
            if self.path.is_symlink():
                raise Linked(f"{self.path} is a link: remove it")

    def release(self) -> None:
        """Release the lock, however often it was acquired."""
        self._lock.release(force=True)
        self.held = False

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()
