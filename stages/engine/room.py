"""What a user is told where a disk is full: where that is, how much is free, how much is still to come, what to do."""

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
"""Of safetensors and numpy, which do not say by a number that a disk is full."""

ELSEWHERE = "choose another place (artifacts=DIR, for reports output=DIR)"


def no_room(
    error: Exception, places: Iterable[Path], more: Callable[[], str] = str, elsewhere: str = ELSEWHERE
) -> str | None:
    """What to tell a user, None of an error that is about something else. `places`: where whoever met it writes; the
    fullest counts, unless the error names a file. `more`: asked for what else is known. `elsewhere`: how to choose
    another place."""
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
    """Of a directory that takes `needed()` bytes when it is complete, as more to tell; "" where that is not known."""
    with contextlib.suppress(OSError, UserError):
        there = sum(path.lstat().st_size for path in directory.rglob("*") if not path.is_dir())
        if needed and (missing := needed() - there) > 0:
            return f", some {amount(missing)} of this model still to come"
    return ""


def _existing(path: Path) -> Path:
    path = path.absolute()
    return next(each for each in (path, *path.parents) if each.is_dir())


def _free(path: Path) -> int:
    return shutil.disk_usage(path).free


def _mounted(path: Path) -> Path:
    return next(each for each in (path, *path.parents) if os.path.ismount(each))
