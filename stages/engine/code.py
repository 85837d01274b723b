"""Digests of the code that a step runs: the project's modules that a module imports, found by reading them."""

from __future__ import annotations

import ast
import functools
import hashlib
import threading
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import xxhash

from stages.engine.digests import Digests
from stages.engine.places import ROOT, RUNTIME

_OWN = {"stages": ROOT, "llama_npu2": RUNTIME}
"""The project's packages, and the directories that they are in."""

_PARSING = threading.Lock()

Import = tuple[int, str, str]
"""Level (0: absolute), module, and the name that is imported from it (empty: the module itself)."""


class Code:
    """Digests of modules' code. The imports of files are remembered in the same way as their digests."""

    def __init__(self, digests: Digests) -> None:
        self._digests = digests
        self._cached: dict[str, str] = {}
        self._imports: dict[str, tuple[list[Path], list[str]]] = {}

    def digest(self, module: str) -> str:
        """Return the xxh3-128, hex, of a module's source and of all project modules that it imports."""
        if module not in self._cached:
            self._cached[module] = xxhash.xxh3_128_hexdigest(self._listed(module, self._digests.of))
        return self._cached[module]

    def sha256(self, module: str) -> str:
        """Return the SHA-256, hex, of a module's source and of all project modules that it imports."""
        key = f"sha256 {module}"
        if key not in self._cached:
            self._cached[key] = hashlib.sha256(self._listed(module, self._digests.sha256)).hexdigest()
        return self._cached[key]

    def _listed(self, module: str, digest: Callable[[Path], str | None]) -> bytes:
        lines = (f"{path.relative_to(ROOT).as_posix()} {digest(path)}\n" for path in sorted(self.files(module)))
        return "".join(lines).encode()

    def files(self, module: str) -> frozenset[Path]:
        """Return the source files of a module and, transitively, of the project modules that it imports anywhere.

        With each comes the TOML file of the same name, which holds its data.
        """
        found: dict[str, list[Path]] = {}
        todo = [module]
        while todo:
            if (name := todo.pop()) not in found:
                found[name], imported = self._read(name)
                todo += imported
        return frozenset(chain.from_iterable(found.values()))

    def _read(self, name: str) -> tuple[list[Path], list[str]]:
        """Return the files of a module and the modules that it imports, both empty if it is not of the project."""
        if name not in self._imports:
            path = _file(name)
            files = [file for file in (path, path.with_suffix(".toml")) if file.is_file()] if path else []
            self._imports[name] = files, list(self._imported(name, path)) if path else []
        return self._imports[name]

    def _imported(self, name: str, path: Path) -> Iterator[str]:
        """Yield the modules that a module imports when it runs.

        A package that imports by name may import all its members.
        """
        statements = self._digests.remembered("imports ", path, lambda p: list(imports(p.read_bytes())))
        for level, module, member in statements:
            package = _absolute(level, module, name, path)
            yield inner if member and _file(inner := f"{package}.{member}") else package
        if path.name == "__init__.py" and any(module == "importlib" for _, module, _ in statements):
            yield from _members(name, path.parent)


def parse(source: bytes) -> ast.Module:
    """Return a syntax tree. Python 3.11 fails where two threads make trees at the same time (cpython #106905)."""
    with _PARSING:
        return ast.parse(source)


def imports(source: bytes) -> Iterator[Import]:
    """Yield every import of a module but those for type checkers only."""
    for node in _executed(parse(source)):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.level, node.module or "", alias.name) for alias in node.names)


def _executed(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        yield node
        yield from _executed(node)


@functools.cache
def _file(name: str) -> Path | None:
    """Return the file of a project module, None if it is not of the project."""
    first, *rest = name.split(".")
    if first not in _OWN:
        return None
    path = _OWN[first].joinpath(first, *rest)
    return next((p for p in (path / "__init__.py", path.with_suffix(".py")) if p.is_file()), None)


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
