"""What a physical buffer is, as the plan says it and packing and the manifest read it."""

from __future__ import annotations

from dataclasses import dataclass

from llama_npu2.dtypes import nbytes
from stages.weights.formats import formats


@dataclass
class Buffer:
    """`kind`: weight | table | cache | activation. Weights and tables: logical shape, packed in `layout` into the file
    `blob`."""

    kind: str
    format: str
    shape: tuple[int, ...]
    layout: str = "plain"
    blob: str = ""

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
