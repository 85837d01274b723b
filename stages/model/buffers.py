"""What a physical buffer is, as the plan says it and packing and the manifest read it."""

from __future__ import annotations

from dataclasses import dataclass


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
