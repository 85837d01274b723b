"""Run a text, and compare its layers with transformers and its launches with references."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from llama_npu2 import Llama, UserError, load
from llama_npu2.artifact import plan
from llama_npu2.artifact.plan import PREFILL
from llama_npu2.artifact.storage import File
from llama_npu2.engine.chunks import Chunk
from stages.engine.objects import listed_objects
from stages.engine.places import CACHE, CONFIG, MODULES
from stages.graph import Build
from stages.model.artifact_weights import ArtifactWeights
from stages.model.checkpoint import Checkpoint
from stages.model.families import read_config
from stages.model.importers import PLAIN
from stages.proof.comparison import divergence, transformers_model
from stages.proof.diagnosis.launches import Finding, Judge
from stages.proof.diagnosis.ops import Op, ops
from stages.proof.diagnosis.record import Recorder, record
from stages.proof.diagnosis.report import Layer, Report, compared
from stages.targets.cpu import modules, objects, programs

PROMPT = 48
"""Tokens of the text that is run if no prompt is given."""
_OF_SEVERAL = (plan.TOKENS, plan.SEQUENCES)
TOKENS = 20
"""Tokens generated after a prompt: enough for the mean error of one row a token (`launches.GROUPS`)."""


def diagnose(build: Build, llm: Llama) -> Report:
    """Run a text, and compare. Raises UserError."""
    options, weights = build.options, ArtifactWeights(build.directory)
    recorder = Recorder(ops(build, llm.manifest), read_config(build.directory / CONFIG).dimensions())
    ids = _prompt(build, llm)
    text = record(llm, recorder, ids, _reply_length(llm, len(ids)))
    states = recorder.states()
    for length, chunks in _prompts_for_every_phase(llm) if options.full else ():
        record(llm, recorder, _repeated(text, length), _reply_length(llm, length), chunks)
    layers, without_layers = _layers(build, weights, text, len(ids), states)
    order = {op: number for number, op in enumerate(recorder.samples)}
    judged = Judge(recorder, weights).findings()
    findings = list(tqdm(judged, desc="launches", total=len(order), disable=None, leave=False))
    not_run = [phase for phase in llm.manifest.plans if phase not in {op.phase for op in order}]
    report = Report(
        model=llm.manifest.model["name"],
        runs=llm.description,
        text=f"a prompt of {len(ids)} tokens, and {len(text) - len(ids)} tokens generated after it",
        layers=layers,
        without_layers=without_layers,
        findings=sorted(findings, key=lambda finding: order[finding.op]),
        not_run=[str(phase) for phase in not_run if phase.kind not in _OF_SEVERAL],
        of_several=[str(phase) for phase in not_run if phase.kind in _OF_SEVERAL],
    )
    if report.wrong and report.wrong[0].op.fused:
        return replace(report, inside=inside(build, report.wrong[0].op, ids, len(text) - len(ids)))
    return report


def _prompt(build: Build, llm: Llama) -> list[int]:
    """Return the tokens of the prompt, cut so that there is room for one more. Raises UserError."""
    options = build.options
    if options.prompt is None:
        ids = llm.encode(divergence.read_text(divergence.TEXT), raw=True)[:PROMPT]
    else:
        ids = llm.encode(options.prompt, options.raw)
    return ids[: llm.context_length - 1]


def _reply_length(llm: Llama, prompt: int) -> int:
    return min(TOKENS, llm.context_length - prompt)


def _prompts_for_every_phase(llm: Llama) -> Iterator[tuple[int, list[Chunk]]]:
    """Yield lengths of prompts that together reach every phase, and their chunks where the runtime would choose others.

    With buckets: a prompt that fills each of them, from the beginning and in each context bucket. Without: one of two
    chunks. Then a token in each context bucket.
    """
    longest = llm.context_length - 1
    if not llm.buckets:
        yield min(len(llm.memory.array("tokens")) + 1, longest), []
    for phase in llm.manifest.plans:
        if rows := phase.rows if phase.kind == PREFILL.kind else 0:
            start = phase.positions - rows
            first = Chunk(phase._replace(context=0), 0, min(rows, longest))
            later = [Chunk(phase, min(rows, start), min(rows + min(rows, start), longest))] if start else []
            yield max(chunk.end for chunk in (first, *later)), [first, *later]
    yield from ((min(window, longest), []) for window in llm.windows[:-1])


def _repeated(ids: Sequence[int], length: int) -> list[int]:
    return (list(ids) * -(-length // len(ids)))[:length]


def _layers(
    build: Build, weights: ArtifactWeights, text: Sequence[int], prompt: int, states: dict[int, dict[int, Any]]
) -> tuple[list[Layer], str]:
    """Return the comparison of each layer with transformers, or why there is none."""
    try:
        source = Checkpoint.open(build.source.fetch()).within(weights.manifest.model["max_seq"])
        exact = transformers_model.layer_outputs(source, weights.values, [text], [text], build.policy.kv)
        rounded = not weights.formats <= set(PLAIN)
        original = transformers_model.layer_outputs(source, source.tensor, [text]) if rounded else None
        bounded = not (weights.rounds_activations or build.bfp16)
        layers: list[Layer] = []
        for layer, pair in enumerate(exact):
            ours = [states[layer][position] for position in sorted(states[layer])]
            # The last token was chosen and not run.
            checkpoint = next(original)[0][: len(ours)] if original else None
            layers += compared(layer, ours, [rows[: len(ours)] for rows in pair], checkpoint, prompt, bounded)
        return layers, ""
    except UserError as error:
        return [], f"layers are not compared: {error}"


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
    entries = [entry for library in build.libraries for entry in library.programs if entry.name == program]
    keys = [part.key for entry in entries for part in entry.parts]
    modules.write_module(build.directory, program, work, keys, [], build.policy.recorded, fused=False)
    module = work / MODULES / f"{program}{modules.SUFFIX}"
    for source in sorted({listed.source for listed in listed_objects(module).values()}):
        objects.write_objects(
            source, [module.with_suffix(".json")], build.artifacts / CACHE, work, **modules.expected(source)
        )
    programs.write_program(module, program, build.artifacts / CACHE, work)
    return work / "elf" / f"{program}{programs.SUFFIX}"
