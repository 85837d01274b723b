"""Compares the files of an artifact directory, byte by byte, with what was built."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from llama_npu2.artifact.manifest import Manifest
from llama_npu2.errors import UserError

_CHUNK = 1 << 24


def check_files(manifest: Manifest, progress: Callable[[int], object] = lambda done: None) -> None:
    """Compare every file with its SHA-256 in the manifest.

    Args:
        progress: is called after each chunk with the number of bytes read so far.

    Raises:
        UserError: names the first file that differs.
    """
    done = 0
    for name, entry in manifest.files.items():
        digest = hashlib.sha256()
        try:
            for chunk in manifest.file(name).chunks(_CHUNK):
                digest.update(chunk)
                progress(done := done + len(chunk))
        except OSError as error:
            raise _unusable(manifest.directory / name, f"cannot be read ({error.strerror})") from None
        if digest.hexdigest() != entry.get("sha256"):
            raise _unusable(manifest.directory / name, "is not what was built")


def _unusable(path: Path, why: str) -> UserError:
    return UserError(f"{path} {why}: copy the directory again or run doit compile")
