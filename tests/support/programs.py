"""Programs of others that tests start."""

from __future__ import annotations

import shutil

import pytest


def installed(program: str, how: str) -> pytest.MarkDecorator:
    """Return a mark for tests of a program."""
    return pytest.mark.needs(f"{program} on PATH: {how}", shutil.which(program) is not None)
