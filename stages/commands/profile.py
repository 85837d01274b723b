"""`doit profile`: where the time of a prompt and of a token goes."""

from __future__ import annotations

from doit.exceptions import TaskFailed

from stages.commands.runtime import reply_arguments, run_runtime
from stages.graph import Build


def run(build: Build) -> TaskFailed | None:
    options = build.options
    as_json = ["--json"] if options.json else []
    raw = ["--raw"] if options.raw else []
    more = ("--profile", *as_json, *raw, *reply_arguments(build), f"--repeats={options.repeats}")
    prompt = [] if options.prompt is None else [options.prompt]
    return run_runtime(build, *more, "--", str(build.directory_as_given), *prompt)
