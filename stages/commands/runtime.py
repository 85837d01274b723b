"""Runs the slim command line, the same that a machine without build tools uses, on a finished build."""

from __future__ import annotations

import contextlib
import subprocess
import sys

from doit.exceptions import TaskFailed

from llama_npu2.options import Sampling, to_arguments
from stages.engine.places import python_environment
from stages.graph import Build


def run_runtime(build: Build, *arguments: str) -> TaskFailed | None:
    """It prints its own error line."""
    command = [sys.executable, "-m", "llama_npu2", *arguments]
    process = subprocess.Popen(command, env=python_environment())
    while (status := process.returncode) is None:
        # The terminal sends Ctrl-C to the runtime too, which ends the reply and, in chat, goes on.
        with contextlib.suppress(KeyboardInterrupt):
            process.wait()
    return TaskFailed(f"generation ended with status {status}", report=False) if status else None


def reply_arguments(build: Build) -> list[str]:
    """Sampling options and threads, as the runtime's command line takes them."""
    return [*to_arguments(build.options, Sampling), f"--threads={build.options.threads}"]
