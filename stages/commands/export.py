"""`doit export [output=FILE]`: artifacts and runtime in one file, `python FILE "some text"`.

The file consists of two zip files, one after the other (`llama_npu2.artifact.storage.Archive` says why). In that of the
artifact, every content begins at a page, so that weights can be mapped where they lie. Equal artifacts make equal
bytes with one version of Python, except for the mark of who built them.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import py_compile
import struct
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO
from zipfile import ZIP64_LIMIT, ZIP_STORED, ZipFile, ZipInfo

from llama_npu2.artifact.manifest import Manifest
from llama_npu2.artifact.storage import File
from llama_npu2.errors import UserError
from llama_npu2.trust import LOCAL, SIGNATURE
from stages.engine.files import HUGE_PAGE
from stages.engine.places import MANIFEST, PROVENANCE, RUNTIME
from stages.engine.room import no_room
from stages.graph import Build
from stages.sharing.provenance import VERIFIED, signed
from stages.weights.blobs import PAGE

SUFFIX = ".pyz"
_BEGINNING = b"#!/usr/bin/env python3\nThis file was cut off: copy it again. "
"""Without its end, Python takes it for a script, and shows the line that it cannot read.

What follows has zeros and a carriage return, at which some versions (3.11.2) end the line: a comment is no error there.
"""
_ENTRY = RUNTIME / "llama_npu2/exported.py"
_ALIGNMENT = 0xD935
"""Of the extra field that fills up to a page: the one of Android's apksig, which begins with the alignment."""
_HEADER, _HEADER_64 = 30, 20
"""Bytes in front of a member without its name, and of the extra field with sizes of 64 bits."""


def run(build: Build) -> None:
    """Raises UserError."""
    output = Path(build.options.output or f"{build.source.name}-{build.name}{SUFFIX}")
    present = [name for name in (LOCAL, PROVENANCE, VERIFIED) if (build.directory / name).is_file()]
    beside = {name: (build.directory / name).read_bytes() for name in present}
    try:
        beside[SIGNATURE] = signed(build.directory)
    except UserError as error:
        print(f"not signed, so that others have to allow it by its digest: {error}", file=sys.stderr, flush=True)
    with build.project.lock:
        export(build.directory, output, beside)
    print(f'{output}: {output.stat().st_size / 1e6:.1f} MB, python {output} "some text"', flush=True)


def export(directory: Path, output: Path, beside: Mapping[str, bytes]) -> None:
    """Write what the manifest in `directory` lists to `output`, and what is said of it. Raises UserError."""
    manifest = Manifest.open(directory)
    with _replacing(output) as file:
        file.write(_BEGINNING)
        with ZipFile(file, "w", ZIP_STORED) as archive:
            for name, content in {MANIFEST.as_posix(): manifest.content, **beside}.items():
                _add(archive, name, len(content), [content])
            for name in sorted(manifest.files):
                stored = manifest.file(name)
                _add(archive, name, stored.size, _as_listed(stored))
        file.write(runtime_archive())


def runtime_archive() -> bytes:
    """The zip file that Python runs: sources, what this version of Python makes of them, and the files beside them."""
    content = io.BytesIO()
    with ZipFile(content, "w", ZIP_STORED) as archive:
        for path in sorted((RUNTIME / "llama_npu2").rglob("[!.]*")):
            if "__pycache__" in path.parts or not path.is_file():
                continue
            name = "__main__.py" if path == _ENTRY else path.relative_to(RUNTIME).as_posix()
            archive.writestr(_member(name), path.read_bytes())
            if path.suffix == ".py":
                archive.writestr(_member(f"{name}c"), _compiled(path, name))
    return content.getvalue()


def _compiled(path: Path, name: str) -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory, "module.pyc")
        unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
        py_compile.compile(str(path), str(output), name, doraise=True, optimize=0, invalidation_mode=unchecked)
        return output.read_bytes()


def _add(archive: ZipFile, name: str, size: int, content: Iterable[bytes]) -> None:
    """A member whose content begins at a page."""
    member = _member(name)
    member.file_size = size
    large = size > ZIP64_LIMIT // 2
    header = _HEADER + len(name.encode()) + _HEADER_64 * large
    assert archive.fp is not None
    padding = -(archive.fp.tell() + header + 6) % PAGE
    member.extra = struct.pack("<HHH", _ALIGNMENT, 2 + padding, PAGE) + bytes(padding)
    with archive.open(member, "w", force_zip64=large) as file:
        for some in content:
            file.write(some)
    member.extra = b""  # the central directory has no use for it


def _member(name: str) -> ZipInfo:
    """Return a zip entry that does not depend on time or user."""
    member = ZipInfo(name)
    member.create_system, member.external_attr = 3, 0o644 << 16
    return member


def _as_listed(stored: File) -> Iterator[bytes]:
    """Raises UserError if it is not what the manifest says."""
    digest = hashlib.sha256()
    for some in stored.chunks(HUGE_PAGE):
        digest.update(some)
        yield some
    if digest.hexdigest() != stored.sha256:
        raise UserError(f"{stored.path} is not what was built: run doit compile")


@contextlib.contextmanager
def _replacing(output: Path) -> Iterator[BinaryIO]:
    """A file that becomes `output` once it is whole. Raises UserError."""
    try:
        descriptor, temporary = tempfile.mkstemp(dir=output.parent, prefix=f".{output.name}.")
        try:
            with os.fdopen(descriptor, "wb", HUGE_PAGE) as file:
                yield file
                file.flush()
                os.fsync(descriptor)
            umask = os.umask(0)
            os.umask(umask)
            Path(temporary).chmod(0o777 & ~umask)
            Path(temporary).replace(output)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        why = no_room(error, [output.parent]) or error.strerror
        raise UserError(f"output={output} cannot be written: {why}") from None
