"""A directed acyclic graph as a drawing to walk through, by mouse, finger or arrow keys.

Choosing a node shows what leads to it and what it leads to, and what a table says of it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from statistics import mean

from markupsafe import Markup

from llama_npu2.frozen import frozen
from stages.reports.pages.blocks import details, svg, tag

_CHARACTER = 7.5
"""Pixels of a character of 12 pixels' size, rather more."""
_HEIGHT, _ROW = 42, 52
"""Pixels of a node, and from one node to the next below it."""
_GAP = 44
"""Pixels between columns."""
_HINT = "Choose a node, or walk with the arrow keys, to see what leads to it, what it leads to, and its figures."

Point = tuple[float, float]


@frozen
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


_SWEEPS = 6
"""Passes over all columns that bring nodes near their neighbours."""
_CHAIN = 8
"""Nodes from which on a chain is drawn downwards in one column."""
_TALL = 16
"""Nodes of a column at most."""
_SEVERAL = 3
"""Nodes that share this many predecessors get lines through a joint."""
JOINT = "\0"
"""First character of a joint's name."""

Graph = Mapping[str, Collection[str]]
"""The direct predecessors of each node, which come before it."""


def reduced(graph: Graph) -> dict[str, list[str]]:
    """Return the graph without the lines that a longer way makes unnecessary."""
    earlier: dict[str, set[str]] = {}
    for node, before in graph.items():
        earlier[node] = set(before).union(*(earlier[other] for other in before))
    return {
        node: [name for name in before if not any(name in earlier[other] for other in before)]
        for node, before in graph.items()
    }


def joined(graph: Graph) -> dict[str, list[str]]:
    """Return the graph with a joint wherever several nodes have the same several predecessors.

    Lines run together in a joint, instead of from each to each.
    """
    readers = Counter(frozenset(before) for before in graph.values() if len(before) >= _SEVERAL)
    joints: dict[frozenset[str], str] = {}
    simpler: dict[str, list[str]] = {}
    for node, before in graph.items():
        several = frozenset(before)
        if readers[several] >= _SEVERAL and several not in joints:
            joints[several] = f"{JOINT}{len(joints)}"
            simpler[joints[several]] = list(before)
        simpler[node] = [joints[several]] if several in joints else list(before)
    return simpler


def layout(graph: Graph) -> dict[str, tuple[int, float]]:
    """Return column and row of each node.

    A node is in the column after its last predecessor, moved right as far as its successors allow; a long chain stays
    in one column. Columns are sorted by the mean row of neighbours (the barycentre heuristic of Sugiyama, Tagawa and
    Toda, 1981), and split where they are too tall.
    """
    after: dict[str, list[str]] = {node: [] for node in graph}
    for node, before in graph.items():
        for name in before:
            after[name].append(node)
    order = {node: number for number, node in enumerate(graph)}
    heads = _heads(graph, after)
    column: dict[str, int] = {}
    for node, before in graph.items():
        column[node] = max((column[name] + (heads[name] != heads[node]) for name in before), default=0)
    for node in reversed(order):
        if after[node]:
            column[node] = min(column[name] - (heads[name] != heads[node]) for name in after[node])
    columns = [[node for node in graph if column[node] == at] for at in range(max(column.values(), default=-1) + 1)]
    row = {node: at - len(nodes) / 2 for nodes in columns for at, node in enumerate(nodes)}

    def wanted(node: str) -> tuple[float, int, int]:
        near = [row[name] for name in (*graph[node], *after[node]) if heads[name] != heads[node]]
        return (mean(near) if near and heads[node] == node else row[heads[node]], order[heads[node]], order[node])

    for sweep in range(_SWEEPS):
        for nodes in columns if sweep % 2 else reversed(columns):
            nodes.sort(key=wanted)
            row |= {node: at - len(nodes) / 2 for at, node in enumerate(nodes)}
    return _placed([part for nodes in columns for part in _split(nodes)])


def _split(nodes: Sequence[str]) -> list[Sequence[str]]:
    """Split a column that is too tall into several, side by side."""
    size = math.ceil(len(nodes) / math.ceil(len(nodes) / _TALL))
    return [nodes[start : start + size] for start in range(0, len(nodes), size)]


def _placed(columns: Sequence[Sequence[str]]) -> dict[str, tuple[int, float]]:
    tallest = max(map(len, columns), default=0)
    return {
        node: (at, row + (tallest - len(nodes)) / 2)
        for at, nodes in enumerate(columns)
        for row, node in enumerate(nodes)
    }


def _heads(graph: Graph, after: Graph) -> dict[str, str]:
    """Return, by node, the first node of its long chain; the node itself where it is in none."""
    chains: dict[str, list[str]] = {}
    for node, before in graph.items():
        alone = [name for name in before if len(before) == 1 and len(after[name]) == 1]
        chains[node] = chains[alone[0]] if alone else []
        chains[node].append(node)
    return {node: chain[0] if len(chain) >= _CHAIN else node for node, chain in chains.items()}
