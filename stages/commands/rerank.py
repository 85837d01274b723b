"""`doit rerank prompt="..." documents=FILE`: documents by their relevance to a query."""

from __future__ import annotations

from doit.exceptions import TaskFailed

from stages.commands.runtime import run_runtime, runtime_arguments
from stages.graph import Build


def run(build: Build) -> TaskFailed | None:
    options = build.options
    if options.prompt is None or not options.documents:
        return TaskFailed('no query or no documents: doit rerank prompt="some query" documents=FILE')
    return run_runtime(runtime_arguments("rerank", build, options, options.prompt))
