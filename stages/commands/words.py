"""Which commands a command line of doit asks for: its words, without options and variables."""

from __future__ import annotations

from collections.abc import Sequence

from doit.cmd_base import DodoTaskLoader, DoitCmdBase
from doit.cmd_run import Run
from doit.cmdparse import CmdOption, CmdParse, CmdParseError
from doit.doit_cmd import DoitMain

from stages.graph.options import COMMANDS

GENERATE = "generate"
"""The task of `doit run`, as `run` itself is doit's own word."""
WITH_NAMES = {"why", "fleet"}
"""Commands that take names: of steps, or of a file."""

_OPTIONS = (*DoitCmdBase.base_options, *DodoTaskLoader.cmd_options, *Run.cmd_options)
"""Options of doit that may stand before commands and steps."""
_VERBS = {verb.get_name() for verb in DoitMain.DOIT_CMDS}


def command_line(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """Return doit's verb, `run` if there is none, and the words after it, as doit finds them."""
    words = _without_variables(arguments)
    rest = _without_options(words, DodoTaskLoader.cmd_options)
    if rest[:1] and rest[0] in _VERBS - {"run"}:
        return rest[0], [word for word in rest[1:] if word[0] != "-"]
    return "run", _without_options(without_run(words), _OPTIONS)


def without_run(arguments: Sequence[str]) -> list[str]:
    """Return arguments without doit's verb `run`, before which doit itself takes no options."""
    if _without_options(_without_variables(arguments), _OPTIONS)[:1] != ["run"]:
        return [*arguments]
    at = [*arguments].index("run")
    return [*arguments[:at], *arguments[at + 1 :]]


def _without_variables(arguments: Sequence[str]) -> list[str]:
    return [argument for argument in arguments if argument[:1] == "-" or "=" not in argument]


def _without_options(words: list[str], known: Sequence[dict[str, object]]) -> list[str]:
    """Return the words without doit's options, or all of them where some option is not among these."""
    try:
        rest: list[str] = CmdParse([CmdOption(each) for each in known]).parse_only(words)[1]
    except CmdParseError:
        return words
    return rest


def commands_of(verb: str, words: Sequence[str]) -> list[str]:
    """Return the commands that a command line asks for; `compile` stands for steps and for doit's own verbs."""
    if verb == "run" and not words:
        return ["run"]
    named = words[:1] if WITH_NAMES & {*words[:1]} else words
    asked = ["run" if word == GENERATE else word for word in named if word in {*COMMANDS, GENERATE} - {"run"}]
    return asked if verb == "run" and len(asked) == len(named) else [*asked, "compile"]
