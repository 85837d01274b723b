"""Steps of rows of many sequences on the CPU (`engine.step.Steps`), over the caches and programs of an engine."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np

from llama_npu2.artifact.plan import BLOCK_POSITIONS
from llama_npu2.devices.cpu import CpuSubmission, Rows
from llama_npu2.engine.memory import Memory
from llama_npu2.engine.row_logits import RowLogits
from llama_npu2.engine.step import Run

_NO_HIDDEN = np.empty((0, 0))


class Whole(NamedTuple):
    """What processes rows that all want logits."""

    calls: CpuSubmission
    logits: np.ndarray
    """Float32 `[most rows, vocab]`, where `calls` write them."""


class NativeSteps:
    """Processes rows of many sequences. Not thread-safe.

    Who takes steps owns the caches: an engine's own context is lost by the first one.
    """

    def __init__(
        self,
        memory: Memory,
        layers: CpuSubmission,
        row_logits: RowLogits,
        row_hidden: Callable[[int], np.ndarray],
        whole: Sequence[Whole],
        blocks: int,
    ) -> None:
        """Initialise steps.

        Args:
            memory: the engine's buffers.
            layers: processes rows up to the last layer.
            row_logits: computes the logits of these rows.
            row_hidden: computes the last norm's output of one of these rows.
            whole: what processes a row with its logits; behind it what does so with several rows, if anything does.
            blocks: how many blocks of the caches may be used.
        """
        self.blocks = blocks
        self._memory, self._layers, self._whole = memory, layers, whole
        self._row_logits, self._row_hidden = row_logits, row_hidden
        self.hidden = _NO_HIDDEN
        self._tokens, self._vocabulary = memory.array("tokens"), whole[0].logits.shape[1]

    @property
    def rows(self) -> int:
        """The most rows that a step has room for."""
        return len(self._tokens)

    def step(self, runs: Sequence[Run]) -> np.ndarray:
        """Process rows, as `Steps.step` says.

        Raises:
            ValueError: if there are no rows or too many, a run wants logits of more rows than it has, its table of
                blocks is too short or names a block that is not there, two rows would be stored in one place, or a
                token is outside the vocabulary. Nothing was stored then.
        """
        self._check(runs)
        ids = [token for run in runs for token in run.tokens]
        if min(ids) < 0 or max(ids) >= self._vocabulary:
            raise ValueError(f"a token is outside the vocabulary of {self._vocabulary}")
        self._tokens[: len(ids)] = ids
        rows, wanted, hidden = _placed(runs), list(_rows_with_logits(runs)), any(run.hidden for run in runs)
        if not hidden:
            self.hidden = _NO_HIDDEN
            for calls, logits in self._whole:
                if len(ids) == len(wanted) <= len(logits):
                    calls.run_rows(rows)
                    return logits[: len(ids)]
        self._layers.run_rows(rows)
        if hidden:
            ends = accumulate(len(run.tokens) for run in runs)
            self.hidden = np.stack(
                [self._row_hidden(end - 1) for run, end in zip(runs, ends, strict=True) if run.hidden]
            )
        return self._row_logits.together(wanted)

    def _check(self, runs: Sequence[Run]) -> None:
        count = sum(len(run.tokens) for run in runs)
        if not runs or not all(0 <= run.logits <= len(run.tokens) > 0 for run in runs) or count > self.rows:
            raise ValueError(f"a step of {count} rows in {len(runs)} runs: it takes 1 to {self.rows}, a run 1 or more")
        written: set[int] = set()
        for run in runs:
            rows, position = len(run.tokens), run.position
            first, last = position // BLOCK_POSITIONS, (position + rows - 1) // BLOCK_POSITIONS
            table = run.blocks[: last + 1]
            if position < 0 or len(table) <= last or min(table) < 0 or max(table) >= self.blocks:
                raise ValueError(f"a run of {rows} rows from {position} on has no table of blocks below {self.blocks}")
            stored = {*table[first:]}
            if len(stored) < last + 1 - first or stored & written:
                raise ValueError(f"rows from {position} on are stored in a block that is stored in already")
            written |= stored

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy all of a block, in all layers, from the first to the second block of each pair, in order."""
        for source, target in pairs:
            for old, new in zip(self._memory.block(source), self._memory.block(target), strict=True):
                new[:] = old

    def read_block(self, block: int) -> bytes:
        """Return the content of a block, in all layers."""
        return b"".join(part.tobytes() for part in self._memory.block(block))

    def write_block(self, block: int, content: bytes) -> None:
        """Store what `read_block` has returned, in any block. Raises ValueError if it has another length."""
        parts = self._memory.block(block)
        ends = [*accumulate(len(part) for part in parts)]
        if len(content) != ends[-1]:
            raise ValueError(f"a block has {ends[-1]} bytes, not {len(content)}")
        for part, end in zip(parts, ends, strict=True):
            part[:] = np.frombuffer(content, np.uint8, len(part), end - len(part))


def _placed(runs: Sequence[Run]) -> list[Rows]:
    """Return the rows of runs, with all their tables of blocks in one array."""
    tables = array("i", chain.from_iterable(run.blocks for run in runs))
    address, _ = tables.buffer_info()
    begins = accumulate((len(run.blocks) * tables.itemsize for run in runs), initial=address)
    return [Rows(len(run.tokens), run.position, tables, begin) for run, begin in zip(runs, begins, strict=False)]


def _rows_with_logits(runs: Sequence[Run]) -> Iterator[int]:
    """Yield the rows of a step whose logits are wanted."""
    end = 0
    for run in runs:
        end += len(run.tokens)
        yield from range(end - run.logits, end)
