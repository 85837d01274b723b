"""Where a checkpoint has the weights of a slot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from llama_npu2.frozen import frozen
from stages.engine.lazy import np


@frozen
class Place:
    """The tensor that holds the weights of a slot, and which of its rows they are."""

    tensor: str
    """Its name, with `{layer}` in those of layers, and `{expert}` where each expert has its own."""
    among: tuple[str, ...] = ()
    """The slots whose rows it holds, in order; nothing: only this one's."""
    alternate: bool = False
    """Whether one row of each of these slots follows another. If not, all rows of a slot follow those of another."""
    transposed: bool = False
    """Whether its matrices are `[in, out]` where they are not quantised."""

    def name(self, slot: str) -> str:
        """Return the name of a slot's weights, which is the tensor's where they are all that it holds."""
        tensor = self.tensor.replace("{expert}", "all")
        return f"{tensor}.{slot}" if self.among else tensor

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


@frozen
class Location:
    """A place in a model of given sizes."""

    tensor: str
    """The tensor's name, with `{expert}` where each expert has its own."""
    shape: tuple[int, ...]
    """The tensor's shape: of stacked experts `[experts, rows, ...]`."""
    find_rows: Callable[[], slice | np.ndarray]
    axis: int = 0
    """The axis of rows."""
    transposed: bool = False
    """As in `Place`."""
    expert: int | None = None
    """The expert that the tensor holds, of weights of all."""

    @cached_property
    def rows(self) -> slice | np.ndarray:
        """The tensor's row that is in each row of the weights: found when the tensor's shape has been checked."""
        return self.find_rows()

    @property
    def plain_shape(self) -> tuple[int, ...]:
        """The tensor's shape where it is not quantised."""
        *outer, rows, columns = self.shape if self.transposed else (*self.shape, 0)
        return (*outer, columns, rows) if self.transposed else self.shape

    def of_experts(self, count: int) -> Iterator[Location]:
        """Yield the tensor's location, or those of the tensors of each of `count` experts."""
        if "{expert}" not in self.tensor:
            yield self
            return
        for expert in range(count):
            yield replace(self, tensor=self.tensor.format(expert=expert), expert=expert)


def whole(pieces: Iterable[tuple[Location, np.ndarray]]) -> np.ndarray:
    """Return a tensor that is not quantised as a checkpoint has it, from all weights that lie in it."""
    owned = [(at, values if at.expert is None else values[at.expert]) for at, values in pieces]
    at, first = owned[0]
    tensor: np.ndarray = np.empty(at.shape, first.dtype)
    for at, values in owned:
        rows = (*(slice(None),) * at.axis, at.rows)
        tensor[rows] = values.reshape(tensor[rows].shape)
    return tensor.swapaxes(-1, -2) if at.transposed else tensor
