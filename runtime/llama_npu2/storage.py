"""Where the files of an artifact lie. Each is a stretch of a file on disk: read, mapped and loaded where it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class File:
    """`size` bytes from `start` on in the file `container`. `path`: its name in messages."""

    path: Path
    container: Path
    start: int
    size: int

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
        """Raises OSError."""
        return b"".join(self.chunks(max(self.size, 1)))


@dataclass(frozen=True)
class Directory:
    """Files by name, `/` between its parts, below `path`."""

    path: Path

    def find(self, name: str) -> File | None:
        """None if there is no such file."""
        return File.at(path) if (path := self.path / name).is_file() else None
