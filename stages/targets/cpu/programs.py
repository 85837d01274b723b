"""Glue and kernel objects -> one shared object, which needs nothing but the C library."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from stages.engine.object_cache import cached_object, copy_cached
from stages.engine.objects import compiled, linked
from stages.targets.cpu.instruction_sets import SOURCES
from stages.targets.cpu.toolchain import FLAGS, INCLUDE, host_system, need_host_compiler
from stages.targets.cpu.toolchain import host_compiler_fingerprint as fingerprint

__all__ = ["DESCRIBES", "SUFFIX", "fingerprint", "link_host", "write_program"]

SUFFIX = ".so"
DESCRIBES = False

# Symbols other than the entry points stay inside: every library carries its own kernels.
_ONLY_NEEDED = ("-Wl,--build-id=none", "-Wl,--gc-sections", "-Wl,-Bsymbolic", "-s")
_LINK = ("-shared", "-pthread", "-static-libstdc++", "-static-libgcc", *_ONLY_NEEDED)


def write_program(module: Path, library: str, cache: Path, work: Path) -> list[Path]:
    """Step action: link a library for the host; returns its objects and the headers of its glue."""
    objects = list(linked(module).values())
    made_by = (fingerprint(), FLAGS, _LINK, host_system())
    sources = [module, *objects, *sorted(SOURCES.glob("*.h"))]
    make = partial(link_host, module, objects)
    link = partial(cached_object, cache, library, made_by, sources, make)
    return [*objects, *copy_cached(link, work / "elf" / f"{library}{SUFFIX}")]


def link_host(glue: Path, objects: Sequence[Path], output: Path) -> list[Path]:
    """Compile the glue and link it with kernel objects; returns the project's files that it read besides.

    Raises UserError.
    """
    inputs = [INCLUDE, str(glue), *map(str, objects), *_LINK]
    return compiled([*need_host_compiler(), *FLAGS, *inputs], output, f"{glue.name} does not compile")
