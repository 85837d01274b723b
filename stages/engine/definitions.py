"""Digests of the functions, classes and constants that a step's code consists of, so that a change can be named.

They lie in the artifact directory next to the receipts, once for all steps that run the same code, and follow from the
code alone. Only messages depend on them.
"""

from __future__ import annotations

import contextlib
import functools
import json
import threading
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from llama_npu2.artifact.regular import read_regular
from llama_npu2.schema import load_json, mapping, string
from stages.engine.places import ROOT
from stages.engine.syntax import syntax

if TYPE_CHECKING:
    from stages.engine.project import Project

FOLDER = Path("build/code")
OUTSIDE = ""
"""Stands for the name of the lines that are in no definition: imports, and comments between definitions."""

Definitions = Mapping[str, Mapping[str, str]]
"""The first 8 hex digits of the xxh3-64 of a definition's source, by file (relative to the project) and by name
(`Class.method`)."""

_KEEPING = threading.Lock()
"""Held while definitions are written, so that of many steps that end at the same time only one finds them."""

_DEFINITIONS = mapping(string, mapping(string, string))


def definitions(source: bytes) -> dict[str, str]:
    """Return the digests of a module's definitions, by name.

    Every line but empty ones belongs to the innermost function, method, class or constant.
    """
    lines = source.splitlines()
    owners = [OUTSIDE] * len(lines)
    for name, first, last in syntax(source).definitions:
        owners[first - 1 : last] = [name] * (last - first + 1)
    states: dict[str, xxhash.xxh3_64] = {}
    for owner, line in zip(owners, lines, strict=True):
        if line.strip():
            states.setdefault(owner, xxhash.xxh3_64()).update(line + b"\n")
    return {name: state.hexdigest()[:8] for name, state in states.items()}


@functools.cache
def _of_file(path: Path, digest: str) -> dict[str, str]:
    """Return the definitions of a file whose content has this digest."""
    if path.suffix == ".toml":
        rows = tomllib.loads(path.read_text()).items()
        return {name: xxhash.xxh3_64_hexdigest(repr(value).encode())[:8] for name, value in rows}
    return definitions(path.read_bytes())


def of_module(project: Project, module: str) -> Definitions:
    """Return the definitions of a module and of all project modules that it imports."""
    paths = sorted(project.code.files(module))
    return {path.relative_to(ROOT).as_posix(): _of_file(path, project.digests.of(path) or "") for path in paths}


def keep(project: Project, module: str) -> str:
    """Write down the definitions of a module's code, unless they are there.

    Return the file's name. Raises UserError.
    """
    code = project.code.digest(module)
    with _KEEPING:
        if there := _intact(project, code):
            return there.name
        content = json.dumps(of_module(project, module), separators=(",", ":"), sort_keys=True).encode()
        name = f"{code}-{xxhash.xxh3_128_hexdigest(content)}.json"
        project.tree.write(FOLDER / name, content)
        return name


def recorded(project: Project, code: str) -> Definitions | None:
    """Return the definitions that a step wrote down of code with this digest.

    None if it did not, or they are damaged.
    """
    path = _intact(project, code)
    try:
        content: Any = load_json(read_regular(path)) if path else None
        _DEFINITIONS(content)
    except (OSError, ValueError):
        return None
    return dict(content)


def settle(project: Project, modules: Iterable[str]) -> None:
    """Bring the definitions of a complete directory, whose steps run `modules`, up to date.

    Missing and damaged ones are written again, and those of other code are removed.
    """
    current = set(modules)
    with contextlib.suppress(OSError):  # a directory that cannot be written works without them
        kept = {name for module in current if (name := keep(project, module))}
        for name in project.tree.names(FOLDER):
            if name not in kept:
                project.tree.remove_file(FOLDER / name)


def _intact(project: Project, code: str) -> Path | None:
    named = (project.directory / FOLDER).glob(f"{code}-*.json") if code.isalnum() else ()
    return next((path for path in named if project.digests.of(path) == path.stem.partition("-")[2]), None)
