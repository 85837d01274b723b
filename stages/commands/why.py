"""`doit why`: for each step, whether it is current."""

from __future__ import annotations

from stages.graph import Build


def run(build: Build) -> None:
    for step in build.steps.values():
        print(f"{step.name:24} {step.why_stale() or 'current'}", flush=True)
