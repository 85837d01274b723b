"""The page of `doit diagnose`: how far layers are from transformers', and inside each layer its launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from markupsafe import Markup

from stages.proof.diagnosis.launches import Finding, Worst
from stages.proof.diagnosis.report import WORST, Distance, Layer, Report
from stages.reports.pages import Axis, Curve, Page, details, facts, lines, note, table, tag

LAUNCHES = (
    "phase",
    "program",
    ">launch",
    "what it does",
    ">calls",
    ">values",
    ">differ",
    ">may differ",
    ">largest error / limit",
    ">bias",
    "verdict",
)
NUMBERS = (">layer", "positions", ">runtime", ">transformers in bf16", ">runtime, against the checkpoint")
MEANING = (
    "Each launch is compared with its kernel's reference on the inputs that it had. Sums in another order make small "
    "differences before a result is rounded. They explain a number of results that differ ('may differ'), but no "
    "result may be further off than its limit, and on average results must not be off to one side ('bias', in units in "
    "the last place)."
)
Measure = Callable[[Distance], float]


def page(report: Report) -> Page:
    """Return the page of a report."""
    shown = Page(f"Diagnosis of {report.model}", report.verdict.removeprefix("diagnose: "))
    figures = {"runs": report.runs, "text": report.text, "launches": len(report.findings), "wrong": len(report.wrong)}
    shown.add("What was run", facts(figures), *(note(f"{said[0].upper()}{said[1:]}.") for said in report.left_out))
    if report.wrong:
        shown.add("What is wrong", *_wrong(report.wrong[0], report.inside))
    if report.layers:
        shown.add("Layers", *_charts(report.layers))
    else:
        shown.add("Layers", note(report.without_layers))
    shown.add("Launches", note(MEANING), *_by_layer(report))
    return shown


def _wrong(finding: Finding, inside: Sequence[Finding]) -> Iterator[Markup]:
    yield note(f"{finding.op.place}: {finding.op.does}: {finding.wrong}.")
    if finding.worst:
        yield _around(finding.worst)
    if inside:
        yield note("This launch computes several in one. The same call, built with each by itself:")
        yield table(LAUNCHES, map(_row, inside), "Launches by themselves")


def _around(worst: Worst) -> Markup:
    """Return the values next to the worst one."""
    places = [f">[{worst.first + i}]" for i in range(len(worst.ours))]
    rows = [(name, *(f"{v:.6g}" for v in of)) for name, of in (("runtime", worst.ours), ("reference", worst.reference))]
    where = f"{worst.slot}[{', '.join(map(str, worst.index))}], {worst.rows} rows from position {worst.position}"
    return table([where, *places], rows, f"Values around the worst element of {worst.slot}")


def _charts(layers: Sequence[Layer]) -> Iterator[Markup]:
    measures: tuple[tuple[str, Measure], ...] = (
        ("1 - cosine", lambda distance: 1 - distance.cosine),
        ("Largest error", lambda distance: distance.largest),
    )
    for title, measure in measures:
        numbers = table(NUMBERS, (_numbers(layer, measure) for layer in layers), f"{title} by layer")
        label = (
            f"{title} of each layer's output, against transformers in float32 with the same weights; cosines leave out "
            f"the worst {WORST} % of the positions"
        )
        curves = list(_curves(layers, measure))
        y = Axis.of(title, [value for curve in curves for _, value in curve.points], log=True)
        x = Axis("layer", min(layer.layer for layer in layers), max(layer.layer for layer in layers) or 1)
        yield lines(curves, x, y, label, numbers)


def _numbers(layer: Layer, measure: Measure) -> tuple[object, ...]:
    checkpoint = f"{measure(layer.checkpoint):.3g}" if layer.checkpoint else "-"
    return (layer.layer, layer.part, *(f"{measure(side):.3g}" for side in (layer.ours, layer.bf16)), checkpoint)


def _curves(layers: Sequence[Layer], measure: Measure) -> Iterator[Curve]:
    """Yield lines of the prompt and, dashed, of the tokens; each side has a colour."""
    sides: list[tuple[str, int, Callable[[Layer], Distance | None]]] = [
        ("runtime", 1, lambda layer: layer.ours),
        ("transformers in bf16", 2, lambda layer: layer.bf16),
        ("runtime, against the checkpoint", 7, lambda layer: layer.checkpoint),
    ]
    for name, series, side in sides:
        for part in ("prompt", "tokens"):
            shown = [(layer.layer, side(layer)) for layer in layers if layer.part == part]
            points = [(number, max(float(measure(off)), 1e-12)) for number, off in shown if off]
            if points:
                yield Curve(f"{name}, {part}", f"series-{series}", points, dashed=part == "tokens", marked=True)


def _by_layer(report: Report) -> Iterator[Markup]:
    def layer(finding: Finding) -> int:
        return -1 if finding.op.layer is None else finding.op.layer

    first = report.wrong[0].op.layer if report.wrong else None
    for number, group in groupby(sorted(report.findings, key=layer), layer):
        findings = list(group)
        wrong = sum(bool(finding.wrong) for finding in findings)
        name = f"Layer {number}" if number >= 0 else "Outside of the layers"
        summary = f"{name}: {len(findings)} launches, {f'{wrong} wrong' if wrong else 'none wrong'}"
        opened = bool(wrong) and (None if number < 0 else number) == first
        why = [note(f"{finding.op.does}, {finding.op.phase}: {finding.wrong}") for finding in findings if finding.wrong]
        rows = table(LAUNCHES, map(_row, findings), f"Launches, {name.lower()}")
        yield details(summary, *why, rows, opened=opened)


def _row(finding: Finding) -> tuple[object, ...]:
    op = finding.op
    return (
        str(op.phase),
        op.program,
        op.index + 1,
        op.does,
        finding.calls,
        finding.elements,
        finding.differ,
        f"{finding.expected:.0f}",
        f"{finding.ratio:.2f}",
        "-" if finding.bias != finding.bias else f"{finding.bias:+.3f}",
        tag("strong", "wrong", class_="bad") if finding.wrong else "right",
    )
