"""doit's own words `help`, `run`, `list`, `info` and `clean`, with the commands and the variables of this project.

doit finds them through `llama_npu2.checkout`, an entry point of the installed package; without it, its own words do.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from doit import cmd_clean, cmd_help, cmd_info, cmd_list, cmd_run
from doit.cmd_base import Command
from doit.cmdparse import CmdParseError
from doit.exceptions import InvalidCommand, InvalidDodoFile, InvalidTask

from llama_npu2 import ending
from llama_npu2.errors import UserError, reason, suggestion
from llama_npu2.options import Option
from stages.commands.words import GENERATE, command_line, commands_of, without_run
from stages.engine.streams import end_with_readers
from stages.graph.options import COMMANDS, GROUPS, sections

_WIDTH = 110
_NAMES = 26
"""Columns of the names of variables."""


def overview() -> str:
    """Return all commands by what they are for."""
    lines = ["doit COMMAND [NAME=VALUE ...]"]
    for title, commands in GROUPS.items():
        lines += ["", f"{title}:", *(f"  doit {name:12}{sentence}" for name, sentence in commands.items())]
    lines += [
        "",
        "doit help COMMAND lists the variables of a command; doit list shows the steps of the build, too.",
        "doit's own words: doit info STEP, doit clean, doit -n 4 compile for four steps at once.",
    ]
    return "\n".join(lines)


def command_help(command: str) -> str:
    """Return the variables that a command takes, each with its meaning, unit and default."""
    lines = [f"doit {command}: {COMMANDS[command]}."]
    for title, variables in sections(command).items():
        lines += ["", f"{title}:", *(line for each in variables for line in _described(each))]
    if command == "run":
        lines += ["", "Options of doit, for every command; they stand before the command:", *_doit_options()]
    return "\n".join(lines)


def _described(each: Option) -> Iterable[str]:
    name = f"  {each.name}={each.metavar}"
    first = f"{name:{_NAMES}}" if len(name) < _NAMES else f"{name}\n{' ' * _NAMES}"
    yield first + textwrap.fill(each.shown_help, _WIDTH - _NAMES).replace("\n", f"\n{' ' * _NAMES}")


def _doit_options() -> Iterable[str]:
    for each in (cmd_run.opt_num_process, cmd_run.opt_always, cmd_run.opt_continue, cmd_run.opt_outfile):
        flag = f"  -{each['short']}" + ("" if each["type"] is bool else " VALUE")
        yield f"{flag:{_NAMES}}{str(each['help']).partition(' [')[0]}"


class Help(cmd_help.Help):
    """`doit help`: our commands, or the variables of one."""

    name = "help"
    doc_purpose = "show the commands of llama-npu2, or the variables of one"

    def execute(self, params: Mapping[str, Any], args: list[str]) -> int:
        if args and not all(name in COMMANDS for name in args):
            if unknown := [name for name in args if not {name} & {*COMMANDS, *self.cmds, "task"}]:
                print(
                    f"error: there is no command {unknown[0]}: {suggestion(unknown[0], [*COMMANDS])}", file=sys.stderr
                )
                return 3
            return int(super().execute(params, args))
        end_with_readers()  # no dodo.py was loaded, which does that for other words
        print("\n\n".join(map(command_help, args)) or overview())
        return 0


class _Word(Command):
    """A word of doit's that knows --help, and whose errors are one line each."""

    def parse_execute(self, in_args: list[str]) -> int:
        words = [arg for arg in in_args if arg not in ("--help", "-h")]
        if words != in_args:
            end_with_readers()
            print(self.shown_help(words))
            return 0
        try:
            return int(super().parse_execute(in_args) or 0)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            return 3
        except (CmdParseError, InvalidCommand, InvalidDodoFile, InvalidTask) as error:
            # doit's parser shows its options as Python objects.
            problem = str(error).partition(" (parsing options")[0].removeprefix("error: ").replace("\n", " ")
            print(f"error: {problem}{f': doit help {self.name}' * isinstance(error, CmdParseError)}", file=sys.stderr)
            return 3

    def shown_help(self, words: Sequence[str]) -> str:
        """Return what `--help` beside these words shows."""
        return str(self.help())


class Run(_Word, cmd_run.Run):
    """`doit run`, and every command without a word of doit's."""

    name = "run"

    def parse_execute(self, in_args: list[str]) -> int:
        status = super().parse_execute(without_run(in_args))
        return ending.at_once(status) if _is_program() else status

    def shown_help(self, words: Sequence[str]) -> str:
        return "\n\n".join(map(command_help, commands_of(*command_line(["run", *words]))))


def _is_program() -> bool:
    """Return whether this process is `doit` or `python -m doit`, which end when the command has."""
    return "doit" in Path(sys.argv[0]).parts[-2:]


class Clean(_Word, cmd_clean.Clean):
    """`doit clean`: remove what was built."""

    name = "clean"

    def clean_tasks(self, tasks: Iterable[Any], dryrun: bool, cleanforget: bool) -> None:
        # doit's own shows actions as Python objects, and goes on after one that failed.
        for task in {task.name: task for task in tasks}.values():
            for action in task.clean_actions:
                try:
                    removed = action.py_callable(dryrun)
                except OSError as error:
                    raise UserError(f"{task.name} cannot be removed: {error.filename}: {reason(error)}") from None
                if removed:
                    print(f"{task.name}: {'would remove' if dryrun else 'removed'} {removed}", file=self.outstream)
            if cleanforget and not dryrun:
                self.dep_manager.remove(task.name)
        self.dep_manager.close()


class Info(_Word, cmd_info.Info):
    """`doit info STEP`: a step in detail."""

    name = "info"

    def _execute(self, pos_args: Sequence[str], hide_status: bool = False) -> int:
        # doit takes the names of the options from the names of the arguments.
        names = [task.name for task in self.task_list]
        if unknown := [name for name in pos_args if name not in names]:
            raise UserError(f"there is no step {unknown[0]}: {suggestion(unknown[0], names)}")
        return int(super()._execute(pos_args, hide_status))


class List(_Word, cmd_list.List):
    """`doit list`: the commands by what they are for, then the steps."""

    name = "list"

    def _execute(
        self,
        subtasks: bool = False,
        quiet: bool = True,
        status: bool = False,
        private: bool = False,
        list_deps: bool = False,
        template: str | None = None,
        sort: str = "name",
        pos_args: Sequence[str] = (),
    ) -> int:
        # doit takes the names of the options from the names of the arguments.
        if subtasks or quiet or status or private or list_deps or template or pos_args:
            asked = (subtasks, quiet, status, private, list_deps, template, sort, pos_args)
            return int(super()._execute(*asked))
        steps = [each for each in self.task_list if not each.subtask_of and each.name not in {*COMMANDS, GENERATE}]
        lines = [overview(), "", "Steps:", *(f"  doit {each.name:12}{each.doc}" for each in steps)]
        print("\n".join(lines), file=self.outstream)
        return 0


# `doit --help` makes a help of its own.
cmd_help.Help.print_usage = lambda self, cmds: print(overview())
