"""What a machine has room for: the error for a full disk, and how many steps run at the same time."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from llama_npu2.cli.table import amount
from llama_npu2.errors import UserError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_WORDS = re.compile(rf"{re.escape(os.strerror(errno.ENOSPC))}|^\d+ requested and \d+ written$")
"""Matches the errors of safetensors and numpy for a full disk, which have no error number."""

ELSEWHERE = "choose another place (artifacts=DIR, for reports output=DIR)"


def no_room(
    error: Exception, places: Iterable[Path], more: Callable[[], str] = str, elsewhere: str = ELSEWHERE
) -> str | None:
    """Return the message for an error of a full disk, a quota or a file size limit; None for other errors.

    Args:
        error: the exception.
        places: the directories that were written to; the fullest counts, unless the error names a file.
        more: returns more text for the message.
        elsewhere: how to choose another place.
    """
    code, file = getattr(error, "errno", None), getattr(error, "filename", None)
    if code == errno.EFBIG:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        most = "what the file system takes" if limit == resource.RLIM_INFINITY else f"{amount(limit)}, see ulimit -f"
        return f"a file would be larger than {most}: raise that, or {elsewhere}"
    if code not in _FULL and not _WORDS.search(str(error)):
        return None
    place = min(map(_existing, [Path(file)] if isinstance(file, str) else places), key=_free)
    what = "your quota is used up" if code == errno.EDQUOT else "the disk is full"
    free = amount(_free(place)) if _free(place) else "nothing"
    return f"{what}: {free} free in {place} (file system {_mounted(place)}){more()}: make room, or {elsewhere}"


def still_to_come(directory: Path, needed: Callable[[], int] | None) -> str:
    """Return the text about bytes that are still to come in a directory; empty where that is not known.

    Args:
        directory: the directory.
        needed: returns its bytes when it is complete.
    """
    with contextlib.suppress(OSError, UserError):
        present = sum(path.lstat().st_size for path in directory.rglob("*") if not path.is_dir())
        if needed and (missing := needed() - present) > 0:
            return f", some {amount(missing)} of this model still to come"
    return ""


def _existing(path: Path) -> Path:
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def _free(path: Path) -> int:
    return shutil.disk_usage(path).free


def _mounted(path: Path) -> Path:
    return next(folder for folder in (path, *path.parents) if os.path.ismount(folder))


MEMORY_OF_LINK = 4 << 30
"""Bytes that a compiler of the NPU's programs may take."""


def at_a_time() -> int:
    """Return how many steps run at the same time: one for each CPU, and for each `MEMORY_OF_LINK` of memory."""
    return max(1, min(len(os.sched_getaffinity(0)), memory() // MEMORY_OF_LINK))


def memory() -> int:
    """Return the bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
