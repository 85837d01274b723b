"""A directed acyclic graph as a drawing to walk through, by mouse, finger or arrow keys.

Choosing a node shows what leads to it and what it leads to, and what a table says of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from stages.reports.pages.blocks import details, svg, tag
from stages.reports.pages.layered import JOINT, joined, layout, reduced

_CHARACTER = 7.5
"""Pixels of a character of 12 pixels' size, rather more."""
_HEIGHT, _ROW = 42, 52
"""Pixels of a node, and from one node to the next below it."""
_GAP = 44
"""Pixels between columns."""
_HINT = "Choose a node, or walk with the arrow keys, to see what leads to it, what it leads to, and its figures."

Point = tuple[float, float]


@dataclass(frozen=True)
class Node:
    """A box of the drawing."""

    name: str
    kind: str
    """Its class in CSS."""
    line: str
    """A short line below the name."""
    before: Collection[str]
    """Names of the nodes that lead to it, all of which come first."""


def graph(nodes: Sequence[Node], label: str, table: Markup) -> Markup:
    """Return the drawing of a graph, without the lines that follow from others.

    Args:
        table: A row for each node, its name first. Without JavaScript, and for those who do not see the drawing, it is
            all there is.
    """
    lines = joined(reduced({node.name: node.before for node in nodes}))
    width = _CHARACTER * max((max(len(node.name), len(node.line)) for node in nodes), default=0) + 24
    places = layout(lines)
    joints = {column for column, _ in places.values()} - {places[node.name][0] for node in nodes}
    # A column of joints alone needs no room for boxes.
    lefts = [0.0]
    for column in range(max((column for column, _ in places.values()), default=-1) + 1):
        lefts.append(lefts[-1] + (0 if column in joints else width) + _GAP)
    middles = {
        name: (lefts[column] + (0 if column in joints else width / 2), _ROW * row + _HEIGHT / 2)
        for name, (column, row) in places.items()
    }
    size = (lefts[-1] - _GAP, max((y for _, y in middles.values()), default=0) + _HEIGHT / 2)
    boxes = _boxes(nodes, middles, width)
    drawing = svg(*size, label, *_curves(lines, middles, width), *boxes, zoom=True, role="group")
    chosen = tag("div", tag("p", _HINT, class_="muted"), class_="chosen", aria_live="polite")
    return tag("div", drawing, chosen, details("All nodes as a table", table), class_="graph")


def _curves(lines: Mapping[str, Collection[str]], middles: Mapping[str, Point], width: float) -> Iterator[Markup]:
    for node, before in lines.items():
        for name in before:
            path = _path(middles[name], middles[node], *(0 if n.startswith(JOINT) else width / 2 for n in (name, node)))
            # HTML has no place for the character that joints begin with.
            ends = {"data_from": name.replace(JOINT, "joint "), "data_to": node.replace(JOINT, "joint ")}
            yield tag("path", d=path, class_="line", **ends)


def _path(start: Point, end: Point, out: float, into: float) -> str:
    """Return a curve from the right of one node, `out` after its middle, to the left of another."""
    (x, y), (last_x, last_y) = start, end
    if x == last_x:
        return f"M {x:.0f} {y + _HEIGHT / 2:.0f} V {last_y:.0f}"
    x, last_x = x + out, last_x - into
    bend = min((last_x - x) / 2, 2 * _GAP)
    return f"M {x:.0f} {y:.0f} C {x + bend:.0f} {y:.0f} {last_x - bend:.0f} {last_y:.0f} {last_x:.0f} {last_y:.0f}"


def _boxes(nodes: Sequence[Node], middles: Mapping[str, Point], width: float) -> Iterator[Markup]:
    """Yield boxes column by column: arrow keys go up and down in this order."""
    for number, node in enumerate(sorted(nodes, key=lambda node: middles[node.name])):
        x, y = middles[node.name]
        left, top = x - width / 2, y - _HEIGHT / 2
        yield tag(
            "g",
            tag("rect", x=f"{left:.0f}", y=f"{top:.0f}", width=f"{width:.0f}", height=_HEIGHT, rx=5, class_="box"),
            tag("rect", x=f"{left:.0f}", y=f"{top:.0f}", width=6, height=_HEIGHT, rx=3, class_="mark"),
            tag("text", node.name, x=f"{left + 14:.0f}", y=f"{top + 17:.0f}", class_="name"),
            tag("text", node.line, x=f"{left + 14:.0f}", y=f"{top + 33:.0f}", class_="brief"),
            class_=f"node {node.kind}",
            role="button",
            tabindex=-1 if number else 0,
            aria_pressed="false",
            aria_label=f"{node.name}, {node.line}",
            data_node=node.name,
        )
