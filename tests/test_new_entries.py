"""A new kernel and a new weight format are files of their own: nothing else is touched, and both targets run them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, doit, ran, snapshot

FILES = {
    "format.py": "stages/weights/formats/tiny8.py",
    "kernel.py": "stages/kernels/unpack.py",
    "cpu.cc": "kernel_src/cpu/unpack.cc",
    "aie2p.cc": "kernel_src/aie2p/unpack.cc",
}


@pytest.fixture
def extended(built: Path) -> Path:
    """A checkout with the entries in `tests/new_entries`."""
    for source, place in FILES.items():
        assert not (built / place).exists()
        (built / place).write_text((ROOT / "tests/new_entries" / source).read_text())
    return built


@pytest.mark.parametrize("target", ["cpu", "npu2-sim"])
def test_runs(extended: Path, target: str, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(extended / "runtime"), str(extended)])}
    (tmp_path / "build").mkdir()
    command = [sys.executable, ROOT / "tests/new_entries/run.py", tmp_path / "build", target]
    run = subprocess.run(list(map(str, command)), cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def test_changes_nothing_that_was_built(extended: Path) -> None:
    """Who reads a table looks again, and makes the same bytes; receipts say what they saw."""
    before = snapshot(extended / "artifacts/model/cpu")
    tasks = ran(doit("compile", "model=model", cwd=extended))
    assert not tasks & {"checkpoint", "tokenizer"} and not any(task.startswith("elf:") for task in tasks)
    after = snapshot(extended / "artifacts/model/cpu")
    assert {name for name in after if after[name] != before.get(name)} <= {n for n in after if "receipts" in n}
