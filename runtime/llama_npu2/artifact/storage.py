"""Where the files of an artifact lie: in its directory, or in the one file that `doit export` makes.

Each is a stretch of a file on disk: read, mapped and loaded where it is.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol, cast

from llama_npu2.artifact.regular import open_regular
from llama_npu2.errors import UserError

if TYPE_CHECKING:
    from zipfile import ZipInfo

_HEADER = 30
"""Bytes in front of a member of a zip file, without its name."""


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
        with os.fdopen(open_regular(self.container), "rb") as file:
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
class Archive:
    """Those of a file that `doit export` made: a zip file of the artifact, in which nothing is compressed, and behind
    it one of the runtime, which is what Python sees. They are two because Python 3.12 and older import from none that
    has 4 GiB."""

    path: Path

    def find(self, name: str) -> File | None:
        """Raises UserError if the file is damaged."""
        return self._members.get(name)

    @cached_property
    def _members(self) -> Mapping[str, File]:
        import struct
        from zipfile import BadZipFile, ZipFile

        try:
            with ZipFile(self.path) as runtime:
                end = min((member.header_offset for member in runtime.infolist()), default=0)
            if not 0 < end <= self.path.stat().st_size:
                raise ValueError("it has no artifact in front of its runtime")
            with self.path.open("rb") as file, mmap.mmap(file.fileno(), end, access=mmap.ACCESS_READ) as artifact:
                with ZipFile(cast(BinaryIO, artifact)) as members:
                    return {each.filename: self._file(artifact, each) for each in members.infolist()}
        except (BadZipFile, struct.error, ValueError, OverflowError, NotImplementedError, OSError) as error:
            raise UserError(
                f"{self.path} is no artifact directory and no whole file of doit export ({error}): copy it again"
            ) from None

    def _file(self, artifact: mmap.mmap, member: ZipInfo) -> File:
        """Its content follows the header, a name and an extra field, whose lengths the header ends with (APPNOTE.TXT
        6.3.10, 4.3.7)."""
        from struct import unpack_from

        start = member.header_offset + _HEADER + sum(unpack_from("<HH", artifact, member.header_offset + _HEADER - 4))
        if member.compress_size != member.file_size or start + member.file_size > len(artifact):
            raise ValueError(f"{member.filename} is not stored as it is")
        return File(self.path / member.filename, self.path, start, member.file_size)


def open_storage(path: Path) -> Storage:
    """A directory, or what lies in a file."""
    return Archive(path) if path.is_file() else Directory(path)


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
