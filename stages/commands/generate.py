"""`doit run prompt="..."`: a reply, streamed."""

from __future__ import annotations

from doit.exceptions import TaskFailed

from stages.commands.runtime import reply_arguments, run_runtime
from stages.graph import Build


def run(build: Build) -> TaskFailed | None:
    options = build.options
    if options.prompt is None:
        return TaskFailed('no prompt: doit run prompt="some text"')
    switches = [f"--{name}" for name in ("raw", "json") if getattr(options, name)]
    return run_runtime(build, *switches, *reply_arguments(build), "--", str(build.directory_as_given), options.prompt)
