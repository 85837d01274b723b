"""A cache of objects and of what is linked of them, which all models of an `artifacts` directory share.

The key covers everything that can change them: compiler, flags, source, headers, and the objects that are linked. An
object that was altered, or that somebody else stored, is made again, so no wrong one is used.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import xxhash

from llama_npu2 import trust
from llama_npu2.artifact.regular import read_regular
from llama_npu2.frozen import frozen
from llama_npu2.schema import load_json
from stages.engine.files import content_digest, content_sha256
from stages.engine.places import ROOT
from stages.engine.tree import Tree

_PURPOSE = "object"


@frozen
class CachedObject:
    """An object in the cache."""

    path: Path
    read: tuple[Path, ...]
    """The project's files that it was made from."""


def cached_object(
    cache: Path, name: str, made_by: object, sources: Iterable[Path], make: Callable[[Path], Iterable[Path]]
) -> CachedObject:
    """Return the object `name`, which is made with `make(path)` unless it is in the cache.

    Args:
        cache: the directory; neither it nor the one above it may be a link (`artifacts/.cache/objects`).
        name: the beginning of the object's file name.
        made_by: compiler and flags; their `repr` is part of the key.
        sources: every file that the compiler may read, objects included, in the order in which it does.
        make: returns those files below the project that the compiler did read. Nothing is stored if it raises.

    Raises:
        UserError: for a cache behind a link, and whatever `make` raises.
    """
    tree = Tree(cache.parents[1])
    inside = cache.relative_to(tree.root)
    entry = cache / f"{name}-{_key(made_by, sources)}.json"
    output = entry.with_suffix(".o")
    read = _intact(entry, output)
    if read is not None:
        with contextlib.suppress(OSError):
            os.utime(entry)  # when it was used last
    else:
        with tree.opened(inside, create=True):
            partial = output.with_name(f".{output.stem}.{os.getpid()}-{threading.get_ident()}.o")
        try:
            read = list(make(partial))
            names = [str(path.relative_to(ROOT)) for path in read]
            record = {"read": names, "mac": trust.own_mac(_authenticated(entry, partial, names), _PURPOSE)}
            tree.take(partial, inside / output.name)
        finally:
            partial.unlink(missing_ok=True)
        tree.write(inside / entry.name, json.dumps(record).encode())
    return CachedObject(output, tuple(read))


def copy_cached(cached: Callable[[], CachedObject], to: Path) -> tuple[Path, ...]:
    """Copy the object that `cached` returns. Return the project's files that it was made from.

    Raises whatever `cached` raises.
    """
    to.parent.mkdir(parents=True, exist_ok=True)
    while True:
        found = cached()
        # Somebody who tidies the cache may just have removed the object.
        with contextlib.suppress(FileNotFoundError):
            shutil.copyfile(found.path, to)
            return found.read


def _key(made_by: object, sources: Iterable[Path]) -> str:
    state = xxhash.xxh3_128(repr(made_by).encode())
    for path in sources:
        state.update(f"{path.name} {content_digest(path)}\n".encode())
    return state.hexdigest()


def _intact(entry: Path, output: Path) -> list[Path] | None:
    """Return the files that the stored object was made from, None unless it is as this user stored it."""
    try:
        record = load_json(read_regular(entry))
        own = trust.is_own_mac(record["mac"].encode(), _authenticated(entry, output, record["read"]), _PURPOSE)
        return [ROOT / path for path in record["read"]] if own else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _authenticated(entry: Path, output: Path, read: Sequence[str]) -> bytes:
    return json.dumps([entry.name, content_sha256(output), read]).encode()
