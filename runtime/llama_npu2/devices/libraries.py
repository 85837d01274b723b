"""Loads the native code of artifacts: the very bytes that were compared with the manifest, never a file by its name."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import json
import os
from typing import Any

from llama_npu2.artifact.storage import File
from llama_npu2.errors import UserError

_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE

_loaded: dict[str, ctypes.CDLL] = {}
"""The loaded libraries by SHA-256, hex."""


def open_library(file: File) -> ctypes.CDLL:
    """Load a shared object. Raises UserError."""
    if file.sha256 in _loaded:
        return _loaded[file.sha256]
    try:
        content = file.read_bytes()
        key = hashlib.sha256(content).hexdigest()
        if key not in _loaded:
            _loaded[key] = _load(content)
            _loaded[key]._name = str(file.path)  # for messages
    except OSError as error:
        why = error.strerror or str(error).partition(": ")[2] or str(error)
        raise UserError(f"{file.path} cannot be loaded ({why}): rebuild it with doit compile") from None
    return _loaded[key]


def entry_point(library: ctypes.CDLL, name: str) -> tuple[Any, dict[str, Any]]:
    """Return a program of a library, and its description, the JSON text `<name>_info`. Raises UserError."""
    try:
        info = ctypes.c_char.in_dll(library, f"{name}_info")
        # An item is always a symbol; an attribute may be one of Python's.
        return library[name], json.loads(ctypes.string_at(ctypes.addressof(info)))
    except (AttributeError, ValueError):
        raise UserError(f"{library._name} has no program {name}: rebuild it with doit compile") from None


def _load(content: bytes) -> ctypes.CDLL:
    """Load a library from memory.

    The dynamic loader knows files by name, and returns old code for a name that it has met. The descriptor stays open
    so that no other file can take its name.
    """
    descriptor = anonymous_file(content)
    try:
        return ctypes.CDLL(descriptor_path(descriptor))
    except OSError:
        os.close(descriptor)
        raise


def anonymous_file(content: bytes) -> int:
    """Return the descriptor of a file in memory with `content`, which nobody can change any more. Raises OSError."""
    descriptor = os.memfd_create("llama-npu2", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    return descriptor


def descriptor_path(descriptor: int) -> str:
    """Return a path that names an open file in this process."""
    return f"/proc/self/fd/{descriptor}"
