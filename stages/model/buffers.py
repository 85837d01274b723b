"""Physical buffers, as the plan describes them and packing and the manifest read them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from llama_npu2.artifact.dtypes import nbytes
from llama_npu2.artifact.plan import BLOCK_POSITIONS, MOST_SEQUENCES, PHASE_TEXT
from llama_npu2.schema import Invalid, anything, list_of, mapping, one_of, record, string, whole
from stages.engine.files import read_checked
from stages.weights.formats import formats


@dataclass
class Buffer:
    """One physical buffer."""

    kind: str
    """weight | table | cache | activation"""
    format: str
    shape: tuple[int, ...]
    """In elements; the logical shape of weights and tables, whose layout may pad it."""
    layout: str = "plain"
    blob: str = ""
    """The blob that a weight or table is packed into."""
    at: int | None = None
    """Where it begins in the memory that activations share, in bytes; None where it has its own."""
    row_positions: int = 0
    """The positions of a row, for a cache in which a table of blocks says where positions lie; 0 for all others."""

    sequences: int = 1
    """How many sequences a cache has rows for, one after the other."""

    @property
    def packed(self) -> bool:
        return self.kind in ("weight", "table")

    @property
    def dtype(self) -> str:
        """The dtype of its elements in memory."""
        return formats()[self.format].dtype

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape in elements, as it lies in memory."""
        return formats()[self.format].packed_shape(tuple(self.shape), self.layout) if self.packed else self.shape

    @property
    def nbytes(self) -> int:
        return nbytes(self.dtype, self.stored_shape)


JOIN = "+"
"""Joins the names of tensors to the name of a buffer that holds their rows one after the other."""


def tensors_of(buffer: str) -> list[str]:
    """Return the names of the tensors that a buffer of weights holds."""
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
            "row_positions": whole(0, BLOCK_POSITIONS),
            "sequences": whole(1, MOST_SEQUENCES),
        }
    ),
)
"""Checks buffers by name as JSON."""

PACKED = record({"buffers": mapping(string, record({})), "files": mapping(string, anything)})
"""Checks the index of packed weights as JSON. Its entries go into the manifest, and are checked there."""


def read_buffers(path: Path) -> dict[str, Buffer]:
    """Return the buffers of a JSON file, by name. Raises UserError."""
    names = [field.name for field in fields(Buffer)]
    content = read_checked(path, BUFFERS)
    return {name: Buffer(**{field: spec[field] for field in names}) for name, spec in content.items()}


_CALL = record({"program": string, "buffers": list_of(string)}, {"layer": whole(0, 1 << 31)})

PLANNED = record(
    {
        "weights": string,
        "kv": string,
        "matmul": string,
        "activations": string,
        "context": whole(1, 1 << 31),
        "buffers": BUFFERS,
        "phases": mapping(PHASE_TEXT, list_of(_CALL)),
    }
)
"""Checks a plan as JSON."""
