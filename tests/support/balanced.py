"""How many workers of xdist there are, and what each runs: the tests of a file together, files that take long first.

What takes long is known from the last run; before the first, from `_USUAL`. The tests of the host's kernels are divided
by instruction set, too. Files whose tests import transformers, which takes four seconds, go to one worker.
"""

from __future__ import annotations

import os
import re
from collections import Counter, OrderedDict
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

ROOT = Path(__file__).parents[2]
_KEY = "llama-npu2/seconds"
_WITH_TRANSFORMERS = "with transformers"
_COMPARES = re.compile(r"""mark\.verify|importorskip\("torch""")
_KERNELS = ("amx", "avx512bf16", "avx2", "portable", "neon")

_USUAL = {
    _WITH_TRANSFORMERS: 140,
    "tests/npu/test_selftest.py": 60,
    "tests/npu/test_npu2_sim.py": 50,
    "tests/npu/test_int8_caches.py": 35,
    "tests/npu/test_lanes.py": 35,
    "tests/npu/test_xrt.py": 25,
    "tests/pipeline/test_dag.py": 25,
    "tests/runtime/test_runtime.py": 20,
    "tests/npu/test_tokens.py": 20,
    "tests/pipeline/test_fleet.py": 20,
    "tests/runtime/test_serve.py": 20,
    "tests/security/test_hostile_requests.py": 20,
    "tests/npu/test_npu2_build.py": 15,
    "tests/npu/test_sim_kernels.py": 15,
    "tests/npu/test_estimate.py": 15,
    "tests/pipeline/test_fit.py": 10,
    "tests/security/test_bad_inputs.py": 10,
    "tests/runtime/test_schedules.py": 10,
    "tests/security/test_hostile_files.py": 10,
    "tests/npu/test_sim_programs.py": 10,
    "tests/kernels/test_experts.py": 10,
}
"""Seconds of the longest units. Others take about `_SECONDS_A_TEST`."""
_SECONDS_A_TEST = 0.08

_seconds: Counter[str] = Counter()


@cache
def _compares(file: str) -> bool:
    """Whether tests of a file import transformers."""
    path = ROOT / file
    return "/npu/" not in file and path.is_file() and bool(_COMPARES.search(path.read_text()))


def unit(nodeid: str) -> str:
    """Return a name for the tests that one worker runs, one after the other."""
    file, _, rest = nodeid.partition("::")
    if _compares(file):
        return _WITH_TRANSFORMERS
    parameters = rest.partition("[")[2].removesuffix("]").split("-")
    return " ".join([file, *(isa for isa in _KERNELS if "_kernels" in file and isa in parameters)])


class _LongestFirst(OrderedDict[str, dict[str, bool]]):
    """Tests by unit. The unit that takes longest is taken out first; one that is not known counts by its tests."""

    def __init__(self, seconds: Mapping[str, float]) -> None:
        super().__init__()
        self._known = seconds

    def popitem(self, last: bool = True) -> tuple[str, dict[str, bool]]:
        name = max(self, key=lambda name: self._known.get(name, _SECONDS_A_TEST * len(self[name])))
        return name, self.pop(name)


class _Balanced(LoadScopeScheduling):
    def __init__(self, config: pytest.Config, log: Any) -> None:
        super().__init__(config, log)
        self.workqueue = _LongestFirst(_USUAL | (config.cache.get(_KEY, {}) if getattr(config, "cache", None) else {}))

    def _split_scope(self, nodeid: str) -> str:
        return unit(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return a worker for each CPU: one more, for when tests wait, takes as long for imports and shared builds."""
    return len(os.sched_getaffinity(0))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling | None:
    return _Balanced(config, log) if config.option.dist == "loadfile" else None


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[unit(report.nodeid)] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    if getattr(config, "cache", None) and not hasattr(config, "workerinput"):
        known = config.cache.get(_KEY, {})
        config.cache.set(_KEY, known | {name: round(seconds, 1) for name, seconds in _seconds.items()})
