"""Damage that a seed repeats: to JSON values by their structure, to files by their bytes."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

NUMBERS = (0, 1, -1, 2, 63, 64, 127, 128, 255, 4095, 4096, 65535, 1 << 20, 1 << 31, 1 << 32, 1 << 48, 1 << 63, 1 << 64)
STRINGS = (
    *("", ".", "..", "/", "../x", "/etc/passwd", "a\x00b", "\x1b[31m", "\n", "\ud800", "ä", "é", "\u202e", "@", "@pos"),
    *("@last", "seq", "max_seq", "0", "-1", "null", "x" * 300, "{{", "%s", "__class__", "__init__", "nan", "1e999"),
)
OTHERS = (None, True, False, 0.5, -0.0, 1e308, 10**400, float("nan"), float("inf"), [], {}, [[]], {"": {}})

Path = list[Any]


def mutated_json(rng: Random, value: Any) -> Any:
    """A copy with one to three changes."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        value = _changed(rng, value)
    return value


def _changed(rng: Random, root: Any) -> Any:
    paths = list(_paths(root))
    path = _descend(rng, root) if rng.random() < 0.5 else rng.choice(paths)
    if not path:
        return rng.choice((root, [root], None, {}, 7))
    parent = _at(root, path[:-1])
    key, old = path[-1], parent[path[-1]]
    action = rng.randrange(12)
    if action < 4:
        parent[key] = _scalar(rng, old, root, paths)
    elif action > 9:
        _everywhere(root, paths, old, _scalar(rng, old, root, paths))
    elif action < 6:
        other = rng.choice(_like(root, paths, path))
        parent[key] = copy.deepcopy(_at(root, other))
    elif action == 6:
        del parent[key]
    elif action == 7 and isinstance(parent, dict):
        parent[rng.choice((*parent, *STRINGS, "x"))] = parent.pop(key)
    elif action == 7:
        parent.insert(rng.randrange(len(parent) + 1), copy.deepcopy(old))
    elif action == 8:
        swapped = rng.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
        parent[key], parent[swapped] = parent[swapped], parent[key]
    else:
        parent[key] = copy.deepcopy(rng.choice((*OTHERS, *NUMBERS, *STRINGS)))
    return root


def _paths(value: Any, path: Sequence[Any] = ()) -> Any:
    yield [*path]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from _paths(inner, (*path, key))


def _descend(rng: Random, value: Any) -> Path:
    """A path whose every step is as likely as its siblings, so that small sections are changed as often as large."""
    path: Path = []
    while isinstance(value, (dict, list)) and value and (not path or rng.random() < 0.9):
        key = rng.choice([*value] if isinstance(value, dict) else range(len(value)))
        path.append(key)
        value = value[key]
    return path


def _at(value: Any, path: Path) -> Any:
    for key in path:
        value = value[key]
    return value


def _like(root: Any, paths: Sequence[Path], path: Path) -> list[Path]:
    """Places that hold what could stand at another: of the same key, else of the same type."""
    same = [p for p in paths if p and p[-1] == path[-1] and len(p) == len(path)]
    kind = type(_at(root, path))
    return same if len(same) > 1 else [p for p in paths if type(_at(root, p)) is kind]


def _scalar(rng: Random, old: Any, root: Any, paths: Sequence[Path]) -> Any:
    if isinstance(old, bool):
        return not old
    if isinstance(old, int):
        near = (old + 1, old - 1, 2 * old, old // 2, -old, old + 64, old + 4096)
        return rng.choice((*near, *NUMBERS, str(old), old / 7 if abs(old) < 1 << 64 else 0.5))
    if isinstance(old, float):
        return rng.choice((-old, old * 1e300, old / 1e300, 0.0, str(old)))
    if isinstance(old, str):
        others = [found for p in paths if isinstance(found := _at(root, p), str)]
        return rng.choice((old + rng.choice(STRINGS), old[:-1], old.upper(), rng.choice(others), rng.choice(STRINGS)))
    return copy.deepcopy(rng.choice(OTHERS))


def _everywhere(root: Any, paths: Sequence[Path], old: Any, new: Any) -> None:
    """Lies that agree with each other."""
    for path in paths:
        if path and (found := _at(root, path)) == old and not isinstance(found, (dict, list)):
            _at(root, path[:-1])[path[-1]] = new


def mutated_bytes(rng: Random, content: bytes, others: Sequence[bytes] = ()) -> bytes:
    """A copy with one to eight changes, in its first half kilobyte as often as in all of it. `others`: to splice in."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 4, 8))):
        at = rng.randrange(min(len(data), 512) + 1) if rng.random() < 0.5 else rng.randrange(len(data) + 1)
        rng.choice(_DAMAGE)(rng, data, at, rng.choice(others) if others else content)
    return bytes(data)


def _flip(rng: Random, data: bytearray, at: int, other: bytes) -> None:
    if at < len(data):
        data[at] ^= 1 << rng.randrange(8)


def _number(rng: Random, data: bytearray, at: int, other: bytes) -> None:
    width = rng.choice((1, 2, 4, 8))
    near = int.from_bytes(data[at : at + width], "little") + rng.choice((-1, 1, 7, 64))
    value = rng.choice((near, *NUMBERS)) % (1 << 8 * width)
    data[at : at + width] = value.to_bytes(width, "little")


def _remove(rng: Random, data: bytearray, at: int, other: bytes) -> None:
    del data[at : at + rng.choice((1, 2, 4, 8, 64))]


def _truncate(rng: Random, data: bytearray, at: int, other: bytes) -> None:
    del data[at:]


def _insert(rng: Random, data: bytearray, at: int, other: bytes) -> None:
    data[at:at] = rng.randbytes(rng.choice((1, 2, 4, 8, 64)))


def _text(rng: Random, data: bytearray, at: int, other: bytes) -> None:
    """A scalar of JSON in place of what looks like one."""
    value = json.dumps(rng.choice((*OTHERS, *NUMBERS, *STRINGS))).encode()
    data[at : at + rng.choice((0, 1, len(value)))] = value


def _splice(rng: Random, data: bytearray, at: int, other: bytes) -> None:
    start = rng.randrange(len(other) + 1)
    length = rng.choice((4, 16, 64, 512))
    data[at : at + rng.choice((0, length))] = other[start : start + length]


_DAMAGE: Sequence[Callable[[Random, bytearray, int, bytes], None]] = (
    *(_flip, _flip, _number, _number, _number, _remove, _truncate, _insert, _text, _splice),
)
