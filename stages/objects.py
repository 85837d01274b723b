"""C++ kernel source -> one object file, and which headers it read."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from runtime.errors import UserError
from stages.object_cache import cached_object
from stages.toolchain import host_compiler_fingerprint, need_host_compiler

CPU_SOURCES = Path("kernel_src/cpu")
CPU_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fno-exceptions", "-fno-rtti", "-Wall", "-Wextra", f"-I{CPU_SOURCES}")


def host_object(source: Path, cache: Path, work: Path) -> list[Path]:
    """Step action: compile one kernel source for the host, or take the object from the cache that all models share.

    Returns the project headers that it includes. Raises UserError.
    """
    output = work / "build/objects" / f"{source.stem}.o"
    output.parent.mkdir(parents=True, exist_ok=True)
    made_by = (host_compiler_fingerprint(), CPU_FLAGS)
    sources = [source, *sorted(source.parent.glob("*.h"))]
    made = cached_object(cache, source.stem, made_by, sources, partial(compile_host, source))
    shutil.copyfile(made.path, output)
    return list(made.read)


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
