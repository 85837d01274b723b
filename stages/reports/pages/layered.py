"""Place the nodes of a directed acyclic graph in columns, from left to right."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from statistics import mean

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
