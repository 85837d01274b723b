"""Prints a module as MLIR text and parses it: AIR operations in custom assembly form, byte-stable.

The custom form, with SSA values in every list of offsets, sizes and strides, parses with old and new releases of
mlir-air, while the generic form of the DMA changed in 2026. The simulator runs the same text that the compiler gets.
"""

from __future__ import annotations

import re
from io import StringIO

from xdsl.context import Context
from xdsl.dialects.arith import Arith
from xdsl.dialects.builtin import Builtin, ModuleOp
from xdsl.dialects.func import Func
from xdsl.dialects.memref import MemRef
from xdsl.dialects.scf import Scf
from xdsl.ir import TypeAttribute
from xdsl.parser import Parser
from xdsl.printer import Printer
from xdsl.utils.exceptions import ParseError

from llama_npu2.errors import UserError
from stages.air.dialect import AIR


def to_mlir(module: ModuleOp) -> str:
    """Return the module as text, which depends on the operations alone: equal modules have equal bytes."""
    stream = StringIO()
    Printer(stream=stream).print_op(module)
    return stream.getvalue() + "\n"


class _Parser(Parser):
    """Reads each type of memrefs once: texts have few of them, thousands of times."""

    _MEMREF = re.compile(r"memref<[\w, :]*>")

    def __init__(self, context: Context, text: str) -> None:
        super().__init__(context, text)
        self._memrefs: dict[str, TypeAttribute | None] = {}

    def parse_optional_type(self) -> TypeAttribute | None:
        found = self._MEMREF.match(self.lexer.input.content, self.pos)
        if found is None:
            return super().parse_optional_type()
        if known := self._memrefs.get(found[0]):
            self._resume_from(found.end())
            return known
        return self._memrefs.setdefault(found[0], super().parse_optional_type())


def parse_mlir(text: str) -> ModuleOp:
    """Return the verified module that `to_mlir` printed. UserError with line and reason if the text is malformed."""
    context = Context()
    for part in (Builtin, Arith, Func, MemRef, Scf, AIR):
        context.load_dialect(part)
    try:
        module = _Parser(context, text).parse_module()
    except ParseError as error:
        line = text.count("\n", 0, error.span.start) + 1
        raise UserError(f"MLIR text, line {line}: {error.msg}") from None
    module.verify()
    return module
