"""Writes safetensors files tensor by tensor, each aligned so that kernels can load from a mapped file directly."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from llama_npu2.artifact.dtypes import SAFETENSORS, nbytes
from stages.engine.files import HUGE_PAGE
from stages.engine.lazy import np

PAGE = 4096
"""Bytes. With this alignment, a tensor can also be mapped or read on its own."""

Tensor = tuple[str, str, tuple[int, ...]]
"""Name, dtype, shape."""


def safetensors_bytes(tensors: Iterable[Tensor], alignment: int = 1) -> int:
    """Return the size of the file that `write_safetensors` makes."""
    header, layout = _layout(list(tensors), alignment)
    return 8 + len(header) + max((end for _, end, _ in layout.values()), default=0)


def write_safetensors(
    path: Path,
    tensors: Iterable[Tensor],
    contents: Iterator[np.ndarray],
    alignment: int = 1,
) -> dict[str, int]:
    """Write `contents`, in the order of `tensors`. Return each tensor's byte offset in the file.

    With an `alignment` in bytes, gaps are declared as U8 tensors named `.pad<N>`, because the format allows no holes.
    """
    header, layout = _layout(list(tensors), alignment)
    base = 8 + len(header)
    with path.open("wb", buffering=HUGE_PAGE) as file:
        _write(file, len(header).to_bytes(8, "little") + header)
        for (start, end, padding), array in zip(layout.values(), contents, strict=True):
            data = np.ascontiguousarray(array)
            if data.nbytes != end - start:
                raise ValueError(f"{path}: got {data.nbytes} bytes for a tensor of {end - start}")
            _write(file, data.view(np.uint8).reshape(-1).data)
            _write(file, bytes(padding))
    return {name: base + start for name, (start, _, _) in layout.items()}


def _write(file: BinaryIO, data: bytes | memoryview) -> None:
    """Write in pieces that end where huge pages do. The file's buffer is full there, so that it writes whole ones."""
    while data:
        count = HUGE_PAGE - file.tell() % HUGE_PAGE
        file.write(data[:count])
        data = data[count:]


def _layout(tensors: list[Tensor], alignment: int) -> tuple[bytes, dict[str, tuple[int, int, int]]]:
    """Return the header, and each tensor's begin, end and padding in bytes after it."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    layout = {}
    position = 0
    for number, (name, dtype, shape) in enumerate(tensors):
        end = position + nbytes(dtype, shape)
        entries[name] = {"dtype": SAFETENSORS[dtype], "shape": list(shape), "data_offsets": [position, end]}
        padding = -end % alignment if number + 1 < len(tensors) else 0
        if padding:
            entries[f".pad{number}"] = {"dtype": "U8", "shape": [padding], "data_offsets": [end, end + padding]}
        layout[name] = (position, end, padding)
        position = end + padding
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-(len(text) + 8) % max(alignment, 8)), layout
