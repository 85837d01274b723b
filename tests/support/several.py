"""The shipped model with programs of several tokens at once, for the simulator."""

from __future__ import annotations

import shutil
from pathlib import Path

from filelock import FileLock

from stages.kernels.tokens import COUNTS
from tests.conftest import ROOT, build
from tests.support.npu_shapes import FEW

TOKENS, SEQUENCES = COUNTS[-1], 4
"""How many of one sequence, and of how many sequences one each."""
CONTEXT = 128
CHOSEN: dict[str, object] = {**FEW, "context": CONTEXT, "tokens": str(TOKENS), "sequences": str(SEQUENCES)}
"""Choices with which each program has one window."""


def build_several(artifacts: Path) -> Path:
    """Its artifacts, which are no other test's: those have other programs, and may be built at the same time."""
    model = artifacts.with_name("models") / "several"
    with FileLock(artifacts.with_name("several.lock")):
        if not model.exists():
            shutil.copytree(ROOT / "models/demo", model)
        return build(model, artifacts, target="npu2-sim", weights="int4", **CHOSEN)
