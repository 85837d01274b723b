"""Reads files that somebody else may have put there, without waiting for a pipe or reading a device without end."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
"""Flags that open a file for reading, and never wait for the other end of a pipe."""

LARGEST_JSON = 64 << 20
"""Most bytes of a JSON file that is read whole. The manifest of a model with a hundred layers has one MiB."""


def open_regular(path: Path) -> int:
    """Open a regular file for reading.

    A pipe, which would be waited for, and a device, which may have no end, are refused.

    Args:
        path: The file; a symbolic link is followed.

    Returns:
        A descriptor that the caller closes.

    Raises:
        OSError: The file cannot be opened, or it is no regular file (EINVAL).
    """
    return checked_regular(os.open(path, READ), path)


def checked_regular(descriptor: int, path: Path) -> int:
    """Return a descriptor of a regular file. Any other is closed, and OSError (EINVAL) is raised for `path`."""
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "is not a regular file", str(path))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_regular(path: Path, most: int = LARGEST_JSON) -> bytes:
    """Read a small regular file whole.

    Args:
        path: The file; a symbolic link is followed.
        most: Bytes that it may have. A sparse file takes no disk, but it takes memory when it is read.

    Raises:
        OSError: The file cannot be read, is no regular file (EINVAL), or has more than `most` bytes (EFBIG).
    """
    with os.fdopen(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"has more than {most} bytes", str(path))
        return file.read(size)  # `most` would be allocated before anything is read


def can_be_a_path(name: str) -> bool:
    """Return whether file systems take a path: at most 255 bytes between slashes, and 1,000 letters in all."""
    return len(name) <= 1000 and all(len(part.encode()) <= 255 for part in name.split("/"))
