"""Packages that only some commands and targets need, and the extra of `pyproject.toml` that brings each."""

from __future__ import annotations

EXTRAS = {"distributed": "fleet", "elftools": "npu", "xdsl": "npu", "perfetto": "report"}
"""Top-level module -> extra."""


def missing_package(error: BaseException) -> str | None:
    """Return what to do about an import that failed, in one line; None if that is not why."""
    module = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    extra = EXTRAS.get(module)
    return extra and f"the package {module} is not installed: pip install -e '.[{extra}]'"
