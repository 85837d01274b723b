"""Steps of rows of many sequences on the CPU (`engine.step.Steps`), over the caches and programs of an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import numpy as np

from llama_npu2.artifact.plan import BLOCK_POSITIONS
from llama_npu2.devices.cpu import CpuSubmission, Rows
from llama_npu2.engine.memory import Memory
from llama_npu2.engine.row_logits import RowLogits
from llama_npu2.engine.step import Run


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
        token: CpuSubmission,
        logits: np.ndarray,
        blocks: int,
    ) -> None:
        """Initialise steps.

        Args:
            memory: the engine's buffers.
            layers: processes rows up to the last layer.
            row_logits: computes the logits of these rows.
            row_hidden: computes the last norm's output of one of these rows.
            token: processes a row, with its logits.
            logits: f32 `[vocab]`, where `token` writes them.
            blocks: how many blocks of the caches may be used.
        """
        self.blocks = blocks
        self._memory, self._layers, self._token = memory, layers, token
        self._row_logits, self._row_hidden = row_logits, row_hidden
        self.hidden = np.empty((0, 0))
        self._tokens, self._logits = memory.array("tokens"), logits

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
        rows = [self._placed(run) for run in runs]
        self._check(runs, rows)
        ids = np.array([token for run in runs for token in run.tokens])
        if ids.min() < 0 or ids.max() >= len(self._logits):
            raise ValueError(f"a token is outside the vocabulary of {len(self._logits)}")
        self._tokens[: len(ids)] = ids
        if len(ids) == 1 and runs[0].logits and not runs[0].hidden:
            self._token.run_rows(rows)
            return self._logits[None]
        self._layers.run_rows(rows)
        ends = accumulate(len(run.tokens) for run in runs)
        hidden = [self._row_hidden(end - 1) for run, end in zip(runs, ends, strict=True) if run.hidden]
        self.hidden = np.stack(hidden) if hidden else np.empty((0, 0))
        return self._row_logits.together(list(_rows_with_logits(runs)))

    def _placed(self, run: Run) -> Rows:
        return Rows.of(len(run.tokens), run.position, np.ascontiguousarray(run.blocks, np.int32))

    def _check(self, runs: Sequence[Run], rows: Sequence[Rows]) -> None:
        count = sum(run.rows for run in rows)
        if not rows or not all(0 <= run.logits <= len(run.tokens) > 0 for run in runs) or count > self.rows:
            raise ValueError(f"a step of {count} rows in {len(rows)} runs: it takes 1 to {self.rows}, a run 1 or more")
        written: set[int] = set()
        for run, placed in zip(runs, rows, strict=True):
            first, last = run.position // BLOCK_POSITIONS, (run.position + placed.rows - 1) // BLOCK_POSITIONS
            table = placed.blocks[: last + 1]
            if run.position < 0 or len(table) <= last or table.min() < 0 or table.max() >= self.blocks:
                raise ValueError(
                    f"a run of {placed.rows} rows from {run.position} on has no table of blocks below {self.blocks}"
                )
            stored = {*table[first:].tolist()}
            if len(stored) < last + 1 - first or stored & written:
                raise ValueError(f"rows from {run.position} on are stored in a block that is stored in already")
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


def _rows_with_logits(runs: Sequence[Run]) -> Iterator[int]:
    """Yield the rows of a step whose logits are wanted."""
    end = 0
    for run in runs:
        end += len(run.tokens)
        yield from range(end - run.logits, end)
