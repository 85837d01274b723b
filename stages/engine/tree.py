"""A directory tree of which others may have made a part: nothing in it is done through a symbolic link.

Artifact directories come from other machines. A link in one could lead to a user's own documents, so each directory on
the way is opened by itself without following links, and files are made, moved and removed relative to the directory
that was opened. A link that is put there in the meantime has no effect either.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path, PurePath
from uuid import uuid4

from llama_npu2.artifact.regular import READ, checked_regular
from llama_npu2.errors import UserError
from llama_npu2.frozen import frozen

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Linked(UserError):
    """A symbolic link lies on the way to a file that was to be changed."""


@frozen
class Tree:
    """The directory `root`, which may itself be a link or be reached through one, as a model's on a larger disk.

    Paths are relative to `root`. Methods raise `Linked` where a directory on the way is a link, and OSError.
    """

    root: Path

    @contextlib.contextmanager
    def opened(self, inside: str | PurePath = "", create: bool = False) -> Iterator[int]:
        """Open a directory below the root.

        Args:
            inside: Its path.
            create: Whether missing directories are made, the root included.

        Yields:
            A descriptor, for `dir_fd`, that is closed afterwards.
        """
        if create:
            self.root.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for name in _parts(inside):
                if create:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(name, dir_fd=descriptor)
                try:
                    below = os.open(name, _DIRECTORY, dir_fd=descriptor)
                except OSError:
                    if _is_link(name, descriptor):
                        raise Linked(
                            f"{self.root / inside} lies behind a link out of {self.root}: remove the link {name}"
                        ) from None
                    raise
                os.close(descriptor)
                descriptor = below
            yield descriptor
        finally:
            os.close(descriptor)

    def check(self, path: str | PurePath) -> None:
        """Raise `Linked` if one of the directories above `path` is a link. They may be missing."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), self.opened(PurePath(path).parent):
            pass

    def open_regular(self, path: str | PurePath) -> int:
        """Open a regular file for reading; return a descriptor that the caller closes.

        A link, a pipe or a device is refused with an OSError: nothing is waited for.
        """
        path = PurePath(path)
        with self.opened(path.parent) as directory:
            descriptor = os.open(path.name, READ | os.O_NOFOLLOW, dir_fd=directory)
        return checked_regular(descriptor, self.root / path)

    def open_own(self, path: str | PurePath) -> int:
        """Open a file for appending, made if there is none; return a descriptor that the caller closes.

        A link, a pipe, or a second name of another file is removed first.
        """
        path = PurePath(path)
        with self.opened(path.parent, create=True) as directory, contextlib.suppress(FileNotFoundError):
            status = os.stat(path.name, dir_fd=directory, follow_symlinks=False)
            if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
                os.unlink(path.name, dir_fd=directory)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with self.opened(path.parent) as directory:
            return os.open(path.name, flags, 0o644, dir_fd=directory)

    def names(self, inside: str | PurePath = "") -> list[str]:
        """Return the sorted names in a directory; none where there is no such directory, or a link leads to it."""
        try:
            with self.opened(inside) as descriptor:
                return sorted(os.listdir(descriptor))  # noqa: PTH208 - a descriptor is no path
        except (OSError, Linked):
            return []

    def files(self, inside: str | PurePath = "") -> Iterator[PurePath]:
        """Yield the paths of all files below a directory, sorted; links are files here.

        Nothing is yielded where there is no such directory, or a link leads to it, nor are files that vanish meanwhile.
        """
        inside = PurePath(inside)
        with contextlib.suppress(OSError, Linked), self.opened(inside) as top:
            for folder, folders, names, descriptor in os.fwalk(".", dir_fd=top):
                folders.sort()
                linked = (name for name in folders if _is_link(name, descriptor))
                yield from (inside / folder / name for name in sorted((*names, *linked)))

    def status(self, path: str | PurePath) -> os.stat_result:
        """Return the status of a file, directory or link itself."""
        path = PurePath(path)
        with self.opened(path.parent) as directory:
            return os.stat(path.name, dir_fd=directory, follow_symlinks=False)

    def remove(self, path: str | PurePath) -> None:
        """Remove a file, a link itself, or a directory with all below it, if it is there."""
        path = PurePath(path)
        with contextlib.suppress(FileNotFoundError), self.opened(path.parent) as directory:
            if stat.S_ISDIR(os.stat(path.name, dir_fd=directory, follow_symlinks=False).st_mode):
                shutil.rmtree(path.name, dir_fd=directory)
            else:
                os.unlink(path.name, dir_fd=directory)

    def remove_file(self, path: str | PurePath) -> None:
        """Remove a file, or a link itself, if it is there. Raises IsADirectoryError for a directory."""
        path = PurePath(path)
        with contextlib.suppress(FileNotFoundError), self.opened(path.parent) as directory:
            os.unlink(path.name, dir_fd=directory)

    def remove_empty(self, inside: str | PurePath) -> None:
        """Remove a directory and those above it, below the root, as long as they are empty."""
        inside = PurePath(inside)
        while inside.parts:
            try:
                with self.opened(inside.parent) as directory:
                    os.rmdir(inside.name, dir_fd=directory)
            except (OSError, Linked):
                return
            inside = inside.parent

    def make_empty(self, inside: str | PurePath) -> Path:
        """Make an empty directory, removing what was there; return its path."""
        self.remove(inside)
        with self.opened(inside, create=True):
            return self.root / inside

    def take(self, source: Path, path: str | PurePath) -> None:
        """Move a file of the caller's own to `path` atomically; a link that was there is replaced, not followed."""
        path = PurePath(path)
        with self.opened(path.parent, create=True) as directory:
            os.replace(source, path.name, dst_dir_fd=directory)

    def link(self, path: str | PurePath, name: str | PurePath) -> None:
        """Give a file a second name, where there is nothing of that name yet."""
        path, name = PurePath(path), PurePath(name)
        with self.opened(path.parent) as source, self.opened(name.parent, create=True) as directory:
            with contextlib.suppress(FileExistsError):
                os.link(path.name, name.name, src_dir_fd=source, dst_dir_fd=directory, follow_symlinks=False)

    def write(self, path: str | PurePath, data: bytes) -> None:
        """Replace a file's content atomically; a failure leaves nothing behind."""
        path = PurePath(path)
        with self.opened(path.parent, create=True) as directory:
            temporary = f".{path.name}.{uuid4().hex[:8]}"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            descriptor = os.open(temporary, flags, 0o644, dir_fd=directory)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    os.fchmod(descriptor, 0o644)
                    file.write(data)
                    file.flush()
                    os.fsync(descriptor)
                os.replace(temporary, path.name, src_dir_fd=directory, dst_dir_fd=directory)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary, dir_fd=directory)
                raise


def _parts(inside: str | PurePath) -> tuple[str, ...]:
    """Return the parts of a relative path. Raises ValueError if it leads out of the tree by its name."""
    parts = PurePath(inside).parts
    if PurePath(inside).is_absolute() or ".." in parts:
        raise ValueError(f"{inside} leads out of its directory")
    return parts


def _is_link(name: str, directory: int) -> bool:
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode)
    except OSError:
        return False
