"""Runs an artifact directory in a process of its own: how long a reply takes, how much memory a run holds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from llama_npu2.cli.peak import PRINT_PEAK
from llama_npu2.errors import UserError, printable
from llama_npu2.frozen import frozen
from stages.engine.places import python_environment
from stages.graph.needs import RUN_IMPORTS


@frozen
class Times:
    """Seconds of a short reply, for which all is loaded: to its first token, and for each further one."""

    ttft: float
    tpot: float


_REPLY = """
import json, sys
from llama_npu2 import load
with load(sys.argv[1]) as llm:
    for _ in range(2):
        reply = "".join(llm.generate("The capital of France is", raw=True, max_tokens=32))
    print(json.dumps({"ttft": llm.stats.ttft, "tpot": llm.stats.tpot}))
"""

_FULL = f"""{RUN_IMPORTS}
import sys
import numpy as np
from llama_npu2 import load
llm, context = load(sys.argv[1]), int(sys.argv[2])
llm.encode("x", raw=True)
llm.prefill(np.random.default_rng(0).integers(llm.manifest.model["vocab"], size=context - 1))
llm.decode(0)
{PRINT_PEAK}
"""
"""Tokens from all over the vocabulary: of an embedding that is not the head, a run holds what its tokens are in."""


def times(directory: Path) -> Times:
    """Return the times of a reply. Raises UserError if there is none."""
    return Times(**json.loads(_said(_REPLY, directory)))


def resident(directory: Path, context: int) -> int:
    """Return the bytes that a run with so many positions holds at most. Raises UserError if it fails."""
    return int(_said(_FULL, directory, context)) << 10


def _said(script: str, *arguments: object) -> str:
    """Return the last line that a script prints."""
    words = [sys.executable, "-c", script, *map(str, arguments)]
    run = subprocess.run(words, env=python_environment(), capture_output=True, text=True, check=False)
    if run.returncode:
        raise UserError(complaint(run))
    return run.stdout.splitlines()[-1]


def complaint(run: subprocess.CompletedProcess[str]) -> str:
    """Return the line with which a command failed."""
    lines = [line for line in run.stderr.splitlines() if line.strip()] or ["it failed without a word"]
    return printable(next((line for line in lines if line.startswith("error: ")), lines[-1])).removeprefix("error: ")
