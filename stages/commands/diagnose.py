"""`doit diagnose`: where a run goes wrong. Each layer's output against transformers with the very weights that the
artifacts hold, in float32 and in bf16; each launch against its kernel's reference on its own inputs. Names the first
layer that drifts and the first launch that is wrong.

`prompt=`: what is run, else the beginning of a text; `full=1`: prompts for every bucket and window, too.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from doit.exceptions import TaskFailed
from tqdm import tqdm

from llama_npu2 import Llama, UserError, load
from llama_npu2.cli.table import Column, fitted
from llama_npu2.engine.chunks import Chunk
from stages.engine.files import write_json
from stages.engine.places import CONFIG
from stages.graph import Build
from stages.model.artifact_weights import ArtifactWeights
from stages.model.checkpoint import Checkpoint
from stages.model.families import read_config
from stages.model.importers import PLAIN
from stages.proof.comparison import divergence, transformers_model
from stages.proof.diagnosis.launches import Finding, Judge
from stages.proof.diagnosis.layers import WORST, Layer, compared
from stages.proof.diagnosis.record import Recorder
from stages.proof.diagnosis.record import run as record
from stages.proof.diagnosis.report import Report
from stages.proof.diagnosis.sites import sites
from stages.proof.diagnosis.unfused import inside
from stages.reports.diagnose_page import page
from stages.weights.formats import w8a8

PROMPT = 48
"""Tokens of the text that is run if no prompt is given."""
TOKENS = 20
"""Generated behind a prompt: enough for the mean error of one row a token (`launches.GROUPS`)."""
SHOWN = 3
"""Wrong launches that are printed; files have all."""

UNFUSED = "the same call, built so that it does each launch by itself:"

COLUMNS = (
    Column("layer", right=True),
    Column("of"),
    Column("cosine", right=True),
    Column("in bf16", right=True),
    Column("largest error", right=True),
    Column("in bf16", right=True),
    Column("error / bf16's", right=True),
    Column("cosine with the checkpoint", right=True),
    Column("wrong launches", right=True),
)


def run(build: Build) -> TaskFailed | None:
    """`doit diagnose`: prints, and writes `diagnose.json` and `diagnose.html`."""
    with contextlib.closing(load(build.directory, build.options.threads)) as llm:
        report = diagnose(build, llm)
    where = build.report("diagnose")
    where.mkdir(parents=True, exist_ok=True)
    found = report.as_json()
    write_json(where / "diagnose.json", found)
    page(report).write(where / "diagnose.html")
    if build.options.json:
        print(json.dumps(found))
    else:
        print("\n".join([*lines(report), report.verdict, str(where / "diagnose.html")]), flush=True)
    return None if report.passed else TaskFailed("diagnose: something is wrong, see above")


def diagnose(build: Build, llm: Llama) -> Report:
    """Run, and compare. Raises UserError."""
    options, weights = build.options, ArtifactWeights(build.directory)
    recorder = Recorder(sites(build, llm.manifest), read_config(build.directory / CONFIG).dimensions())
    ids = _ids(build, llm)
    text = record(llm, recorder, ids, _behind(llm, len(ids)))
    states = recorder.states()
    for more, chunks in _others(llm) if options.full else ():
        record(llm, recorder, _repeated(text, more), _behind(llm, more), chunks)
    layers, unsaid = _layers(build, weights, text, len(ids), states)
    in_order = {site: at for at, site in enumerate(recorder.samples)}
    judged = Judge(recorder, weights).findings()
    findings = list(tqdm(judged, desc="launches", total=len(in_order), disable=None, leave=False))
    report = Report(
        model=llm.manifest.model["name"],
        runs=llm.description,
        text=f"{len(ids)} tokens and {len(text) - len(ids)} behind them",
        layers=layers,
        unsaid=unsaid,
        findings=sorted(findings, key=lambda finding: in_order[finding.site]),
        unmet=[str(phase) for phase in llm.manifest.plans if phase not in {site.phase for site in in_order}],
    )
    if report.wrong and report.wrong[0].site.fused:
        return replace(report, inside=inside(build, report.wrong[0].site, ids, len(text) - len(ids)))
    return report


def _ids(build: Build, llm: Llama) -> list[int]:
    """What is run: at most what leaves room for a token. Raises UserError."""
    options = build.options
    if options.prompt is None:
        ids = llm.encode(divergence.read_text(divergence.TEXT), raw=True)[:PROMPT]
    else:
        ids = llm.encode(options.prompt, options.raw)
    return ids[: llm.context_length - 1]


def _behind(llm: Llama, prompt: int) -> int:
    return min(TOKENS, llm.context_length - prompt)


def _others(llm: Llama) -> Iterator[tuple[int, list[Chunk]]]:
    """Lengths of prompts, and their chunks where these are said, that come to every phase: what fills each bucket, from
    the beginning and behind that in each window, or two chunks of any size; a token in each window."""
    longest = llm.context_length - 1
    if not llm.buckets:
        yield min(len(llm.memory.array("tokens")) + 1, longest), []
    for phase in llm.manifest.plans:
        if rows := phase.rows:
            start = phase.positions - rows
            first = Chunk(phase._replace(context=0), 0, min(rows, longest))
            behind = [Chunk(phase, min(rows, start), min(rows + min(rows, start), longest))] if start else []
            yield max(chunk.end for chunk in (first, *behind)), [first, *behind]
    yield from ((min(window, longest), []) for window in llm.windows[:-1])


def _repeated(ids: Sequence[int], length: int) -> list[int]:
    return (list(ids) * -(-length // len(ids)))[:length]


def _layers(
    build: Build, weights: ArtifactWeights, text: Sequence[int], prompt: int, states: dict[int, dict[int, Any]]
) -> tuple[list[Layer], str]:
    """Each layer against transformers, or why that cannot be."""
    try:
        source = Checkpoint.open(build.source.fetch())
        exact = transformers_model.layer_outputs(source, weights.values, [text], [text], build.policy.kv)
        others = not weights.formats <= set(PLAIN)
        theirs = transformers_model.layer_outputs(source, source.tensor, [text]) if others else None
        bounded = w8a8.FORMAT.name not in weights.formats and not build.bfp16
        return list(_each_layer(states, exact, theirs, prompt, bounded)), ""
    except UserError as error:
        return [], f"layers are not compared: {error}"


def _each_layer(
    states: dict[int, dict[int, Any]],
    exact: Iterator[list[Any]],
    theirs: Iterator[list[Any]] | None,
    prompt: int,
    bounded: bool,
) -> Iterator[Layer]:
    for layer, pair in enumerate(exact):
        ours = [states[layer][position] for position in sorted(states[layer])]
        # The last token was chosen and not run.
        checkpoint = next(theirs)[0][: len(ours)] if theirs else None
        yield from compared(layer, ours, [each[: len(ours)] for each in pair], checkpoint, prompt, bounded)


def lines(report: Report) -> list[str]:
    """For the terminal."""
    found = [f"{report.model}; {report.runs}", report.text, ""]
    if report.layers:
        found += [fitted(COLUMNS, rows(report)), f"cosine: of {100 - WORST} % of the positions, at least", ""]
    else:
        found += [report.unsaid, ""]
    for finding in report.wrong[:SHOWN]:
        found += [f"{finding.site.place}: {finding.site.does}", f"  {finding.wrong}", *_worst(finding), ""]
    if report.inside:
        found += [UNFUSED, *(f"  {each.site.does}: {each.wrong or 'right'}" for each in report.inside), ""]
    if len(report.wrong) > SHOWN:
        found += [f"{len(report.wrong) - SHOWN} more launches are wrong", ""]
    if report.unmet:
        found += [f"not run: {', '.join(report.unmet)} (full=1)", ""]
    return found


def rows(report: Report) -> Iterator[tuple[object, ...]]:
    """Of `COLUMNS`."""
    wrong = [finding.site.layer for finding in report.wrong]
    for layer in report.layers:
        ours, bf16, checkpoint = layer.ours, layer.bf16, layer.checkpoint
        yield (
            layer.layer + 1,
            layer.part,
            f"{ours.cosine:.6f}",
            f"{bf16.cosine:.6f}",
            f"{ours.largest:.3g}",
            f"{bf16.largest:.3g}",
            f"{layer.times:.2f}{' drifts' if layer.drifts else ''}",
            f"{checkpoint.cosine:.6f}" if checkpoint else "-",
            wrong.count(layer.layer) or "-",
        )


def _worst(finding: Finding) -> Iterator[str]:
    """Values around the worst."""
    worst = finding.worst
    if worst is None:
        return
    place = ", ".join(map(str, worst.index))
    yield f"  worst: {worst.slot}[{place}] of a call of {worst.rows} rows from position {worst.position} on"
    for name, values in (("ours", worst.ours), ("reference", worst.reference)):
        yield f"  {name:>9} from {worst.first} on: {' '.join(f'{value:.5g}' for value in values)}"
