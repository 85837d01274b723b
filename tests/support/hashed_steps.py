"""A stand-in for a model that processes rows of many sequences: any wrong block or position shows in its logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llama_npu2.engine.step import Run

POSITIONS, VOCAB = 8, 24
_POWERS = np.cumprod(np.full(4096, 6364136223846793005, np.uint64))
_MIXERS = np.random.default_rng(0).integers(1, 2**63, VOCAB, np.uint64) | np.uint64(1)


class HashedSteps:
    """Keeps a token for each position of a block; logits are a hash of all tokens that a row's table reaches."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self.cells = np.full((blocks, POSITIONS), -1, np.int64)
        self.rows: list[int] = []
        self.wanted: list[int] = []
        self.hidden = np.empty((0, VOCAB), np.float32)

    @property
    def blocks(self) -> int:
        return self._blocks

    def step(self, runs: Sequence[Run]) -> np.ndarray:
        written: list[int] = []
        for run in runs:
            end = run.position + len(run.tokens)
            assert run.tokens and len(run.blocks) * POSITIONS >= end
            written += run.blocks[run.position // POSITIONS : -(-end // POSITIONS)]
            for position, token in enumerate(run.tokens, run.position):
                self.cells[run.blocks[position // POSITIONS], position % POSITIONS] = token
        tables = [block for run in runs for block in set(run.blocks)]
        assert all(tables.count(block) == 1 for block in written), "rows are stored in a block of two tables"
        self.rows.append(sum(len(run.tokens) for run in runs))
        self.wanted.append(sum(run.logits for run in runs))
        self.hidden = np.array([-self._logits(run._replace(logits=1))[0] for run in runs if run.hidden], np.float32)
        return np.array([row for run in runs for row in self._logits(run)], np.float32).reshape(-1, VOCAB)

    def _logits(self, run: Run) -> list[np.ndarray]:
        end = run.position + len(run.tokens)
        seen = self.cells[list(run.blocks)].ravel()
        return [logits_after(seen[:at]) for at in range(end - run.logits + 1, end + 1)]

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            self.cells[target] = self.cells[source]

    def read_block(self, block: int) -> bytes:
        return self.cells[block].tobytes()

    def write_block(self, block: int, content: bytes) -> None:
        self.cells[block] = np.frombuffer(content, np.int64)


def logits_after(tokens: np.ndarray | Sequence[int]) -> np.ndarray:
    """Logits `[VOCAB]` that any other token, or another order, changes."""
    ids = np.asarray(tokens).astype(np.uint64)
    with np.errstate(over="ignore"):
        hashed = np.uint64((ids + np.uint64(1)) @ _POWERS[: len(ids)])
        mixed = (hashed ^ (hashed >> np.uint64(31))) * _MIXERS
    logits = (mixed >> np.uint64(40)).astype(np.float32) / np.float32(2**24)
    if hashed >> np.uint64(20) & np.uint64(3):  # most tokens follow from the last one, so that drafts come true
        logits[(int(ids[-1]) * 5 + 3) % VOCAB] += 1
    return logits
