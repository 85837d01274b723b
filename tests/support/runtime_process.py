"""The runtime in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT
from tests.support import forked


def run_module(demo: Path, *arguments: str, stdin: str = "", command: str = "run") -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "runtime", command, str(demo), *arguments]
    return forked.run(line, cwd=ROOT, input=stdin, timeout=120)
