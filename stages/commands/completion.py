"""`doit completion`: a script that completes commands and variables, made from the table of options."""

from __future__ import annotations

from llama_npu2.cli.completion import script
from stages.graph import Build
from stages.graph.options import COMMANDS, table


def run(build: Build) -> None:
    print(script(build.options.shell, "doit", COMMANDS, table(), flags=False), end="")
