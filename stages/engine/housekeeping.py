"""The files below `artifacts/`, and the removal of those that no complete artifact directory needs.

A directory of `artifacts/` that is a link, to a larger disk for example, is listed, but nothing in it is removed.
"""

from __future__ import annotations

import contextlib
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path, PurePath

from llama_npu2.artifact.regular import read_regular
from llama_npu2.frozen import frozen
from llama_npu2.schema import load_json
from stages.engine.lock import ProcessLock
from stages.engine.places import CACHE, CALIBRATED, GENERATED, INCOMING, MANIFEST, SCRATCH, lock_file
from stages.engine.project import RECEIPTS, WORK, load_receipt
from stages.engine.tree import Tree

RECENT = 3600
"""Seconds for which a file that no lock guards is kept after it was used."""

_OUTPUTS = ("elf", "weights", "tokenizer", "build/modules", "build/objects", CALIBRATED.as_posix())
"""Folders of an artifact directory in which there are only outputs of steps."""


@frozen
class ArtifactDirectory:
    """`artifacts/<model>/<name>`."""

    artifacts: Path
    model: str
    name: str

    @property
    def path(self) -> Path:
        return self.artifacts / self.model / self.name

    @property
    def lock(self) -> ProcessLock:
        """The lock of its builds."""
        return ProcessLock(lock_file(self.artifacts, self.model, self.name))

    @cached_property
    def listed(self) -> Mapping[str, Mapping[str, object]]:
        """The files that its manifest lists; none if it is not complete."""
        try:
            files = load_json(read_regular(self.path / MANIFEST))["files"]
            return {name: dict(entry) for name, entry in files.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}

    @property
    def complete(self) -> bool:
        """Whether it has a manifest."""
        return (self.path / MANIFEST).is_file()

    @cached_property
    def outputs(self) -> set[str]:
        """The outputs that its receipts list."""
        receipts = (load_receipt(self.path / RECEIPTS / name) for name in self.tree.names(RECEIPTS))
        return {label for receipt in receipts if receipt for label in receipt["outputs"]}

    @property
    def linked(self) -> bool:
        """Whether it or its model's directory is a link."""
        return self.path.is_symlink() or self.path.parent.is_symlink()

    @cached_property
    def tree(self) -> Tree:
        return Tree(self.path)

    def files(self) -> Iterator[Path]:
        """Return the paths of every file in it; links in it are not followed."""
        return files_below(self.path)


@frozen
class Unneeded:
    """Files and directories that can be removed together."""

    kind: str
    paths: tuple[Path, ...]
    nbytes: int
    used: float
    """When any of them was last written, in seconds of the epoch."""
    directory: ArtifactDirectory | None = None
    """The directory whose lock guards them, if any."""


def directories(artifacts: Path) -> Iterator[ArtifactDirectory]:
    """Yield the directories with artifacts, complete or not."""
    for path in sorted(artifacts.glob("[!.]*/[!.]*")):
        if path.is_dir() and ((path / MANIFEST).is_file() or (path / "build").is_dir()):
            yield ArtifactDirectory(artifacts, path.parent.name, path.name)


def files_below(path: Path) -> Iterator[Path]:
    """Return every file below a directory, which itself may be a link; links in it are not followed.

    Files that vanish meanwhile are left out.
    """
    return (path / file for file in Tree(path).files())


def unneeded(artifacts: Path, calibration: bool = False) -> list[Unneeded]:
    """Return everything below `artifacts` that is not needed.

    Args:
        artifacts: the directory of all artifacts.
        calibration: whether to include weights that were rounded for a text, once they are packed. A build would make
            them again.
    """
    items = [item for directory in directories(artifacts) for item in unneeded_in(directory, calibration)]
    return [*items, *_checkpoints(artifacts), *_cached(artifacts), *_abandoned(artifacts)]


def unneeded_in(directory: ArtifactDirectory, calibration: bool = False) -> Iterator[Unneeded]:
    """Yield the items of one artifact directory that are not needed."""
    path, tree = directory.path, directory.tree
    if directory.linked:
        return
    if not directory.complete:
        yield from _item("incomplete", [path], directory)
        return
    for folder in (WORK, INCOMING):
        for name in tree.names(folder):
            yield from _item("abandoned work", [path / folder / name], directory)
    for left in (file for file in directory.files() if file.name.startswith(".")):
        yield from _item("abandoned work", [left], directory)  # an unfinished atomic write
    needed = directory.outputs | directory.listed.keys()
    old = [file for folder in _OUTPUTS for file in tree.files(folder)]
    if gone := [path / file for file in old if file.as_posix() not in needed and file.name[:1] != "."]:
        yield from _item("old outputs", gone, directory)
    if calibration and next(tree.files(CALIBRATED), None):
        yield from _item("calibration", [path / CALIBRATED], directory)


def _checkpoints(artifacts: Path) -> Iterator[Unneeded]:
    """Yield generated checkpoints from which nothing is built."""
    built, tree = {directory.model for directory in directories(artifacts)}, Tree(artifacts)
    for model in (name for name in tree.names() if name[0] != "."):
        for name in tree.names(model):
            owner = ArtifactDirectory(artifacts, model, "")
            if name[0] == "." and ".tmp-" in name:
                yield from _item("abandoned work", [artifacts / model / name], owner)
            elif model not in built and GENERATED in tree.names(PurePath(model, name)):
                yield from _item("checkpoint", [artifacts / model / name], owner)


def _cached(artifacts: Path) -> Iterator[Unneeded]:
    """Yield cached objects, whose entry's time says when they were last linked, and files of stopped compilers."""
    paths = [artifacts / CACHE / name for name in Tree(artifacts).names(CACHE)]
    entries = [path for path in paths if path.suffix == ".json"]
    for entry in entries:
        yield from _item("cached object", [entry, entry.with_suffix(".o")])
    listed = {path for entry in entries for path in (entry, entry.with_suffix(".o"))}
    for left in (path for path in paths if path not in listed):
        yield from _item("abandoned work", [left])


def _abandoned(artifacts: Path) -> Iterator[Unneeded]:
    for name in Tree(artifacts).names():
        if name.startswith((".fit-", SCRATCH)) or (name.startswith("..d") and ".json." in name):
            yield from _item("abandoned work", [artifacts / name])


def is_recent(item: Unneeded) -> bool:
    """Whether nothing guards it but that it was written a moment ago: somebody may be about to use it."""
    return item.directory is None and time.time() - item.used < RECENT


def _item(kind: str, paths: Iterable[Path], directory: ArtifactDirectory | None = None) -> Iterator[Unneeded]:
    """Yield an item with those of `paths` that exist, and the sizes and times of the files below them.

    Nothing is yielded if none exists: another process may have removed them since they were listed.
    """
    existing, nbytes, used = [], 0, 0.0
    for path in paths:
        with contextlib.suppress(OSError):
            stats = [path.lstat()]
            is_folder = stat.S_ISDIR(stats[0].st_mode)
            stats += [file.lstat() for file in files_below(path)] if is_folder else []
            nbytes += sum(status.st_size for status in stats[is_folder:])
            used = max([used, *(status.st_mtime for status in stats)])
            existing.append(path)
    if existing:
        yield Unneeded(kind, tuple(existing), nbytes, used, directory)


def remove(artifacts: Path, item: Unneeded, calibration: bool = False) -> bool:
    """Remove an item, unless somebody works on it, or wrote to it since it was found.

    Returns:
        Whether it was removed.

    Raises:
        OSError: if it cannot be removed.
        UserError: if a link now leads to it.
    """
    if is_recent(item):
        return False
    if item.directory is None:
        delete(artifacts, item.paths)
        return True
    lock = item.directory.lock
    if not lock.try_acquire():
        return False
    try:
        if item.directory.name and item not in list(unneeded_in(item.directory, calibration)):
            return False
        delete(artifacts, item.paths)
        return True
    finally:
        lock.release()


def delete(artifacts: Path, paths: Iterable[Path]) -> None:
    """Remove paths in their order: a cache's entry before the object that it promises.

    Folders of models that are empty afterwards are removed as well.
    """
    tree = Tree(artifacts)
    for path in paths:
        inside = path.relative_to(artifacts)
        tree.remove(inside)
        if inside.parts[0][0] != ".":
            tree.remove_empty(inside.parent)
