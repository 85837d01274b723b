"""Whether an artifact directory is right, and how good: against transformers.

Right: with the very weights that the artifacts hold, as values, and K and V rounded as their cache rounds them, greedy
tokens are those of transformers in bf16, and logits are about as near to those in float32 as a run in bf16 is. Good:
what the formats of weights and cache cost, against the checkpoint (`quality`). What was found lies beside the manifest,
in `verified.json`; `verify_report` has all of it, for people and for CI.
"""

from __future__ import annotations

import json
from pathlib import Path

from doit.exceptions import TaskFailed

from stages.graph import Build
from stages.proof.comparison import divergence
from stages.proof.comparison.prompts import SHIPPED, Prompt, read_prompts
from stages.proof.comparison.verification import print_lines, say_nothing, verify
from stages.reports import verify_report

FEW = 2
"""Of the shipped prompts, without full=1."""


def run(build: Build) -> TaskFailed | None:
    """`doit verify`: some of the shipped prompts and of the text, or with full=1 all; of `prompts=FILE` always all."""
    options = build.options
    text = Path(options.text) if options.text else divergence.TEXT
    prompts = read_prompts(Path(options.prompts)) if options.prompts else shipped(options.full)
    say = say_nothing if options.json else print_lines
    found = verify(build.directory, build.source.fetch(), prompts, options.full, text, options.threads, say)
    page = verify_report.write(build.report("verify"), build.artifact, found)
    print_lines(json.dumps(verify_report.described(build.artifact, found), indent=1) if options.json else page)
    return None if found.passed else TaskFailed(f"verify: the runtime and transformers disagree: see {page}")


def shipped(full: bool) -> list[Prompt]:
    """Of the prompts that come with the project."""
    return read_prompts(SHIPPED)[: None if full else FEW]
