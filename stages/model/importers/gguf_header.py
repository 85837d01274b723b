"""The header of a GGUF file: metadata, and where tensors are (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).

Read here and not with the `gguf` package, whose reader allocates what a damaged count asks for.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from llama_npu2.artifact.regular import open_regular
from llama_npu2.errors import UserError, first_line
from llama_npu2.frozen import frozen
from stages.engine.lazy import np

VERSIONS = (2, 3)
_NUMBERS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
"""numpy's name for each type of values."""
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4
_SHORTEST = {"tensors": 8 + 4 + 4 + 8, "values": 8 + 4 + 1}
"""Bytes of an entry with an empty name, in the order of the counts in the header."""


@frozen
class Place:
    """The place of a tensor in a file."""

    shape: tuple[int, ...]
    """The outermost dimension first."""
    type: int
    """ggml's number."""
    offset: int
    """Bytes from the file's beginning."""
    file: Path


class Header:
    """A file's `metadata`, values by key with arrays as lists, and the places of its `tensors` by name.

    UserError where the file is not GGUF or is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with (
                os.fdopen(open_regular(path), "rb") as file,
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as self._data,
            ):
                self._at = 0
                self.metadata, self.tensors = self._read()
        except ValueError:
            raise self._damaged("it is empty") from None
        except OSError as error:
            raise UserError(f"{path} cannot be read: {first_line(error)}") from None

    def _damaged(self, why: str) -> UserError:
        return UserError(f"{self.path} is damaged ({why}): download it again")

    def _read(self) -> tuple[dict[str, Any], dict[str, Place]]:
        if self._take(4) != b"GGUF":
            raise UserError(
                f"{self.path} is no GGUF file: model= takes a directory in Hugging Face format or a GGUF file"
            )
        if (version := self._number("<u4")) not in VERSIONS:
            raise UserError(f"{self.path}: GGUF version {version}: only {', '.join(map(str, VERSIONS))} are read")
        tensors, values = (self._count(self._number("<u8"), size, of) for of, size in _SHORTEST.items())
        metadata: dict[str, Any] = {}
        for _ in range(values):
            key = self._name(metadata, "key")
            metadata[key] = self._value(self._number("<u4"), key)
        places: dict[str, Place] = {}
        for _ in range(tensors):
            name = self._name(places, "tensor")
            places[name] = self._place(name)
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment < 1 << 20:
            raise self._damaged(f"general.alignment = {alignment}")
        start = -(-self._at // alignment) * alignment
        return metadata, {name: replace(place, offset=start + place.offset) for name, place in places.items()}

    def _take(self, size: int) -> bytes:
        if size > len(self._data) - self._at:
            raise self._damaged("it ends in its header")
        self._at += size
        return self._data[self._at - size : self._at]

    def _number(self, kind: str) -> Any:
        return np.frombuffer(self._take(np.dtype(kind).itemsize), kind)[0].item()

    def _count(self, count: int, size: int, of: str) -> int:
        """Return a count of entries of at least `size` bytes. UserError where the file has no room for them."""
        if count * size > len(self._data) - self._at:
            raise self._damaged(f"{count} {of} do not fit in it")
        return count

    def _string(self) -> str:
        (size,) = struct.unpack("<Q", self._take(8))
        try:
            return self._take(size).decode()
        except UnicodeDecodeError:
            raise self._damaged("a string is not UTF-8") from None

    def _name(self, seen: dict[str, Any], what: str) -> str:
        if (name := self._string()) in seen:
            raise self._damaged(f"{what} {name[:80]} is there twice")
        return name

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._string()
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind != _ARRAY:
            raise self._damaged(f"{key[:80]} has type {kind}")
        kind, count = self._number("<u4"), self._number("<u8")
        if kind == _STRING:
            return [self._string() for _ in range(self._count(count, 8, f"strings of {key[:80]}"))]
        if kind not in _NUMBERS:
            raise self._damaged(f"{key[:80]} is an array of type {kind}")
        size = np.dtype(_NUMBERS[kind]).itemsize
        raw = self._take(self._count(count, size, f"values of {key[:80]}") * size)
        return np.frombuffer(raw, _NUMBERS[kind]).tolist()

    def _place(self, name: str) -> Place:
        if (dimensions := self._number("<u4")) > _MOST_DIMENSIONS:
            raise self._damaged(f"tensor {name[:80]} has {dimensions} dimensions")
        shape = tuple(self._number("<u8") for _ in range(dimensions))[::-1]
        if not 0 < prod(shape) < 1 << 48:
            raise self._damaged(f"tensor {name[:80]} has shape {list(shape)}")
        return Place(shape, self._number("<u4"), self._number("<u8"), self.path)
