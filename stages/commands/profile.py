"""`doit profile`: where the time of a prompt and of a token goes."""

from __future__ import annotations

from doit.exceptions import TaskFailed

from stages.commands.runtime import run_runtime
from stages.graph import Build


def run(build: Build) -> TaskFailed | None:
    options = build.options
    as_json = ["--json"] if options.json else []
    counts = (f"--threads={options.threads}", f"--repeats={options.repeats}")
    return run_runtime(build, "--profile", *as_json, *counts, "--", str(build.directory_as_given))
