"""How many workers of xdist there are, and what each runs: the tests of a file together, files that take long first.

What takes long is known from the last run; before the first, from `_USUAL`. The tests of the host's kernels are divided
by instruction set, too.
"""

from __future__ import annotations

import os
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

_KEY = "llama-npu2/seconds"
_KERNELS = ("amx", "avx512bf16", "avx2", "portable", "neon")

_USUAL = {
    "tests/npu/test_npu2_sim.py": 60,
    "tests/npu/test_lanes.py": 55,
    "tests/pipeline/test_dag.py": 55,
    "tests/npu/test_selftest.py": 45,
    "tests/kernels/test_families.py": 40,
    "tests/npu/test_xrt.py": 30,
    "tests/security/test_bad_inputs.py": 25,
    "tests/runtime/test_runtime.py": 25,
    "tests/npu/test_estimate.py": 25,
    "tests/npu/test_sim_kernels.py": 20,
    "tests/npu/test_npu2_build.py": 10,
    "tests/pipeline/test_streams.py": 20,
    "tests/pages/test_chat_page.py": 20,
    "tests/npu/test_sim_programs.py": 20,
    "tests/runtime/test_serve.py": 20,
    "tests/security/test_hostile_requests.py": 20,
    "tests/unit/test_weights.py": 15,
    "tests/unit/test_importers.py": 15,
    "tests/unit/test_calibration.py": 15,
    "tests/security/test_hostile_files.py": 15,
    "tests/pipeline/test_diagnose.py": 15,
    "tests/npu/test_air_modules.py": 15,
    "tests/security/test_fuzz.py": 15,
}
"""Seconds of the longest units. Others take about `_SECONDS_A_TEST`."""
_SECONDS_A_TEST = 0.15

_seconds: Counter[str] = Counter()


def unit(nodeid: str) -> str:
    """Return a name for the tests that one worker runs, one after the other."""
    file, _, rest = nodeid.partition("::")
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
