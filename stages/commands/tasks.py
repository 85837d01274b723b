"""Steps and commands as doit tasks, for the build that the command line names.

A command is a module here with `run(build)`; it is imported when it runs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

from doit import doit_cmd
from doit.exceptions import InvalidDodoFile, TaskFailed

from llama_npu2.errors import UserError
from stages.engine.doit_tasks import COMPLETE, FIRST, command_task, doit_task
from stages.graph import Build
from stages.graph.options import parse_options
from stages.proof.selftest.graph import Probes

Task = dict[str, Any]

_STEPLESS = {"doctor", "du", "fit", "gc", "trust"}
"""Commands that run no steps, and are asked before a checkpoint is here. Which steps there are hangs on what a
quantised one holds; for these it may be any."""

try:
    # doit offers get_var for known names only; the names themselves are needed to refuse a misspelt one.
    _build = Build(parse_options(doit_cmd._CMDLINE_VARS or {}))
    _any = _STEPLESS & {*sys.argv[1:]} and not _build.options.weights
    _wired = Build(replace(_build.options, weights="bf16")) if _any else _build
    _probes = Probes(_wired)
    _steps = _wired.steps | _probes.steps
    _places = [_build.artifacts, _build.report("")]
except UserError as error:
    raise InvalidDodoFile(str(error)) from None


def _room() -> int:
    needed: int = import_module("stages.commands.fit").room(_wired)
    return needed


_wired.project.needed = _room


def step(name: str) -> Task:
    """One step as a doit task."""
    return doit_task(_steps[name], _steps.values())


def group(name: str) -> Iterator[Task]:
    """The steps of a group as doit subtasks."""
    yield from (step(of) for of in _steps if of.startswith(f"{name}:"))


def command(name: str, built: bool = True, **more: Any) -> Task:
    """A command as a doit task; `built`: it uses the artifacts, once they are complete. `more`: of the task."""
    action = partial(_run, name, _build)
    if built:
        return command_task(action, [_build.finish], ["manifest"], _places) | {"meta": {FIRST: _need_tools}} | more
    return command_task(action, [], [], _places) | more


def estimate() -> Task:
    """The estimate as a doit task: only what it is compared with, what the simulator counts, needs programs."""
    return command("estimate", built=_build.options.target == "npu2-sim" and not _build.options.published)


def quality() -> Task:
    """The comparison of formats as a doit task: it needs no programs."""
    needs = ["tokenizer", *(["calibration"] if _build.calibration else [])]
    return command_task(partial(_run, "quality", _build), [], needs, _places)


def selftest() -> Task:
    """The ladder as a doit task: it uses its own programs, and a model's."""
    if not _probes.suit:
        return command_task(partial(_run, "selftest", _probes), [], [], _places)
    needs = ["manifest", "probe:manifest"]
    task = command_task(partial(_run, "selftest", _probes), [_build.finish, _probes.finish], needs, _places)
    return task | {"meta": {FIRST: _need_tools_of_probes}}


def report_complete() -> Task:
    """The task that builds everything and says so."""
    return command_task(_build.finish, [], ["manifest"], _places) | {"meta": {COMPLETE: str(_build.directory_as_given)}}


def _need_tools() -> None:
    """What is to run has to be built as a whole: before anything is, it is said what that lacks. Raises UserError."""
    _build.need_tools()


def _need_tools_of_probes() -> None:
    """Raises UserError."""
    _build.need_tools()
    _probes.need_tools()


def _run(name: str, build: Build, *names: str) -> TaskFailed | bool | None:
    outcome: TaskFailed | bool | None = import_module(f"stages.commands.{name}").run(build, *names)
    return outcome
