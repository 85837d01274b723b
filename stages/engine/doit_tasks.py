"""What doit makes of steps: tasks, configuration, and one line per event."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from doit.exceptions import BaseFail, TaskFailed
from doit.reporter import ConsoleReporter

from llama_npu2.errors import UserError
from stages.engine.progress import show_on
from stages.engine.steps import Step

if TYPE_CHECKING:
    from stages.engine.display import Display

LAST = "last"
"""In `meta` of a step's task: how many seconds it took last, or None."""
COMPLETE = "complete"
"""In `meta` of a command's: the directory that is up to date behind it."""

Action = Callable[..., TaskFailed | bool | None]

NAMES = "names"
"""`pos_arg` of a task that takes words of the command line: its action gets them one by one."""


class OneLineReporter(ConsoleReporter):
    """Names what runs, on a terminal also while it does; says nothing of what is up to date; a failure is one line
    unless it is a defect."""

    desc = "one line per task that runs, one line per failure"

    def __init__(self, outstream: Any, options: Any) -> None:
        super().__init__(outstream, options)
        self._said: set[str] = set()
        self._started = time.monotonic()
        self._display: Display | None = None
        self._ran = self._current = 0

    def initialize(self, tasks, selected_tasks) -> None:
        steps = [task for task in _needed(tasks, selected_tasks) if _is_step(task)]
        if steps and self.outstream.isatty():
            # It takes longer to import than most builds that are up to date.
            from stages.engine.display import Display, is_terminal

            if is_terminal(self.outstream):
                before = {task.name: task.meta[LAST] for task in steps if task.meta[LAST] is not None}
                self._display = Display(self.outstream, len(steps), before)
                show_on(self._display)

    def get_status(self, task) -> None:
        if self._display and task.actions and not _is_step(task):
            self._display.rest()  # it prints what it likes

    def execute_task(self, task) -> None:
        if _is_step(task):
            if self._display:
                self._display.begin(task.name)
            else:
                self.write(f"{task.title()}\n")

    def add_success(self, task) -> None:
        if _is_step(task):
            self._ran += 1
            if self._display:
                self._display.end(task.name)
        elif complete := (task.meta or {}).get(COMPLETE):
            seconds = time.monotonic() - self._started
            self.write(f"{complete} is up to date: {self._ran} steps run, {self._current} current, {seconds:.1f} s\n")

    def skip_uptodate(self, task) -> None:
        if _is_step(task):
            self._current += 1
            if self._display:
                self._display.skip()

    def add_failure(self, task, fail: BaseFail) -> None:
        message = fail.get_msg() if fail.traceback else fail.message
        if self._display and _is_step(task):
            self._display.end(task.name, done=False)
        if fail.report and message not in self._said:
            # Tasks that run at the same time may miss the same tool.
            self._said.add(message)
            print(f"error: {message}", file=sys.stderr, flush=True)

    def complete_run(self) -> None:
        if self._display:
            self._display.rest()
            show_on(None)
        if self.runtime_errors:
            self.write("\n".join(self.runtime_errors) + "\n")


def _is_step(task: Any) -> bool:
    return LAST in (task.meta or {})


def _needed(tasks: Mapping[str, Any], selected: Iterable[str]) -> list[Any]:
    """What is selected, and what that depends on."""
    found: dict[str, Any] = {}
    todo = list(selected)
    while todo:
        if (name := todo.pop()) not in found:
            found[name] = tasks[name]
            todo += tasks[name].task_dep
    return list(found.values())


def _interrupted(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
    """Ctrl-C ends a build in one line; what is finished stays finished."""
    if kind is KeyboardInterrupt:
        print("interrupted: the next run goes on from here", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, traceback)


sys.excepthook = _interrupted

DOIT_CONFIG = {
    "default_tasks": ["generate"],
    "reporter": OneLineReporter,
    "verbosity": 2,
    # What is current is recorded in receipts beside the artifacts; doit keeps no state of its own.
    "backend": "sqlite3",
    "dep_file": ":memory:",
}


class UpToDate:
    """The `uptodate` entry of a doit task; its text is what `doit info` shows."""

    def __init__(self, step: Step) -> None:
        self.step = step

    def __call__(self) -> bool:
        self.step.project.turn.take()
        try:
            return self.step.is_current()
        except UserError:
            return False  # running it says why

    def __repr__(self) -> str:
        return self.step.why_stale() or "up to date"


def doit_task(step: Step, steps: Iterable[Step]) -> dict[str, Any]:
    """A step as a doit task; who comes before it is derived from who writes what it reads."""
    maker = {output: other.name for other in steps for output in other.outputs}
    group, _, member = step.name.partition(":")
    return {
        **({"name": member} if member else {"basename": group}),
        "doc": step.doc,
        "actions": [step.run],
        "uptodate": [UpToDate(step)],
        "targets": [output.as_posix() for output in step.outputs],
        "task_dep": sorted({maker[p] for p in step.inputs if p in maker} | set(step.after)),
        "clean": [step.clean],
        "meta": {LAST: step.project.durations.last.get(step.name)},
        "verbosity": 2,
    }


def command_task(action: Action, before: Sequence[Action], needs: Sequence[str]) -> dict[str, Any]:
    """A doit task of what people ask for: `action` behind `before` and the tasks it `needs`. A user's mistake, or a
    full disk, is a failed task with its one line."""
    return {
        "actions": [partial(_reported, each) for each in (*before, action)],
        "task_dep": list(needs),
        "verbosity": 2,
    }


def _reported(action: Action, names: Sequence[str] | None = None) -> TaskFailed | bool | None:
    try:
        return action(*(names or ()))
    except UserError as error:
        return TaskFailed(str(error))
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return TaskFailed(f"{where}{error.strerror or error}: run the command again once that is mended")
