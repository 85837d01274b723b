"""The files of an artifact, which lie in a directory or in the one file that `doit export` makes.

Each is a range of bytes of a file on disk, and is read, mapped and loaded from there.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol, cast

from llama_npu2.artifact.regular import open_regular
from llama_npu2.errors import UserError
from llama_npu2.frozen import frozen

if TYPE_CHECKING:
    from zipfile import ZipInfo

_HEADER = 30
"""Bytes of the header in front of a member of a zip file, without its name and extra field."""


class Altered(UserError):
    """The content of a file does not have the SHA-256 that the manifest says."""


@frozen
class File:
    """A range of bytes of a file on disk."""

    path: Path
    """Its name in messages."""
    container: Path
    """The file on disk."""
    start: int
    """Offset of the first byte in `container`."""
    size: int
    sha256: str | None = None
    """Hex, of the content that it must have; None where that is unknown."""

    @classmethod
    def at(cls, path: Path) -> File:
        """Return all of the file at `path`. A missing one counts as empty; opening it fails."""
        return cls(path, path, 0, path.stat().st_size if path.is_file() else 0)

    def chunks(self, most: int) -> Iterator[bytes]:
        """Yield the content, at most `most` bytes at a time. Raises OSError."""
        with os.fdopen(open_regular(self.container), "rb") as file:
            file.seek(self.start)
            left = self.size
            while left and (chunk := file.read(min(left, most))):
                left -= len(chunk)
                yield chunk

    def read_into(self, memory: memoryview, offset: int) -> None:
        """Fill `memory` with the content from byte `offset` on. Raises UserError if it ends early or cannot be read."""
        filled, size = 0, min(len(memory), max(self.size - offset, 0))
        try:
            with self.container.open("rb", buffering=0) as container:
                container.seek(self.start + offset)
                while filled < size and (count := container.readinto(memory[filled:size])):
                    filled += count
        except OSError as error:
            raise UserError(f"{self.path}: {error.strerror}: copy it again or run doit compile") from None
        if filled < len(memory):
            short = len(memory) - filled
            raise UserError(f"{self.path} ends {short} bytes early: copy it again or run doit compile")

    def read_bytes(self) -> bytes:
        """Return the whole content. Raises OSError, and Altered if its SHA-256 is not `sha256`."""
        content = b"".join(self.chunks(max(self.size, 1)))
        if self.sha256 not in (None, hashlib.sha256(content).hexdigest()):
            raise Altered(f"{self.path} is not what was built: copy the directory again or run doit compile")
        return content


class Storage(Protocol):
    """Files by name, with `/` between the parts of a name."""

    @property
    def path(self) -> Path:
        """Where the files are, for messages."""

    def find(self, name: str) -> File | None:
        """Return the file of that name, None if there is none."""


@frozen
class Directory:
    """The files below the directory `path`."""

    path: Path

    def find(self, name: str) -> File | None:
        return File.at(path) if (path := self.path / name).is_file() else None


@frozen
class Archive:
    """The files in a file that `doit export` made.

    It is a zip file of the artifact, in which nothing is compressed, followed by one of the runtime, which is the one
    that Python sees. They are two because Python 3.12 and older cannot import from a zip file of 4 GiB or more.
    """

    path: Path

    def find(self, name: str) -> File | None:
        """Return the file of that name, None if there is none. Raises UserError if the archive is damaged."""
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
                    return {member.filename: self._file(artifact, member) for member in members.infolist()}
        except (BadZipFile, struct.error, ValueError, OverflowError, NotImplementedError, OSError) as error:
            raise UserError(
                f"{self.path} is no artifact directory and no whole file of doit export ({error}): copy it again"
            ) from None

    def _file(self, artifact: mmap.mmap, member: ZipInfo) -> File:
        """Return the range of a member's content, which follows the header, a name and an extra field.

        The lengths of both are the last fields of the header (APPNOTE.TXT 6.3.10, 4.3.7).
        """
        from struct import unpack_from

        start = member.header_offset + _HEADER + sum(unpack_from("<HH", artifact, member.header_offset + _HEADER - 4))
        if member.compress_size != member.file_size or start + member.file_size > len(artifact):
            raise ValueError(f"{member.filename} is not stored as it is")
        return File(self.path / member.filename, self.path, start, member.file_size)


def open_storage(path: Path) -> Storage:
    """Return the storage at `path`: an archive if that is a file, else a directory."""
    return Archive(path) if path.is_file() else Directory(path)


@frozen
class Listed:
    """Those files of `inner` that a manifest lists. Files that somebody added are not among them."""

    inner: Storage
    sha256: Mapping[str, str]
    """The SHA-256 of each listed file, hex, by name."""

    @property
    def path(self) -> Path:
        return self.inner.path

    def find(self, name: str) -> File | None:
        file = self.inner.find(name) if name in self.sha256 else None
        return replace(file, sha256=self.sha256[name]) if file else None
