"""The simulator is compiled by the host's compiler, for all that this CPU has."""

from __future__ import annotations

from llama_npu2.cpu_features import cpu_features
from stages.targets.cpu.toolchain import host_compiler_fingerprint


def native_fingerprint() -> str | None:
    """The same for objects that use all of this machine's CPU."""
    compiler = host_compiler_fingerprint()
    return compiler and f"{compiler} with {' '.join(cpu_features())}"
