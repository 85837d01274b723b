"""Packages that take seconds to import. Every worker collects all tests, and runs some of them."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest


class _Later(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # what pytest asks of everything that a file of tests names
            raise AttributeError(name)
        return getattr(importlib.import_module(self.__name__), name)


def later(name: str, reason: str = "") -> Any:
    """Return a module that is imported when a test uses it. `reason`: why a file's tests are skipped without it."""
    if reason and find_spec(name) is None:
        pytest.skip(reason, allow_module_level=True)
    return _Later(name)
