"""`doit estimate`: the time of every launch on the NPU and what limits it, by program, token and prompt.

`streams=4`: also what 4 sequences get at a time. `npu.tokens=4`: also four tokens of a text at once, `npu.sequences=4`:
also a token of each of four sequences at once.
`measured=FILE`: with the rates in a report of `doit selftest`, as far as it has them. `published=1`: other projects'
plans by the same arithmetic, next to what they measured. `target=npu2-sim`: next to what the simulator counted. The
arithmetic is that of `stages.estimate`.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from llama_npu2.errors import UserError
from stages.engine.files import write_json
from stages.estimate.constants import Machine
from stages.estimate.price import compiled_code
from stages.graph import Build
from stages.graph.needs import locked_memory
from stages.model.plan import make_plan
from stages.model.sources import config_of
from stages.reports.estimate_text import locked_line, print_check, print_estimates
from stages.reports.estimated import Estimate
from stages.targets.npu2.groupings import GROUPINGS


def run(build: Build) -> None:
    """Print an estimate, and write `estimate.json` and `estimate.html`. Raises UserError."""
    options = build.options
    machine = Machine.from_report(Path(options.measured)) if options.measured else Machine()
    if options.published:
        print_check(machine, options.json)
        return
    if not build.target.static:
        # An estimate does not depend on the target that this machine would run.
        build = Build(replace(options, target="npu2"))
    _report(build, machine)


def _report(build: Build, machine: Machine) -> None:
    from stages.reports.estimate_figures import counted, figures
    from stages.reports.estimate_page import page

    options, config = build.options, config_of(build.source)
    stored = config.within(build.context)
    build.target.check(stored)
    chosen = options.bucket_list(), machine, build.policy
    sizes: dict[str, Any] = {"positions": build.positions, "counts": options.token_counts()}
    sizes["together"] = options.sequence_counts()
    estimates = {name: Estimate(config, name, *chosen, second_copy=options.second_copy, **sizes) for name in GROUPINGS}
    grouping, composed = build.grouping_name, build.grouping
    # Others are for comparison, if the array takes their programs.
    estimates = {name: estimate for name, estimate in estimates.items() if name == grouping or _fits(estimate)}
    estimates[grouping] = replace(estimates[grouping], code_bytes=compiled_code(build.directory))
    plan = make_plan(stored, composed, build.target.kernel_set, build.buckets, build.policy)
    locked = locked_memory(plan, stored, composed, build.buckets, build.policy, options.second_copy)
    turns = [estimates[grouping].turns(sequences) for sequences in options.stream_list()]
    found = figures(build.source.name, estimates, grouping, turns) | {"locked": locked}
    if build.target.device == "sim":
        found["counted"] = counted(build.directory, estimates[grouping])
    if options.json:
        print(json.dumps(found))
    else:
        print_estimates(found, estimates[grouping], locked_line(locked, stored.max_seq))
    where = build.report("estimate")
    write_json(where / "estimate.json", found)
    page(found).write(where / "estimate.html")
    if not options.json:
        print(f"\n{where / 'estimate.html'}")


def _fits(estimate: Estimate) -> bool:
    """Return whether the array has room for all programs."""
    try:
        return bool(estimate.modules)
    except UserError:
        return False
