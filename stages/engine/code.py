"""Digests of the code that a step runs: the project's modules that a module imports, found by reading them."""

from __future__ import annotations

import functools
import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import xxhash

from stages.engine.digests import Digests
from stages.engine.places import ROOT, RUNTIME
from stages.engine.syntax import syntax

_OWN = {"stages": ROOT, "llama_npu2": RUNTIME}
"""The project's packages, and the directories that they are in."""


class Code:
    """Digests of modules' code. The imports of a file are remembered by its content, since it takes time to parse."""

    def __init__(self, digests: Digests) -> None:
        self._digests = digests
        self._lock = threading.Lock()
        """Held while something is found out, so that of many threads that ask for the same only one reads it."""
        self._cached: dict[str, str] = {}
        self._lines: dict[tuple[str, Path], tuple[list[str], str]] = {}
        self._imports: dict[str, tuple[list[Path], frozenset[str]]] = {}

    def digest(self, module: str) -> str:
        """Return the xxh3-128, hex, of a module's source and of all project modules that it imports."""
        with self._lock:
            if module not in self._cached:
                self._cached[module] = xxhash.xxh3_128_hexdigest(self._listed(module, "xxh3", self._digests.of))
            return self._cached[module]

    def sha256(self, module: str) -> str:
        """Return the SHA-256, hex, of a module's source and of all project modules that it imports."""
        key = f"sha256 {module}"
        with self._lock:
            if key not in self._cached:
                self._cached[key] = hashlib.sha256(self._listed(module, "sha256", self._digests.sha256)).hexdigest()
            return self._cached[key]

    def _listed(self, module: str, kind: str, digest: Callable[[Path], str | None]) -> bytes:
        """Return a line for each file, in the order of their paths, each made once for all modules."""
        lines, listed = self._lines, []
        for path in self.files(module):
            if (line := lines.get((kind, path))) is None:
                label = path.relative_to(ROOT).as_posix()
                line = lines[kind, path] = label.split("/"), f"{label} {digest(path)}\n"
            listed.append(line)
        return "".join(text for _, text in sorted(listed)).encode()

    def files(self, module: str) -> frozenset[Path]:
        """Return the source files of a module and, transitively, of the project modules that it imports anywhere.

        With each comes the TOML file of the same name, which holds its data.
        """
        seen, todo = {module}, [module]
        found: list[Path] = []
        while todo:
            files, imported = self._read(todo.pop())
            found += files
            new = imported - seen
            seen |= new
            todo += new
        return frozenset(found)

    def _read(self, name: str) -> tuple[list[Path], frozenset[str]]:
        """Return the files of a module and the modules that it imports, both empty if it is not of the project."""
        if name not in self._imports:
            path = _file(name)
            files = [file for file in (path, path.with_suffix(".toml")) if file.is_file()] if path else []
            own = (other for other in self._imported(name, path) if _file(other)) if path else ()
            self._imports[name] = files, frozenset(own)
        return self._imports[name]

    def _imported(self, name: str, path: Path) -> Iterator[str]:
        """Yield the modules that a module imports when it runs.

        A package that imports by name may import all its members.
        """
        statements = self._digests.of_content("imports of ", path, lambda content: syntax(content).imports)
        for level, module, member in statements:
            package = _absolute(level, module, name, path)
            yield inner if member and _file(inner := f"{package}.{member}") else package
        if path.name == "__init__.py" and any(module == "importlib" for _, module, _ in statements):
            yield from _members(name, path.parent)


@functools.cache
def _file(name: str) -> Path | None:
    """Return the file of a project module, None if it is not of the project."""
    package, _, last = name.rpartition(".")
    if not package:
        init = _OWN[name] / name / "__init__.py" if name in _OWN else None
        return init if init and init.is_file() else None
    return _modules(package).get(last)


@functools.cache
def _modules(package: str) -> Mapping[str, Path]:
    """Return the files of the modules and packages in a package of the project, by name; none in what is no package."""
    init = _file(package)
    if init is None or init.name != "__init__.py":
        return {}
    directory, names = init.parent, os.listdir(init.parent)  # noqa: PTH208 - makes no path of each
    inner = {name: directory / name / "__init__.py" for name in names if "." not in name}
    files = {name[:-3]: directory / name for name in names if name.endswith(".py")}
    return files | {name: path for name, path in inner.items() if path.is_file()}


def _absolute(level: int, module: str, name: str, path: Path) -> str:
    """Return the module that an import in the module `name` refers to."""
    if not level:
        return module
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    return ".".join([*package[: len(package) - level + 1], *filter(None, [module])])


def _members(name: str, directory: Path) -> Iterator[str]:
    for path in directory.iterdir():
        if path.suffix == ".py" and path.name != "__init__.py":
            yield f"{name}.{path.stem}"
        elif (path / "__init__.py").is_file():
            yield f"{name}.{path.name}"
