"""The operations of MLIR-AIR that our programs use: launch > segment > herd, n-dimensional DMA, channels.

A launch is a grid of steps run by the command processor, a segment owns the L2 buffers, a herd runs its body on every
tile of a rectangle of cores. All three are isolated from above: outer values are passed to them as arguments.

xDSL's own experimental dialect is not used: its operations have asynchronous tokens as results, and ours have none.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, Self, TypeVar

from xdsl import builder
from xdsl.dialects.arith import ConstantOp
from xdsl.dialects.builtin import ArrayAttr, IndexType, IntegerAttr, MemRefType, StringAttr, SymbolRefAttr, i64
from xdsl.ir import Attribute, BlockArgument, Dialect, Operation, Region, SSAValue
from xdsl.irdl import (
    AttrSizedOperandSegments,
    IRDLOperation,
    attr_def,
    irdl_op_definition,
    operand_def,
    opt_attr_def,
    region_def,
    traits_def,
    var_operand_def,
)
from xdsl.parser import Parser, UnresolvedOperand
from xdsl.printer import Printer
from xdsl.traits import IsolatedFromAbove, IsTerminator, SingleBlockImplicitTerminator, ensure_terminator
from xdsl.utils.exceptions import VerifyException

# xDSL's ImplicitBuilder, which adds terminators, exchanges a method of all operations and puts it back. When two
# threads do so at the same time, it stays exchanged twice, and operations are inserted twice. So it is exchanged once,
# for good: the block into which operations are inserted is a matter of each thread already.
builder._override_operation_post_init()
builder._override_operation_post_init = lambda: Operation.__post_init__

L3, L2, L1 = 0, 1, 2

Op = TypeVar("Op", bound=Operation)

Pattern = tuple[Sequence[SSAValue], Sequence[SSAValue], Sequence[SSAValue]]
"""Offsets, sizes and strides."""


def memory_space(kind: Attribute) -> int:
    """Return the memory space of a memref type: 0 is DDR (L3), 1 the memory tiles (L2), 2 a core's data memory (L1)."""
    if not isinstance(kind, MemRefType):
        raise TypeError(f"{kind} is not a memref")
    space = kind.memory_space
    return space.value.data if isinstance(space, IntegerAttr) else L3


def constant_of(value: SSAValue) -> int | None:
    """Return the number that an `arith.constant` produces; None for any other value."""
    if not isinstance(value.owner, ConstantOp):
        return None
    attribute = value.owner.value
    return attribute.value.data if isinstance(attribute, IntegerAttr) else None


def enclosing(op: Operation, kind: type[Op]) -> Op | None:
    """Return the nearest operation of a kind around `op`, or None."""
    return next((parent for parent in parents(op) if isinstance(parent, kind)), None)


def parents(op: Operation) -> Iterator[Operation]:
    """Yield the operations around `op`, the nearest first."""
    while (parent := op.parent_op()) is not None:
        yield (op := parent)


@irdl_op_definition
class LaunchTerminatorOp(IRDLOperation):
    name = "air.launch_terminator"
    traits = traits_def(IsTerminator())


@irdl_op_definition
class SegmentTerminatorOp(IRDLOperation):
    name = "air.segment_terminator"
    traits = traits_def(IsTerminator())


@irdl_op_definition
class HerdTerminatorOp(IRDLOperation):
    name = "air.herd_terminator"
    traits = traits_def(IsTerminator())


class Hierarchy(IRDLOperation):
    """A launch, a segment or a herd. `sizes` (0 or 2 of them) span a grid, `args` are the values passed in.

    Block arguments are the position in the grid, the grid's sizes, then one for each of `args`.
    """

    sizes = var_operand_def(IndexType())
    args = var_operand_def()
    body = region_def("single_block")
    sym_name = opt_attr_def(StringAttr)
    irdl_options = (AttrSizedOperandSegments(),)

    RANK: ClassVar[int] = 2
    PARENT: ClassVar[type[Operation] | None] = None
    GRID: ClassVar[str] = " "
    """Text before the grid."""

    def __init__(
        self,
        sizes: Sequence[SSAValue],
        args: Sequence[SSAValue],
        body: Region,
        attributes: Mapping[str, Attribute] | None = None,
    ) -> None:
        """Take the body, whose one block need not have its terminator yet."""
        super().__init__(operands=[list(sizes), list(args)], regions=[body], attributes=attributes or {})
        for trait in self.get_traits_of_type(SingleBlockImplicitTerminator):
            ensure_terminator(self, trait)

    @property
    def ids(self) -> tuple[BlockArgument, ...]:
        return tuple(self.body.block.args[: self.RANK])

    @property
    def size_args(self) -> tuple[BlockArgument, ...]:
        return tuple(self.body.block.args[self.RANK : 2 * self.RANK])

    @property
    def body_args(self) -> tuple[BlockArgument, ...]:
        return tuple(self.body.block.args[2 * self.RANK :])

    def shape(self) -> tuple[int, ...]:
        """Return the grid, which must be constant."""
        sizes = [constant_of(size) for size in self.sizes]
        if None in sizes:
            raise VerifyException(f"{self.name}: grid sizes must be constants")
        return tuple(size for size in sizes if size is not None)

    def verify_(self) -> None:
        if len(self.sizes) != self.RANK:
            raise VerifyException(f"{self.name}: expected {self.RANK} grid sizes, got {len(self.sizes)}")
        if any(size < 1 for size in self.shape()):
            raise VerifyException(f"{self.name}: grid {self.shape()} is empty")
        expected = [IndexType()] * (2 * self.RANK) + [a.type for a in self.args]
        if [a.type for a in self.body.block.args] != expected:
            raise VerifyException(f"{self.name}: block arguments do not match operands")
        if self.PARENT is not None and self.parent_op() is not None and enclosing(self, self.PARENT) is None:
            raise VerifyException(f"{self.name}: must be inside {self.PARENT.name}")

    def print(self, printer: Printer) -> None:
        if self.sym_name is not None:
            printer.print_string(f" @{self.sym_name.data}")
        if self.RANK:
            printer.print_string(f"{self.GRID}(")
            printer.print_list(self.ids, printer.print_ssa_value)
            printer.print_string(") in ")
            _print_bindings(printer, self.size_args, self.sizes)
        if self.args:
            printer.print_string(" args")
            _print_bindings(printer, self.body_args, self.args)
            printer.print_string(" : ")
            printer.print_list([a.type for a in self.args], printer.print_attribute)
        hidden = ("operandSegmentSizes", "sym_name")
        printer.print_op_attributes(self.attributes, reserved_attr_names=hidden, print_keyword=True)
        printer.print_string(" ")
        printer.print_region(self.body, print_entry_block_args=False, print_block_terminators=False)

    @classmethod
    def parse(cls, parser: Parser) -> Self:
        name = parser.parse_optional_symbol_name()
        named: list[Parser.UnresolvedArgument] = []
        sizes: Sequence[SSAValue] = ()
        if cls.RANK:
            if cls.GRID.strip():
                parser.parse_keyword(cls.GRID.strip())
            ids = parser.parse_comma_separated_list(parser.Delimiter.PAREN, lambda: _parse_argument(parser))
            parser.parse_keyword("in")
            position = parser.pos
            size_args, outer = _parse_bindings(parser)
            named = [*ids, *size_args]
            sizes = parser.resolve_operands(outer, [IndexType()] * len(outer), position)
        arguments = [argument.resolve(IndexType()) for argument in named]
        values: Sequence[SSAValue] = ()
        if parser.parse_optional_keyword("args"):
            position = parser.pos
            inner, outer = _parse_bindings(parser)
            parser.parse_punctuation(":")
            types = parser.parse_comma_separated_list(parser.Delimiter.NONE, parser.parse_type)
            values = parser.resolve_operands(outer, types, position)
            arguments += [argument.resolve(kind) for argument, kind in zip(inner, types, strict=True)]
        dictionary = parser.parse_optional_attr_dict_with_keyword()
        attributes: dict[str, Attribute] = {} if dictionary is None else dict(dictionary.data)
        if name is not None:
            attributes["sym_name"] = name
        return cls(sizes, values, parser.parse_region(arguments), attributes)


def _print_bindings(printer: Printer, inner: Sequence[SSAValue], outer: Sequence[SSAValue]) -> None:
    with printer.in_parens():
        bindings = list(zip(inner, outer, strict=True))
        printer.print_list(bindings, lambda binding: printer.print_list(binding, printer.print_ssa_value, "="))


def _parse_argument(parser: Parser) -> Parser.UnresolvedArgument:
    return parser.parse_argument(expect_type=False)


def _parse_bindings(parser: Parser) -> tuple[list[Parser.UnresolvedArgument], list[UnresolvedOperand]]:
    """Parse `(%inner=%outer, ...)` into the names inside and the values outside."""

    def binding() -> tuple[Parser.UnresolvedArgument, UnresolvedOperand]:
        inner = _parse_argument(parser)
        parser.parse_punctuation("=")
        return inner, parser.parse_unresolved_operand()

    pairs = parser.parse_comma_separated_list(parser.Delimiter.PAREN, binding)
    return [inner for inner, _ in pairs], [outer for _, outer in pairs]


@irdl_op_definition
class LaunchOp(Hierarchy):
    name = "air.launch"
    traits = traits_def(IsolatedFromAbove(), SingleBlockImplicitTerminator(LaunchTerminatorOp))


@irdl_op_definition
class SegmentOp(Hierarchy):
    name = "air.segment"
    RANK: ClassVar[int] = 0
    PARENT: ClassVar[type[Operation] | None] = LaunchOp
    traits = traits_def(IsolatedFromAbove(), SingleBlockImplicitTerminator(SegmentTerminatorOp))


@irdl_op_definition
class HerdOp(Hierarchy):
    """A herd. `shape()` is (columns, rows); the object `link_with` has every function that the body calls."""

    name = "air.herd"
    PARENT: ClassVar[type[Operation] | None] = SegmentOp
    GRID: ClassVar[str] = " tile "
    link_with = opt_attr_def(StringAttr)
    traits = traits_def(IsolatedFromAbove(), SingleBlockImplicitTerminator(HerdTerminatorOp))


@irdl_op_definition
class DmaMemcpyNdOp(IRDLOperation):
    """A copy between memory spaces. Offsets and strides count elements: address = sum((offset + index) * stride).

    Empty lists mean the whole buffer in order. Each side is a stream of elements, the last dimension fastest.
    """

    name = "air.dma_memcpy_nd"
    dst = operand_def(MemRefType)
    dst_offsets = var_operand_def(IndexType())
    dst_sizes = var_operand_def(IndexType())
    dst_strides = var_operand_def(IndexType())
    src = operand_def(MemRefType)
    src_offsets = var_operand_def(IndexType())
    src_sizes = var_operand_def(IndexType())
    src_strides = var_operand_def(IndexType())
    irdl_options = (AttrSizedOperandSegments(),)
    assembly_format = (
        "` ` `(` $dst `` `[` $dst_offsets `]` `[` $dst_sizes `]` `[` $dst_strides `]` `,` "
        "$src `` `[` $src_offsets `]` `[` $src_sizes `]` `[` $src_strides `]` `)` "
        "`:` `(` type($dst) `,` type($src) `)` attr-dict"
    )

    def __init__(self, dst: SSAValue, dst_lists: Pattern, src: SSAValue, src_lists: Pattern) -> None:
        super().__init__(operands=[dst, *(list(part) for part in dst_lists), src, *(list(part) for part in src_lists)])

    def verify_(self) -> None:
        dst, src = self.dst.type, self.src.type
        assert isinstance(dst, MemRefType) and isinstance(src, MemRefType)
        if dst.element_type != src.element_type:
            raise VerifyException(f"air.dma_memcpy_nd: element types differ: {dst} and {src}")
        if memory_space(dst) == memory_space(src):
            raise VerifyException(f"air.dma_memcpy_nd: both sides are in memory space {memory_space(dst)}")
        _verify_pattern(self, self.dst_offsets, self.dst_sizes, self.dst_strides)
        _verify_pattern(self, self.src_offsets, self.src_sizes, self.src_strides)
        written, read = _elements(dst, self.dst_sizes), _elements(src, self.src_sizes)
        if written != read:
            raise VerifyException(f"air.dma_memcpy_nd: destination takes {written} elements, source gives {read}")


def _elements(kind: MemRefType, sizes: Sequence[SSAValue]) -> int:
    """Return the number of elements that a pattern walks in a buffer."""
    numbers = [constant_of(size) for size in sizes] if sizes else list(kind.get_shape())
    if None in numbers:
        raise VerifyException("air.dma_memcpy_nd: sizes must be constants")
    return math.prod(number for number in numbers if number is not None)


def _verify_pattern(op: Operation, *lists: Sequence[SSAValue]) -> None:
    if len({len(part) for part in lists}) != 1:
        raise VerifyException(f"{op.name}: offsets, sizes and strides differ in length")


@functools.cache
def _numbers(numbers: tuple[int, ...]) -> ArrayAttr[IntegerAttr]:
    return ArrayAttr([IntegerAttr(n, i64) for n in numbers])


CASCADE = "npu_cascade"
"""The type of channels whose items go from a core to its neighbour by the stream between their accumulators, not by DMA
(mlir-air, `channel_type`)."""


@irdl_op_definition
class ChannelOp(IRDLOperation):
    """An array of FIFOs between segment and herd, or between cores of a herd.

    Where an entry of `size` is 1 and that of `broadcast_shape` is N, every item is delivered to N tiles. `channel_type`
    is `CASCADE` or missing.
    """

    name = "air.channel"
    sym_name = attr_def(StringAttr)
    size = attr_def(ArrayAttr[IntegerAttr])
    broadcast_shape = attr_def(ArrayAttr[IntegerAttr])
    channel_type = opt_attr_def(StringAttr)

    def __init__(self, name: str, size: Sequence[int], broadcast_shape: Sequence[int], cascade: bool = False) -> None:
        attributes: dict[str, Attribute] = {
            "size": _numbers(tuple(size)),
            "broadcast_shape": _numbers(tuple(broadcast_shape)),
        }
        if cascade:
            attributes["channel_type"] = StringAttr(CASCADE)
        super().__init__(attributes={"sym_name": StringAttr(name), **attributes})

    def verify_(self) -> None:
        for size, wide in zip(self.size, self.broadcast_shape, strict=True):
            if size != wide and size.value.data != 1:
                raise VerifyException(f"air.channel @{self.sym_name.data}: only entries of size 1 can be broadcast")
        if self.channel_type and (self.channel_type.data != CASCADE or self.size != self.broadcast_shape):
            raise VerifyException(f"air.channel @{self.sym_name.data}: a cascade has one reader")

    def print(self, printer: Printer) -> None:
        size, wide = (", ".join(str(n.value.data) for n in part) for part in (self.size, self.broadcast_shape))
        more = f' {{channel_type = "{CASCADE}"}}' if self.channel_type else ""
        more = more if size == wide else f" {{broadcast_shape = [{wide}]}}"
        printer.print_string(f" @{self.sym_name.data} [{size}]{more}")

    @classmethod
    def parse(cls, parser: Parser) -> Self:
        name = parser.parse_symbol_name().data
        size = parser.parse_comma_separated_list(parser.Delimiter.SQUARE, parser.parse_integer)
        if parser.parse_optional_punctuation("{") is None:
            return cls(name, size, size)
        if cascade := parser.parse_optional_keyword("channel_type") is not None:
            parser.parse_punctuation("=")
            parser.parse_str_literal()
            wide = size
        else:
            parser.parse_keyword("broadcast_shape")
            parser.parse_punctuation("=")
            wide = parser.parse_comma_separated_list(parser.Delimiter.SQUARE, parser.parse_integer)
        parser.parse_punctuation("}")
        return cls(name, size, wide, cascade)


class ChannelEnd(IRDLOperation):
    """One side of a transfer through the FIFO `chan_name[indices]`: a buffer, walked as in `air.dma_memcpy_nd`."""

    chan_name = attr_def(SymbolRefAttr)
    indices = var_operand_def(IndexType())
    buffer = operand_def(MemRefType)
    offsets = var_operand_def(IndexType())
    sizes = var_operand_def(IndexType())
    strides = var_operand_def(IndexType())
    irdl_options = (AttrSizedOperandSegments(),)
    assembly_format = (
        "$chan_name `` `[` $indices `]` `(` $buffer `` `[` $offsets `]` `[` $sizes `]` `[` $strides `]` `)` "
        "`:` `(` type($buffer) `)` attr-dict"
    )

    def __init__(self, channel: str, indices: Sequence[SSAValue], buffer: SSAValue, lists: Pattern) -> None:
        super().__init__(
            operands=[list(indices), buffer, *(list(part) for part in lists)],
            attributes={"chan_name": SymbolRefAttr(channel)},
        )

    def verify_(self) -> None:
        _verify_pattern(self, self.offsets, self.sizes, self.strides)


@irdl_op_definition
class ChannelPutOp(ChannelEnd):
    """Puts a copy of the elements that the pattern walks into a FIFO."""

    name = "air.channel.put"


@irdl_op_definition
class ChannelGetOp(ChannelEnd):
    """Writes the next item of a FIFO to the elements that the pattern walks. A tile takes from its own position."""

    name = "air.channel.get"


AIR = Dialect(
    "air",
    [
        LaunchOp,
        LaunchTerminatorOp,
        SegmentOp,
        SegmentTerminatorOp,
        HerdOp,
        HerdTerminatorOp,
        DmaMemcpyNdOp,
        ChannelOp,
        ChannelPutOp,
        ChannelGetOp,
    ],
    [],
)
