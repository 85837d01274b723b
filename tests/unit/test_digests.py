"""Digests of files: of what is in them, however they are read."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
import xxhash

from stages.engine import files
from stages.engine.digests import Digests
from stages.engine.files import HUGE_PAGE, content_digest, content_sha256

PIECE = 2 * HUGE_PAGE
SIZES = (0, 1, (1 << 20) + 1, HUGE_PAGE - 1, HUGE_PAGE, PIECE, PIECE + 1, 2 * PIECE + HUGE_PAGE + 12345)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_PIECE", PIECE)


@pytest.mark.parametrize("size", SIZES)
def test_digests_are_of_the_whole_content(size: int, tmp_path: Path) -> None:
    content = np.random.default_rng(size).bytes(size)
    path = tmp_path / "file"
    path.write_bytes(content)
    assert content_digest(path) == xxhash.xxh3_128_hexdigest(content)
    assert content_sha256(path) == hashlib.sha256(content).hexdigest()


def test_a_file_that_shrinks_is_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its second piece was to be cached before it was there."""
    path = tmp_path / "file"
    path.write_bytes(bytes(2 * PIECE))
    cache = files._cache_in_huge_pages

    def shrink(file: files.BinaryIO, start: int, count: int) -> None:
        with path.open("r+b") as other:
            other.truncate(PIECE)
        cache(file, start, count)

    monkeypatch.setattr(files, "_cache_in_huge_pages", shrink)
    assert content_digest(path) == xxhash.xxh3_128_hexdigest(bytes(PIECE))


def test_what_follows_from_content_is_computed_once_for_all_files_that_have_it(tmp_path: Path) -> None:
    """Also in a copy of the memory, beside copies of the files; not of a file that has changed."""
    computed: list[bytes] = []

    def length(content: bytes) -> int:
        computed.append(content)
        return len(content)

    one, other = tmp_path / "one", tmp_path / "other"
    for path in (one, other):
        path.write_bytes(b"same")
    digests = Digests(tmp_path / "memory")
    assert [digests.of_content("length of ", path, length) for path in (one, other)] == [4, 4]
    digests.save()
    again = Digests((tmp_path / "memory").rename(tmp_path / "copy"))
    assert again.of_content("length of ", one, length) == 4 and computed == [b"same"]
    one.write_bytes(b"changed")
    assert again.of_content("length of ", one, length) == 7 and computed == [b"same", b"changed"]
