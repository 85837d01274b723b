"""Ends a process as soon as its work is done.

Python takes down every module before it ends, which takes as long as a tenth of a short reply, and nobody needs it.
"""

from __future__ import annotations

import atexit
import os
import sys

_status: int | None = None


def at_once(status: int) -> int:
    """Return the status, with which the process ends after its exit handlers if it ends now."""
    global _status
    _status = status
    return status


def _end() -> None:
    """Run as the last exit handler, because it is the first one that is registered."""
    if _status is None:
        return
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        return  # Python says so
    os._exit(_status)


atexit.register(_end)
