"""MLIR text of a module: AIR operations in custom assembly form, byte-stable.

The custom form with SSA values in every offset, size and stride list parses with old and new releases of mlir-air; the
generic form of the DMA changed in 2026.
"""

from __future__ import annotations

from io import StringIO

from xdsl.dialects.builtin import ModuleOp
from xdsl.printer import Printer


def to_mlir(module: ModuleOp) -> str:
    """The module as text. Depends on the operations alone: same module, same bytes."""
    stream = StringIO()
    Printer(stream=stream).print_op(module)
    return stream.getvalue() + "\n"
