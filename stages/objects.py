"""C++ kernel source -> one object file, and which headers it read."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import xxhash

from runtime.errors import UserError
from stages.files import content_digest, write_atomic
from stages.toolchain import host_compiler_fingerprint, need_host_compiler

CPU_SOURCES = Path("kernel_src/cpu")
CPU_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fno-exceptions", "-fno-rtti", "-Wall", "-Wextra", f"-I{CPU_SOURCES}")


def host_object(source: Path, cache: Path, work: Path) -> list[Path]:
    """Step action: compile one kernel source for the host, or take the object from the cache that all models share.

    Returns the project headers that it includes. Raises UserError.
    """
    output = work / "build/objects" / f"{source.stem}.o"
    output.parent.mkdir(parents=True, exist_ok=True)
    entry = cache / f"{source.stem}-{_cache_key(source)}.json"
    headers = _from_cache(entry, output)
    if headers is None:
        headers = compile_host(source, output)
        write_atomic(entry.with_suffix(".o"), output.read_bytes())
        write_atomic(entry, json.dumps({"object": content_digest(output), "headers": list(map(str, headers))}).encode())
    return headers


def _cache_key(source: Path) -> str:
    """Covers everything that can change the object: compiler, flags, the source and every header beside it."""
    state = xxhash.xxh3_128(repr((host_compiler_fingerprint(), CPU_FLAGS)).encode())
    for path in [source, *sorted(source.parent.glob("*.h"))]:
        state.update(f"{path.name} {content_digest(path)}\n".encode())
    return state.hexdigest()


def _from_cache(entry: Path, output: Path) -> list[Path] | None:
    """Copy the cached object if it is there and intact."""
    try:
        record = json.loads(entry.read_text())
        shutil.copyfile(entry.with_suffix(".o"), output)
        return [Path(h) for h in record["headers"]] if content_digest(output) == record["object"] else None
    except (OSError, ValueError, KeyError):
        return None


def compile_host(source: Path, output: Path) -> list[Path]:
    """Compile `source` to the object `output`; return the project headers that it included. Raises UserError."""
    dependencies = output.with_suffix(".d")
    run_compiler([*CPU_FLAGS, "-c", str(source), "-o", str(output), "-MMD", "-MF", str(dependencies)], str(source))
    headers = read_dependencies(dependencies, source)
    dependencies.unlink()
    return headers


def run_compiler(arguments: Sequence[str], what: str) -> None:
    """Run the host compiler. A failure is one UserError with the compiler's first error line."""
    run = subprocess.run([*need_host_compiler(), *arguments], capture_output=True, text=True, check=False)
    if run.returncode:
        lines = run.stderr.splitlines()
        first = next((line for line in lines if "error" in line.lower()), lines[0] if lines else "no message")
        raise UserError(f"{what} does not compile: {first.strip()}")


def read_dependencies(path: Path, source: Path) -> list[Path]:
    """Headers below the kernel sources in a make-style dependency file."""
    text = path.read_text().partition(":")[2].replace("\\\n", " ")
    files = [Path(name.replace("\\ ", " ")) for name in re.split(r"(?<!\\)\s+", text) if name]
    return sorted({f for f in files if f != source and not f.is_absolute()})
