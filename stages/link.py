"""Glue and kernel objects -> one shared object per ELF."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stages.objects import CPU_FLAGS, run_compiler


def host_elf(source: Path, objects: Sequence[Path], program: str, work: Path) -> None:
    """Step action: link a program for the host."""
    link_host(source, objects, work / "elf" / f"{program}.so")


def link_host(glue: Path, objects: Sequence[Path], output: Path) -> None:
    """Compile the glue and link it with kernel objects. The result needs nothing but the C library."""
    output.parent.mkdir(parents=True, exist_ok=True)
    # Symbols other than the entry points stay inside: every ELF carries its own kernels.
    only_needed = ("-Wl,--build-id=none", "-Wl,--gc-sections", "-Wl,-Bsymbolic", "-s")
    static = ("-static-libstdc++", "-static-libgcc")
    arguments = [*CPU_FLAGS, str(glue), *map(str, objects), "-shared", "-pthread", *static, *only_needed]
    run_compiler([*arguments, "-o", str(output)], f"{output.name}")
