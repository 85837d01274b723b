"""Inside a launch that does several of a part in one: the same program, built so that each is by itself."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from llama_npu2 import load
from llama_npu2.artifact.storage import File
from stages.engine.objects import asked
from stages.engine.places import CACHE, CONFIG, MODULES
from stages.graph import Build
from stages.model.artifact_weights import ArtifactWeights
from stages.model.families import read_config
from stages.proof.diagnosis.launches import Finding, Judge
from stages.proof.diagnosis.record import Recorder, run
from stages.proof.diagnosis.sites import Site, sites
from stages.targets.cpu import modules, objects, programs


def inside(build: Build, site: Site, prompt: Sequence[int], tokens: int) -> list[Finding]:
    """The launches of a fused launch's call, one by one, of a run of the same text. Raises UserError."""
    with tempfile.TemporaryDirectory() as work, contextlib.closing(load(build.directory)) as llm:
        # Built here and now, so nobody is asked whether it may run.
        program = llm.device.load_program(File.at(_library(build, site.program, Path(work))), site.program, True)
        for phase, calls in llm.manifest.plans.items():
            for at, call in enumerate(calls):
                if call.program == site.program:
                    llm.calls[phase][at] = replace(llm.calls[phase][at], program=program)
        alone = sites(build, llm.manifest, unfused=site.program)
        place = (site.phase, site.call)
        watched = {
            phase: [[each for each in call if (each.phase, each.call) == place] for call in calls]
            for phase, calls in alone.items()
        }
        recorder = Recorder(watched, read_config(build.directory / CONFIG).dimensions())
        run(llm, recorder, prompt, tokens)
    return list(Judge(recorder, ArtifactWeights(build.directory)).findings())


def _library(build: Build, program: str, work: Path) -> Path:
    """Of one program of the host, by the rooms that build it otherwise."""
    policy, all_programs = build.policy, (each for library in build.libraries for each in library.programs)
    keys = [part.key for each in all_programs if each.name == program for part in each.parts]
    modules.write_module(build.directory, program, work, keys, [], policy.text, policy.kv, policy.matmul, fused=False)
    module = work / MODULES / f"{program}{modules.SUFFIX}"
    for source in sorted({source for source, *_ in asked(module).values()}):
        objects.write_objects(
            source, [module.with_suffix(".json")], build.artifacts / CACHE, work, **modules.expected(source)
        )
    programs.write_program(module, program, work)
    return work / "elf" / f"{program}{programs.SUFFIX}"
