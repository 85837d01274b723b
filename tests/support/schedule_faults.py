"""Faults of blocks and drafts, which random schedules must show. Each is put in for one test."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llama_npu2.engine.batch import pool, scheduler, sequence


def freed_early(patch: pytest.MonkeyPatch) -> None:
    """A block that two hold is free once one of them gives it up."""
    patch.setattr(pool.BlockPool, "share", lambda self, block: block)


def off_by_one(patch: pytest.MonkeyPatch) -> None:
    """A run is given its table of blocks shifted by one."""
    real = scheduler.Planned.run

    def run(self: scheduler.Planned) -> Any:
        made = real(self)
        return made._replace(blocks=made.blocks[1:] + made.blocks[:1])

    patch.setattr(scheduler.Planned, "run", run)


def kept_draft(patch: pytest.MonkeyPatch) -> None:
    """A token that was chosen beside a draft is followed by that draft's K and V."""
    real = scheduler.Scheduler._choose

    def choose(self: scheduler.Scheduler, one: sequence.Sequence, drafts: list[int], logits: np.ndarray) -> None:
        before = one.done
        real(self, one, drafts, logits)
        if drafts and one.done == before and not one.growing.finished:
            one.growing.take(logits[1])
            one.done += 1

    patch.setattr(scheduler.Scheduler, "_choose", choose)


def no_owner(patch: pytest.MonkeyPatch) -> None:
    """Who writes into a block does not ask who else holds it."""
    patch.setattr(sequence.Cache, "own_last", lambda self, one: None)
