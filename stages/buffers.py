"""What a physical buffer is, as the plan says it and packing and the manifest read it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Buffer:
    """`kind`: weight | table | cache | activation. Weights also name the tensor and the layout they are packed in."""

    kind: str
    dtype: str
    shape: tuple[int, ...]
    tensor: str = ""
    layout: str = ""
