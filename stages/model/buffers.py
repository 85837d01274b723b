"""What a physical buffer is, as the plan says it and packing and the manifest read it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from llama_npu2.dtypes import nbytes
from llama_npu2.plan import PHASE_TEXT
from llama_npu2.schema import Invalid, anything, list_of, mapping, one_of, record, string, whole
from stages.engine.files import read_checked
from stages.weights.formats import formats


@dataclass
class Buffer:
    """`kind`: weight | table | cache | activation. Weights and tables: logical shape, packed in `layout` into the file
    `blob`. `at`: where it begins in the memory that activations share, in bytes; None where it has its own."""

    kind: str
    format: str
    shape: tuple[int, ...]
    layout: str = "plain"
    blob: str = ""
    at: int | None = None

    @property
    def packed(self) -> bool:
        return self.kind in ("weight", "table")

    @property
    def dtype(self) -> str:
        """Of its elements in memory."""
        return formats()[self.format].dtype

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """In elements, as it lies in memory."""
        return formats()[self.format].packed_shape(tuple(self.shape), self.layout) if self.packed else self.shape

    @property
    def nbytes(self) -> int:
        return nbytes(self.dtype, self.stored_shape)


JOIN = "+"
"""Between the names of tensors whose rows a buffer holds one behind the other, and so in its name."""


def tensors_of(buffer: str) -> list[str]:
    """Names of the tensors that a buffer of weights holds."""
    return buffer.split(JOIN)


def _format(value: Any) -> None:
    if not isinstance(value, str) or value not in formats():
        raise Invalid(value, f"one of {', '.join(formats())}")


def _place(value: Any) -> None:
    if value is not None:
        whole(0, 1 << 46)(value)


BUFFERS = mapping(
    string,
    record(
        {
            "kind": one_of("weight", "table", "cache", "activation"),
            "format": _format,
            "shape": list_of(whole(1, 1 << 46), 1, 8),
            "layout": string,
            "blob": string,
            "at": _place,
        }
    ),
)
"""What buffers by name are as JSON."""

PACKED = record({"buffers": mapping(string, record({})), "files": mapping(string, anything)})
"""What the index of packed weights is as JSON. What it says of each goes into the manifest, and is checked there."""


def read_buffers(path: Path) -> dict[str, Buffer]:
    """Buffers by name, of a JSON file. Raises UserError."""
    names = [field.name for field in fields(Buffer)]
    found = read_checked(path, BUFFERS)
    return {name: Buffer(**{field: spec[field] for field in names}) for name, spec in found.items()}


_CALL = record({"program": string, "buffers": list_of(string)}, {"layer": whole(0, 1 << 31)})

PLANNED = record(
    {
        "weights": string,
        "kv": string,
        "matmul": string,
        "context": whole(1, 1 << 31),
        "buffers": BUFFERS,
        "phases": mapping(PHASE_TEXT, list_of(_CALL)),
    }
)
"""What a plan is as JSON."""
