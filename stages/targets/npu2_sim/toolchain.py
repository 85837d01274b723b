"""The fingerprint of the host's compiler, which compiles the simulator for all features of this CPU."""

from __future__ import annotations

from llama_npu2.artifact.cpu_features import cpu_features
from stages.targets.cpu.toolchain import host_compiler_fingerprint


def native_fingerprint() -> str | None:
    """Return the version of the host's compiler and the features of this CPU; None without a compiler."""
    compiler = host_compiler_fingerprint()
    return compiler and f"{compiler} with {' '.join(cpu_features())}"
