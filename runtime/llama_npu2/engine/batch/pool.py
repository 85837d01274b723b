"""Counts who holds each block of the KV cache."""

from __future__ import annotations


class BlockPool:
    """The blocks of a KV cache, each with the number of tables and tree nodes that hold it.

    A block with one holder may be written. A block without one is free.
    """

    def __init__(self, count: int) -> None:
        self._holders = [0] * count
        self._free = list(reversed(range(count)))

    @property
    def count(self) -> int:
        """Number of blocks, free or not."""
        return len(self._holders)

    @property
    def free(self) -> int:
        """Number of blocks that nobody holds."""
        return len(self._free)

    def holders(self, block: int) -> int:
        """Return how many hold a block."""
        return self._holders[block]

    def take(self) -> int | None:
        """Return a free block, which has one holder from now on, or None if there is none."""
        if not self._free:
            return None
        block = self._free.pop()
        self._holders[block] = 1
        return block

    def share(self, block: int) -> int:
        """Add a holder to a block that has one; return the block. Raises ValueError if it is free."""
        self._check(block)
        self._holders[block] += 1
        return block

    def release(self, block: int) -> None:
        """Take a holder from a block, which is free after its last one. Raises ValueError if it is free already."""
        self._check(block)
        self._holders[block] -= 1
        if not self._holders[block]:
            self._free.append(block)

    def _check(self, block: int) -> None:
        if self._holders[block] < 1:
            raise ValueError(f"block {block} is free: it cannot be shared or released")
