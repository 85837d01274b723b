"""`doit verify`: is an artifact directory right, and how good is it? Compare it with transformers.

Right: with the weights that the artifacts hold, and K and V rounded as in their cache, greedy tokens are those of
transformers in bf16, and logits are about as near to those in float32 as a run in bf16 is. Good: the loss that the
formats of weights and cache make, against the checkpoint. A summary is written next to the manifest
(`verified.json`), and all of it by `verify_report`, for people and for CI.
"""

from __future__ import annotations

import json
from pathlib import Path

from doit.exceptions import TaskFailed

from stages.graph import Build
from stages.proof.comparison import divergence
from stages.proof.comparison.continuations import SHIPPED, Prompt, read_prompts
from stages.proof.comparison.verification import print_lines, verify
from stages.reports import verify_report

FEW = 2
"""Shipped prompts that are run without full=1."""


def run(build: Build) -> TaskFailed | None:
    """Verify with some of the shipped prompts and of the text, all of them with full=1, or all of `prompts=FILE`."""
    options = build.options
    text = Path(options.text) if options.text else divergence.TEXT
    prompts = read_prompts(Path(options.prompts)) if options.prompts else shipped(options.full)
    say = (lambda *lines: None) if options.json else print_lines
    result = verify(build.directory, build.source.fetch(), prompts, options.full, text, options.threads, say)
    page = verify_report.write(build.report("verify"), build.artifact, result)
    print_lines(json.dumps(verify_report.described(build.artifact, result), indent=1) if options.json else page)
    return None if result.passed else TaskFailed(f"verify: the runtime and transformers disagree: see {page}")


def shipped(full: bool) -> list[Prompt]:
    """Return prompts that come with the project, all of them or the first few."""
    return read_prompts(SHIPPED)[: None if full else FEW]
