"""Steps and commands as doit tasks, for the build that the command line names.

A command is a module here with `run(build)`; it is imported when it runs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

from doit import doit_cmd
from doit.exceptions import TaskFailed

from llama_npu2.errors import UserError, closest, unreadable
from stages.commands.words import GENERATE, WITH_NAMES, command_line, commands_of
from stages.engine.doit_tasks import COMPLETE, DOIT_CONFIG, FIRST, NAMES, command_task, doit_task
from stages.graph import Build
from stages.graph.options import COMMANDS, parse_options
from stages.kernels import HOST_SET

Task = dict[str, Any]

_STEPLESS = {"doctor", "du", "fit", "gc", "models", "trust", "completion", "worker", "fleet"}
"""Commands that run no steps, and are asked before a checkpoint is here. Which steps there are depends on what a
quantised one holds; for these it may be any."""
_UNBUILT = _STEPLESS | {"provenance", "pull", "graph", "why"}
"""Commands that use what is there."""
_PORTABLE = {"compile", "export", "push", "pull", "verify"}
"""Commands after which other machines may run the artifacts, and the one whose findings are shared with them: these
compile kernels for the instruction sets of all machines. The others compile those that this machine uses."""


def _probes_of(build: Build) -> Any:
    """Return the programs of the selftest. They load what builds for the CPU do not need."""
    return import_module("stages.proof.selftest.graph").Probes(build)


def _check_known(words: Sequence[str]) -> None:
    """Check that words of the command line name commands, steps or what steps write. Raises UserError."""
    if misplaced := [word for word in words if word[0] == "-"]:
        raise UserError(f"{misplaced[0]}: options of doit stand before the command, as in doit -n 4 compile")
    groups = ["calibration", "probe", *(name.partition(":")[0] for name in _steps)]
    known = [*COMMANDS, GENERATE, *groups, *_steps]
    for word in words:
        if word not in known and not {*"*?./"} & {*word}:
            close = closest(word, known)
            hint = f"did you mean {close}?" if close else "doit list shows both"
            raise UserError(f"{word} is neither a command nor a step: {hint}")


try:
    # doit offers get_var for known names only; the names themselves are needed to refuse a misspelt one.
    _verb, _words = command_line(sys.argv[1:]) if doit_cmd._CMDLINE_VARS is not None else ("list", [])
    _commands = commands_of(_verb, _words)
    _portable = bool(_PORTABLE & {*_commands})
    _given = doit_cmd._CMDLINE_VARS or {}
    try:
        _options = parse_options(_given, _commands)
    except UserError:
        if _verb == "run":  # a misspelt command takes no variables: that is what is wrong then
            _steps = Build(parse_options(_given), _portable).steps
            _check_known(_words)
        raise
    _build = Build(_options, _portable)
    _any = _STEPLESS & {*_commands} and not _build.options.weights
    _wired = Build(replace(_build.options, weights="bf16"), _portable) if _any else _build
    _probes: Any = _probes_of(_wired) if _wired.target.kernel_set != HOST_SET else None
    _steps = _wired.steps | (_probes.steps if _probes else {})
    _places = [_build.artifacts, _build.report("")]
    if _build.options.on:
        DOIT_CONFIG["num_process"] = import_module("stages.sharing.fleet").IN_FLIGHT
    if _verb == "run" and not WITH_NAMES & {*_words[:1]}:
        _check_known(_words)
except (UserError, PermissionError) as error:
    # doit would print it in words of its own.
    print(f"error: {error if isinstance(error, UserError) else unreadable(error)}", file=sys.stderr)
    raise SystemExit(3) from None


def _room() -> int:
    needed: int = import_module("stages.commands.fit").room(_wired)
    return needed


_wired.project.needed = _room


def step(name: str) -> Task:
    """Return one step as a doit task."""
    return doit_task(_steps[name], _steps.values())


def group(name: str) -> Iterator[Task]:
    """Yield the steps of a group as doit subtasks."""
    yield from (step(of) for of in _steps if of.startswith(f"{name}:"))


def commands() -> Iterator[Task]:
    """Yield every command as a doit task."""
    for name, sentence in COMMANDS.items():
        task = _SPECIAL[name]() if name in _SPECIAL else _command(name, built=name not in _UNBUILT)
        names = {"pos_arg": NAMES} if name in WITH_NAMES else {}
        yield {"basename": GENERATE if name == "run" else name, "doc": sentence} | task | names


def _command(name: str, built: bool) -> Task:
    """Return a command; `built`: it uses the artifacts, once they are complete."""
    action = partial(_run, GENERATE if name == "run" else name, _build)
    if built:
        return command_task(action, [_build.finish], ["manifest"], _places) | {"meta": {FIRST: _need_tools}}
    return command_task(action, [], [], _places)


def _estimate() -> Task:
    """Return the estimate: only what it is compared with, what the simulator counts, needs programs."""
    return _command("estimate", built=_build.options.target == "npu2-sim" and not _build.options.published)


def _quality() -> Task:
    """Return the comparison of formats: it needs no programs."""
    needs = ["tokenizer", *(["calibration"] if _build.calibration else [])]
    return command_task(partial(_run, "quality", _build), [], needs, _places)


def _selftest() -> Task:
    """Return the ladder: it uses its own programs, and a model's."""
    if not _probes:
        return command_task(lambda: _run("selftest", _probes_of(_wired)), [], [], _places)
    needs = ["manifest", "probe:manifest"]
    task = command_task(partial(_run, "selftest", _probes), [_build.finish, _probes.finish], needs, _places)
    return task | {"meta": {FIRST: _need_tools_of_probes}}


def _compile() -> Task:
    """Return the command that builds everything and says so."""
    return command_task(_build.finish, [], ["manifest"], _places) | {"meta": {COMPLETE: str(_build.directory_as_given)}}


_SPECIAL = {"compile": _compile, "estimate": _estimate, "quality": _quality, "selftest": _selftest}


def _need_tools() -> None:
    """Refuse a command before anything is built for it if a tool is missing. Raises UserError."""
    _build.need_tools()


def _need_tools_of_probes() -> None:
    """Refuse the selftest if a tool for the model or for the probes is missing. Raises UserError."""
    _build.need_tools()
    if _probes:
        _probes.need_tools()


def _run(name: str, build: Build, *names: str) -> TaskFailed | bool | None:
    outcome: TaskFailed | bool | None = import_module(f"stages.commands.{name}").run(build, *names)
    return outcome
