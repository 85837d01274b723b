"""A cluster whose parts are killed, stopped and cut off at random leaves complete builds, and nothing wrong."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conftest import ROOT

pytest.importorskip("distributed")


@pytest.mark.thorough
def test_100_random_faults_leave_nothing_wrong() -> None:
    command = [sys.executable, "-m", "tests.support.fleet_chaos", "100"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
