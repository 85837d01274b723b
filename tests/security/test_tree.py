"""A directory of which others made a part: nothing is read, made, moved or removed through a link, a pipe or a name."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from stages.engine.tree import Linked, Tree

LETTER = "my own letter"


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    """A user's own, beside the tree."""
    (tmp_path / "documents/below").mkdir(parents=True)
    (tmp_path / "documents/letter").write_text(LETTER)
    (tmp_path / "documents/below/letter").write_text(LETTER)
    return tmp_path / "documents"


@pytest.fixture
def tree(tmp_path: Path, documents: Path) -> Tree:
    """In which `way` leads to documents, `name` to one of them, and `second` is a second name of that one."""
    root = tmp_path / "root"
    (root / "empty").mkdir(parents=True)
    (root / "file").write_text("a file")
    (root / "way").symlink_to(documents)
    (root / "name").symlink_to(documents / "letter")
    (root / "second").hardlink_to(documents / "letter")
    os.mkfifo(root / "pipe")
    return Tree(root)


def write_on(tree: Tree, path: str) -> None:
    with os.fdopen(tree.open_own(path), "r+b") as file:
        file.write(b"mine")


def take(tree: Tree, path: str) -> None:
    source = tree.root / "taken"
    source.write_text("mine")
    tree.take(source, path)


CHANGES: dict[str, Callable[[Tree, str], object]] = {
    "open": lambda tree, path: tree.opened(path, create=True).__enter__(),
    "check": lambda tree, path: tree.check(path),
    "read": lambda tree, path: os.close(tree.open_regular(path)),
    "write on": write_on,
    "status": lambda tree, path: tree.status(path),
    "remove": lambda tree, path: tree.remove(path),
    "remove a file": lambda tree, path: tree.remove_file(path),
    "make empty": lambda tree, path: tree.make_empty(path),
    "take": take,
    "link from": lambda tree, path: tree.link(path, "new"),
    "link to": lambda tree, path: tree.link("file", path),
    "write": lambda tree, path: tree.write(path, b"mine"),
}


def content(directory: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in directory.rglob("*")}


@pytest.mark.parametrize("change", CHANGES)
def test_a_directory_on_the_way_is_no_link(change: str, tree: Tree, documents: Path) -> None:
    before = content(documents)
    for path in ("way/letter", "way/below/letter", "way/new/letter"):
        with pytest.raises(Linked, match=r"lies behind a link out of .*: remove the link way"):
            CHANGES[change](tree, path)
    assert content(documents) == before and (tree.root / "way").is_symlink()


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    "path", ["../documents/new/letter", "empty/../../documents/new/letter", "{documents}/new/letter"]
)
def test_a_path_leads_not_out_by_its_name(change: str, path: str, tree: Tree, documents: Path) -> None:
    before = content(documents)
    with pytest.raises((ValueError, OSError)):
        CHANGES[change](tree, path.format(documents=documents))
    assert content(documents) == before


@pytest.mark.parametrize("name", ["name", "second", "pipe"])
@pytest.mark.parametrize("change", ["write on", "take", "write", "remove", "remove a file", "make empty"])
def test_what_lies_in_the_place_is_replaced(change: str, name: str, tree: Tree, documents: Path) -> None:
    """A link, a second name of somebody's file, a pipe: itself, not what it leads to."""
    CHANGES[change](tree, name)
    assert (documents / "letter").read_text() == LETTER
    path = tree.root / name
    if change in ("remove", "remove a file"):
        assert not os.path.lexists(path)
    elif change == "make empty":
        assert path.is_dir() and not path.is_symlink()
    else:
        assert path.read_bytes() == b"mine" and stat.S_ISREG(path.lstat().st_mode) and path.lstat().st_nlink == 1


def test_only_regular_files_are_read(tree: Tree) -> None:
    (tree.root / "device").symlink_to("/dev/zero")
    for name in ("name", "way", "pipe", "device", "empty"):
        with pytest.raises(OSError):
            tree.open_regular(name)
    before = len([*Path("/proc/self/fd").iterdir()])
    os.close(tree.open_regular("file"))
    assert len([*Path("/proc/self/fd").iterdir()]) == before


def test_links_are_named_and_not_followed(tree: Tree) -> None:
    assert stat.S_ISLNK(tree.status("name").st_mode) and stat.S_ISLNK(tree.status("way").st_mode)
    assert sorted(map(str, tree.files())) == ["file", "name", "pipe", "second", "way"]
    assert tree.names() == ["empty", "file", "name", "pipe", "second", "way"]
    assert [*tree.files("way")] == tree.names("way") == tree.names("way/below") == []
    assert [*tree.files("absent")] == tree.names("absent") == []


def test_a_link_is_given_a_second_name_itself(tree: Tree) -> None:
    tree.link("name", "third")
    assert (tree.root / "third").is_symlink()


def test_empty_directories_above_go(tree: Tree, documents: Path) -> None:
    (tree.root / "a/b/c").mkdir(parents=True)
    (tree.root / "a/file").touch()
    tree.remove_empty("a/b/c")
    assert not (tree.root / "a/b").exists() and (tree.root / "a/file").exists()
    (documents / "hollow").mkdir()
    tree.remove_empty("way/hollow")
    tree.remove_empty("way")
    assert (documents / "hollow").is_dir() and (tree.root / "way").is_symlink()


def test_half_a_file_is_never_seen(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError("a full disk")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="a full disk"):
        tree.write("file", b"new")
    assert (tree.root / "file").read_text() == "a file" and "." not in {name[0] for name in tree.names()}


def test_the_root_may_be_a_link(tree: Tree, tmp_path: Path) -> None:
    """A model's directory on a larger disk is."""
    (tmp_path / "disk").symlink_to(tree.root)
    Tree(tmp_path / "disk").write("empty/new", b"mine")
    assert (tree.root / "empty/new").read_bytes() == b"mine"
