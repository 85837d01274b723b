"""Where the nodes of a directed acyclic graph lie in a drawing: in layers from left to right, with few crossings.

After Sugiyama, Tagawa and Toda (1981): a layer by the longest path, lines through points of their own in the layers
that they cross, an order by barycentres. Libraries for it need Graphviz, or are not kept up any more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

_SWEEPS = 8
"""Through all layers, forth and back: more changes little."""
_FOLDED = 8
"""Nodes of a chain from which on it is folded."""
_TALL = 12
"""Nodes in a column of a folded chain."""

_SEVERAL = 3
"""Nodes that have as many others in common right before them have them through a joint."""
JOINT = "\0"
_BETWEEN = 0.3
"""Of a node's width, between columns."""

Graph = Mapping[str, Collection[str]]
"""By node, those that come right before it. Those that come first come first."""
Point = tuple[float, float]


@dataclass(frozen=True)
class Layout:
    """In units of a node's size and the room around it: `nodes` where each has its middle, `lines` the points that
    each line of `reduced` runs through, both ends included, `size` of all, from 0, 0."""

    nodes: Mapping[str, Point]
    lines: Mapping[tuple[str, str], Sequence[Point]]
    size: Point


def reduced(graph: Graph) -> dict[str, list[str]]:
    """The same without what follows from the rest: no line where there is a longer way."""
    earlier: dict[str, set[str]] = {}
    for node, before in graph.items():
        earlier[node] = set(before).union(*(earlier[each] for each in before))
    return {
        node: [each for each in before if not any(each in earlier[other] for other in before)]
        for node, before in graph.items()
    }


def joined(graph: Graph) -> dict[str, list[str]]:
    """The same with a joint, whose name begins with `JOINT`, where several nodes have the same several before them:
    lines run together there instead of from each to each."""
    behind = Counter(frozenset(before) for before in graph.values() if len(before) >= _SEVERAL)
    joints: dict[frozenset[str], str] = {}
    found: dict[str, list[str]] = {}
    for node, before in graph.items():
        several = frozenset(before)
        if behind[several] >= _SEVERAL:
            if several not in joints:
                joints[several] = f"{JOINT}{len(joints)}"
                found[joints[several]] = list(before)
            found[node] = [joints[several]]
        else:
            found[node] = list(before)
    return found


def layout(graph: Graph) -> Layout:
    """Of a graph that is `reduced`. Long chains are folded into columns that go down and up in turn."""
    chains = _chains(graph)
    first = {node: chain[0] for chain in chains for node in chain}
    folded = {chain[0]: [first[each] for each in graph[chain[0]]] for chain in chains}
    members = {chain[0]: chain for chain in chains}
    layers = _layers(folded)
    columns, points = _with_points(folded, layers)
    _order(columns, points)
    heights = {node: _height(len(members.get(node, ()))) for column in columns for node in column}
    middles = _heights_in(columns, points, heights)
    nodes: dict[str, Point] = {}
    passages: dict[str, list[Point]] = {}
    left = 0.0
    for column in columns:
        width = max(_width(len(members.get(node, ()))) for node in column)
        for node in column:
            chain = members.get(node, ())
            nodes |= zip(chain, _fold(len(chain), (left + width / 2, middles[node])), strict=True)
            passages[node] = [(left, middles[node]), (left + width, middles[node])]
        left += width + _BETWEEN
    bottom = max((middles[node] + heights[node] / 2 for node in middles), default=0.0)
    return Layout(nodes, _lines(graph, nodes, first, len(columns), passages), (max(left - _BETWEEN, 0.0), bottom))


def _chains(graph: Graph) -> list[list[str]]:
    """All nodes, those of long chains together: each but the last has one behind it, which has it alone before."""
    behind: dict[str, list[str]] = {node: [] for node in graph}
    for node, before in graph.items():
        for each in before:
            behind[each].append(node)
    chains: dict[str, list[str]] = {}
    for node, before in graph.items():
        single = next(iter(before)) if len(before) == 1 else None
        chain = chains[single] if single is not None and len(behind[single]) == 1 else []
        chain.append(node)
        chains[node] = chain
    found: list[list[str]] = []
    for node, chain in chains.items():
        if len(chain) < _FOLDED:
            found.append([node])
        elif node == chain[0]:
            found.append(chain)
    return found


def _layers(graph: Graph) -> dict[str, int]:
    """As far to the right as what comes behind a node allows."""
    layers = dict.fromkeys(graph, 0)
    for node in reversed(list(graph)):
        for each in graph[node]:
            layers[each] = min(layers[each], layers[node] - 1)
    least = min(layers.values(), default=0)
    return {node: layer - least for node, layer in layers.items()}


def _with_points(graph: Graph, layers: Mapping[str, int]) -> tuple[list[list[str]], dict[str, list[str]]]:
    """Columns of nodes and of points of lines, and what comes right before each, which is in the column before it."""
    columns: list[list[str]] = [[] for _ in range(max(layers.values(), default=-1) + 1)]
    linked: dict[str, list[str]] = {}
    for node, layer in layers.items():
        columns[layer].append(node)
        linked[node] = []
    for node, before in graph.items():
        for each in before:
            last = each
            for layer in range(layers[each] + 1, layers[node]):
                point = _point(each, node, layer)
                columns[layer].append(point)
                linked[point], last = [last], point
            linked[node].append(last)
    return columns, linked


def _order(columns: list[list[str]], linked: Mapping[str, Sequence[str]]) -> None:
    """Sort each column by where its neighbours are in the one before it or, on the way back, behind it."""
    behind = _turned(linked)
    for sweep in range(_SWEEPS):
        forth = sweep % 2 == 0
        for fixed, moved in pairwise(columns if forth else reversed(columns)):
            at = {node: index for index, node in enumerate(fixed)}
            own = {node: index for index, node in enumerate(moved)}
            near = linked if forth else behind
            moved.sort(key=lambda node: _mean((at[each] for each in near.get(node, ())), own[node]))


def _turned(linked: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    behind: dict[str, list[str]] = {}
    for node, before in linked.items():
        for each in before:
            behind.setdefault(each, []).append(node)
    return behind


def _mean(values: Iterable[float], otherwise: float) -> float:
    found = list(values)
    return sum(found) / len(found) if found else otherwise


def _heights_in(
    columns: Sequence[Sequence[str]], linked: Mapping[str, Sequence[str]], heights: Mapping[str, float]
) -> dict[str, float]:
    """The middle of each in its column, near those that it is linked with."""
    behind = _turned(linked)
    middles = {node: float(index) for column in columns for index, node in enumerate(column)}
    for sweep in range(_SWEEPS):
        for column in columns if sweep % 2 == 0 else reversed(columns):
            near = linked if sweep % 2 == 0 else behind
            wanted = [_mean((middles[each] for each in near.get(node, ())), middles[node]) for node in column]
            middles |= zip(column, _apart(wanted, [heights[node] for node in column]), strict=True)
    top = min((middles[node] - heights[node] / 2 for node in middles), default=0.0)
    return {node: middle - top for node, middle in middles.items()}


def _apart(wanted: Sequence[float], heights: Sequence[float]) -> list[float]:
    """Places in that order, without overlaps, that are nearest to those wanted by least squares: neighbours that want
    to overlap become a block with the mean of what its members want (pool adjacent violators)."""
    offsets = [0.0]
    for above, below in pairwise(heights):
        offsets.append(offsets[-1] + (above + below) / 2)
    blocks: list[tuple[float, int]] = []
    for place, offset in zip(wanted, offsets, strict=True):
        mean, count = place - offset, 1
        while blocks and blocks[-1][0] > mean:
            other, others = blocks.pop()
            mean, count = (mean * count + other * others) / (count + others), count + others
        blocks.append((mean, count))
    starts = [mean for mean, count in blocks for _ in range(count)]
    return [start + offset for start, offset in zip(starts, offsets, strict=True)]


def _height(count: int) -> float:
    """Of a node, a folded chain of `count`, or (0) a point of a line."""
    return float(min(count, _TALL)) if count else 0.4


def _width(count: int) -> float:
    return float(-(-count // _TALL)) if count else 0.0


def _fold(count: int, middle: Point) -> list[Point]:
    """Where the nodes of a chain around `middle` are."""
    left, top = middle[0] - _width(count) / 2 + 0.5, middle[1] - _height(count) / 2 + 0.5
    places = []
    for index in range(count):
        column, row = divmod(index, _TALL)
        places.append((left + column, top + (_TALL - 1 - row if column % 2 else row)))
    return places


def _lines(
    graph: Graph,
    nodes: Mapping[str, Point],
    first: Mapping[str, str],
    columns: int,
    passages: Mapping[str, Sequence[Point]],
) -> dict[tuple[str, str], list[Point]]:
    """`first`: of the chain of each node; `passages`: both ends of what lines have to themselves in a column."""
    lines = {}
    for node, before in graph.items():
        for each in before:
            names = [_point(first[each], first[node], layer) for layer in range(columns)]
            through = [place for name in names for place in passages.get(name, ())]
            lines[each, node] = [nodes[each], *through, nodes[node]]
    return lines


def _point(before: str, node: str, layer: int) -> str:
    """What a line goes through on its way."""
    return f"{before} > {node} > {layer}"
