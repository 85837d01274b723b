"""Removes the leftovers of a build that failed: empty directories, a lock, and files made before the model was refused.

That happens when the run ends. Files and directories that were there before stay as they were.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable
from pathlib import Path

from stages.engine.lock import ProcessLock


class Leftovers:
    """The possible leftovers of a build, noted before it has made anything.

    Args:
        directory: the artifact directory.
        work: the directory in which its steps work.
        lock: the build's lock.
        remembered: the file of digests, which is no reason to keep the directory that it is in.
        accepted: a file that exists once the model was accepted; without it a new directory is of no use.
    """

    def __init__(self, directory: Path, work: Path, lock: ProcessLock, remembered: Path, accepted: Path | None) -> None:
        self._directory, self._lock, self._remembered, self._accepted = directory, lock, remembered, accepted
        self._root, self._locks = remembered.parent, lock.path.parent
        self._new = [path for path in (lock.path, self._locks, work, *work.parents) if not path.exists()]

    def remove(self, failed: bool) -> None:
        """Remove the leftovers. If the build `failed`, that includes a new directory whose model was not accepted."""
        if not self._lock.held:
            return  # the directory is complete, or somebody else builds it
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
"""The leftovers of the builds that this process began."""


def note(leftovers: Leftovers) -> None:
    """Remember the leftovers of a build for `remove_leftovers`."""
    if leftovers not in _begun:
        _begun.append(leftovers)


def remove_leftovers(failed: bool) -> None:
    """Remove the leftovers of all builds that this process began, see `Leftovers.remove`."""
    while _begun:
        with contextlib.suppress(OSError):  # leftovers that cannot be removed do no harm
            _begun.pop().remove(failed)
