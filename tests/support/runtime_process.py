"""The runtime in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT


def run_module(demo: Path, *arguments: str, stdin: str = "", command: str = "run") -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "runtime", command, str(demo), *arguments]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, input=stdin, timeout=120)
