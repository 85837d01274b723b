"""Look inside a fused launch: its program is built again with each launch by itself, and run on the same text."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from llama_npu2 import load
from llama_npu2.artifact.storage import File
from stages.engine.objects import listed_objects
from stages.engine.places import CACHE, CONFIG, MODULES
from stages.graph import Build
from stages.model.artifact_weights import ArtifactWeights
from stages.model.families import read_config
from stages.proof.diagnosis.launches import Finding, Judge
from stages.proof.diagnosis.ops import Op, ops
from stages.proof.diagnosis.record import Recorder, record
from stages.targets.cpu import modules, objects, programs


def inside(build: Build, op: Op, prompt: Sequence[int], tokens: int) -> list[Finding]:
    """Return findings of all launches of a fused launch's call, one by one. Raises UserError."""
    with tempfile.TemporaryDirectory() as work, contextlib.closing(load(build.directory)) as llm:
        # This process built it, so nobody is asked whether it may run.
        program = llm.device.load_program(File.at(_library(build, op.program, Path(work))), op.program, True)
        for phase, calls in llm.manifest.plans.items():
            for at, call in enumerate(calls):
                if call.program == op.program:
                    llm.calls[phase][at] = replace(llm.calls[phase][at], program=program)
        alone = ops(build, llm.manifest, unfused=op.program)
        place = (op.phase, op.call)
        watched = {
            phase: [[one for one in call if (one.phase, one.call) == place] for call in calls]
            for phase, calls in alone.items()
        }
        recorder = Recorder(watched, read_config(build.directory / CONFIG).dimensions())
        record(llm, recorder, prompt, tokens)
    return list(Judge(recorder, ArtifactWeights(build.directory)).findings())


def _library(build: Build, program: str, work: Path) -> Path:
    """Build the library of one program of the host, with the target's own steps."""
    policy = build.policy
    entries = [entry for library in build.libraries for entry in library.programs if entry.name == program]
    keys = [part.key for entry in entries for part in entry.parts]
    modules.write_module(build.directory, program, work, keys, [], policy.text, policy.kv, policy.matmul, fused=False)
    module = work / MODULES / f"{program}{modules.SUFFIX}"
    for source in sorted({listed.source for listed in listed_objects(module).values()}):
        objects.write_objects(
            source, [module.with_suffix(".json")], build.artifacts / CACHE, work, **modules.expected(source)
        )
    programs.write_program(module, program, work)
    return work / "elf" / f"{program}{programs.SUFFIX}"
