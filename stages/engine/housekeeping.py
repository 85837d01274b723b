"""What lies below `artifacts/`, and what of it no artifact directory needs that is complete."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from llama_npu2.schema import load_json
from stages.engine.places import CACHE, CALIBRATED, GENERATED, INCOMING, MANIFEST, lock_file
from stages.engine.steps import RECEIPTS, WORK, load_receipt, remove_empty
from stages.engine.turn import Turn

RECENT = 3600
"""Seconds for which nothing is removed that no lock guards."""

_OUTPUTS = ("elf", "weights", "tokenizer", "build/modules", "build/objects", CALIBRATED.as_posix())
"""Folders of an artifact directory that hold nothing but what steps left."""


@dataclass(frozen=True)
class ArtifactDirectory:
    """`artifacts/<model>/<name>`."""

    artifacts: Path
    model: str
    name: str

    @property
    def path(self) -> Path:
        return self.artifacts / self.model / self.name

    @property
    def turn(self) -> Turn:
        """What a build of it holds."""
        return Turn(lock_file(self.artifacts, self.model, self.name))

    @cached_property
    def listed(self) -> Mapping[str, Mapping[str, object]]:
        """The files that its manifest names; none where it is not complete."""
        try:
            files = load_json((self.path / MANIFEST).read_bytes())["files"]
            return {name: dict(entry) for name, entry in files.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}

    @property
    def complete(self) -> bool:
        return (self.path / MANIFEST).is_file()

    @cached_property
    def outputs(self) -> set[str]:
        """What its receipts name."""
        receipts = (load_receipt(path) for path in (self.path / RECEIPTS).glob("*.json"))
        return {label for receipt in receipts if receipt for label in receipt["outputs"]}

    def files(self) -> Iterator[Path]:
        return files_below(self.path)


@dataclass(frozen=True)
class Unneeded:
    """`paths` that may go together. `used`: when any of them was last written, in seconds of the epoch. `directory`:
    whose lock guards them."""

    kind: str
    paths: tuple[Path, ...]
    nbytes: int
    used: float
    directory: ArtifactDirectory | None = None


def directories(artifacts: Path) -> Iterator[ArtifactDirectory]:
    """Those with artifacts, complete or not."""
    for path in sorted(artifacts.glob("[!.]*/[!.]*")):
        if path.is_dir() and ((path / MANIFEST).is_file() or (path / "build").is_dir()):
            yield ArtifactDirectory(artifacts, path.parent.name, path.name)


def files_below(path: Path) -> Iterator[Path]:
    """Every file, what vanishes meanwhile left out; links are not followed."""
    for folder, _, names in os.walk(path):
        yield from (Path(folder, name) for name in sorted(names))


def unneeded(artifacts: Path, calibration: bool = False) -> list[Unneeded]:
    """`calibration`: also weights that were rounded for a text, once they are packed. A build would make them again."""
    found = [item for directory in directories(artifacts) for item in unneeded_in(directory, calibration)]
    return [*found, *_checkpoints(artifacts), *_cached(artifacts / CACHE), *_abandoned(artifacts)]


def unneeded_in(directory: ArtifactDirectory, calibration: bool = False) -> Iterator[Unneeded]:
    """What of one artifact directory may go."""
    path = directory.path
    if not directory.complete:
        yield _item("incomplete", [path], directory)
        return
    for folder in (WORK, INCOMING):
        for left in sorted((path / folder).glob("*")):
            yield _item("abandoned work", [left], directory)
    for left in (file for file in directory.files() if file.name.startswith(".")):
        yield _item("abandoned work", [left], directory)  # half of an atomic write
    needed = directory.outputs | directory.listed.keys()
    old = [file for folder in _OUTPUTS for file in files_below(path / folder)]
    if gone := [file for file in old if file.relative_to(path).as_posix() not in needed and file.name[:1] != "."]:
        yield _item("old outputs", gone, directory)
    if calibration and (path / CALIBRATED).is_dir():
        yield _item("calibration", [path / CALIBRATED], directory)


def _checkpoints(artifacts: Path) -> Iterator[Unneeded]:
    """Generated ones of which nothing is built."""
    built = {directory.model for directory in directories(artifacts)}
    for stamp in sorted(artifacts.glob(f"[!.]*/*/{GENERATED}")):
        if (model := stamp.parents[1].name) not in built:
            yield _item("checkpoint", [stamp.parent], ArtifactDirectory(artifacts, model, ""))
    for half in sorted(artifacts.glob("[!.]*/.*.tmp-*")):
        yield _item("abandoned work", [half], ArtifactDirectory(artifacts, half.parent.name, ""))


def _cached(cache: Path) -> Iterator[Unneeded]:
    """Objects by when they were last linked, and what compilers left that were stopped."""
    entries = sorted(cache.glob("*.json"))
    for entry in entries:
        yield _item("cached object", [entry, entry.with_suffix(".o")])
    known = {path for entry in entries for path in (entry, entry.with_suffix(".o"))}
    for left in sorted(set(cache.glob("*")) - known):
        yield _item("abandoned work", [left])


def _abandoned(artifacts: Path) -> Iterator[Unneeded]:
    for left in sorted((*artifacts.glob(".fit-*"), *artifacts.glob("..d*.json.*"))):
        yield _item("abandoned work", [left])


def _item(kind: str, paths: Iterable[Path], directory: ArtifactDirectory | None = None) -> Unneeded:
    """With what is there of `paths`, and below them."""
    there, nbytes, used = [], 0, 0.0
    for path in paths:
        with contextlib.suppress(OSError):
            inside = [path, *files_below(path)] if path.is_dir() else [path]
            stats = [each.lstat() for each in inside]
            nbytes += sum(stat.st_size for each, stat in zip(inside, stats, strict=True) if not each.is_dir())
            used = max([used, *(stat.st_mtime for stat in stats)])
            there.append(path)
    return Unneeded(kind, tuple(there), nbytes, used, directory)


def remove(item: Unneeded, calibration: bool = False) -> bool:
    """Whether it is gone. What somebody works on, or wrote since it was found, stays. Raises OSError."""
    if item.directory is None:
        if time.time() - item.used < RECENT:
            return False
        _delete(item.paths)
        return True
    turn = item.directory.turn
    if not turn.try_take():
        return False
    try:
        if item.directory.name and item not in list(unneeded_in(item.directory, calibration)):
            return False
        _delete(item.paths)
        for path in item.paths:
            remove_empty(path.parent, item.directory.path.parent)
        return True
    finally:
        turn.give_up()


def _delete(paths: Iterable[Path]) -> None:
    """In order: a cache's entry goes before the object that it promises."""
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
