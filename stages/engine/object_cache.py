"""Objects shared by all models of an `artifacts` directory, named by everything that can change them.

A wrong entry is impossible: the key covers compiler, flags, source and headers, and an object that is not what was
stored, or that somebody else stored, is made again. A missing entry is only slow.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from llama_npu2 import trust
from llama_npu2.artifact.regular import read_regular
from llama_npu2.schema import load_json
from stages.engine.files import content_digest, content_sha256
from stages.engine.places import ROOT
from stages.engine.tree import Tree

_PURPOSE = "object"


@dataclass(frozen=True)
class CachedObject:
    """An object in the cache, and the project's files that it was made from."""

    path: Path
    read: tuple[Path, ...]


def cached_object(
    cache: Path, name: str, made_by: object, sources: Iterable[Path], make: Callable[[Path], Iterable[Path]]
) -> CachedObject:
    """The object `name`, made with `make(path)` unless it is there.

    `cache`: the directory, of which neither it nor the one above it may be a link (`artifacts/.cache/objects`).
    `made_by`: compiler and flags; its `repr` is part of the key. `sources`: every file that the compiler may read.
    `make` returns those that it did read, all below the project. Raises UserError for a cache behind a link, and what
    `make` raises; then nothing is stored.
    """
    tree = Tree(cache.parents[1])
    inside = cache.relative_to(tree.root)
    entry = cache / f"{name}-{_key(made_by, sources)}.json"
    output = entry.with_suffix(".o")
    read = _intact(entry, output)
    if read is not None:
        with contextlib.suppress(OSError):
            os.utime(entry)  # how recently it was of use
    else:
        with tree.opened(inside, create=True):
            partial = output.with_suffix(f".{os.getpid()}-{threading.get_ident()}.o")
        try:
            read = list(make(partial))
            names = [str(path.relative_to(ROOT)) for path in read]
            record = {"read": names, "mac": trust.own_mac(_said(entry, partial, names), _PURPOSE)}
            tree.take(partial, inside / output.name)
        finally:
            partial.unlink(missing_ok=True)
        tree.write(inside / entry.name, json.dumps(record).encode())
    return CachedObject(output, tuple(read))


def _key(made_by: object, sources: Iterable[Path]) -> str:
    state = xxhash.xxh3_128(repr(made_by).encode())
    for path in sources:
        state.update(f"{path.name} {content_digest(path)}\n".encode())
    return state.hexdigest()


def _intact(entry: Path, output: Path) -> list[Path] | None:
    """What the stored object was made from, if it is as this user stored it."""
    try:
        record = load_json(read_regular(entry))
        own = trust.is_own_mac(record["mac"].encode(), _said(entry, output, record["read"]), _PURPOSE)
        return [ROOT / path for path in record["read"]] if own else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _said(entry: Path, output: Path, read: Sequence[str]) -> bytes:
    return json.dumps([entry.name, content_sha256(output), read]).encode()
