"""Random schedules on the simulator, where sequences take turns."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from llama_npu2 import load
from tests.conftest import build
from tests.support.model_schedules import schedule
from tests.support.schedules import total


@pytest.mark.slow
def test_thirty_schedules_change_no_bit(artifacts: Path) -> None:
    directory = build("demo", artifacts, target="npu2-sim", buckets="64,128")
    with closing(load(directory, 2)) as llm:
        counts = total(lambda seed: schedule(llm, seed, most=4, longest=200), range(30))
    print(counts)
    assert counts.swaps and counts.shared and counts.copies and counts.evicted and not counts.drafted
