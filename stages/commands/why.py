"""`doit why [STEP...]`: say whether steps are current, and if not, what changed since they ran."""

from __future__ import annotations

import json

from llama_npu2.errors import UserError, suggestion
from stages.engine.why import CURRENT, STALE, Finding, examine
from stages.graph import Build
from stages.proof.selftest.graph import Probes

_MOST = 12
"""Names of steps that a line lists."""


def run(build: Build, *names: str) -> None:
    """Print all about the steps or groups (such as `elf`) of these names, or a line for each step. Raises UserError."""
    steps = Probes(build).steps if any(name.startswith("probe") for name in names) else build.steps
    findings = examine(steps)
    chosen = {name: finding for name, finding in findings.items() if not names or _is_meant(name, names)}
    for name in names:
        if not any(_is_meant(step, [name]) for step in findings):
            raise UserError(f"there is no step {name}: {suggestion(name, list(findings))}")
    if build.options.json:
        print(json.dumps([finding.to_json() for finding in chosen.values()], indent=1))
    elif names:
        print("\n\n".join(_paragraph(finding, findings) for finding in chosen.values()))
    else:
        width = max(map(len, steps))
        print("\n".join(f"{name:{width}}  {_line(chosen[name])}" for name in steps), flush=True)


def _is_meant(step: str, names: list[str] | tuple[str, ...]) -> bool:
    return any(step == name or step.startswith(f"{name}:") for name in names)


def _line(finding: Finding) -> str:
    first, *more = finding.sentences or [CURRENT]
    return f"{first} (and {len(more)} more: doit why {finding.step.name})" if more else first


def _paragraph(finding: Finding, findings: dict[str, Finding]) -> str:
    """Return all about one step."""
    name = finding.step.name
    lines = [f"{name} is {finding.state}. {finding.step.doc}"]
    lines += [f"  {sentence}" for sentence in finding.sentences]
    readers = [other.step.name for other in findings.values() if name in other.reads]
    behind = [other.step.name for other in findings.values() if name in other.behind]
    for what, others in (("reads from", finding.reads), ("comes after", finding.after), ("read by", readers)):
        if others:
            lines.append(f"  {what} {_listed(others)}")
    if behind and finding.state == STALE:
        lines.append(f"  may change what {_listed(behind)} read")
    return "\n".join(lines)


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_MOST]) + (f" and {len(names) - _MOST} more" if len(names) > _MOST else "")
