"""`doit models`: the models that are built; `delete=NAME` or `delete=NAME/DIRECTORY` removes them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

from llama_npu2.cli.table import amount, fitted
from llama_npu2.errors import UserError
from llama_npu2.schema import load_json
from stages.engine.housekeeping import ArtifactDirectory, delete, directories, files_below, unneeded
from stages.engine.housekeeping import remove as remove_unneeded
from stages.engine.places import MANIFEST
from stages.graph import Build

_COLUMNS = ("model", "directory", "weights", "KV cache", ">context", ">size", "built")


def run(build: Build) -> None:
    """Raises UserError."""
    options, built = build.options, list(directories(build.artifacts))
    if options.delete:
        chosen = named(built, options.delete)
        for line in removed(build, chosen, options.dry_run):
            print(line, flush=True)
        return
    rows = [described(directory) for directory in built]
    if options.json:
        print(json.dumps(rows))
        return
    if not rows:
        print(f"no model is built in {options.artifacts}: doit run prompt=... builds the one that ships")
        return
    cells = [[*list(row.values())[:5], amount(row["bytes"]), _day(row["built"])] for row in rows]
    print(fitted(_COLUMNS, cells))


def described(directory: ArtifactDirectory) -> dict[str, Any]:
    """Return what a directory is, by its manifest; what does not say it is shown as incomplete."""
    path = directory.path / MANIFEST
    try:
        model = load_json(path.read_bytes())["model"]
        formats = {"weights": str(model["weights"]), "kv": str(model.get("kv", "bf16")), "context": model["max_seq"]}
        when = path.stat().st_mtime
    except (OSError, ValueError, KeyError, TypeError):
        formats, when = {"weights": "incomplete", "kv": "", "context": ""}, 0.0
    nbytes = sum(file.lstat().st_size for file in directory.files())
    return {"model": directory.model, "directory": directory.name, **formats, "bytes": nbytes, "built": when}


def _day(when: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(when)) if when else ""


def named(built: Sequence[ArtifactDirectory], name: str) -> list[ArtifactDirectory]:
    """Return the directories of a model, or one of them. Raises UserError."""
    chosen = [each for each in built if name in (each.model, f"{each.model}/{each.name}")]
    if not chosen:
        known = dict.fromkeys(each.model for each in built)
        raise UserError(f"delete={name}: there is no such model: {', '.join(known) or 'none'} is built")
    if linked := [each for each in chosen if each.linked]:
        raise UserError(f"{linked[0].path} is a link: nothing is removed; remove it, and what it leads to, yourself")
    return chosen


def removed(build: Build, chosen: Sequence[ArtifactDirectory], dry: bool) -> Iterator[str]:
    """Remove directories, and the generated checkpoint of a model of which nothing is left. Raises UserError."""
    for directory in chosen:
        nbytes = sum(file.lstat().st_size for file in files_below(directory.path))
        name = f"{directory.model}/{directory.name}"
        if dry:
            yield f"would remove {name}: {amount(nbytes)}"
            continue
        lock = directory.lock
        if not lock.try_acquire():
            raise UserError(f"{name} cannot be removed: {lock.refused}: try again when that is over")
        try:
            delete(build.artifacts, [directory.path])
        finally:
            lock.release()
        yield f"removed {name}: {amount(nbytes)}"
    models = {directory.model for directory in chosen}
    for item in () if dry else unneeded(build.artifacts):
        if item.kind == "checkpoint" and item.directory and item.directory.model in models:
            remove_unneeded(build.artifacts, item)
            yield f"removed its generated checkpoint: {amount(item.nbytes)}"
