"""Constants of byte layouts that Python packs by and C++ reads by. The compilers get them as macros."""

from __future__ import annotations

from llama_npu2.artifact.plan import BLOCK_POSITIONS
from stages.air.limits import BLOCK

PANEL_ROWS = 16
"""Output rows per panel: one 64-byte line holds a pair of inputs for each, the operand of one `vdpbf16ps`."""

KV_BLOCK_POSITIONS = BLOCK_POSITIONS
"""Positions per block of a KV cache in panels: a block of one head stays in the first-level cache."""

GROUP = 32
"""Inputs that share a scale in group-wise formats."""

SHORT_GROUP = 16
"""Inputs that share a scale in group-wise formats with short groups."""

QUAD = 4
"""Inputs of one lane of `vpdpbusd`, the instruction that multiplies whole numbers."""

LANES = 32
"""Outputs of a wide panel of the array: as many as a core multiplies at once."""

POSITION = 32
"""Elements of bf16, a cache line, that begin with a token's position as i32. They come after its queries, and as half
as many f32 after its row of rotary embedding."""

HEAD_POSITION = BLOCK
"""Elements of bf16, a row of a block, that begin with a row's position as i32. They come after each head of a prompt's
queries."""


def macros() -> tuple[str, ...]:
    """Return the compiler flags for every kernel source, whatever its target."""
    first = ("PANEL_ROWS", "KV_BLOCK_POSITIONS", "BLOCK", "GROUP", "SHORT_GROUP", "QUAD", "LANES", "POSITION")
    return tuple(f"-DLAYOUT_{name}={globals()[name]}" for name in (*first, "HEAD_POSITION"))
