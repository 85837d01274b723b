"""`doit run prompt="..."`: a reply, streamed."""

from __future__ import annotations

from doit.exceptions import TaskFailed

from stages.commands.runtime import reply_arguments, run_runtime
from stages.graph import Build


def run(build: Build) -> TaskFailed | None:
    if build.options.prompt is None:
        return TaskFailed('no prompt: doit run prompt="some text"')
    raw = ["--raw"] if build.options.raw else []
    return run_runtime(build, *raw, *reply_arguments(build), "--", str(build.directory_as_given), build.options.prompt)
