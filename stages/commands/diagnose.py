"""`doit diagnose`: find where a run goes wrong.

Each layer's output is compared with transformers, with the weights that the artifacts hold, in float32 and in bf16.
Each launch is compared with its kernel's reference on its own inputs. The first layer that drifts and the first launch
that is wrong are named. `prompt=` is run, or else the beginning of a text; `full=1` adds prompts for every bucket and
context bucket.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

from doit.exceptions import TaskFailed

from llama_npu2 import load
from llama_npu2.cli.table import fitted
from stages.engine.files import write_json
from stages.graph import Build
from stages.proof.diagnosis.diagnose import diagnose
from stages.proof.diagnosis.launches import Finding
from stages.proof.diagnosis.report import WORST, Report
from stages.reports.diagnose_page import page

SHOWN = 3
"""Wrong launches that are printed; the files have all."""

UNFUSED = "the same call, built with each launch by itself:"

COLUMNS = (
    ">layer",
    "positions",
    ">cosine",
    ">in bf16",
    ">largest error",
    ">in bf16",
    ">error / bf16's",
    ">cosine with the checkpoint",
    ">wrong launches",
)


def run(build: Build) -> TaskFailed | None:
    """Print the report, and write `diagnose.json` and `diagnose.html`."""
    with contextlib.closing(load(build.directory, build.options.threads)) as llm:
        report = diagnose(build, llm)
    where = build.report("diagnose")
    where.mkdir(parents=True, exist_ok=True)
    content = report.as_json()
    write_json(where / "diagnose.json", content)
    page(report).write(where / "diagnose.html")
    if build.options.json:
        print(json.dumps(content))
    else:
        print("\n".join([*lines(report), report.verdict, str(where / "diagnose.html")]), flush=True)
    return None if report.passed else TaskFailed("diagnose: something is wrong, see above")


def lines(report: Report) -> list[str]:
    """Return the report for a terminal, without its verdict."""
    text = [f"{report.model}; {report.runs}", report.text, ""]
    if report.layers:
        legend = (
            f"Cosine and largest error: the runtime against transformers in float32, and transformers in bf16 against "
            f"the same. Cosines leave out the worst {WORST} % of the positions."
        )
        text += [fitted(COLUMNS, rows(report)), legend, ""]
    else:
        text += [report.without_layers, ""]
    for finding in report.wrong[:SHOWN]:
        text += [f"{finding.op.place}: {finding.op.does}", f"  {finding.wrong}", *_worst(finding), ""]
    if report.inside:
        text += [UNFUSED, *(f"  {finding.op.does}: {finding.wrong or 'right'}" for finding in report.inside), ""]
    if len(report.wrong) > SHOWN:
        text += [f"{len(report.wrong) - SHOWN} more launches are wrong", ""]
    return [*text, *report.left_out, *([""] if report.left_out else [])]


def rows(report: Report) -> Iterator[tuple[object, ...]]:
    """Yield the cells of `COLUMNS` for each layer."""
    wrong = [finding.op.layer for finding in report.wrong]
    for layer in report.layers:
        ours, bf16, checkpoint = layer.ours, layer.bf16, layer.checkpoint
        yield (
            layer.layer,
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
    """Yield lines about the worst element and its neighbours."""
    worst = finding.worst
    if worst is None:
        return
    place = ", ".join(map(str, worst.index))
    yield f"  worst: {worst.slot}[{place}] of a call of {worst.rows} rows from position {worst.position}"
    for name, values in (("runtime", worst.ours), ("reference", worst.reference)):
        yield f"  {name:>9} from {worst.first}: {' '.join(f'{value:.5g}' for value in values)}"
