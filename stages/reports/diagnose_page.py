"""The page of `doit diagnose`: how far layers are off, and inside each its launches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from llama_npu2.cli.table import Column
from stages.proof.diagnosis.launches import Finding, Worst
from stages.proof.diagnosis.layers import WORST, Layer, Off
from stages.reports.pages import Page, chart, colour, details, facts, note, table, tag

if TYPE_CHECKING:
    from stages.proof.diagnosis.report import Report

LAUNCHES = (
    Column("phase"),
    Column("program"),
    Column("launch", right=True),
    Column("what it does"),
    Column("calls", right=True),
    Column("values", right=True),
    Column("another number", right=True),
    Column("explained", right=True),
    Column("largest error / limit", right=True),
    Column("bias", right=True),
    Column("verdict"),
)
NUMBERS = (
    Column("layer", right=True),
    Column("of"),
    Column("ours", right=True),
    Column("bf16", right=True),
    Column("ours, of the checkpoint", right=True),
)
MEANT = (
    "A launch is compared with its kernel's reference on the inputs that it had. Before results are rounded, the two "
    "may be as far apart as sums in another order can be: so many results may be another number (explained), none may "
    "be further off than its limit, and on average they must not be off to one side (bias, in units in the last place)."
)


def page(report: Report) -> Page:
    """All of a report."""
    made = Page(f"Diagnosis of {report.model}", report.verdict.removeprefix("diagnose: "))
    figures = {"runs": report.runs, "text": report.text, "launches": len(report.findings), "wrong": len(report.wrong)}
    made.add("What was run", facts(figures), *_unmet(report))
    if report.wrong:
        made.add("What is wrong", *_wrong(report.wrong[0], report.inside))
    if report.layers:
        made.add("Layers", *_charts(report.layers))
    else:
        made.add("Layers", note(report.unsaid))
    made.add("Launches", note(MEANT), *_by_layer(report))
    return made


def _unmet(report: Report) -> list[Markup]:
    return [note(f"No prompt came to {', '.join(report.unmet)}: full=1 runs all.")] if report.unmet else []


def _wrong(finding: Finding, inside: Sequence[Finding]) -> Iterator[Markup]:
    yield note(f"{finding.site.place}: {finding.site.does}: {finding.wrong}.")
    if finding.worst:
        yield _around(finding.worst)
    if inside:
        yield note("It does several launches in one. The same call, built so that it does each by itself:")
        yield table(LAUNCHES, map(_line, inside), "Launches by themselves")


def _around(worst: Worst) -> Markup:
    """Values beside the worst."""
    places = [Column(f"[{worst.first + i}]", right=True) for i in range(len(worst.ours))]
    lines = [(name, *(f"{v:.6g}" for v in of)) for name, of in (("ours", worst.ours), ("reference", worst.reference))]
    where = f"{worst.slot}[{', '.join(map(str, worst.index))}], {worst.rows} rows from position {worst.position} on"
    return table([Column(where), *places], lines, f"Values around the worst element of {worst.slot}")


def _charts(layers: Sequence[Layer]) -> Iterator[Markup]:
    for title, of in (("1 - cosine", lambda off: 1 - off.cosine), ("Largest error", lambda off: off.largest)):
        numbers = table(NUMBERS, (_numbers(layer, of) for layer in layers), f"{title} by layer")
        axes = {
            "height": 340,
            "xaxis": {"title": {"text": "layer"}, "dtick": max(1, len(layers) // 32)},
            "yaxis": {"title": {"text": title}, "type": "log", "nticks": 6},
        }
        label = (
            f"{title} of each layer's output from transformers in float32 with the same weights; cosines are of all "
            f"but the worst {WORST} % of the positions"
        )
        yield chart(list(_traces(layers, of)), axes, label, numbers)


def _numbers(layer: Layer, of: Any) -> tuple[object, ...]:
    pair = (layer.ours, layer.bf16)
    apart = f"{of(layer.checkpoint):.3g}" if layer.checkpoint else "-"
    return (layer.layer + 1, layer.part, *(f"{of(off):.3g}" for off in pair), apart)


def _traces(layers: Sequence[Layer], of: Any) -> Iterator[dict[str, Any]]:
    """Lines of prompt and tokens; of one colour what is measured alike."""
    sides = [("ours", 1, lambda layer: layer.ours), ("transformers in bf16", 2, lambda layer: layer.bf16)]
    if layers[0].checkpoint:
        sides.append(("ours, of the checkpoint's weights", 4, lambda layer: layer.checkpoint))
    for name, series, side in sides:
        for part, dash in (("prompt", "solid"), ("tokens", "dot")):
            shown: list[tuple[int, Off]] = [(layer.layer + 1, side(layer)) for layer in layers if layer.part == part]
            yield {
                "type": "scatter",
                "mode": "lines+markers",
                "name": f"{name}, {part}",
                "x": [layer for layer, _ in shown],
                "y": [max(float(of(off)), 1e-12) for _, off in shown],
                "line": {"color": colour(f"series-{series}"), "dash": dash},
                "marker": {"color": colour(f"series-{series}"), "symbol": "circle" if dash == "solid" else "diamond"},
            }


def _by_layer(report: Report) -> Iterator[Markup]:
    def layer(finding: Finding) -> int:
        return -1 if finding.site.layer is None else finding.site.layer

    first = report.wrong[0].site.layer if report.wrong else None
    for at, group in groupby(sorted(report.findings, key=layer), layer):
        found = list(group)
        wrong = sum(bool(finding.wrong) for finding in found)
        name = f"Layer {at + 1}" if at >= 0 else "Outside of the layers"
        said = f"{name}: {len(found)} launches, {f'{wrong} wrong' if wrong else 'none wrong'}"
        opened = bool(wrong) and (None if at < 0 else at) == first
        why = [note(f"{each.site.does}, {each.site.phase}: {each.wrong}") for each in found if each.wrong]
        yield details(said, *why, table(LAUNCHES, map(_line, found), f"Launches, {name.lower()}"), opened=opened)


def _line(finding: Finding) -> tuple[object, ...]:
    site = finding.site
    return (
        str(site.phase),
        site.program,
        site.index + 1,
        site.does,
        finding.calls,
        finding.elements,
        finding.differ,
        f"{finding.expected:.0f}",
        f"{finding.ratio:.2f}",
        "-" if finding.bias != finding.bias else f"{finding.bias:+.3f}",
        tag("strong", "wrong", class_="bad") if finding.wrong else "right",
    )
