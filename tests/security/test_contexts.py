"""Contexts on disk come from outside: whatever is wrong with one, it is refused in one line."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from llama_npu2 import UserError
from llama_npu2.engine.contexts import read_context, write_context

KEY = {"manifest": "ab", "instruction set": "avx2", "KV cache": "bf16"}
BLOCKS, POSITIONS = [b"x" * 40, b"y" * 40], 8


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_context(tmp_path / "context", KEY, range(11), BLOCKS)
    return tmp_path / "context"


def read(path: Path, key: dict[str, str] = KEY, most: int = 64) -> tuple[list[int], list[bytes]]:
    return read_context(path, key, 40, POSITIONS, most)


def test_a_context_is_read_as_it_was_written(path: Path) -> None:
    assert read(path) == ([*range(11)], BLOCKS)
    assert path.stat().st_mode & 0o777 == 0o600
    write_context(path, KEY, [1], BLOCKS[:1])
    assert read(path) == ([1], BLOCKS[:1])
    assert [each.name for each in path.parent.iterdir()] == ["context"]


@pytest.mark.parametrize("name", KEY)
def test_another_models_context_is_refused(path: Path, name: str) -> None:
    with pytest.raises(UserError, match=f"of other {name}"):
        read(path, KEY | {name: "another"})


def test_bits_and_lengths_are_checked(path: Path) -> None:
    whole, draw = path.read_bytes(), random.Random(0)
    for at in draw.sample(range(len(whole)), 100):
        for changed in (whole[:at], whole[:at] + bytes([whole[at] ^ 1 << draw.randrange(8)]) + whole[at + 1 :]):
            path.write_bytes(changed)
            with pytest.raises(UserError):
                read(path)
    path.write_bytes(whole + b"z")
    with pytest.raises(UserError, match="damaged"):
        read(path)


@pytest.mark.parametrize(
    "change",
    [{"tokens": 0}, {"tokens": -1}, {"tokens": True}, {"tokens": 10**30}, {"sha256": None}, {"more": 1}, {"key": []}],
)
def test_headers_that_lie_are_refused(path: Path, change: dict[str, Any]) -> None:
    line, _, body = path.read_bytes().partition(b"\n")
    path.write_bytes(json.dumps(json.loads(line) | change).encode() + b"\n" + body)
    with pytest.raises(UserError):
        read(path)


@pytest.mark.parametrize("text", [b"", b"\n", b"[" * 70000, b"9" * 70000, b"\xff\n", b"null\n"])
def test_what_is_no_context_is_refused(path: Path, text: bytes) -> None:
    path.write_bytes(text)
    with pytest.raises(UserError, match="no context"):
        read(path)


def test_only_its_owners_own_file_is_read(path: Path) -> None:
    path.chmod(0o640)
    with pytest.raises(UserError, match="chmod 600"):
        read(path)
    path.chmod(0o600)
    link, fifo = path.with_name("link"), path.with_name("fifo")
    link.symlink_to(path)
    os.mkfifo(fifo, 0o600)
    for other in (link, fifo, path.parent, path.with_name("none")):
        with pytest.raises(UserError):
            read(other)


def test_a_context_that_has_no_room_is_refused(path: Path) -> None:
    with pytest.raises(UserError, match="room for 10"):
        read(path, most=10)


def test_a_context_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "context").mkdir()
    with pytest.raises(UserError, match="cannot be saved"):
        write_context(tmp_path / "context", KEY, [1], BLOCKS[:1])
    assert [each.name for each in tmp_path.iterdir()] == ["context"]
    with pytest.raises(UserError, match="cannot be saved"):
        write_context(tmp_path / "none" / "context", KEY, [1], BLOCKS[:1])
