"""Digests of files, remembered by stat signature, so that a build that has nothing to do reads no file twice."""

from __future__ import annotations

import contextlib
import hashlib
import json
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePath
from typing import Any

import xxhash

from llama_npu2 import trust
from llama_npu2.artifact.regular import read_regular
from llama_npu2.errors import UserError
from llama_npu2.schema import load_json
from stages.engine.files import content_digest, content_sha256, write_atomic
from stages.engine.saving import Saving

# A file changed again within this time of being read could keep its stat signature.
_STAT_GRANULARITY_NS = 50_000_000
_PURPOSE = "digests 2"
"""The purpose of the file's authentication code. The number is raised when the file's shape changes."""


class Digests:
    """Digests of files, and other values that follow from their content alone, in a JSON file, which may be deleted.

    The file lies among artifacts that others may write to, so it carries an authentication code that only this user can
    make (`trust.own_mac`). A file that is damaged, or that somebody else wrote, is ignored.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._entries = self._load()
        self._dirty = False
        self._saving = Saving(self._save)

    def _load(self) -> dict[str, list]:
        try:
            content = load_json(read_regular(self.path))
            entries: dict[str, list] = content["known"]
            own = trust.is_own_mac(str(content["mac"]).encode(), _canonical(entries), _PURPOSE)
        except (OSError, ValueError, KeyError, TypeError, UserError):
            return {}
        return entries if own else {}

    def of(self, path: Path) -> str | None:
        """Return the xxh3-128, hex, of a file's content, or of a directory's names and contents.

        None if there is no such path.
        """
        digest = self.of_file(path)
        return xxhash.xxh3_128_hexdigest(_listed(path, self.of)) if digest is None and path.is_dir() else digest

    def of_file(self, path: Path) -> str | None:
        """Return the xxh3-128, hex, of a file's content; None if there is no such file."""
        digest: str | None = self.remembered("", path, content_digest)
        return digest

    def sha256(self, path: Path) -> str | None:
        """Return the SHA-256, hex, of a file or directory, for other machines: xxh3 does not withstand forgery."""
        if path.is_dir():
            return hashlib.sha256(_listed(path, self.sha256)).hexdigest()
        digest: str | None = self.remembered("sha256 ", path, content_sha256)
        return digest

    def remembered(self, kind: str, path: Path, compute: Callable[[Path], Any]) -> Any:
        """Return `compute(path)`, remembered from the last time if the file has not changed.

        Args:
            kind: distinguishes the values of different functions.
            path: the file.
            compute: returns a JSON value.

        Returns:
            The value; None if there is no such file.
        """
        try:
            status = path.stat()
        except (OSError, ValueError):  # ValueError for text that cannot be a path
            return None
        if not stat.S_ISREG(status.st_mode):
            return None  # a device or a pipe may have no end
        signature = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
        key = f"{kind}{path}"
        entry = self._entries.get(key)
        if entry and entry[:-1] == signature:
            return entry[-1]
        started = time.time_ns()
        try:
            value = compute(path)
        except OSError:
            return None  # a file that cannot be read is as good as absent
        if started - status.st_mtime_ns > _STAT_GRANULARITY_NS and started - status.st_ctime_ns > _STAT_GRANULARITY_NS:
            self._entries[key] = [*signature, value]
            self._dirty = True
        return value

    def of_content(self, kind: str, path: Path, compute: Callable[[bytes], Any]) -> Any:
        """Return `compute(content)` of a file, remembered for all that have this content, be it in other checkouts.

        Args:
            kind: distinguishes the values of different functions.
            path: the file.
            compute: returns a JSON value.
        """
        entry = self._entries.get(f"{kind}{self.of_file(path)}")
        if entry is None:
            content = path.read_bytes()
            entry = self._entries[f"{kind}{xxhash.xxh3_128_hexdigest(content)}"] = [compute(content)]
            self._dirty = True
        return entry[-1]

    def save(self, soon: bool = False) -> None:
        """Merge the entries into the file, now or `soon`, as after each of many steps (`Saving`).

        An entry that is lost, to a concurrent writer or a full disk, only costs another hash.
        """
        (self._saving.soon if soon else self._saving.now)()

    def _save(self) -> None:
        if self._dirty and self.path.parent.is_dir():
            self._dirty = False  # before the entries are read, to which other threads add
            with contextlib.suppress(OSError, UserError):
                entries = self._load() | self._entries
                content = {"known": entries, "mac": trust.own_mac(_canonical(entries), _PURPOSE)}
                write_atomic(self.path, json.dumps(content).encode())


def _canonical(entries: Mapping[str, list]) -> bytes:
    return json.dumps(entries).encode()


def _listed(directory: Path, digest: Callable[[Path], str | None]) -> bytes:
    """Return the names and digests of all files below a directory."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return _listing((path.relative_to(directory).as_posix(), digest(path)) for path in files)


def _listing(files: Iterable[tuple[str, str | None]]) -> bytes:
    return json.dumps(list(files)).encode()


def digest_of_files(label: str, files: Mapping[str, str]) -> str | None:
    """Return what `Digests.of` would return for the path `label` if `files`, which have digests by label, were all."""
    below = sorted(path for path in map(PurePath, files) if path.is_relative_to(label))
    if label in files or not below:
        return files.get(label)
    listing = _listing((path.relative_to(label).as_posix(), files[path.as_posix()]) for path in below)
    return xxhash.xxh3_128_hexdigest(listing)
