"""Constants of byte layouts, which Python packs by and C++ reads by. Said here; the compilers get them as macros."""

from __future__ import annotations

from stages.air.limits import BLOCK

PANEL_ROWS = 16
"""Output rows per panel: one 64-byte line holds a pair of inputs for each, the operand of one `vdpbf16ps`."""

KV_BLOCK_POSITIONS = 128
"""Positions per block of a KV cache in panels: a block of one head stays in the first-level cache."""

GROUP = 32
"""Inputs that share a scale in grouped formats."""

SHORT_GROUP = 16
"""The same of those with short groups."""

QUAD = 4
"""Inputs of one lane of `vpdpbusd`, which products of whole numbers are made of."""

LANES = 32
"""Outputs of a wide panel of the array: as many as its cores multiply at once."""

POSITION = 32
"""Elements of bf16, a cache line, that begin with a token's position as i32: behind its queries, and as half as many
f32 behind its row of rotary embedding."""

HEAD_POSITION = BLOCK
"""Elements of bf16, a row of a block, that begin with a row's position as i32: behind each head of a prompt's
queries."""


def macros() -> tuple[str, ...]:
    """Compiler flags with which every kernel source is compiled, whatever its target."""
    values = {
        "PANEL_ROWS": PANEL_ROWS,
        "KV_BLOCK_POSITIONS": KV_BLOCK_POSITIONS,
        "BLOCK": BLOCK,
        "GROUP": GROUP,
        "SHORT_GROUP": SHORT_GROUP,
        "QUAD": QUAD,
        "LANES": LANES,
        "POSITION": POSITION,
        "HEAD_POSITION": HEAD_POSITION,
    }
    return tuple(f"-DLAYOUT_{name}={value}" for name, value in values.items())
