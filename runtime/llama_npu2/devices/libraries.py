"""Loading the shared objects of an artifact directory."""

from __future__ import annotations

import ctypes
import os

from llama_npu2.errors import UserError
from llama_npu2.storage import File

_loaded: dict[tuple[int, int], ctypes.CDLL] = {}


def open_library(file: File) -> ctypes.CDLL:
    """Load a shared object. Raises UserError.

    The dynamic loader knows files by name, and would hand out the old code after a rebuild has replaced one. So it is
    given the name of a descriptor, which stays open: no other file can take that name, or that inode.
    """
    try:
        descriptor = os.open(file.container, os.O_RDONLY | os.O_CLOEXEC)
        status = os.fstat(descriptor)
        key = (status.st_dev, status.st_ino)
        if key in _loaded:
            os.close(descriptor)
        else:
            _loaded[key] = _load(descriptor)
            _loaded[key]._name = str(file.path)  # for messages
    except OSError as error:
        why = error.strerror or str(error).partition(": ")[2] or str(error)
        raise UserError(f"{file.path} cannot be loaded ({why}): rebuild it with doit compile") from None
    return _loaded[key]


def _load(descriptor: int) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(f"/proc/self/fd/{descriptor}")
    except OSError:
        os.close(descriptor)
        raise
