"""`doit du`: what takes space below `artifacts/`, and of the hub's cache what artifacts here were built from."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from llama_npu2.cli.table import amount, fitted
from llama_npu2.errors import UserError
from stages.engine.files import read_json
from stages.engine.housekeeping import ArtifactDirectory, directories, files_below, is_recent, unneeded
from stages.engine.places import CACHE, CALIBRATED, CHECKPOINT, GENERATED, INCOMING, OBJECTS
from stages.engine.project import WORK
from stages.graph import Build

_KINDS = {
    "weights": "weights",
    "elf": "programs",
    OBJECTS.as_posix(): "objects",
    CALIBRATED.as_posix(): "calibration",
    WORK.as_posix(): "unfinished",
    INCOMING.as_posix(): "unfinished",
}
"""What is in a folder of an artifact directory; all else are descriptions: manifest, tokenizer, receipts, sources."""

_OTHER = "descriptions"
_COLUMNS = tuple(dict.fromkeys((*_KINDS.values(), _OTHER)))


def run(build: Build) -> None:
    artifacts = build.artifacts
    held = list(directories(artifacts))
    usage = {directory: dict(_by_kind(directory)) for directory in held}
    shared = {
        "cached objects": _total(files_below(artifacts / CACHE)),
        "digests": _total([artifacts / ".digests.json"]),
        "generated checkpoints": sum(_total(files_below(p.parent)) for p in artifacts.glob(f"[!.]*/*/{GENERATED}")),
        "hub cache": sum(_total(files_below(path)) for path in _hub_folders(held)),
    }
    duplicates = duplicated(held)
    gone = sum(item.nbytes for item in unneeded(artifacts) if not is_recent(item))
    if build.options.json:
        rows = [
            {"model": directory.model, "directory": directory.name, "complete": directory.complete, "bytes": kinds}
            for directory, kinds in usage.items()
        ]
        print(json.dumps({"artifacts": rows, "shared": shared, "duplicated": duplicates, "unneeded": gone}))
    else:
        print(_table(usage))
        print("\n" + "\n".join(f"{what}: {amount(nbytes)}" for what, nbytes in shared.items() if nbytes))
        print(f"duplicates: {amount(duplicates) if duplicates else 'nothing'}")
        print(f"not needed: {amount(gone)}; doit gc shows what" if gone else "not needed: nothing")


def _by_kind(directory: ArtifactDirectory) -> Counter[str]:
    """Bytes; a file of two names counts once."""
    sizes: Counter[str] = Counter()
    for path, nbytes in _once(directory.files()):
        inside = path.relative_to(directory.path)
        sizes[next((kind for folder, kind in _KINDS.items() if inside.is_relative_to(folder)), _OTHER)] += nbytes
    return sizes


def _once(paths: Iterable[Path]) -> Iterator[tuple[Path, int]]:
    """Files with their sizes, each inode once; what vanished meanwhile is left out."""
    seen = set()
    for path in paths:
        try:
            status = path.lstat()
        except OSError:
            continue
        if (status.st_dev, status.st_ino) not in seen:
            seen.add((status.st_dev, status.st_ino))
            yield path, status.st_size


def _total(paths: Iterable[Path]) -> int:
    return sum(nbytes for _, nbytes in _once(paths))


def _hub_folders(held: Iterable[ArtifactDirectory]) -> list[Path]:
    """Return the folders of the hub's cache with checkpoints that are built here."""
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.file_download import repo_folder_name

    repos = set()
    for directory in held:
        try:
            source = read_json(directory.path / CHECKPOINT).get("source")
        except UserError:
            continue
        if isinstance(source, dict) and source.get("kind") == "hub":
            repos.add(str(source.get("repo")))
    return [Path(HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type="model") for repo in sorted(repos)]


def duplicated(held: Iterable[ArtifactDirectory]) -> int:
    """Bytes of files that several manifests name with the same SHA-256, but for the first of each; links count once."""
    files = [
        (str(entry.get("sha256")), directory.path / name)
        for directory in held
        for name, entry in directory.listed.items()
        if (directory.path / name).is_file()
    ]
    sums = {path: sha256 for sha256, path in files}
    found = list(_once(sums))
    first = {sums[path]: nbytes for path, nbytes in found}
    return sum(nbytes for _, nbytes in found) - sum(first.values())


def _table(usage: Mapping[ArtifactDirectory, Mapping[str, int]]) -> str:
    numbers = [f">{kind}" for kind in (*_COLUMNS, "all")]
    rows = [
        [directory.model, directory.name + ("" if directory.complete else " (incomplete)"), *_amounts(kinds)]
        for directory, kinds in usage.items()
    ]
    whole: Counter[str] = Counter()
    for kinds in usage.values():
        whole.update(kinds)
    return fitted(["model", "directory", *numbers], [*rows, ["all", "", *_amounts(whole)]])


def _amounts(kinds: Mapping[str, int]) -> list[str]:
    return [amount(kinds.get(kind, 0)) for kind in _COLUMNS] + [amount(sum(kinds.values()))]
