"""What a build leaves that came to nothing: empty directories, a lock, and what was made before the model was refused.
It is removed when the run ends. What was there before stays as it was."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable
from pathlib import Path

from stages.engine.lock import ProcessLock


class Leftovers:
    """Of a build of `directory` that has made nothing yet. `work`: where its steps work. `remembered`: the file of
    what is known of other files, which is no reason to keep the directory that it is in. `accepted`: what is there once
    the model was accepted; without it a new directory is of no use."""

    def __init__(self, directory: Path, work: Path, lock: ProcessLock, remembered: Path, accepted: Path | None) -> None:
        self._directory, self._lock, self._remembered, self._accepted = directory, lock, remembered, accepted
        self._root, self._locks = remembered.parent, lock.path.parent
        self._new = [path for path in (lock.path, self._locks, work, *work.parents) if not path.exists()]

    def remove(self, failed: bool) -> None:
        """`failed`: the build did, so that what it made of a model may be in vain."""
        if not self._lock.held:
            return  # it is complete, or somebody else builds it
        if failed and self._directory in self._new and self._accepted and not self._accepted.exists():
            shutil.rmtree(self._directory, ignore_errors=True)
        above = [self._root, *self._root.parents]
        self._remove_empty(path for path in self._new if path.is_relative_to(self._root) and path not in above)
        if not self._directory.exists() and self._lock.path in self._new:
            self._lock.path.unlink(missing_ok=True)
            self._remove_empty([self._locks])
        if self._root in self._new and [*self._root.iterdir()] == [self._remembered]:
            self._remembered.unlink()
        self._remove_empty(above)

    def _remove_empty(self, directories: Iterable[Path]) -> None:
        for directory in directories:
            if directory in self._new:
                with contextlib.suppress(OSError):
                    directory.rmdir()


_begun: list[Leftovers] = []
"""Of the builds that this process began."""


def note(leftovers: Leftovers) -> None:
    if leftovers not in _begun:
        _begun.append(leftovers)


def remove_leftovers(failed: bool) -> None:
    """Of all builds that this process began, see `Leftovers.remove`."""
    while _begun:
        with contextlib.suppress(OSError):  # what cannot be removed is in nobody's way
            _begun.pop().remove(failed)
