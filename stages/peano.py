"""Tile functions -> object files for the NPU's cores, by Peano; and which headers they read."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from runtime.errors import UserError
from stages.files import content_digest, write_atomic
from stages.objects import read_dependencies
from stages.toolchain import aie_api, need_npu_tools, peano, peano_fingerprint

TILE_SOURCES = Path("kernel_src/aie2p")
FLAGS = (
    "--target=aie2p-none-unknown-elf",
    "-O2",
    "-std=c++20",
    "-DNDEBUG",
    "-Wno-parentheses",
    "-Wno-attributes",
    "-Wno-macro-redefined",
    "-Wno-empty-body",
)


@dataclass(frozen=True)
class TileObject:
    """An object in the cache, and the project's sources that it was made from."""

    path: Path
    read: tuple[Path, ...]


def tile_object(name: str, stem: str, flags: Sequence[str], cache: Path, work: Path) -> list[Path]:
    """Step action: one object variant as `build/objects/NAME`. Returns the project headers that it includes."""
    made = compile_tile(name, stem, flags, cache)
    output = work / "build/objects" / name
    output.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(made.path, output)
    return [path for path in made.read if path.suffix != ".cc"]


def compile_tile(name: str, stem: str, flags: Sequence[str], cache: Path) -> TileObject:
    """Object `name` of `kernel_src/aie2p/<stem>.cc` with `flags` (`Variant.flags()`), from `cache` if content, flags
    and compiler are known there. Raises UserError."""
    need_npu_tools("Peano", "AIE API headers")
    source = TILE_SOURCES / f"{stem}.cc"
    entry = cache / f"{Path(name).stem}-{_cache_key(source, flags)}.json"
    output = entry.with_suffix(".o")
    read = _from_cache(entry, output)
    if read is None:
        cache.mkdir(parents=True, exist_ok=True)
        partial = output.with_suffix(f".{os.getpid()}-{threading.get_ident()}.o")
        try:
            read = [source, *_compile(source, name, flags, partial)]
            record = {"object": content_digest(partial), "read": list(map(str, read))}
            partial.replace(output)
        finally:
            partial.unlink(missing_ok=True)
        write_atomic(entry, json.dumps(record).encode())
    return TileObject(output, tuple(read))


def command_line(source: Path, flags: Sequence[str], output: Path, dependencies: Path) -> list[str]:
    """Peano's command for one object. The tools are there."""
    compiler, headers = peano(), aie_api()
    assert compiler and headers
    paths = [f"-I{headers.path}", f"-I{TILE_SOURCES}"]
    outputs = ["-c", str(source), "-o", str(output), "-MMD", "-MF", str(dependencies)]
    return [str(compiler.path / "bin/clang++"), *FLAGS, *paths, *flags, *outputs]


def _compile(source: Path, name: str, flags: Sequence[str], output: Path) -> list[Path]:
    dependencies = output.with_suffix(".d")
    command = command_line(source, flags, output, dependencies)
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        if run.returncode or not output.is_file():
            lines = run.stderr.splitlines()
            first = next((line for line in lines if "error" in line.lower()), lines[-1] if lines else "no message")
            raise UserError(f"{source} does not compile for the NPU as {name}: {first.strip()}")
        return read_dependencies(dependencies, source) if dependencies.exists() else []
    finally:
        dependencies.unlink(missing_ok=True)


def _cache_key(source: Path, flags: Sequence[str]) -> str:
    """Covers all that can change the object: compiler, API headers, flags, the source, every header beside it."""
    state = xxhash.xxh3_128(repr((peano_fingerprint(), FLAGS, tuple(flags))).encode())
    for path in [source, *sorted(source.parent.glob("*.h"))]:
        state.update(f"{path.name} {content_digest(path)}\n".encode())
    return state.hexdigest()


def _from_cache(entry: Path, output: Path) -> list[Path] | None:
    """What the cached object was made from, if it is there and intact."""
    try:
        record = json.loads(entry.read_text())
        return [Path(p) for p in record["read"]] if content_digest(output) == record["object"] else None
    except (OSError, ValueError, KeyError):
        return None
