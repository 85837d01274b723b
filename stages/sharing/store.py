"""The content of a remote that need not be trusted: files are checked by their digests, entries by signatures."""

from __future__ import annotations

import base64
import hashlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePath
from typing import Any, BinaryIO

from tqdm import tqdm

from llama_npu2.errors import UserError
from llama_npu2.frozen import frozen
from llama_npu2.schema import load_json
from llama_npu2.trust import sign, trusted_keys, verify
from llama_npu2.trust.envelopes import MAX_BYTES, own_key
from llama_npu2.trust.keys import from_environment
from stages.engine.bar import Bar
from stages.engine.digests import Digests
from stages.engine.files import require_space
from stages.engine.tree import Tree
from stages.sharing.records import Blob, canonical
from stages.sharing.remotes import BLOCK, Remote, RemoteError

_FINGERPRINT = "SHA256:"
_STRANGERS = 16
"""Most entries of unknown signers under a name that are read: anybody may have put many there."""


class Damaged(UserError):
    """The content of an object on a remote does not have the digest in its name."""


@frozen
class Entry:
    """An entry that was signed by somebody whom the user trusts."""

    content: dict[str, Any]
    signer: str
    """The user's name for them."""


@frozen
class Store:
    """Objects and signed entries on a remote. The first folder of an entry's name is the purpose of its signature."""

    remote: Remote
    digests: Digests
    """The digests of local files."""

    def entries(self, name: str) -> list[Entry]:
        """Return the entries of trusted signers under a name; others are not read.

        A damaged entry is skipped with a warning. Raises RemoteError.
        """

        def read(signer: str) -> bytes | RemoteError | None:
            try:
                return self.remote.read(f"{name}/{signer}.json", MAX_BYTES)
            except RemoteError as error:
                return error

        contents = self.remote.parallel(read, _trusted())
        failures = [content for content in contents if isinstance(content, RemoteError)]
        if failures and len(failures) == len(contents):
            raise failures[0]
        for failure in failures:  # another signer's entry is still good
            warn(f"not used: {failure}")
        return [entry for content in contents if isinstance(content, bytes) for entry in self._opened(name, content)]

    def own(self, name: str) -> dict[str, Any] | None:
        """Return the content of this user's entry under a name, None if there is none. Raises RemoteError."""
        data = self.remote.read(_own(name), MAX_BYTES)
        return next((entry.content for entry in self._opened(name, data)), None) if data else None

    def check_strangers(self, name: str) -> None:
        """Look for entries of signers whom the user does not trust.

        Raises:
            Untrusted: if there is one; the message says how to trust its signer.
            UserError: if one is damaged, or the remote cannot list them.
        """
        for other in self.remote.names(name)[:_STRANGERS]:
            if data := self.remote.read(other, MAX_BYTES):
                verify(data, purpose(name), f"{name} of {self.remote.url}")

    def _opened(self, name: str, envelope: bytes) -> Iterator[Entry]:
        what = f"{name} of {self.remote.url}"
        try:
            signed = verify(envelope, purpose(name), what)
            content = load_json(signed.payload)
        except (UserError, ValueError) as error:
            warn(f"not used: {error}")
        else:
            if isinstance(content, dict):
                yield Entry(content, signed.name)

    def write(self, entries: Mapping[str, dict[str, Any]]) -> None:
        """Write an entry under each of these names, signed by this user. Raises UserError."""
        self.remote.put({_own(name): sign(canonical(content), purpose(name)) for name, content in entries.items()})

    def send(self, files: Mapping[Blob, Path]) -> int:
        """Write the files that the remote does not have; return their bytes. Raises UserError."""
        absent = self.remote.missing({blob.name: blob.size for blob in files})
        absent |= {blob.name for blob in files if blob.name not in absent and self._is_damaged(blob)}
        new = {blob: path for blob, path in files.items() if blob.name in absent}
        total = sum(blob.size for blob in new)
        with _progress("sending", total) as bar:
            self.remote.put({blob.name: path for blob, path in new.items()}, bar.update)
        for blob, path in new.items():
            if self.digests.sha256(path) != blob.sha256:
                self.remote.remove(blob.name)
                raise UserError(f"{path} changed while it was sent: run the command again")
        return total

    def _is_damaged(self, blob: Blob) -> bool:
        """Return whether an object of the remote has a wrong digest, if this machine can see the file."""
        path = self.remote.local(blob.name)
        return path is not None and self.digests.sha256(path) not in (None, blob.sha256)

    def receive(self, blobs: Iterable[Blob], tree: Tree, inside: PurePath) -> dict[Blob, Path]:
        """Receive files into the directory `inside` of a tree, and compare each with its digest.

        A part of a file that was received there before is not received again. There may be one caller at a time.

        Returns:
            The paths of the files.

        Raises:
            UserError: if there is no room, or the remote fails.
        """
        wanted = list(dict.fromkeys(blobs))
        with tree.opened(inside, create=True):
            pass
        require_space(tree.root / inside, sum(blob.size for blob in wanted), f"what comes from {self.remote.url}")

        def receive_one(blob: Blob) -> Path:
            with os.fdopen(tree.open_own(inside / blob.sha256), "r+b") as file:
                self._receive(blob, file, bar.update)
            return tree.root / inside / blob.sha256

        with _progress("receiving", sum(blob.size for blob in wanted)) as bar:
            paths = self.remote.parallel(receive_one, wanted)
        return dict(zip(wanted, paths, strict=True))

    def _receive(self, blob: Blob, file: BinaryIO, moved: Callable[[int], object]) -> None:
        """Complete a file, of which a part may be there. If its digest is wrong in the end, it is emptied."""
        digest, start = _started(file)
        if start >= blob.size and digest.hexdigest() != blob.sha256:
            file.truncate(0)
            digest, start = hashlib.sha256(), 0
        moved(start)
        with ThreadPoolExecutor(1) as hashing:
            for block in self.remote.blocks(blob.name, start, blob.size):
                hashed = hashing.submit(digest.update, block) if blob.size > BLOCK else digest.update(block)
                file.write(block)
                if hashed:
                    hashed.result()
                moved(len(block))
        if digest.hexdigest() != blob.sha256:
            file.truncate(0)
            where = f"remote {self.remote.url}: {blob.name}"
            raise Damaged(f"{where} is damaged: push it again, and if that does not help, remove it there first")


def _started(file: BinaryIO) -> tuple[Any, int]:
    """Return the digest state and the length of the part of a file that is there."""
    digest, length = hashlib.sha256(), 0
    while block := file.read(BLOCK):
        digest.update(block)
        length += len(block)
    return digest, length


def purpose(name: str) -> str:
    """Return the purpose of an entry's signature, so that it cannot pass for an entry of another kind."""
    return name.partition("/")[0]


def _trusted() -> list[str]:
    """Return the file names of trusted signers, without suffix."""
    fingerprints = {key.fingerprint for key in trusted_keys()}
    return sorted({_hex(text) for text in (*fingerprints, *from_environment()) if text.startswith(_FINGERPRINT)})


def _own(name: str) -> str:
    return f"{name}/{_hex(own_key().fingerprint)}.json"


def _hex(fingerprint: str) -> str:
    """Return a fingerprint as a file name, which is unique on file systems that ignore case, too."""
    return base64.b64decode(fingerprint.removeprefix(_FINGERPRINT) + "=").hex()


def _progress(what: str, total: int) -> Bar:
    return Bar(total=total, desc=what, unit="B", unit_scale=True, leave=False, disable=None if total else True)


def warn(line: str) -> None:
    """Print a line to stderr, above a progress bar if there is one."""
    tqdm.write(line, file=sys.stderr)
