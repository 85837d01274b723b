"""Weights that were rounded before they are packed: calibration leaves them stored, not yet in a layout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors import safe_open


def calibrated_weights(files: Sequence[Path]) -> dict[str, Path]:
    """Which weight is in which file."""
    found: dict[str, Path] = {}
    for path in files:
        with safe_open(path, "numpy") as held:
            found |= dict.fromkeys(held.keys(), path)
    return found


def read_calibrated(path: Path, name: str) -> np.ndarray:
    """A weight in the elements of its format."""
    with safe_open(path, "numpy") as held:
        stored: np.ndarray = held.get_tensor(name)
    return stored
