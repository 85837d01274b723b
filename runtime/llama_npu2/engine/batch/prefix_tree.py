"""Remembers which blocks hold the beginnings of texts that were processed, so that none is processed again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from llama_npu2.engine.batch.pool import BlockPool


@dataclass(eq=False)
class Node:
    """A block's worth of tokens behind those of its parent. Only a node whose block is full has children."""

    tokens: tuple[int, ...]
    block: int
    parent: Node | None
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)
    used: int = 0
    """When it was last asked for: greater is later."""
    pins: int = 0
    """How many want it kept."""


class PrefixTree:
    """A radix tree over blocks of tokens, one for each namespace. It is a holder of the blocks of its nodes.

    K and V of a position depend on the tokens up to it alone, so whoever begins with a node's path may use its blocks.
    Who may not even learn what others have asked for has a namespace: nothing is found in that of another.
    """

    def __init__(self, pool: BlockPool, positions: int, least: int = 8) -> None:
        """Make an empty tree.

        Args:
            pool: whose blocks its nodes hold.
            positions: in a block.
            least: how many tokens of a block must be shared for it to be worth a copy.
        """
        self._pool, self._positions, self._least = pool, positions, least
        self._roots: dict[str, Node] = {}
        self._clock = count(1)

    def match(self, ids: Sequence[int], namespace: str = "") -> tuple[list[int], int]:
        """Return the blocks that hold the longest beginning of `ids`, and its number of tokens.

        The last block may hold other tokens behind them: copy it before it is written. The caller is a holder of all of
        them from now on.
        """
        path, matched = self._path(ids, namespace)
        for node in path:
            node.used = next(self._clock)
        return [self._pool.share(node.block) for node in path], matched

    def held(self, ids: Sequence[int], namespace: str = "") -> list[int]:
        """Return the blocks of `match`, without a holder more."""
        return [node.block for node in self._path(ids, namespace)[0]]

    def insert(self, ids: Sequence[int], table: list[int], namespace: str = "") -> None:
        """Remember the blocks of a processed text.

        Args:
            ids: its tokens; those behind the last full block are remembered, too.
            table: its blocks. One that the tree holds already with the same content is replaced by the tree's.
            namespace: who may find them.
        """
        node, size = self._roots.setdefault(namespace, Node((), -1, None)), self._positions
        for at, start in enumerate(range(0, len(ids), size)):
            tokens = tuple(ids[start : start + size])
            child = node.children.get(tokens)
            if child is None:
                child = self._longer(node, tokens) or self._add(node, tokens, table[at])
            elif child.block != table[at]:
                old, table[at] = table[at], self._pool.share(child.block)
                self._pool.release(old)
            child.used = next(self._clock)
            node = child

    def evict(self) -> bool:
        """Forget the block that was asked for longest ago, of those that nobody else holds. False if there is none."""
        leaves = [node for node in self._nodes() if not node.children and self._is_spare(node)]
        if not leaves:
            return False
        self._remove(min(leaves, key=lambda node: node.used))
        return True

    def forget(self, block: int) -> bool:
        """Forget a block. Return whether it did: none that others follow, and no pinned one."""
        node = next((node for node in self._nodes() if node.block == block), None)
        if node is None or node.children or node.pins:
            return False
        self._remove(node)
        return True

    def spare(self, apart_from: Sequence[int] = ()) -> int:
        """Return how many blocks `evict` can free, apart from some."""
        kept = set(apart_from)
        return sum(self._is_spare(node) and node.block not in kept for node in self._nodes())

    def pin(self, ids: Sequence[int], by: int = 1, namespace: str = "") -> int:
        """Keep the blocks of the longest beginning of `ids`; with `by=-1`, give up that wish. Return its tokens."""
        path, matched = self._path(ids, namespace)
        for node in path:
            node.pins = max(node.pins + by, 0)
        return matched

    @property
    def size(self) -> int:
        """Number of blocks that the tree holds."""
        return sum(1 for _ in self._nodes())

    def _path(self, ids: Sequence[int], namespace: str) -> tuple[list[Node], int]:
        path, matched, size = list[Node](), 0, self._positions
        node = self._roots.get(namespace, Node((), -1, None))
        while child := node.children.get(tuple(ids[matched : matched + size])):
            node, matched = child, matched + len(child.tokens)
            path.append(node)
        rest = ids[matched : matched + size]
        shared, best = max(
            ((_common(child.tokens, rest), child) for child in node.children.values()),
            key=lambda choice: choice[0],
            default=(0, None),
        )
        if best is None or shared < self._least:
            return path, matched
        return [*path, best], matched + shared

    def _longer(self, node: Node, tokens: tuple[int, ...]) -> Node | None:
        """Return a child that holds `tokens`, which are no full block, and more."""
        if len(tokens) == self._positions:
            return None
        return next((child for child in node.children.values() if child.tokens[: len(tokens)] == tokens), None)

    def _add(self, node: Node, tokens: tuple[int, ...], block: int) -> Node:
        shorter = [child for child in node.children.values() if child.tokens == tokens[: len(child.tokens)]]
        node.children[tokens] = child = Node(tokens, self._pool.share(block), node)
        for old in shorter:
            if not old.pins:
                self._remove(old)
        return child

    def _remove(self, node: Node) -> None:
        assert node.parent
        del node.parent.children[node.tokens]
        self._pool.release(node.block)

    def _is_spare(self, node: Node) -> bool:
        return not node.pins and self._pool.holders(node.block) == 1

    def _nodes(self) -> Iterator[Node]:
        waiting = [child for root in self._roots.values() for child in root.children.values()]
        while waiting:
            node = waiting.pop()
            waiting += node.children.values()
            yield node


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((at for at, (left, right) in enumerate(zip(a, b, strict=False)) if left != right), min(len(a), len(b)))
