"""What doit makes of steps: tasks, configuration, and one line per event."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from doit.exceptions import BaseFail, TaskFailed
from doit.reporter import ConsoleReporter

from llama_npu2.errors import UserError
from stages.engine.steps import Step

Action = Callable[..., TaskFailed | bool | None]

NAMES = "names"
"""`pos_arg` of a task that takes words of the command line: its action gets them one by one."""


class OneLineReporter(ConsoleReporter):
    """Names what runs; says nothing of what is up to date; a failure is one line unless it is a defect."""

    desc = "one line per task that runs, one line per failure"

    def __init__(self, outstream: Any, options: Any) -> None:
        super().__init__(outstream, options)
        self._said: set[str] = set()

    def execute_task(self, task) -> None:
        if task.actions and not (task.meta or {}).get("quiet"):
            self.write(f"{task.title()}\n")

    def skip_uptodate(self, task) -> None:
        pass

    def add_failure(self, task, fail: BaseFail) -> None:
        message = fail.get_msg() if fail.traceback else fail.message
        if fail.report and message not in self._said:
            # Tasks that run at the same time may miss the same tool.
            self._said.add(message)
            print(f"error: {message}", file=sys.stderr, flush=True)

    def complete_run(self) -> None:
        if self.runtime_errors:
            self.write("\n".join(self.runtime_errors) + "\n")


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
        "verbosity": 2,
    }


def command_task(action: Action, before: Sequence[Action], needs: Sequence[str]) -> dict[str, Any]:
    """A doit task of what people ask for: `action` behind `before` and the tasks it `needs`. A user's mistake, or a
    full disk, is a failed task with its one line."""
    return {
        "actions": [partial(_reported, each) for each in (*before, action)],
        "task_dep": list(needs),
        "meta": {"quiet": True},
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
