"""What code a step runs: the project's modules that a module imports, found by reading them."""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import xxhash

from stages.engine.digests import Digests
from stages.engine.places import ROOT, RUNTIME

_OWN = {"stages": ROOT, "llama_npu2": RUNTIME}
"""The project's packages, and where they are."""

Import = tuple[int, str, str]
"""Level (0: absolute), module, and what of it (empty: itself)."""


class Code:
    """Digests of modules' code. What files import is remembered as their digests are."""

    def __init__(self, digests: Digests) -> None:
        self._digests = digests
        self._known: dict[str, str] = {}

    def digest(self, module: str) -> str:
        """xxh3-128, hex, of a module's source and of all project modules it imports."""
        if module not in self._known:
            self._known[module] = xxhash.xxh3_128_hexdigest(self._listed(module, self._digests.of))
        return self._known[module]

    def sha256(self, module: str) -> str:
        """SHA-256 of the same."""
        known = f"sha256 {module}"
        if known not in self._known:
            self._known[known] = hashlib.sha256(self._listed(module, self._digests.sha256)).hexdigest()
        return self._known[known]

    def _listed(self, module: str, digest: Callable[[Path], str | None]) -> bytes:
        lines = (f"{path.relative_to(ROOT).as_posix()} {digest(path)}\n" for path in sorted(self.files(module)))
        return "".join(lines).encode()

    def files(self, module: str) -> frozenset[Path]:
        """Source files of a module and, transitively, of what it imports from this project, wherever in it; with each
        the TOML file of the same name, which holds its data."""
        found: dict[str, Path | None] = {}
        todo = [module]
        while todo:
            name = todo.pop()
            if name not in found:
                found[name] = path = _file(name)
                todo += self._imported(name, path) if path else ()
        sources = (path for path in found.values() if path)
        return frozenset(file for path in sources for file in (path, path.with_suffix(".toml")) if file.is_file())

    def _imported(self, name: str, path: Path) -> Iterator[str]:
        """Modules that a module imports when it runs. A package that imports by name may import all its members."""
        said = self._digests.remembered("imports ", path, lambda p: list(imports(p.read_bytes())))
        for level, module, member in said:
            package = _absolute(level, module, name, path)
            yield inner if member and _file(inner := f"{package}.{member}") else package
        if path.name == "__init__.py" and any(module == "importlib" for _, module, _ in said):
            yield from _members(name, path.parent)


def imports(source: bytes) -> Iterator[Import]:
    """Every import of a module but those that are for type checkers only."""
    for node in _executed(ast.parse(source)):
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
    """Where one of the project's modules is."""
    first, *rest = name.split(".")
    if first not in _OWN:
        return None
    path = _OWN[first].joinpath(first, *rest)
    return next((p for p in (path / "__init__.py", path.with_suffix(".py")) if p.is_file()), None)


def _absolute(level: int, module: str, name: str, path: Path) -> str:
    """The module that an import means in the module `name`."""
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
