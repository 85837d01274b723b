"""`doit serve`: an HTTP server."""

from __future__ import annotations

from doit.exceptions import TaskFailed

from stages.commands.runtime import run_runtime, runtime_arguments
from stages.graph import Build


def run(build: Build) -> TaskFailed | None:
    return run_runtime(runtime_arguments("serve", build, build.options, *build.options.also))
