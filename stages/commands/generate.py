"""`doit run prompt="..."`: a reply, streamed."""

from __future__ import annotations

from doit.exceptions import TaskFailed

from stages.commands.runtime import run_runtime, runtime_arguments
from stages.graph import Build


def run(build: Build) -> TaskFailed | None:
    options = build.options
    if options.prompt is None and not options.prompt_file:
        return TaskFailed('no prompt: doit run prompt="some text"; doit help lists all commands')
    return run_runtime(runtime_arguments("run", build, options, options.prompt))
