"""Weights that were rounded before they are packed: calibration leaves them stored, not yet in a layout."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from llama_npu2.errors import UserError, first_line


def calibrated_weights(files: Sequence[Path]) -> dict[str, Path]:
    """Which weight is in which file."""
    found: dict[str, Path] = {}
    for path in files:
        with _opened(path) as held:
            found |= dict.fromkeys(held.keys(), path)
    return found


def read_calibrated(path: Path, name: str) -> np.ndarray:
    """A weight in the elements of its format."""
    with _opened(path) as held:
        stored: np.ndarray = held.get_tensor(name)
    return stored


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, "numpy") as held:
            yield held
    except SafetensorError as error:
        raise UserError(f"{path} is damaged ({first_line(error)}): remove it and run doit compile") from None
