"""A directed acyclic graph as a drawing to walk through: by mouse, finger or arrow keys. Choosing a node shows what
leads to it and what it leads to, and what a table says of it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from stages.reports.pages.blocks import svg, tag
from stages.reports.pages.layered import JOINT, Layout, Point, joined, layout, reduced

_CHARACTER = 7.5
"""Pixels of a character of 12 pixels' size, rather more."""
_HEIGHT = 42
_ROW = 52
"""From one node to the next below it."""
_GAP = 40
"""Between columns."""


@dataclass(frozen=True)
class Node:
    """`kind`: its class in CSS. `said`: a short line below its name. `before`: names of those that lead to it, all of
    which come first."""

    name: str
    kind: str
    said: str
    before: Collection[str]


def graph(nodes: Sequence[Node], label: str, table: Markup) -> Markup:
    """`table`: of the nodes by name, a row each; it is all there is without JavaScript, and for those who do not see
    the drawing. Lines that follow from others are left out."""
    placed = layout(joined(reduced({node.name: node.before for node in nodes})))
    width = _CHARACTER * max((max(len(node.name), len(node.said)) for node in nodes), default=0) + 24
    drawn = svg(
        placed.size[0] * (width + _GAP),
        placed.size[1] * _ROW,
        label,
        *_lines(placed, width),
        *_nodes(nodes, placed.nodes, width),
        zoom=True,
        role="group",
    )
    chosen = tag("div", tag("p", _HINT, class_="muted"), class_="chosen", aria_live="polite")
    return tag("div", drawn, chosen, table, class_="graph")


_HINT = "Choose a node, or walk with the arrow keys: what leads to it, what it leads to, and what is known of it."


def _at(point: Point, width: float) -> Point:
    return point[0] * (width + _GAP), point[1] * _ROW


def _lines(placed: Layout, width: float) -> Iterator[Markup]:
    for (before, node), points in placed.lines.items():
        ends = [0 if name.startswith(JOINT) else width / 2 for name in (before, node)]
        path = _path([_at(point, width) for point in points], *ends)
        yield tag("path", d=path, class_="line", data_from=_name(before), data_to=_name(node))


def _name(node: str) -> str:
    """HTML has no place for the character that joints begin with."""
    return node.replace(JOINT, "joint ")


def _path(corners: Sequence[Point], out: float, into: float) -> str:
    """Curves from `out` on the right of the first node's middle to `into` on the left of the last one's; a straight
    line within a column."""
    (x, y), *through, (last_x, last_y) = corners
    if last_x <= x + 1:
        return f"M {x:.0f} {y + _HEIGHT / 2 * (1 if last_y > y else -1):.0f} V {last_y:.0f}"
    parts = [f"M {x + out:.0f} {y:.0f}"]
    at, height = x + out, y
    for to, level in [*through, (last_x - into, last_y)]:
        middle = (at + to) / 2
        parts.append(f"C {middle:.0f} {height:.0f} {middle:.0f} {level:.0f} {to:.0f} {level:.0f}")
        at, height = to, level
    return " ".join(parts)


def _nodes(nodes: Sequence[Node], places: Mapping[str, Point], width: float) -> Iterator[Markup]:
    """In the order of columns, in which arrow keys go up and down."""
    ordered = sorted(nodes, key=lambda node: places[node.name])
    for number, node in enumerate(ordered):
        x, y = _at(places[node.name], width)
        left, top = x - width / 2, y - _HEIGHT / 2
        yield tag(
            "g",
            tag("rect", x=f"{left:.0f}", y=f"{top:.0f}", width=f"{width:.0f}", height=_HEIGHT, rx=5, class_="box"),
            tag("rect", x=f"{left:.0f}", y=f"{top:.0f}", width=6, height=_HEIGHT, rx=3, class_="mark"),
            tag("text", node.name, x=f"{left + 14:.0f}", y=f"{top + 17:.0f}", class_="name"),
            tag("text", node.said, x=f"{left + 14:.0f}", y=f"{top + 33:.0f}", class_="said"),
            class_=f"node {node.kind}",
            role="button",
            tabindex=-1 if number else 0,
            aria_pressed="false",
            aria_label=f"{node.name}, {node.said}",
            data_node=node.name,
        )
