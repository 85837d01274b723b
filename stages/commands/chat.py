"""`doit chat`: a conversation in the terminal."""

from __future__ import annotations

from doit.exceptions import TaskFailed

from stages.commands.runtime import reply_arguments, run_runtime
from stages.graph import Build


def run(build: Build) -> TaskFailed | None:
    return run_runtime(build, "--chat", *reply_arguments(build), "--", str(build.directory_as_given))
