"""Files of weights that calibration has rounded: in the elements of their formats, without a layout."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from llama_npu2.errors import UserError, first_line
from stages.engine.lazy import np


def calibrated_weights(files: Sequence[Path]) -> dict[str, Path]:
    """Return the file of each weight. Raises UserError."""
    file_of: dict[str, Path] = {}
    for path in files:
        with _opened(path) as file:
            file_of |= dict.fromkeys(file.keys(), path)
    return file_of


def read_calibrated(path: Path, name: str) -> np.ndarray:
    """Return a weight in the elements of its format. Raises UserError."""
    with _opened(path) as file:
        stored: np.ndarray = file.get_tensor(name)
    return stored


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, "numpy") as file:
            yield file
    except SafetensorError as error:
        raise UserError(f"{path} is damaged ({first_line(error)}): remove it and run doit compile") from None
