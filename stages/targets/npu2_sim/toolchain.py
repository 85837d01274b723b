"""The fingerprint of the host's compiler, which compiles the simulator for all features of this CPU."""

from __future__ import annotations

import os

from llama_npu2.artifact.cpu_features import cpu_features
from llama_npu2.errors import UserError
from stages.targets.cpu.toolchain import host_compiler_fingerprint

LEVEL = "LLAMA_NPU2_SIM_O"
"""Environment variable with the level at which programs of the simulator are optimised, instead of 3."""


def level() -> str:
    """Return the digit of the compiler's `-O`. Raises UserError if the environment has another value."""
    chosen = os.environ.get(LEVEL) or "3"
    if chosen not in ("0", "1", "2", "3"):
        raise UserError(f"{LEVEL}={chosen}: must be 0 to 3")
    return chosen


def native_fingerprint() -> str | None:
    """Return the version of the host's compiler, the features of this CPU and the level; None without a compiler.

    Raises UserError as `level` does.
    """
    compiler = host_compiler_fingerprint()
    return compiler and f"{compiler} -O{level()} with {' '.join(cpu_features())}"
