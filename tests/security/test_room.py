"""A full disk is one line: which, how much is free, how much is still to come, and what to do."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from doit.exceptions import TaskFailed

from llama_npu2.errors import UserError
from stages.commands.fit import room
from stages.engine.digests import Digests
from stages.engine.doit_tasks import command_task
from stages.engine.lock import ProcessLock
from stages.engine.project import Project
from stages.engine.room import no_room, still_to_come
from stages.engine.steps import Step
from stages.graph import Build
from stages.graph.options import parse_options
from tests.conftest import complaints, doit
from tests.support.chaos import DISK, small_disk

REMEDY = "make room, or choose another place (artifacts=DIR, for reports output=DIR)"
AMOUNT = r"(\d[\d.]* [KMG]iB|nothing)"


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of a few megabytes."""
    with small_disk(tmp_path / "small"):
        if not os.path.ismount(tmp_path / "small"):
            pytest.skip("this user may not mount a small disk")
        yield tmp_path / "small"


@pytest.mark.thorough
def test_a_build_on_a_full_disk(small: Path) -> None:
    run = doit("run", "prompt=hi", f"artifacts={small}/artifacts")
    assert (run.returncode, run.stdout) == (1, "")
    (line,) = complaints(run)
    wanted = (
        rf"error: cannot build weights: the disk is full: {AMOUNT} free in {small}/artifacts/demo/cpu \(file system "
        rf"{small}\), some {AMOUNT} of this model still to come: {re.escape(REMEDY)}"
    )
    assert re.fullmatch(wanted, line), line
    assert DISK < room(Build(parse_options({"artifacts": f"{small}/artifacts", "target": "cpu"}))) < 4 * DISK


def test_a_command_on_a_full_disk(small: Path, demo: Path) -> None:
    (small / "filling").write_bytes(bytes(DISK - (1 << 12)))
    run = doit("graph", f"artifacts={demo.parents[1]}", f"output={small}/report")
    assert (run.returncode, run.stdout) == (1, "")
    (line,) = complaints(run)
    assert re.fullmatch(rf"error: the disk is full: {AMOUNT} free in {small}/report .*: {re.escape(REMEDY)}", line)
    run = doit("export", f"artifacts={demo.parents[1]}", f"output={small}/demo.pyz")
    (line,) = complaints(run)
    assert line.startswith(f"error: output={small}/demo.pyz cannot be written: the disk is full: ")
    assert f"free in {small} (file system {small})" in line


FULL = {
    "without a path": OSError(errno.ENOSPC, "No space left on device"),
    "numpy": OSError("6400 requested and 120 written"),
    "safetensors": RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
}


@pytest.mark.parametrize("name", FULL)
def test_what_libraries_say_of_a_full_disk(name: str, tmp_path: Path) -> None:
    found = no_room(FULL[name], [tmp_path / "not/yet"])
    assert found and re.fullmatch(rf"the disk is full: {AMOUNT} free in {tmp_path} \(file system .*", found)


def test_the_file_that_an_error_names_says_where(tmp_path: Path) -> None:
    error = OSError(errno.EDQUOT, "Disk quota exceeded", str(tmp_path / "file"))
    found = no_room(error, [Path("/proc")])
    assert found and found.startswith("your quota is used up: ") and f" free in {tmp_path} " in found


def test_other_errors_say_something_else(tmp_path: Path) -> None:
    assert no_room(OSError(errno.EACCES, "Permission denied"), [tmp_path]) is None
    assert no_room(ValueError("6400 requested"), [tmp_path]) is None


def test_what_is_still_to_come(tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(bytes(1 << 20))
    assert still_to_come(tmp_path, lambda: 3 << 20) == ", some 2.00 MiB of this model still to come"
    assert still_to_come(tmp_path, lambda: 1 << 20) == still_to_come(tmp_path, None) == ""

    def unknown() -> int:
        raise UserError("the hub cannot be reached")

    assert still_to_come(tmp_path, unknown) == ""


def fail(error: Exception, *_: object) -> None:
    raise error


@pytest.mark.parametrize("name", FULL)
def test_a_step_and_a_command_say_so(name: str, tmp_path: Path) -> None:
    project = Project(tmp_path / "a", Digests(tmp_path / "digests"), ProcessLock(tmp_path / "lock"))
    failed = Step(project, "step", "", partial(fail, FULL[name]), (tmp_path / "a/out",)).run()
    assert failed and failed.message.startswith("cannot build step: the disk is full: ")
    (reported,) = command_task(partial(fail, FULL[name]), [], [], [tmp_path])["actions"]
    outcome = reported()
    assert isinstance(outcome, TaskFailed) and outcome.message.startswith("the disk is full: ")


def test_a_defect_stays_one(tmp_path: Path) -> None:
    project = Project(tmp_path / "a", Digests(tmp_path / "digests"), ProcessLock(tmp_path / "lock"))
    with pytest.raises(ZeroDivisionError):
        Step(project, "step", "", lambda work: [work / str(1 // 0)], (tmp_path / "a/out",)).run()
    (reported,) = command_task(lambda: np.zeros(1)[2], [], [])["actions"]
    with pytest.raises(IndexError):
        reported()


def test_another_error_of_a_step_has_one_colon(tmp_path: Path) -> None:
    project = Project(tmp_path / "a", Digests(tmp_path / "digests"), ProcessLock(tmp_path / "lock"))
    for error, said in (
        (OSError(errno.EIO, "Input/output error"), "cannot build step: Input/output error: nothing was changed"),
        (OSError(errno.EIO, "Input/output error", "/x"), "cannot build step: /x: Input/output error: nothing was"),
    ):
        failed = Step(project, "step", "", partial(fail, error), (tmp_path / "a/out",)).run()
        assert failed and failed.message.startswith(said)
