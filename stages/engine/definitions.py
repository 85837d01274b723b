"""Of what a step's code consists: digests of its functions, classes and constants, so that a change can be named.

They lie in the artifact directory beside the receipts, once for all steps that run the same code, and follow from it
alone. Nothing depends on them but words.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from llama_npu2.artifact.regular import read_regular
from llama_npu2.schema import load_json, mapping, string
from stages.engine.places import ROOT

if TYPE_CHECKING:
    from stages.engine.project import Project

FOLDER = Path("build/code")
OUTSIDE = ""
"""In place of a name: what is in no definition, imports and comments between them."""

Definitions = Mapping[str, Mapping[str, str]]
"""By file, relative to the project, and by name (`Class.method`): the first 8 hex digits of xxh3-64 of the source."""

_DEFINITIONS = mapping(string, mapping(string, string))
_BLOCKS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def definitions(source: bytes) -> dict[str, str]:
    """Of one module. Every line but empty ones belongs to the innermost function, method, class or constant."""
    lines = source.splitlines()
    owners = [OUTSIDE] * len(lines)
    for name, first, last in _spans(ast.parse(source).body, ""):
        owners[first - 1 : last] = [name] * (last - first + 1)
    states: dict[str, xxhash.xxh3_64] = {}
    for owner, line in zip(owners, lines, strict=True):
        if line.strip():
            states.setdefault(owner, xxhash.xxh3_64()).update(line + b"\n")
    return {name: state.hexdigest()[:8] for name, state in states.items()}


def _spans(body: Iterable[ast.stmt], inside: str) -> Iterator[tuple[str, int, int]]:
    """Names with their first and last lines, inner ones behind those that they are in."""
    named = ""
    for node in body:
        if isinstance(node, _BLOCKS):
            named = f"{inside}{node.name}"
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            yield named, first, node.end_lineno or first
            if isinstance(node, ast.ClassDef):
                yield from _spans(node.body, f"{named}.")
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            named = f"{inside}{ast.unparse(target)}"
            yield named, node.lineno, node.end_lineno or node.lineno
        elif named and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield named, node.lineno, node.end_lineno or node.lineno  # what is said of a constant


@functools.cache
def _of_file(path: Path, digest: str) -> dict[str, str]:
    """`digest`: of its content."""
    if path.suffix == ".toml":
        rows = tomllib.loads(path.read_text()).items()
        return {name: xxhash.xxh3_64_hexdigest(repr(value).encode())[:8] for name, value in rows}
    return definitions(path.read_bytes())


def of_module(project: Project, module: str) -> Definitions:
    """Of a module and of all project modules that it imports."""
    paths = sorted(project.code.files(module))
    return {path.relative_to(ROOT).as_posix(): _of_file(path, project.digests.of(path) or "") for path in paths}


def keep(project: Project, module: str) -> None:
    """Write down what the code of `module` is, where that is not there yet. Raises UserError."""
    code = project.code.digest(module)
    if _intact(project, code) is None:
        content = json.dumps(of_module(project, module), separators=(",", ":"), sort_keys=True).encode()
        project.tree.write(FOLDER / f"{code}-{xxhash.xxh3_128_hexdigest(content)}.json", content)


def recorded(project: Project, code: str) -> Definitions | None:
    """Of code by its digest, as a step wrote it down; None if it did not, or that is damaged."""
    path = _intact(project, code)
    try:
        known: Any = load_json(read_regular(path)) if path else None
        _DEFINITIONS(known)
    except (OSError, ValueError):
        return None
    return dict(known)


def settle(project: Project, modules: Iterable[str]) -> None:
    """Of a complete directory, whose steps run `modules`: what is missing or damaged is written again, what is about
    other code goes."""
    current = set(modules)
    with contextlib.suppress(OSError):  # a directory that cannot be written is no worse for it
        for module in current:
            keep(project, module)
        kept = {path.name for module in current if (path := _intact(project, project.code.digest(module)))}
        for name in project.tree.names(FOLDER):
            if name not in kept:
                project.tree.remove_file(FOLDER / name)


def _intact(project: Project, code: str) -> Path | None:
    named = (project.directory / FOLDER).glob(f"{code}-*.json") if code.isalnum() else ()
    return next((path for path in named if project.digests.of(path) == path.stem.partition("-")[2]), None)
