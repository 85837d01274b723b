"""The operations of MLIR-AIR that our programs use: launch > segment > herd, n-dimensional DMA, channels.

A launch is a grid of steps run by the command processor, a segment owns the L2 buffers, a herd runs its body on every
tile of a rectangle of cores. All three are isolated from above: what they use, they are given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from xdsl.dialects.arith import ConstantOp
from xdsl.dialects.builtin import ArrayAttr, IndexType, IntegerAttr, MemRefType, StringAttr, SymbolRefAttr, i64
from xdsl.ir import Attribute, Block, BlockArgument, Dialect, Operation, Region, SSAValue
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
from xdsl.printer import Printer
from xdsl.traits import IsolatedFromAbove, IsTerminator, SingleBlockImplicitTerminator
from xdsl.utils.exceptions import VerifyException

L3, L2, L1 = 0, 1, 2

Pattern = tuple[Sequence[SSAValue], Sequence[SSAValue], Sequence[SSAValue]]
"""Offsets, sizes and strides."""


def memory_space(kind: Attribute) -> int:
    """Memory space of a memref type: 0 is DDR (L3), 1 the memory tiles (L2), 2 a core's data memory (L1)."""
    if not isinstance(kind, MemRefType):
        raise TypeError(f"{kind} is not a memref")
    space = kind.memory_space
    return space.value.data if isinstance(space, IntegerAttr) else L3


def constant_of(value: SSAValue) -> int | None:
    """The number an `arith.constant` produces, or None for anything else."""
    if not isinstance(value.owner, ConstantOp):
        return None
    attribute = value.owner.value
    return attribute.value.data if isinstance(attribute, IntegerAttr) else None


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


class _Hierarchy(IRDLOperation):
    """Shared by the three levels: `sizes` (0 or 2 of them) span a grid, `args` are the values handed in.

    Block arguments are the grid position, the grid sizes, then one per handed-in value.
    """

    sizes = var_operand_def(IndexType())
    args = var_operand_def()
    body = region_def("single_block")
    sym_name = opt_attr_def(StringAttr)
    irdl_options = (AttrSizedOperandSegments(),)

    RANK: ClassVar[int] = 2
    PARENT: ClassVar[str | None] = None

    def __init__(
        self,
        sizes: Sequence[SSAValue],
        args: Sequence[SSAValue],
        block: Block,
        attributes: dict[str, Attribute] | None = None,
    ) -> None:
        super().__init__(operands=[list(sizes), list(args)], regions=[Region(block)], attributes=attributes or {})

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
        """The grid, which must be constant."""
        found = [constant_of(size) for size in self.sizes]
        if None in found:
            raise VerifyException(f"{self.name}: grid sizes must be constants")
        return tuple(size for size in found if size is not None)

    def verify_(self) -> None:
        if len(self.sizes) != self.RANK:
            raise VerifyException(f"{self.name}: expected {self.RANK} grid sizes, got {len(self.sizes)}")
        if any(size < 1 for size in self.shape()):
            raise VerifyException(f"{self.name}: grid {self.shape()} is empty")
        expected = [IndexType()] * (2 * self.RANK) + [a.type for a in self.args]
        if [a.type for a in self.body.block.args] != expected:
            raise VerifyException(f"{self.name}: block arguments do not match operands")
        parent = self.parent_op()
        if self.PARENT and parent is not None and _enclosing(self, self.PARENT) is None:
            raise VerifyException(f"{self.name}: must be inside {self.PARENT}")

    def print(self, printer: Printer) -> None:
        if self.sym_name is not None:
            printer.print_string(f" @{self.sym_name.data}")
        if self.RANK:
            kind = " tile" if self.name == "air.herd" else ""
            printer.print_string(f"{kind} (")
            printer.print_list(self.ids, printer.print_ssa_value)
            printer.print_string(") in (")
            printer.print_list(tuple(zip(self.size_args, self.sizes, strict=True)), lambda p: _binding(printer, *p))
            printer.print_string(")")
        if self.args:
            printer.print_string(" args(")
            printer.print_list(tuple(zip(self.body_args, self.args, strict=True)), lambda p: _binding(printer, *p))
            printer.print_string(") : ")
            printer.print_list([a.type for a in self.args], printer.print_attribute)
        hidden = ("operandSegmentSizes", "sym_name")
        printer.print_op_attributes(self.attributes, reserved_attr_names=hidden, print_keyword=True)
        printer.print_string(" ")
        printer.print_region(self.body, print_entry_block_args=False, print_block_terminators=False)


def _binding(printer: Printer, inner: SSAValue, outer: SSAValue) -> None:
    printer.print_ssa_value(inner)
    printer.print_string("=")
    printer.print_ssa_value(outer)


def _enclosing(op: Operation, name: str) -> Operation | None:
    parent = op.parent_op()
    while parent is not None and parent.name != name:
        parent = parent.parent_op()
    return parent


@irdl_op_definition
class LaunchOp(_Hierarchy):
    name = "air.launch"
    traits = traits_def(IsolatedFromAbove(), SingleBlockImplicitTerminator(LaunchTerminatorOp))


@irdl_op_definition
class SegmentOp(_Hierarchy):
    name = "air.segment"
    RANK: ClassVar[int] = 0
    PARENT: ClassVar[str | None] = "air.launch"
    traits = traits_def(IsolatedFromAbove(), SingleBlockImplicitTerminator(SegmentTerminatorOp))


@irdl_op_definition
class HerdOp(_Hierarchy):
    """`shape()` is (columns, rows); the object named by `link_with` holds every function the body calls."""

    name = "air.herd"
    PARENT: ClassVar[str | None] = "air.segment"
    link_with = opt_attr_def(StringAttr)
    traits = traits_def(IsolatedFromAbove(), SingleBlockImplicitTerminator(HerdTerminatorOp))


@irdl_op_definition
class DmaMemcpyNdOp(IRDLOperation):
    """Copy between memory spaces. Offsets and strides count elements: address = sum((offset + index) * stride).

    Empty lists mean the whole buffer in order. Either side is read as a stream, last dimension fastest.
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

    def __init__(
        self,
        dst: SSAValue,
        dst_lists: Pattern,
        src: SSAValue,
        src_lists: Pattern,
    ) -> None:
        super().__init__(operands=[dst, *(list(part) for part in dst_lists), src, *(list(part) for part in src_lists)])

    def sides(self) -> tuple[tuple[SSAValue, ...], tuple[SSAValue, ...]]:
        """(memref, offsets, sizes, strides) of destination and source, flattened for walking."""
        return (
            (self.dst, *self.dst_offsets, *self.dst_sizes, *self.dst_strides),
            (self.src, *self.src_offsets, *self.src_sizes, *self.src_strides),
        )

    def elements(self) -> int:
        """Elements moved by one execution."""
        return self._elements(self.dst, self.dst_sizes)

    @staticmethod
    def _elements(buffer: SSAValue, sizes: Sequence[SSAValue]) -> int:
        numbers = [constant_of(size) for size in sizes] if sizes else list(buffer.type.get_shape())  # type: ignore[attr-defined]
        total = 1
        for number in numbers:
            if number is None:
                raise VerifyException("air.dma_memcpy_nd: sizes must be constants")
            total *= number
        return total

    def verify_(self) -> None:
        dst, src = self.dst.type, self.src.type
        assert isinstance(dst, MemRefType) and isinstance(src, MemRefType)
        if dst.element_type != src.element_type:
            raise VerifyException(f"air.dma_memcpy_nd: element types differ: {dst} and {src}")
        if memory_space(dst) == memory_space(src):
            raise VerifyException(f"air.dma_memcpy_nd: both sides are in memory space {memory_space(dst)}")
        for lists in (
            (self.dst_offsets, self.dst_sizes, self.dst_strides),
            (self.src_offsets, self.src_sizes, self.src_strides),
        ):
            if len({len(part) for part in lists}) != 1:
                raise VerifyException("air.dma_memcpy_nd: offsets, sizes and strides differ in length")
        written, read = self._elements(self.dst, self.dst_sizes), self._elements(self.src, self.src_sizes)
        if written != read:
            raise VerifyException(f"air.dma_memcpy_nd: destination takes {written} elements, source gives {read}")

    def print(self, printer: Printer) -> None:
        printer.print_string(" (")
        self.print_side(printer, self.dst, (self.dst_offsets, self.dst_sizes, self.dst_strides))
        printer.print_string(", ")
        self.print_side(printer, self.src, (self.src_offsets, self.src_sizes, self.src_strides))
        printer.print_string(") : (")
        printer.print_list((self.dst.type, self.src.type), printer.print_attribute)
        printer.print_string(")")

    @staticmethod
    def print_side(printer: Printer, buffer: SSAValue, lists: tuple[Sequence[SSAValue], ...]) -> None:
        printer.print_ssa_value(buffer)
        for position, part in enumerate(lists):
            printer.print_string("[" if position == 0 else " [")
            printer.print_list(part, printer.print_ssa_value)
            printer.print_string("]")


@irdl_op_definition
class ChannelOp(IRDLOperation):
    """An array of FIFOs between segment and herd. With `broadcast_shape`, an entry that is 1 in `size` and more there
    delivers every item to that many tiles."""

    name = "air.channel"
    sym_name = attr_def(StringAttr)
    size = attr_def(ArrayAttr[IntegerAttr])
    broadcast_shape = attr_def(ArrayAttr[IntegerAttr])

    def __init__(self, name: str, size: Sequence[int], broadcast_shape: Sequence[int]) -> None:
        arrays = {"size": size, "broadcast_shape": broadcast_shape}
        attributes: dict[str, Attribute] = {
            key: ArrayAttr([IntegerAttr(n, i64) for n in numbers]) for key, numbers in arrays.items()
        }
        super().__init__(attributes={"sym_name": StringAttr(name), **attributes})

    def verify_(self) -> None:
        for size, wide in zip(self.size, self.broadcast_shape, strict=True):
            if size != wide and size.value.data != 1:
                raise VerifyException(f"air.channel @{self.sym_name.data}: only entries of size 1 can be broadcast")

    def print(self, printer: Printer) -> None:
        size, wide = (", ".join(str(n.value.data) for n in part) for part in (self.size, self.broadcast_shape))
        printer.print_string(f" @{self.sym_name.data} [{size}] {{broadcast_shape = [{wide}]}}")


class _ChannelEnd(IRDLOperation):
    """One side of a transfer through FIFO `chan_name[indices]`: a buffer, walked as in `air.dma_memcpy_nd`."""

    chan_name = attr_def(SymbolRefAttr)
    indices = var_operand_def(IndexType())
    buffer = operand_def(MemRefType)
    offsets = var_operand_def(IndexType())
    sizes = var_operand_def(IndexType())
    strides = var_operand_def(IndexType())
    irdl_options = (AttrSizedOperandSegments(),)

    def __init__(
        self,
        channel: str,
        indices: Sequence[SSAValue],
        buffer: SSAValue,
        lists: Pattern,
    ) -> None:
        super().__init__(
            operands=[list(indices), buffer, *(list(part) for part in lists)],
            attributes={"chan_name": SymbolRefAttr(channel)},
        )

    def verify_(self) -> None:
        if len({len(part) for part in (self.offsets, self.sizes, self.strides)}) != 1:
            raise VerifyException(f"{self.name}: offsets, sizes and strides differ in length")

    def print(self, printer: Printer) -> None:
        printer.print_string(f" @{self.chan_name.string_value()}[")
        printer.print_list(self.indices, printer.print_ssa_value)
        printer.print_string("] (")
        DmaMemcpyNdOp.print_side(printer, self.buffer, (self.offsets, self.sizes, self.strides))
        printer.print_string(") : (")
        printer.print_attribute(self.buffer.type)
        printer.print_string(")")


@irdl_op_definition
class ChannelPutOp(_ChannelEnd):
    """Queues a copy of what the pattern walks."""

    name = "air.channel.put"


@irdl_op_definition
class ChannelGetOp(_ChannelEnd):
    """Takes the next item into what the pattern walks. A tile of a herd takes from its own position."""

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
