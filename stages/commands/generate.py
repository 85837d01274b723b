"""`doit run prompt="..."`: a reply, streamed."""

from __future__ import annotations

from pathlib import Path

from doit.exceptions import TaskFailed

from stages.commands.runtime import run_runtime, runtime_arguments
from stages.graph import Build


def run(build: Build) -> TaskFailed | None:
    options = build.options
    if options.prompt is None and not options.prompt_file:
        return TaskFailed('no prompt: doit run prompt="some text"; doit help lists all commands')
    if options.prompt_file and not Path(options.prompt_file).is_file():
        problem = "this is no file" if Path(options.prompt_file).exists() else "there is no such file"
        return TaskFailed(f"prompt_file={options.prompt_file}: {problem}: give a text file")
    return run_runtime(runtime_arguments("run", build, options, options.prompt))
