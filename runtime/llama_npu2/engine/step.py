"""A step: rows of many sequences in one pass over the weights, and what processes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from llama_npu2.artifact.plan import Phase
from llama_npu2.engine.chunks import Recipe


class Run(NamedTuple):
    """Rows of one sequence at consecutive positions."""

    tokens: Sequence[int]
    """Ids of at least one token, a row each."""
    position: int
    """That of the first token in its sequence, from 0."""
    blocks: Sequence[int]
    """The sequence's block table: entry i is the number of the block that holds the positions from i times a block's
    positions on. It reaches at least to the last row's position."""
    logits: int = 1
    """Of how many of its last rows logits are wanted: 0 for none, all of them where drafts are checked."""
    hidden: bool = False
    """Whether the last norm's output of its last row is wanted."""
    phase: Phase | None = None
    """What processes them, where programs have fixed shapes."""


class Steps(Protocol):
    """What processes rows of many sequences, whose K and V lie in numbered blocks of positions.

    The logits of a row depend on its sequence's tokens up to its position alone. They have the same bits whatever other
    runs are in the step, however a prompt is cut into runs, and whichever blocks hold it.
    """

    @property
    def blocks(self) -> int:
        """Number of blocks. A block holds K and V of all layers for as many positions as the manifest says."""

    @property
    def hidden(self) -> np.ndarray:
        """The last norm's output of the last row of each run of the last step that wants it, `[runs, hidden size]`."""

    def step(self, runs: Sequence[Run]) -> np.ndarray:
        """Process rows. K and V of all rows of a run are stored before one of them attends, up to its own position.

        Args:
            runs: one for each sequence that has rows. A block that a run's rows are stored in is in no other table.

        Returns:
            Float32 logits `[rows that want them, vocab]`, in the order of the runs. They are valid until the next step.
        """

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy all of a block, in all layers, from the first to the second block of each pair, in order."""

    def read_block(self, block: int) -> bytes:
        """Return the content of a block, in all layers."""

    def write_block(self, block: int, content: bytes) -> None:
        """Store what `read_block` has returned, in any block."""


class Turns(Steps, Protocol):
    """Steps of a device whose programs have fixed shapes and one contiguous cache: a step has one run."""

    @property
    def recipe(self) -> Recipe:
        """Which phases process a sequence, so that it has the bits that it has alone."""

    @property
    def turn(self) -> int:
        """How many tokens of a sequence should come before another one's, since changing over takes time."""
