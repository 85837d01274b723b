"""What doit's command line means here: variables, configuration, and one line per event."""

from __future__ import annotations

import sys
from typing import Any

from doit import doit_cmd
from doit.exceptions import BaseFail, InvalidDodoFile
from doit.reporter import ConsoleReporter

from runtime.errors import UserError
from stages.graph import Graph
from stages.options import parse_options


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

try:
    # doit offers get_var for known names only; the names themselves are needed to refuse a misspelt one.
    graph = Graph(parse_options(doit_cmd._CMDLINE_VARS or {}))
except UserError as error:
    raise InvalidDodoFile(str(error)) from None
