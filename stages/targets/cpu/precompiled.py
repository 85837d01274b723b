"""The system's headers, which a process that compiles kernels reads once: a compiler takes 0.3 s for intrinsics."""

from __future__ import annotations

import functools
import os
import subprocess
import tempfile
import threading
from pathlib import Path

from stages.targets.cpu.instruction_sets import SOURCES
from stages.targets.cpu.toolchain import FLAGS, host_compiler_fingerprint, need_host_compiler

HEADER = SOURCES / "system.h"

_lock = threading.Lock()
_owner = os.getpid()


def system_headers() -> list[str]:
    """Return the options by which a kernel's source begins with the system's headers, precompiled where possible.

    Only a process that removes its files when it ends makes some: those that it forks do not.
    """
    with _lock:
        directory = _precompiled() if os.getpid() == _owner else None
    return [*([f"-I{directory.name}"] if directory else []), "-include", HEADER.name]


@functools.cache
def _precompiled() -> tempfile.TemporaryDirectory[str] | None:
    """Return a directory that holds them for this process alone; None where the compiler is no GCC, or fails."""
    version = host_compiler_fingerprint() or ""
    if "clang" in version or "zig" in version:
        return None
    try:
        directory = tempfile.TemporaryDirectory(prefix="llama-npu2-headers-")
    except OSError:
        return None
    output = Path(directory.name) / f"{HEADER.name}.gch"
    command = [*need_host_compiler(), *FLAGS, "-x", "c++-header", str(HEADER), "-o", str(output)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        output.unlink(missing_ok=True)
        return None
    return directory
