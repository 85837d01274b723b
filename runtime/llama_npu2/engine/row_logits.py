"""Logits of rows that a prompt's layers have processed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from llama_npu2.artifact.manifest import Manifest
from llama_npu2.artifact.plan import LAST_ROW, LOGITS, PREFILL, Phase
from llama_npu2.devices import Submission
from llama_npu2.engine.memory import Memory


class SeveralRows:
    """Computes the logits of several rows in one pass over the LM head."""

    def __init__(self, manifest: Manifest, memory: Memory, phase: Phase, calls: Submission) -> None:
        """Initialise it with the calls of `phase`, whose kind is `LOGITS`."""
        self.most, self._calls = phase.rows, calls
        self._layers = memory.array(_output_of_layers(manifest))
        self._logits = memory.array("row_logits")[:, : manifest.model["vocab"]]

    def of(self, rows: Sequence[int]) -> np.ndarray:
        """Return float32 logits `[len(rows), vocab]` of at most `most` rows, valid until the next ones."""
        count = len(rows)
        self._layers[:count] = self._layers[rows]
        self._calls.run(count, 0)
        return self._logits[:count]


class RowLogits:
    """Computes the logits of rows of the last prefill. Afterwards its rows are lost."""

    def __init__(self, last: Submission, logits: np.ndarray, several: SeveralRows | None) -> None:
        """Initialise it.

        Args:
            last: computes the logits of the last of the rows that it is told of.
            logits: f32 `[vocab]`, where `last` writes them.
            several: computes those of several rows; without it rows take turns.
        """
        self._last, self._logits, self._several = last, logits, several

    def of(self, rows: Sequence[int], position: int = 0) -> Iterator[np.ndarray]:
        """Yield float32 logits `[vocab]` of each row. They are valid until the next ones are asked for.

        Args:
            rows: ascending.
            position: that of the prefill's first row.
        """
        if self._several is None or len(rows) == 1:
            for row in rows:
                self._last.run(row + 1, position)
                yield self._logits
            return
        # Rows that are left lie behind those that are overwritten: row i of an ascending sequence is i at least.
        for start in range(0, len(rows), self._several.most):
            yield from self._several.of(rows[start : start + self._several.most])

    def together(self, rows: Sequence[int]) -> np.ndarray:
        """Return float32 logits `[len(rows), vocab]` of ascending rows, valid until the next ones are asked for."""
        if self._several is not None and 1 < len(rows) <= self._several.most:
            return self._several.of(rows)
        logits = np.empty((len(rows), len(self._logits)), np.float32)
        for out, computed in zip(logits, self.of(rows), strict=True):
            out[:] = computed
        return logits


def logits_phase(manifest: Manifest) -> Phase | None:
    """Return the phase that computes logits of several rows, if there is one."""
    return next((phase for phase in manifest.plans if phase.kind == LOGITS.kind), None)


def _output_of_layers(manifest: Manifest) -> str:
    """Return the name of the buffer of whose last row a prefill computes logits."""
    bound = (reference for call in manifest.plans[PREFILL] for reference in call.buffers)
    return next(reference.name for reference in bound if reference.view == LAST_ROW)
