"""Contexts on disk: tokens with the blocks of the KV cache that hold them.

A file is a line of JSON, the tokens as little-endian 32-bit numbers, and the blocks. It is used only if it is whole and
comes from the same weights, instruction set and format of the cache, and if nobody but its owner may have written it.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llama_npu2.errors import UserError, first_line, reason

_MAGIC = "llama-npu2 context 1"
_LONGEST_HEADER = 1 << 16


def write_context(path: Path, key: Mapping[str, Any], tokens: Sequence[int], blocks: Iterable[bytes]) -> None:
    """Write a context. An older file of that name stays until the new one is whole.

    Args:
        path: where; only its owner can read it.
        key: what must be equal for the blocks to mean the same, as JSON.
        tokens: those whose K and V the blocks hold.
        blocks: the blocks' contents, in the order of the positions.

    Raises:
        UserError: if it cannot be written.
    """
    ids = np.asarray(tokens, "<u4").tobytes()
    body = [ids, *blocks]
    digest = hashlib.sha256()
    for part in body:
        digest.update(part)
    header = {"format": _MAGIC, "key": dict(key), "tokens": len(tokens), "sha256": digest.hexdigest()}
    part_path = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with os.fdopen(os.open(part_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
            file.write(json.dumps(header).encode() + b"\n")
            file.writelines(body)
        part_path.replace(path)
    except OSError as error:
        part_path.unlink(missing_ok=True)
        raise UserError(f"{path}: the context cannot be saved: {reason(error)}: choose another place") from None


def is_context(path: Path) -> bool:
    """Return whether `write_context` made a file, by its beginning; False for one that cannot be read."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            beginning = json.dumps({"format": _MAGIC}).encode()[:-1]
            return stat.S_ISREG(os.fstat(file.fileno()).st_mode) and file.read(len(beginning)) == beginning
    except OSError:
        return False


def read_context(
    path: Path, key: Mapping[str, Any], block_bytes: int, positions: int, most: int
) -> tuple[list[int], list[bytes]]:
    """Return the tokens and blocks of a context.

    Args:
        path: a file of `write_context`.
        key: as for it.
        block_bytes: of each block.
        positions: in each block.
        most: tokens that there is room for.

    Raises:
        UserError: if it cannot be read, is too long, is damaged, of another model, or not its owner's alone.
    """
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            _check_private(path, os.fstat(file.fileno()))
            header = _header(path, file.readline(_LONGEST_HEADER), key)
            count, ids_end = header["tokens"], 4 * header["tokens"]
            size = ids_end + -(-count // positions) * block_bytes
            body = file.read(size + 1) if count <= most else b""
    except OSError as error:
        raise UserError(f"{path}: the context cannot be read: {reason(error)}") from None
    if count > most:
        raise UserError(f"{path}: the context has {count} tokens, there is room for {most}: give one that is shorter")
    if len(body) != size or hashlib.sha256(body).hexdigest() != header["sha256"]:
        raise UserError(f"{path}: the context is damaged: delete it and save it again")
    tokens = np.frombuffer(body, "<u4", count).tolist()
    return tokens, [body[at : at + block_bytes] for at in range(ids_end, len(body), block_bytes)]


def _check_private(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise UserError(
            f"{path}: a context must be a file that only you can read and write: chmod 600 it if it is yours"
        )


def _header(path: Path, line: bytes, key: Mapping[str, Any]) -> dict[str, Any]:
    try:
        header = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: no context: {first_line(error)}: give a file of save_context") from None
    fields = {"format": str, "key": dict, "tokens": int, "sha256": str}
    if not isinstance(header, dict) or {name: type(value) for name, value in header.items()} != fields:
        raise UserError(f"{path}: no context: give a file of save_context")
    if header["format"] != _MAGIC or header["tokens"] < 1:
        raise UserError(f"{path}: no context that this version reads: save it again")
    if header["key"] != dict(key):
        theirs = {**key, **header["key"]}
        differs = ", ".join(name for name in theirs if header["key"].get(name) != key.get(name))
        raise UserError(f"{path}: the context is of other {differs}: save it again with this model and machine")
    return header
