"""Saves what the prefix tree remembers of a text, and remembers what was saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llama_npu2.engine.batch.sequence import Cache
from llama_npu2.engine.contexts import read_context, write_context
from llama_npu2.errors import UserError


def save(cache: Cache, path: Path, key: Mapping[str, Any], ids: Sequence[int], namespace: str = "") -> int:
    """Write the longest beginning of a text that the tree holds; return its number of tokens. Raises UserError."""
    blocks, matched = cache.tree.match(ids, namespace)
    try:
        if not matched:
            raise UserError(f"{path}: nothing of this text is in the KV cache: process it first")
        write_context(path, _in(namespace, key), ids[:matched], map(cache.steps.read_block, blocks))
    finally:
        cache.drop(blocks)
    return matched


def load(cache: Cache, path: Path, key: Mapping[str, Any], namespace: str = "") -> int:
    """Put a saved text into the tree; return its number of tokens. Raises UserError."""
    room, positions = cache.room(), cache.positions
    ids, contents = read_context(path, _in(namespace, key), len(cache.steps.read_block(0)), positions, room * positions)
    blocks = [block for _ in contents if (block := cache.take()) is not None]
    for block, content in zip(blocks, contents, strict=True):
        cache.steps.write_block(block, content)
    cache.tree.insert(ids, blocks, namespace)
    cache.drop(blocks)
    return len(ids)


def _in(namespace: str, key: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**key, "namespace": namespace} if namespace else key
