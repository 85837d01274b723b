"""`doit embed prompt="..."`: embeddings of texts."""

from __future__ import annotations

from doit.exceptions import TaskFailed

from stages.commands.runtime import run_runtime, runtime_arguments
from stages.graph import Build


def run(build: Build) -> TaskFailed | None:
    options = build.options
    if options.prompt is None and not options.prompt_file:
        return TaskFailed('no text: doit embed prompt="some text", or prompt_file=FILE with one in each line')
    return run_runtime(runtime_arguments("embed", build, options, options.prompt))
