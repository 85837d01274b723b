"""`doit selftest`: bring up an NPU rung by rung, and write a report that a user can attach to a bug report."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from doit.exceptions import TaskFailed

from llama_npu2.artifact.manifest import Manifest
from llama_npu2.errors import UserError
from stages.commands import doctor
from stages.engine.places import CACHE, CONFIG
from stages.model.families import read_config
from stages.model.grouping import programs
from stages.proof.selftest import report
from stages.proof.selftest.graph import Probes
from stages.proof.selftest.ladder import Outcome, Rung, Setup, run_ladder
from stages.proof.selftest.relink import relink

HEADING = (
    "Each line is a check: its result, the rung of the ladder, what is tried, and what was seen. The first that is\n"
    "broken ends it, and says what that means. An error is how far a number is from the one that numpy computes.\n"
)


def run(probes: Probes) -> TaskFailed | None:
    """Run the ladder, and fail if a rung breaks. Raises UserError."""
    if not probes.suit:
        raise UserError(f"selftest: target {probes.target.name} runs no programs on the NPU: add target=npu2")
    outcome = climb(_setup(probes))
    content = report.report(outcome, [asdict(row) for row in doctor.report()], _about(probes))
    path = report.write(probes.directory, content)
    print(f"\n{end(outcome, probes.directory_as_given / path.name)}", flush=True)
    failed = outcome.failed
    return TaskFailed(f"selftest broke at {failed.rung}: {failed.what}", report=False) if failed else None


def climb(setup: Setup) -> Outcome:
    """Run the ladder, and print each rung when it ends."""
    print(HEADING, flush=True)
    return run_ladder(setup, _say)


def end(outcome: Outcome, path: Path) -> str:
    """Return what is said at the end; `path`: of the report."""
    same = path.with_suffix(".txt").name
    return f"{report.summary(outcome.rungs)}\n\nThe report: {path} (the same as text: {same})"


def _setup(probes: Probes) -> Setup:
    model, options = probes.model, probes.options
    config = read_config(model.directory / CONFIG)
    return Setup(
        Manifest.open(probes.directory),
        Manifest.open(model.directory),
        config,
        programs(config, model.whole_grouping, model.buckets, model.policy, model.positions),
        model.bfp16,
        options.threads,
        options.repeats,
        options.risky,
        partial(relink, probes.artifacts / CACHE) if probes.target.programs.fingerprint() else None,
    )


def _about(probes: Probes) -> dict[str, Any]:
    """Return what was run, and what the programs were built with."""
    options, built = probes.options, probes.steps["probe:elf:add"].receipt() or {"key": {}}
    return {
        "llama-npu2": version("llama-npu2"),
        "target": probes.target.name,
        "model": probes.model.source.name,
        "grouping": options.grouping or probes.target.default_grouping,
        "matmul": probes.model.policy.matmul,
        "buckets": options.buckets,
        "weights": probes.model.policy.matrices,
        "tokens": options.tokens,
        "sequences": options.sequences,
        "risky": options.risky,
        "tools": built["key"].get("tool", ""),
    }


def _say(rung: Rung) -> None:
    detail = f": {rung.detail}" if rung.detail else ""
    print(f"{rung.result:8} {rung.rung}, {rung.what}{detail}", flush=True)
