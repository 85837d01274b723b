"""Glue and kernel objects -> one shared object, which needs nothing but the C library."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stages.engine.objects import compiled, linked
from stages.targets.cpu.toolchain import FLAGS, INCLUDE, need_host_compiler
from stages.targets.cpu.toolchain import host_compiler_fingerprint as fingerprint

__all__ = ["DESCRIBES", "SUFFIX", "fingerprint", "link_host", "write_program"]

SUFFIX = ".so"
DESCRIBES = False


def write_program(module: Path, library: str, work: Path) -> list[Path]:
    """Step action: link a library for the host; returns its objects and the headers of its glue."""
    objects = list(linked(module).values())
    return [*objects, *link_host(module, objects, work / "elf" / f"{library}{SUFFIX}")]


def link_host(glue: Path, objects: Sequence[Path], output: Path) -> list[Path]:
    """Compile the glue and link it with kernel objects; returns the project's files that it read besides.

    Raises UserError.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    # Symbols other than the entry points stay inside: every library carries its own kernels.
    only_needed = ("-Wl,--build-id=none", "-Wl,--gc-sections", "-Wl,-Bsymbolic", "-s")
    static = ("-static-libstdc++", "-static-libgcc")
    inputs = [INCLUDE, str(glue), *map(str, objects), "-shared", "-pthread", *static, *only_needed]
    return compiled([*need_host_compiler(), *FLAGS, *inputs], output, f"{output.name} does not compile")
