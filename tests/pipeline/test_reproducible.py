"""Two builds of the same inputs are the same bytes, wherever and however they are made."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.conftest import doit, ran, snapshot

SURROUNDINGS = {"PYTHONHASHSEED": "7", "LC_ALL": "C", "TZ": "Asia/Tokyo", "TMPDIR": ""}
SIMULATED = ("model=demo", "target=npu2-sim", "npu.buckets=64")
CALIBRATED = ("model=model", "weights=int4", "calibrate=default")


def elsewhere(project: Path, directory: Path, *variables: str) -> dict[str, bytes]:
    """What a copy of the checkout builds, at another place, for another locale, by other numbers of threads and of
    steps at a time, for files that others cannot read. Objects come from its cache as far as it has them."""
    shutil.copytree(project, directory)
    shutil.rmtree(directory / "artifacts/model")
    (directory / "tmp").mkdir()
    mask = os.umask(0o077)
    try:
        environment = SURROUNDINGS | {"TMPDIR": str(directory / "tmp")}
        ran(doit("-n", 2, "compile", "threads=1", *variables, cwd=directory, env=environment))
    finally:
        os.umask(mask)
    return made(directory)


def made(checkout: Path) -> dict[str, bytes]:
    """The files of its only artifact directory."""
    (directory,) = (checkout / "artifacts").glob("[!.]*/*")
    return snapshot(directory)


def differences(one: dict[str, bytes], other: dict[str, bytes]) -> set[str]:
    return {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}


def test_two_builds_are_the_same_bytes(built: Path, tmp_path: Path) -> None:
    """Receipts and provenance, too. One object is compiled again, in the other place."""
    for path in (built / "artifacts/.cache/objects").glob("embed-*"):
        path.unlink()
    assert differences(made(built), elsewhere(built, tmp_path / "other place", "model=model")) == set()


@pytest.mark.slow
@pytest.mark.parametrize("variables", [SIMULATED, CALIBRATED], ids=" ".join)
def test_builds_that_take_long(built: Path, tmp_path: Path, variables: tuple[str, ...]) -> None:
    """Without a cache: the tile functions of the simulator, and weights that are calibrated by several threads."""
    shutil.rmtree(built / "artifacts/.cache")
    other = elsewhere(built, tmp_path / "other place", *variables)
    shutil.rmtree(built / "artifacts/model")
    ran(doit("compile", *variables, cwd=built))
    assert differences(made(built), other) == set()
