"""The C++ compiler of this machine, and its options for kernels.

Its version is known too, so that a changed compiler rebuilds what it made.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys

from llama_npu2.errors import UserError
from stages.engine.places import KERNELS
from stages.weights.constants import macros

FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fno-exceptions", "-fno-rtti", "-Wall", "-Wextra", *macros())
INCLUDE = f"-I{KERNELS / 'cpu'}"


_SEARCHED = ("CPATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", "COMPILER_PATH", "GCC_EXEC_PREFIX")
"""Variables that lead a compiler to other headers and libraries."""


def host_system() -> dict[str, str]:
    """Return the properties of this machine that the compiler's output may depend on, besides the compiler."""
    searched = {name: os.environ[name] for name in _SEARCHED if name in os.environ}
    libc = " ".join(platform.libc_ver())
    return {"system": sys.platform, "machine": platform.machine(), "libc": libc, **searched}


@functools.cache
def host_compiler() -> tuple[str, ...] | None:
    """Command of the host C++ compiler: `CXX`, then the system's, then the `ziglang` wheel; None if there is none."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    if chosen:
        return tuple(chosen) if shutil.which(chosen[0]) else None
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return (name,)
    if importlib.util.find_spec("ziglang"):
        return (sys.executable, "-m", "ziglang", "c++")
    return None


def need_host_compiler() -> tuple[str, ...]:
    """The host compiler, or UserError that says how to get one."""
    chosen = os.environ.get("CXX")
    if chosen and not shutil.which(shlex.split(chosen)[0]):
        raise UserError(f"CXX={chosen}: no such program on PATH: set CXX to a C++ compiler or unset it")
    command = host_compiler()
    if command is None:
        raise UserError("no C++ compiler found: install one (apt install g++), set CXX, or `pip install ziglang`")
    return command


@functools.cache
def host_compiler_fingerprint() -> str | None:
    """Return the version line, the options and the machine of the host compiler, None without one.

    The options are those that it always gets; the machine is the one that it compiles for.
    """
    command = host_compiler()
    if command is None:
        return None
    run = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
    line = (run.stdout or run.stderr).partition(chr(10))[0].strip()
    return " ".join([line, *command[1:], "for", platform.machine()])
