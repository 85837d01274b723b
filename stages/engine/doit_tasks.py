"""Makes steps and commands tasks of doit, runs steps at the same time, and decides what of them is shown."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from doit import cmd_run
from doit.exceptions import BaseFail, InvalidTask, TaskFailed
from doit.reporter import ConsoleReporter
from doit.runner import MThreadRunner

from llama_npu2.errors import UserError
from stages.engine.extras import missing_package
from stages.engine.leftovers import note, remove_leftovers
from stages.engine.objects import stop_compilers
from stages.engine.progress import is_terminal, show_on
from stages.engine.room import at_a_time, no_room
from stages.engine.steps import Step
from stages.engine.streams import answering, parted

if TYPE_CHECKING:
    from stages.engine.display import Display

LAST = "last"
"""In `meta` of a step's task: the seconds that its last run took, or None."""
COMPLETE = "complete"
"""In `meta` of a command's task: the directory that is up to date after it."""

FIRST = "first"
"""In `meta` of a command's task: a function that raises UserError, before any step runs, if it is impossible."""

Action = Callable[..., TaskFailed | bool | None]

_SPOKEN = {"io": {"capture": False}}
"""In a task: its output is shown as it comes. doit keeps no copy, for which it would replace the streams."""

NAMES = "names"
"""`pos_arg` of a task that takes words of the command line: its action gets them one by one."""


class OneLineReporter(ConsoleReporter):
    """Shows the steps that run while they run, on a terminal; elsewhere names them only if asked to (`doit -v 1`).

    Nothing is said of steps that are up to date. A failure is one line unless it is a defect. All of that goes to
    standard error, or to the file of `doit --output-file`, where steps are named in any case.
    """

    desc = "a line of progress on a terminal, one line per failure; with -v 1 also one line per step"

    def __init__(self, outstream: Any, options: Any) -> None:
        super().__init__(outstream, options)
        self._file = None if outstream is sys.stdout else outstream
        self._parted = contextlib.ExitStack()
        self._said: set[str] = set()
        self._started = time.monotonic()
        self._display: Display | None = None
        self._ran = self._current = 0
        self._failed = False

    def write(self, text: str) -> None:
        print(text, end="", file=self._file or sys.stderr, flush=True)

    def initialize(self, tasks, selected_tasks) -> None:
        self._parted.enter_context(parted())
        for name in selected_tasks:
            if check := (tasks[name].meta or {}).get(FIRST):
                with _in_one_line():
                    check()
        steps = [task for task in _needed(tasks, selected_tasks) if _is_step(task)]
        if steps and not self._file and is_terminal(sys.stderr):
            # It takes longer to import than most builds that are up to date.
            from stages.engine.display import Display

            before = {task.name: task.meta[LAST] for task in steps if task.meta[LAST] is not None}
            self._display = Display(sys.stderr, len(steps), before)
            show_on(self._display)

    def get_status(self, task) -> None:
        if self._display and task.actions and not _is_step(task):
            self._display.rest()  # it prints what it likes

    def execute_task(self, task) -> None:
        named, task.verbosity = task.verbosity or self._file, 0  # else doit exchanges the streams of all threads
        if not _is_step(task):
            return
        if self._display:
            self._display.begin(task.name, stays=bool(named))
        elif named:
            self.write(f"{task.title()}\n")

    def add_success(self, task) -> None:
        if _is_step(task):
            self._ran += 1
            if self._display:
                self._display.end(task.name)
        elif complete := (task.meta or {}).get(COMPLETE):
            seconds = time.monotonic() - self._started
            with _in_one_line(), answering():
                said = f"{complete} is up to date: {self._ran} steps run, {self._current} current, {seconds:.1f} s"
                print(said, file=self._file, flush=True)

    def skip_uptodate(self, task) -> None:
        if _is_step(task):
            self._current += 1
            if self._display:
                self._display.skip()

    def add_failure(self, task, fail: BaseFail) -> None:
        message = fail.get_msg() if fail.traceback else fail.message
        self._failed |= _is_step(task)
        if self._display and _is_step(task):
            self._display.end(task.name, done=False)
        if fail.report and message not in self._said:
            # Tasks that run at the same time may miss the same tool.
            self._said.add(message)
            print(f"error: {message}\n", end="", file=sys.stderr, flush=True)

    def complete_run(self) -> None:
        if self._display:
            self._display.rest()
            show_on(None)
        if self.runtime_errors:
            self.write("\n".join(self.runtime_errors) + "\n")
        remove_leftovers(self._failed)
        self._parted.close()


@contextlib.contextmanager
def _in_one_line() -> Iterator[None]:
    """Turn a UserError outside of tasks into an error of doit's own; of any other, doit prints a traceback."""
    try:
        yield
    except UserError as error:
        raise InvalidTask(f"error: {error}") from None


def _is_step(task: Any) -> bool:
    return LAST in (task.meta or {})


def _needed(tasks: Mapping[str, Any], selected: Iterable[str]) -> list[Any]:
    """Return the selected tasks and those that they depend on."""
    needed: dict[str, Any] = {}
    todo = list(selected)
    while todo:
        if (name := todo.pop()) not in needed:
            needed[name] = tasks[name]
            todo += tasks[name].task_dep
    return list(needed.values())


def _interrupted(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
    """Ctrl-C ends a build in one line; what is finished stays finished."""
    if kind is KeyboardInterrupt:
        print("interrupted: the next run goes on from here", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, traceback)


sys.excepthook = _interrupted


class StepRunner(MThreadRunner):
    """Runs steps in threads. Commands run in the main thread, which signals and the terminal belong to."""

    def select_task(self, node: Any, tasks: Mapping[str, Any]) -> bool:
        if self._stop_running or not super().select_task(node, tasks):
            return False
        if not _is_step(node.task):
            self.process_task_result(node, self.execute_task(node.task))
            return False
        return True

    def run_tasks(self, dispatcher: Any) -> None:
        try:
            super().run_tasks(dispatcher)
        except BaseException:
            stop_compilers()
            raise


cmd_run.MThreadRunner = StepRunner  # doit has no other place for it


DOIT_CONFIG = {
    "default_tasks": ["generate"],
    "reporter": OneLineReporter,
    "verbosity": int(os.environ.get("LLAMA_NPU2_VERBOSITY", "0")),
    "num_process": at_a_time(),
    "par_type": "thread",
    # What is current is recorded in receipts beside the artifacts; doit keeps no state of its own.
    "backend": "sqlite3",
    "dep_file": ":memory:",
}


class UpToDate:
    """The `uptodate` entry of a doit task; its text is what `doit info` shows."""

    def __init__(self, step: Step) -> None:
        self.step = step

    def __call__(self) -> bool:
        project = self.step.project
        note(project.leftovers)
        project.lock.acquire()
        try:
            return self.step.is_current()
        except UserError:
            return False  # running it says why

    def __repr__(self) -> str:
        return self.step.why_stale() or "up to date"


def doit_task(step: Step, steps: Iterable[Step]) -> dict[str, Any]:
    """Return a step as a doit task. It comes after the steps that write its inputs, and after those that it names."""
    maker = {output: other.name for other in steps for output in other.outputs}
    group, _, member = step.name.partition(":")
    last = step.project.durations.last
    return {
        **({"name": member} if member else {"basename": group}),
        "doc": step.doc,
        "actions": [step.run],
        "uptodate": [UpToDate(step)],
        "targets": [output.as_posix() for output in step.outputs],
        # What took longest goes first, so that all end at about the same time.
        "task_dep": sorted(
            {maker[p] for p in step.inputs if p in maker} | set(step.after), key=lambda name: (-last.get(name, 0), name)
        ),
        "clean": [step.clean],
        "meta": {LAST: last.get(step.name)},
        **_SPOKEN,
    }


def command_task(
    action: Action, before: Sequence[Action], needs: Sequence[str], places: Sequence[Path] = ()
) -> dict[str, Any]:
    """Return a command as a doit task. A user's mistake, or a full disk, fails the task with one line.

    Args:
        action: does what was asked for.
        before: actions that run first.
        needs: the tasks that come before.
        places: the directories that it writes to, which messages about a full disk name.
    """
    return {
        "actions": [partial(_reported, each, places) for each in (*before, action)],
        "task_dep": list(needs),
        **_SPOKEN,
    }


def _reported(action: Action, places: Sequence[Path], names: Sequence[str] | None = None) -> TaskFailed | bool | None:
    try:
        with answering():
            return action(*(names or ()))
    except UserError as error:
        return TaskFailed(str(error))
    except Exception as error:
        if missing := missing_package(error):
            return TaskFailed(missing)
        if full := no_room(error, [*places, Path(tempfile.gettempdir()), Path.cwd()]):
            return TaskFailed(full)
        if not isinstance(error, OSError):
            raise
        where = f"{error.filename}: " if error.filename else ""
        return TaskFailed(f"{where}{error.strerror or error}: run the command again once that is mended")
