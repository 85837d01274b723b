"""Where a checkpoint has the weights of a slot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from stages.engine.lazy import np


@dataclass(frozen=True)
class Place:
    """The tensor that holds the weights of a slot, and which of its rows they are."""

    tensor: str
    """Its name, with `{layer}` in those of layers."""
    among: tuple[str, ...] = ()
    """The slots whose rows it holds, in order; nothing: only this one's."""
    alternate: bool = False
    """Whether one row of each of these slots follows another. If not, all rows of a slot follow those of another."""

    def name(self, slot: str) -> str:
        """Return the name of a slot's weights, which is the tensor's where they are all that it holds."""
        return f"{self.tensor}.{slot}" if self.among else self.tensor

    def rows(self, slot: str, counts: Mapping[str, int], head: Sequence[int] | None = None) -> slice | np.ndarray:
        """Return the tensor's row that is in each row of a slot.

        Args:
            counts: the rows of each slot.
            head: the tensor's row that is in each row of a head; None: all are in their places.
        """
        rows = slice(None)
        if self.alternate:
            rows = slice(self.among.index(slot), None, len(self.among))
        elif self.among:
            first = sum(counts[other] for other in self.among[: self.among.index(slot)])
            rows = slice(first, first + counts[slot])
        if head is None:
            return rows
        heads: np.ndarray = np.arange(sum(counts[other] for other in self.among or (slot,)))[rows]
        return heads.reshape(-1, len(head))[:, head].reshape(-1)


@dataclass(frozen=True)
class Location:
    """A place in a model of given sizes."""

    tensor: str
    """The tensor's name."""
    shape: tuple[int, ...]
    """The tensor's shape."""
    find_rows: Callable[[], slice | np.ndarray]

    @cached_property
    def rows(self) -> slice | np.ndarray:
        """The tensor's row that is in each row of the weights: found when the tensor's shape has been checked."""
        return self.find_rows()


def whole(pieces: Iterable[tuple[Location, np.ndarray]]) -> np.ndarray:
    """Return a tensor as a checkpoint has it, from all weights that lie in it."""
    (location, first), *others = pieces
    if isinstance(location.rows, slice) and location.rows == slice(None):
        return first
    tensor: np.ndarray = np.empty((location.shape[0], *first.shape[1:]), first.dtype)
    for at, values in [(location, first), *others]:
        tensor[at.rows] = values
    return tensor
