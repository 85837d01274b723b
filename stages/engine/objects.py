"""Compiles the objects that modules link, and runs compilers.

Next to every generated module lies a description (JSON); its `objects` lists the objects that the module links, each as
`[source, *flags]`, the source as `<kernel set>/<stem>`.
"""

from __future__ import annotations

import os
import re
import subprocess
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from llama_npu2.errors import UserError
from stages.engine.files import read_json
from stages.engine.object_cache import CachedObject, copy_cached
from stages.engine.places import KERNELS, OBJECTS, kernel_files
from stages.engine.progress import say, speaker

_running: set[subprocess.Popen[str]] = set()
"""The compilers that threads of this process wait for."""
_one_for_each_cpu = threading.BoundedSemaphore(os.cpu_count() or 1)

_ERROR = re.compile(r"\berror\b", re.IGNORECASE)


def source_file(source: str) -> Path:
    """Return the C++ file of `<kernel set>/<stem>`, or `<kernel set>/<stem>.<variant>`."""
    return (KERNELS / source).with_suffix(".cc")


class ListedObject(NamedTuple):
    """An object in a module's description."""

    source: str
    """`<kernel set>/<stem>`."""
    flags: list[str]


def listed_objects(module: Path) -> dict[str, ListedObject]:
    """Return the objects in a module's description, by name."""
    objects = read_json(module.with_suffix(".json"))["objects"]
    return {name: ListedObject(source, flags) for name, (source, *flags) in objects.items()}


def linked(module: Path) -> dict[str, Path]:
    """Return the paths, in its artifact directory, of the objects that a module links, by name."""
    return {name: module.parents[2] / OBJECTS / listed.source / name for name, listed in listed_objects(module).items()}


def flags_by_object(source: str, modules: Iterable[Path]) -> dict[str, list[str]]:
    """Return the flags of the objects of a source that modules link, by name."""
    objects = (entry for module in modules for entry in listed_objects(module).items())
    return {name: listed.flags for name, listed in objects if listed.source == source}


def write_objects(
    source: str, objects: dict[str, list[str]], compile_one: Callable[[str, Sequence[str]], CachedObject], work: Path
) -> list[Path]:
    """Write the objects of a source below `work`, several at a time.

    Args:
        source: `<kernel set>/<stem>`.
        objects: flags, by name.
        compile_one: returns the object for a name and its flags.
        work: the step's work directory.

    Returns:
        The project's files that the compiler read.
    """
    directory = work / OBJECTS / source
    directory.mkdir(parents=True)

    from stages.engine.bar import Bar

    def make(name: str, flags: Sequence[str]) -> Sequence[Path]:
        read = copy_cached(lambda: compile_one(name, flags), directory / name)
        bar.update()
        return read

    with (
        ThreadPoolExecutor(os.cpu_count()) as pool,
        Bar(total=len(objects), desc="objects", disable=speaker() is None) as bar,
    ):
        read = list(pool.map(make, objects, objects.values()))
    return sorted({path for paths in read for path in paths})


def run_compiler(command: Sequence[str], failed: str) -> None:
    """Run a compiler or linker. Raises UserError: `failed` and its first error."""
    say(f"waiting for {Path(command[0]).name}")
    none, pipe = subprocess.DEVNULL, subprocess.PIPE
    with (
        _one_for_each_cpu,
        subprocess.Popen(command, text=True, stdin=none, stdout=none, stderr=pipe) as compiler,
    ):
        _running.add(compiler)
        try:
            _, errors = compiler.communicate()
        finally:
            _running.discard(compiler)
            compiler.kill()
    if compiler.returncode:
        raise UserError(f"{failed}: {complaint(errors)}")


def stop_compilers() -> None:
    """End the compilers of this process."""
    for compiler in list(_running):
        compiler.terminate()


def complaint(output: str) -> str:
    """Return the first line about an error in a tool's output, or its first line if none is."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return next(filter(_ERROR.search, lines), lines[0] if lines else "no message")


def compile_object(command: Sequence[str], source: Path, output: Path, failed: str) -> list[Path]:
    """Compile a source; return the project's files that the compiler read: the source and headers. Raises UserError."""
    return compiled([*command, "-c", str(source)], output, failed)


def compiled(command: Sequence[str], output: Path, failed: str) -> list[Path]:
    """Run a compiler, which may link as well, to make `output`; return the project's files that it read.

    Raises UserError.
    """
    dependencies = output.with_suffix(".d")
    try:
        run_compiler([*command, "-o", str(output), "-MMD", "-MF", str(dependencies)], failed)
        return read_dependencies(dependencies)
    finally:
        dependencies.unlink(missing_ok=True)


def read_dependencies(path: Path) -> list[Path]:
    """Return the kernel sources in a make-style dependency file."""
    text = path.read_text().partition(":")[2].replace("\\\n", " ")
    return kernel_files(Path(name.replace("\\ ", " ")) for name in re.split(r"(?<!\\)\s+", text) if name)
