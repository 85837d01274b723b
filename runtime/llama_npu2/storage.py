"""Where the files of an artifact lie. Each is a stretch of a file on disk: read, mapped and loaded where it is."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from llama_npu2.errors import UserError


class Altered(UserError):
    """A file is not what its manifest says."""


@dataclass(frozen=True)
class File:
    """`size` bytes from `start` on in the file `container`. `path`: its name in messages. `sha256`: hex, of what it
    must hold; None where nobody says."""

    path: Path
    container: Path
    start: int
    size: int
    sha256: str | None = None

    @classmethod
    def at(cls, path: Path) -> File:
        """A file that lies by itself; one that is not there is empty, until it is opened."""
        return cls(path, path, 0, path.stat().st_size if path.is_file() else 0)

    def chunks(self, most: int) -> Iterator[bytes]:
        """Its content, at most so many bytes at a time. Raises OSError."""
        with self.container.open("rb") as file:
            file.seek(self.start)
            left = self.size
            while left and (chunk := file.read(min(left, most))):
                left -= len(chunk)
                yield chunk

    def read_bytes(self) -> bytes:
        """All of it. Raises OSError, and UserError if it is not what it must be."""
        content = b"".join(self.chunks(max(self.size, 1)))
        if self.sha256 not in (None, hashlib.sha256(content).hexdigest()):
            raise Altered(f"{self.path} is not what was built: copy the directory again or run doit compile")
        return content


class Storage(Protocol):
    """Files by name, `/` between its parts. `path`: where they are, for messages."""

    @property
    def path(self) -> Path: ...

    def find(self, name: str) -> File | None:
        """None if there is no such file."""


@dataclass(frozen=True)
class Directory:
    """Those below `path`."""

    path: Path

    def find(self, name: str) -> File | None:
        return File.at(path) if (path := self.path / name).is_file() else None


@dataclass(frozen=True)
class Listed:
    """Of the files in `inner` those that a manifest lists, `sha256` by name. What somebody added is not there."""

    inner: Storage
    sha256: Mapping[str, str]

    @property
    def path(self) -> Path:
        return self.inner.path

    def find(self, name: str) -> File | None:
        file = self.inner.find(name) if name in self.sha256 else None
        return replace(file, sha256=self.sha256[name]) if file else None
