"""Reads MLIR text with AIR's custom assembly form back into IR.

What `aircc` is given is then what the simulator runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xdsl.context import Context
from xdsl.dialects import arith, builtin, func, memref, scf
from xdsl.dialects.builtin import ArrayAttr, IndexType, ModuleOp
from xdsl.ir import Dialect, Region, SSAValue
from xdsl.parser import AttrParser, Parser
from xdsl.utils.exceptions import ParseError

from runtime.errors import UserError
from stages.air import dialect

_Lists = tuple[Sequence[SSAValue], Sequence[SSAValue], Sequence[SSAValue]]


def parse_mlir(text: str) -> ModuleOp:
    """The module that `stages.air.printer.to_mlir` printed. UserError with line and reason where it is malformed."""
    context = Context()
    for part in (builtin.Builtin, arith.Arith, func.Func, memref.MemRef, scf.Scf, _AIR):
        context.load_dialect(part)
    try:
        module = Parser(context, text).parse_module()
    except ParseError as error:
        line = text.count("\n", 0, error.span.start) + 1
        raise UserError(f"MLIR text, line {line}: {error.msg}") from None
    module.verify()
    return module


def _parse_level(kind: type[dialect._Hierarchy], parser: Parser) -> Any:
    name = parser.parse_optional_symbol_name()
    sizes, arguments = [], []
    if kind.RANK:
        if kind is _Herd:
            parser.parse_keyword("tile")
        ids = parser.parse_comma_separated_list(
            parser.Delimiter.PAREN, lambda: parser.parse_argument(expect_type=False)
        )
        parser.parse_keyword("in")
        bound = parser.parse_comma_separated_list(parser.Delimiter.PAREN, lambda: _parse_binding(parser))
        sizes = [parser.resolve_operand(outer, IndexType()) for _, outer in bound]
        arguments = [a.resolve(IndexType()) for a in (*ids, *(inner for inner, _ in bound))]
    values = []
    if parser.parse_optional_keyword("args"):
        bound = parser.parse_comma_separated_list(parser.Delimiter.PAREN, lambda: _parse_binding(parser))
        parser.parse_punctuation(":")
        types = [parser.parse_type() for _ in _separated(parser, len(bound))]
        values = [parser.resolve_operand(outer, t) for (_, outer), t in zip(bound, types, strict=True)]
        arguments += [inner.resolve(t) for (inner, _), t in zip(bound, types, strict=True)]
    attributes = parser.parse_optional_attr_dict_with_keyword()
    region = parser.parse_region(arguments)
    return _finish(kind, sizes, values, region, {} if attributes is None else dict(attributes.data), name)


def _finish(kind: Any, sizes: Any, values: Any, region: Region, attributes: dict[str, Any], name: Any) -> Any:
    block = region.detach_block(region.block)
    if block.last_op is None or not block.last_op.name.endswith("_terminator"):
        block.add_op(_TERMINATORS[kind.name]())
    if name is not None:
        attributes["sym_name"] = name
    return kind(sizes, values, block, attributes)


def _parse_binding(parser: Parser) -> tuple[Any, Any]:
    inner = parser.parse_argument(expect_type=False)
    parser.parse_punctuation("=")
    return inner, parser.parse_unresolved_operand()


def _separated(parser: AttrParser, count: int) -> Any:
    for i in range(count):
        if i:
            parser.parse_punctuation(",")
        yield i


def _parse_side(parser: Parser) -> tuple[Any, _Lists]:
    buffer = parser.parse_unresolved_operand()
    lists = [
        parser.parse_comma_separated_list(parser.Delimiter.SQUARE, parser.parse_unresolved_operand) for _ in range(3)
    ]
    first, second, third = ([parser.resolve_operand(v, IndexType()) for v in part] for part in lists)
    return buffer, (first, second, third)


def _parse_channel(parser: Parser) -> Any:
    name = parser.parse_symbol_name().data
    size = parser.parse_comma_separated_list(parser.Delimiter.SQUARE, parser.parse_integer)
    wide = parser.parse_optional_attr_dict()["broadcast_shape"]
    assert isinstance(wide, ArrayAttr)
    return _Channel(name, size, [n.value.data for n in wide.data])


def _parse_end(kind: Any, parser: Parser) -> Any:
    name = parser.parse_symbol_name().data
    indices = parser.parse_comma_separated_list(parser.Delimiter.SQUARE, parser.parse_unresolved_operand)
    parser.parse_punctuation("(")
    buffer, lists = _parse_side(parser)
    parser.parse_punctuation(")")
    parser.parse_punctuation(":")
    (memory,) = parser.parse_comma_separated_list(parser.Delimiter.PAREN, parser.parse_type)
    resolved = [parser.resolve_operand(i, IndexType()) for i in indices]
    return kind(name, resolved, parser.resolve_operand(buffer, memory), lists)


def _parse_dma(parser: Parser) -> Any:
    parser.parse_punctuation("(")
    dst, dst_lists = _parse_side(parser)
    parser.parse_punctuation(",")
    src, src_lists = _parse_side(parser)
    parser.parse_punctuation(")")
    parser.parse_punctuation(":")
    to, source = parser.parse_comma_separated_list(parser.Delimiter.PAREN, parser.parse_type)
    return _Dma(parser.resolve_operand(dst, to), dst_lists, parser.resolve_operand(src, source), src_lists)


class _Launch(dialect.LaunchOp):
    @classmethod
    def parse(cls, parser: Parser) -> _Launch:
        return _parse_level(cls, parser)


class _Segment(dialect.SegmentOp):
    @classmethod
    def parse(cls, parser: Parser) -> _Segment:
        return _parse_level(cls, parser)


class _Herd(dialect.HerdOp):
    @classmethod
    def parse(cls, parser: Parser) -> _Herd:
        return _parse_level(cls, parser)


class _Dma(dialect.DmaMemcpyNdOp):
    @classmethod
    def parse(cls, parser: Parser) -> _Dma:
        return _parse_dma(parser)


class _Channel(dialect.ChannelOp):
    @classmethod
    def parse(cls, parser: Parser) -> _Channel:
        return _parse_channel(parser)


class _Put(dialect.ChannelPutOp):
    @classmethod
    def parse(cls, parser: Parser) -> _Put:
        return _parse_end(cls, parser)


class _Get(dialect.ChannelGetOp):
    @classmethod
    def parse(cls, parser: Parser) -> _Get:
        return _parse_end(cls, parser)


_TERMINATORS = {
    "air.launch": dialect.LaunchTerminatorOp,
    "air.segment": dialect.SegmentTerminatorOp,
    "air.herd": dialect.HerdTerminatorOp,
}
_AIR = Dialect("air", [_Launch, _Segment, _Herd, _Dma, _Channel, _Put, _Get, *_TERMINATORS.values()], [])
