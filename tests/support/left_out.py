"""Tests that a run leaves out: they are not asked for, or need a compiler that is not there.

They are deselected, and the summary has one line for each reason. What is skipped is then a surprise, and worth a look.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import pytest

NOT_ASKED_FOR = {
    "thorough": "more cases, and long builds, before a release: pytest -m thorough",
    "slow": "takes minutes: pytest -m slow",
    "clients": "programs of others with the server, minutes: pytest -m clients",
    "long": "too long for every run: see CONTRIBUTING.md for its command",
    "toolchain": "the real MLIR-AIR passes, minutes: pytest -m toolchain",
}
"""Marks of tests that run only if -m asks for them, and why."""

_counts: Counter[str] = Counter()


@pytest.hookimpl(tryfirst=True)  # before marks are selected by
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _mark_all_but_samples(items)
    reasons = {item: _why_left_out(item, bool(config.option.markexpr)) for item in items}
    left_out = [item for item, reason in reasons.items() if reason]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item, reason in reasons.items() if not reason]
    _counts.update(reason for reason in reasons.values() if reason)
    if hasattr(config, "workeroutput"):  # of xdist: what the process that writes the summary gets to know
        config.workeroutput["left_out"] = dict(_counts)


def _mark_all_but_samples(items: list[pytest.Item]) -> None:
    """Mark the cases of tests marked `sampled(count)` as thorough, except for so many, evenly spread.

    Of cases that are thorough anyway, none is one of those.
    """
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled") and not any(map(item.get_closest_marker, ("slow", "thorough"))):
            cases[item.nodeid.partition("[")[0]].append(item)
    for of_test in cases.values():
        (count,) = of_test[0].get_closest_marker("sampled").args  # type: ignore[union-attr]
        samples = {number * len(of_test) // count for number in range(count)}
        for number, item in enumerate(of_test):
            if number not in samples:
                item.add_marker("thorough")


def _why_left_out(item: pytest.Item, is_asked_for: bool) -> str | None:
    for mark in item.iter_markers("needs"):
        what, is_there = mark.args
        if not is_there:
            return f"needs {what}"
    names = () if is_asked_for else (mark.name for mark in item.iter_markers())
    return next((NOT_ASKED_FOR[name] for name in names if name in NOT_ASKED_FOR), None)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take the counts of a worker of xdist. Each of them collects all tests."""
    _counts.update({} if _counts else getattr(node, "workeroutput", {}).get("left_out", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for reason, count in sorted(_counts.items()):
        terminalreporter.write_line(f"LEFT OUT [{count}] {reason}")
