"""MLIR-AIR in xDSL: the dialect and its text, a builder, stitching, analysis, the limits of the hardware, checks.

The package knows the array and its rules, and must not know what the array computes. Names are imported when they are
first used: importing xDSL takes a third of a second, and most builds make no program.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stages.air.builder import AirModule, Builder, Channel, Index, MemRef, Number, memref_type  # noqa: F401
    from stages.air.checks import check  # noqa: F401
    from stages.air.dialect import L1, L2, L3  # noqa: F401
    from stages.air.externs import Variant  # noqa: F401
    from stages.air.stitching import reserve_channel_names, settles, stitch, toggle_settling  # noqa: F401
    from stages.air.text import parse_mlir, to_mlir  # noqa: F401
    from stages.air.traffic import Traffic, count  # noqa: F401

_PUBLIC = {
    "builder": ("AirModule", "Builder", "Channel", "Index", "MemRef", "Number", "memref_type"),
    "checks": ("check",),
    "dialect": ("L1", "L2", "L3"),
    "externs": ("Variant",),
    "stitching": ("reserve_channel_names", "settles", "stitch", "toggle_settling"),
    "text": ("parse_mlir", "to_mlir"),
    "traffic": ("Traffic", "count"),
}
_HOME = {name: module for module, names in _PUBLIC.items() for name in names}


KEEP = "_keep"
"""What names of tile functions end with that touch none of their buffers: those stay where they are allocated."""


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    return value
