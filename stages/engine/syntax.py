"""What the statements of a Python module say: what it imports, and which lines its definitions are.

Both are read at once, and once in a process, whatever artifact directories ask: to parse the project takes a second.
"""

from __future__ import annotations

import ast
import functools
import threading
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_PARSING = threading.Lock()
"""Python 3.11 fails where two threads make syntax trees at the same time (cpython #106905)."""

_PARTS = ("body", "handlers", "cases", "orelse", "finalbody")
"""Fields of syntax trees that hold statements, or parts of one that do, in their order."""

_BLOCKS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)

Import = tuple[int, str, str]
"""Level (0: absolute), module, and the name that is imported from it (empty: the module itself)."""


class Lines(NamedTuple):
    """A function, method, class or constant in a source."""

    name: str
    """`Class.method` for a method."""
    first: int
    last: int


class Syntax(NamedTuple):
    """What is read of a source."""

    imports: list[Import]
    """Every import but those for type checkers only."""
    definitions: list[Lines]
    """Inner ones come after those that they are in."""


@functools.cache
def syntax(source: bytes) -> Syntax:
    """Return what the statements of a module say."""
    with _PARSING:
        tree = ast.parse(source)
    return Syntax(list(_imports(tree)), list(_definitions(tree.body, "")))


def _imports(tree: ast.AST) -> Iterator[Import]:
    for node in _statements(tree):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.level, node.module or "", alias.name) for alias in node.names)


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements in a tree, each before those inside it: walking expressions too takes ten times as long."""
    todo = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        yield node
        inner = [each for name in _PARTS for each in getattr(node, name, ())]
        todo += reversed(inner)


def _definitions(body: Iterable[ast.stmt], inside: str) -> Iterator[Lines]:
    named = ""
    for node in body:
        if isinstance(node, _BLOCKS):
            named = f"{inside}{node.name}"
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            yield Lines(named, first, node.end_lineno or first)
            if isinstance(node, ast.ClassDef):
                yield from _definitions(node.body, f"{named}.")
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            named = f"{inside}{ast.unparse(target)}"
            yield Lines(named, node.lineno, node.end_lineno or node.lineno)
        elif named and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield Lines(named, node.lineno, node.end_lineno or node.lineno)  # a constant's docstring
