"""Processes that share artifacts and remotes are killed, find the disk full, lose connections: nothing is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT


@pytest.mark.slow
def test_800_random_operations_with_faults_lose_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.chaos", "200"]
    run = subprocess.run(command, cwd=ROOT, env=os.environ | {"TMPDIR": str(tmp_path)}, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "are whole" in run.stdout
