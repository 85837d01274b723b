"""Runs the slim command line, the same that a machine without build tools uses, on a finished build."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Sequence

from doit.exceptions import TaskFailed

from llama_npu2.options import Answering, Listening, Running, Sampling, to_arguments
from stages.engine.ahead import take_ahead
from stages.engine.places import python_environment
from stages.engine.streams import end_if_closed, for_answers
from stages.graph import Build
from stages.graph.options import Options


def run_runtime(arguments: Sequence[str]) -> TaskFailed | None:
    """It prints its own error line."""
    if ahead := take_ahead():
        process = ahead.run(arguments)
    else:
        process = subprocess.Popen(_command(arguments), env=python_environment(), stdout=for_answers())
    before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())  # a server would outlive doit
    try:
        while (status := process.returncode) is None:
            # The terminal sends Ctrl-C to the runtime too, which ends the reply and, in chat, goes on.
            with contextlib.suppress(KeyboardInterrupt):
                process.wait()
    finally:
        signal.signal(signal.SIGTERM, before)
    end_if_closed(status)
    return _failure(status) if status else None


def captured_runtime(arguments: Sequence[str]) -> str | TaskFailed:
    """Return the standard output of the runtime, which prints its own error line."""
    done = subprocess.run(_command(arguments), env=python_environment(), stdout=subprocess.PIPE, text=True)
    return _failure(done.returncode) if done.returncode else done.stdout


def _command(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "llama_npu2", *arguments]


def _failure(status: int) -> TaskFailed:
    return TaskFailed(f"the runtime ended with status {status}", report=False)


def runtime_arguments(command: str, build: Build, options: Options, *more: str | None) -> list[str]:
    """Return a command line of the runtime: one of its commands, with the options that doit's takes, too.

    Args:
        more: what comes behind the artifact directory, if it is given.
    """
    given = to_arguments(options, Sampling, Running, Answering, Listening, command=command)
    return [command, *given, "--", str(build.directory_as_given), *(each for each in more if each is not None)]
