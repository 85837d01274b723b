"""What was found out about files, remembered by stat signature, so that a no-op build reads nothing twice."""

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

# A file changed again within this time of being read could keep its stat signature.
_STAT_GRANULARITY_NS = 50_000_000
_PURPOSE = "digests 2"
"""The kind of content that the memory's authentication code is for. The number is raised when its shape changes."""


class Digests:
    """Digests of files, and what else follows from their content alone, in one JSON file, which may be deleted.

    The file lies among artifacts that others may write to, so it carries an authentication code that only this user can
    make (`trust.own_mac`). A file that is damaged, or that somebody else wrote, counts as none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known = self._load()
        self._dirty = False

    def _load(self) -> dict[str, list]:
        try:
            memory = load_json(read_regular(self.path))
            known: dict[str, list] = memory["known"]
            own = trust.is_own_mac(str(memory["mac"]).encode(), _canonical(known), _PURPOSE)
        except (OSError, ValueError, KeyError, TypeError, UserError):
            return {}
        return known if own else {}

    def of(self, path: Path) -> str | None:
        """xxh3-128, hex, of a file's content, or of a directory's names and contents; None if there is no such path."""
        if path.is_dir():
            return xxhash.xxh3_128_hexdigest(_listed(path, self.of))
        digest: str | None = self.remembered("", path, content_digest)
        return digest

    def sha256(self, path: Path) -> str | None:
        """SHA-256 in the same way, for other machines: xxh3 is made to find changes, not to withstand forgery."""
        if path.is_dir():
            return hashlib.sha256(_listed(path, self.sha256)).hexdigest()
        digest: str | None = self.remembered("sha256 ", path, content_sha256)
        return digest

    def remembered(self, what: str, path: Path, find: Callable[[Path], Any]) -> Any:
        """`find(path)`, or what it was when the file was as it is now; None if there is no such file. `what` tells
        different findings apart; they are JSON."""
        try:
            status = path.stat()
        except (OSError, ValueError):  # the latter for what is no name
            return None
        if not stat.S_ISREG(status.st_mode):
            return None  # a device or a pipe may have no end
        signature = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
        key = f"{what}{path}"
        known = self._known.get(key)
        if known and known[:-1] == signature:
            return known[-1]
        started = time.time_ns()
        try:
            found = find(path)
        except OSError:
            return None  # what cannot be read is as good as absent
        if started - status.st_mtime_ns > _STAT_GRANULARITY_NS and started - status.st_ctime_ns > _STAT_GRANULARITY_NS:
            self._known[key] = [*signature, found]
            self._dirty = True
        return found

    def save(self) -> None:
        """Merge into the file. Losing an entry, to a concurrent writer or a full disk, only costs a hash."""
        if self._dirty and self.path.parent.is_dir():
            with contextlib.suppress(OSError, UserError):
                known = self._load() | self._known
                memory = {"known": known, "mac": trust.own_mac(_canonical(known), _PURPOSE)}
                write_atomic(self.path, json.dumps(memory).encode())
            self._dirty = False


def _canonical(known: Mapping[str, list]) -> bytes:
    return json.dumps(known).encode()


def _listed(directory: Path, digest: Callable[[Path], str | None]) -> bytes:
    """Names and digests of all files below a directory."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return _listing((path.relative_to(directory).as_posix(), digest(path)) for path in files)


def _listing(files: Iterable[tuple[str, str | None]]) -> bytes:
    return json.dumps(list(files)).encode()


def digest_of_files(label: str, files: Mapping[str, str]) -> str | None:
    """What `Digests.of` says of the path `label` where `files` are all there are, by label with their digests."""
    below = sorted(path for path in map(PurePath, files) if path.is_relative_to(label))
    if label in files or not below:
        return files.get(label)
    listing = _listing((path.relative_to(label).as_posix(), files[path.as_posix()]) for path in below)
    return xxhash.xxh3_128_hexdigest(listing)
