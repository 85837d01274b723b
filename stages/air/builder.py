"""Builds AIR programs from Python that reads like them: nested `with` blocks, Python numbers, captured values.

Launch, segment and herd are isolated from above. The builder passes outer values in on first use, so a program never
lists its operands. Constants are made once per isolated block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from xdsl.dialects import arith, func, memref, scf
from xdsl.dialects.builtin import (
    FixedBitwidthType,
    Float32Type,
    FloatAttr,
    FunctionType,
    IndexType,
    IntegerAttr,
    IntegerType,
    MemRefType,
    ModuleOp,
    StringAttr,
    UnitAttr,
    bf16,
    f32,
    i8,
    i32,
)
from xdsl.ir import Attribute, Block, Operation, Region, SSAValue

from llama_npu2.frozen import frozen
from stages.air import analysis, dialect
from stages.air.dialect import L3
from stages.air.externs import Variant

ELEMENT_TYPES: dict[str, FixedBitwidthType] = {"bf16": bf16, "f32": f32, "i32": i32, "i8": i8}

Shape = Sequence[int]


def memref_type(shape: Shape, dtype: str = "bf16", space: int = L3) -> MemRefType:
    """Return a memref type. TypeError if `dtype` is not in `ELEMENT_TYPES`.

    Spaces other than DDR are written as 32-bit integers, as AIR expects.
    """
    if dtype not in ELEMENT_TYPES:
        raise TypeError(f"dtype {dtype!r} is none of {', '.join(ELEMENT_TYPES)}")
    if space == L3:
        return MemRefType(ELEMENT_TYPES[dtype], shape)
    return MemRefType(ELEMENT_TYPES[dtype], shape, memory_space=IntegerAttr(space, 32))


@frozen
class Index:
    """An index value that supports `+`, `*`, `//`, `%` with Python numbers and other indices."""

    builder: Builder
    value: SSAValue

    def __add__(self, other: Index | int) -> Index:
        return self if other == 0 else self._apply(arith.AddiOp, other)

    def __mul__(self, other: Index | int) -> Index:
        return self if other == 1 else self._apply(arith.MuliOp, other)

    def __floordiv__(self, other: int) -> Index:
        return self if other == 1 else self._apply(arith.DivUIOp, other)

    def __mod__(self, other: int) -> Index:
        return self._apply(arith.RemUIOp, other)

    __radd__ = __add__
    __rmul__ = __mul__

    def _apply(self, op: type, other: Index | int) -> Index:
        left, right = self.builder.resolve(self.value), self.builder.index(other)
        return Index(self.builder, self.builder.emit(op(left, right)).results[0])


Number = Index | int
Indices = AbstractContextManager[tuple[Index, Index]]
"""A context with the position in a grid."""
Channel = str
"""The name of an array of FIFOs."""


@frozen
class MemRef:
    """A memref and, optionally, the access pattern with which a DMA walks it."""

    value: SSAValue
    offsets: tuple[Number, ...] = ()
    sizes: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()

    def at(self, *dims: tuple[Number, int, int]) -> MemRef:
        """Return the same buffer, walked by `(offset, size, stride)` per dimension, outermost first.

        Dimensions of one element at offset 0 are left out. The compiler tells dimensions by their strides when it cuts
        a transfer, so it would take such a dimension for its neighbour, and move all of what it should cut.
        """
        kept = [(offset, size, stride) for offset, size, stride in dims if (offset, size) != (0, 1)] or dims[-1:]
        offsets, sizes, strides = zip(*kept, strict=True)
        return MemRef(self.value, offsets, sizes, strides)


@frozen
class AirModule:
    """A verified module with one public function, and the object variants that its calls link."""

    module: ModuleOp
    variants: frozenset[Variant]

    @property
    def function(self) -> func.FuncOp:
        return analysis.public_function(self.module)

    @property
    def launches(self) -> list[dialect.LaunchOp]:
        return analysis.launches(self.module)


@dataclass
class _Scope:
    """An isolated block under construction."""

    block: Block
    insert: list[Block]
    """Blocks of the loops and conditions around the next operation, the innermost last."""
    constants: dict[tuple[Attribute, int | float], SSAValue] = field(default_factory=dict)
    captured: dict[SSAValue, SSAValue] = field(default_factory=dict)
    """Outer value -> block argument."""
    owned: set[SSAValue] = field(default_factory=set)
    """Values that the block defines."""
    links: set[str] = field(default_factory=set)
    """Objects with the functions that it calls."""


class Builder:
    """Builds a module with one public function `name`, whose arguments are `args` (name -> DDR memref type)."""

    def __init__(self, name: str, args: dict[str, MemRefType]) -> None:
        self.module = ModuleOp([])
        self.variants: set[Variant] = set()
        self._declared: dict[str, FunctionType] = {}
        self._named = 0
        types = list(args.values())
        block = Block(arg_types=types)
        for value, hint in zip(block.args, args, strict=True):
            value.name_hint = hint
        self.function = func.FuncOp(name, FunctionType.from_lists(types, []), Region(block))
        self._scopes = [_Scope(block, [block], owned=set(block.args))]
        self.args = {hint: MemRef(value) for hint, value in zip(args, block.args, strict=True)}

    def finish(self) -> AirModule:
        self._scopes[0].block.add_op(func.ReturnOp())
        self.module.body.block.add_op(self.function)
        self.module.verify()
        return AirModule(self.module, frozenset(self.variants))

    # values

    def emit(self, op: Operation) -> Operation:
        scope = self._scopes[-1]
        scope.insert[-1].add_op(op)
        scope.owned.update(op.results)
        return op

    def resolve(self, value: SSAValue, depth: int = -1) -> SSAValue:
        """Return the value as the current isolated block sees it: itself, or the argument that it is passed as."""
        scope = self._scopes[depth]
        if value in scope.owned:
            return value
        if value not in scope.captured:
            self.resolve(value, depth - 1)
            inner = scope.block.insert_arg(value.type, len(scope.block.args))
            inner.name_hint = value.name_hint
            scope.captured[value] = inner
        return scope.captured[value]

    def constant(self, value: int | float, kind: Float32Type | IntegerType | IndexType) -> SSAValue:
        scope = self._scopes[-1]
        key = (kind, value)
        if key not in scope.constants:
            number = FloatAttr(value, kind) if isinstance(kind, Float32Type) else IntegerAttr(int(value), kind)
            op = arith.ConstantOp(number)
            self._insert_constant(scope, op)
            scope.constants[key] = op.result
            scope.owned.add(op.result)
        return scope.constants[key]

    @staticmethod
    def _insert_constant(scope: _Scope, op: Operation) -> None:
        if scope.constants:
            last = next(reversed(scope.constants.values())).owner
            assert isinstance(last, Operation)
            scope.block.insert_ops_after([op], last)
        elif scope.block.first_op is not None:
            scope.block.insert_ops_before([op], scope.block.first_op)
        else:
            scope.block.add_op(op)

    def index(self, value: Number) -> SSAValue:
        return self.resolve(value.value) if isinstance(value, Index) else self.constant(value, IndexType())

    # hierarchy

    @contextmanager
    def launch(self, outer: int = 1, inner: int = 1, together: bool = True) -> Iterator[tuple[Index, Index]]:
        """Repeat the body for a grid of steps, and yield the position in it.

        Steps of the second dimension can be issued together. So a grid of one dimension is one of the second, unless
        its steps are not to be issued `together`: the compiler takes one number of steps for all launches of a module,
        so a launch that allows few would slow down the others.
        """
        if inner == 1 and together:
            with self._level(dialect.LaunchOp, (1, outer)) as (one, step):
                yield step, one
        else:
            with self._level(dialect.LaunchOp, (outer, inner)) as steps:
                yield steps

    def segment(self) -> Indices:
        return self._level(dialect.SegmentOp, (), self._name("segment"))

    def herd(self, columns: int, rows: int) -> Indices:
        return self._level(dialect.HerdOp, (columns, rows), self._name("herd"))

    def _name(self, level: str) -> str:
        """Return a new symbol. The function is in the same table, and cores of one name would be the same cores."""
        self._named += 1
        return f"{self.function.sym_name.data}_{level}_{self._named}"

    @contextmanager
    def _level(self, kind: type[dialect.Hierarchy], grid: Shape, name: str | None = None) -> Iterator[Any]:
        sizes = [self.index(size) for size in grid]
        block = Block(arg_types=[IndexType()] * (2 * kind.RANK))
        scope = _Scope(block, [block], owned=set(block.args))
        self._scopes.append(scope)
        yield tuple(Index(self, value) for value in block.args[: kind.RANK])
        self._scopes.pop()
        attributes: dict[str, Attribute] = {} if name is None else {"sym_name": StringAttr(name)}
        if scope.links:
            (link,) = scope.links
            attributes["link_with"] = StringAttr(link)
        self.emit(kind(sizes, [self.resolve(value) for value in scope.captured], Region(block), attributes))

    @contextmanager
    def loop(self, count: int) -> Iterator[Number]:
        """Repeat the body `count` times; a single step needs no loop."""
        if count == 1:
            yield 0
            return
        first, last, step = (self.index(value) for value in (0, count, 1))
        block = Block(arg_types=[IndexType()])
        with self._inside(block, scf.YieldOp) as (index,):
            yield index
        self.emit(scf.ForOp(first, last, step, [], block))

    @contextmanager
    def where(self, value: Index, relation: str, other: Number) -> Iterator[None]:
        """Run the body on those tiles only on which the comparison is true (`eq`, `ne`)."""
        condition = self.emit(arith.CmpiOp(self.index(value), self.index(other), relation)).results[0]
        block = Block()
        with self._inside(block, scf.YieldOp):
            yield
        self.emit(scf.IfOp(condition, [], Region(block)))

    @contextmanager
    def parallel(self, columns: int, rows: int) -> Iterator[tuple[Index, Index]]:
        """Run the body of a segment once for each core of a herd of this shape, all at the same time."""
        first, step = self.index(0), self.index(1)
        sizes = [self.index(size) for size in (columns, rows)]
        block = Block(arg_types=[IndexType()] * 2)
        with self._inside(block, scf.ReduceOp) as (x, y):
            yield x, y
        self.emit(scf.ParallelOp([first] * 2, sizes, [step] * 2, Region(block)))

    @contextmanager
    def _inside(self, block: Block, end: type[Operation]) -> Iterator[list[Index]]:
        """Insert operations into the block of a loop or condition, and then its terminator."""
        scope = self._scopes[-1]
        scope.owned.update(block.args)
        scope.insert.append(block)
        yield [Index(self, value) for value in block.args]
        block.add_op(end())
        scope.insert.pop()

    # memory and calls

    @contextmanager
    def alloc(self, space: int, *shapes: Shape | tuple[Shape, str]) -> Iterator[list[MemRef]]:
        """Allocate buffers in L1 or L2 for the body, each given as a shape, for bf16, or as `(shape, dtype)`.

        In L2, dimensions of one element are left out, as in `MemRef.at`.
        """
        buffers = []
        for entry in shapes:
            shape, dtype = entry if isinstance(entry[-1], str) else (entry, "bf16")
            sizes = [size for size in shape if size != 1 or space != dialect.L2]  # type: ignore[union-attr]
            kind = memref_type(sizes, dtype, space)  # type: ignore[arg-type]
            buffers.append(MemRef(self.emit(memref.AllocOp([], [], kind)).results[0]))
        yield buffers
        for buffer in buffers:
            self.emit(memref.DeallocOp.get(buffer.value))

    def channel(self, size: Shape, broadcast_shape: Shape, cascade: bool = False) -> Channel:
        """Add FIFOs between this segment and its herd: one per entry of `size`, each delivered to `broadcast_shape`."""
        name = self._name("channel")
        self.module.body.block.add_op(dialect.ChannelOp(name, size, broadcast_shape, cascade))
        return name

    def cascade(self, size: Shape) -> Channel:
        """Add FIFOs from cores to their neighbours to the right or below, for whole buffers. They block both cores."""
        return self.channel(size, size, cascade=True)

    def put(self, channel: Channel, indices: Sequence[Number], source: MemRef) -> None:
        self.emit(dialect.ChannelPutOp(channel, [self.index(n) for n in indices], *self._side(source)))

    def get(self, channel: Channel, indices: Sequence[Number], target: MemRef) -> None:
        self.emit(dialect.ChannelGetOp(channel, [self.index(n) for n in indices], *self._side(target)))

    def dma(self, dst: MemRef, src: MemRef) -> None:
        self.emit(dialect.DmaMemcpyNdOp(*self._side(dst), *self._side(src)))

    def _side(self, side: MemRef) -> tuple[SSAValue, dialect.Pattern]:
        offsets, sizes, strides = ([self.index(n) for n in part] for part in (side.offsets, side.sizes, side.strides))
        return self.resolve(side.value), (offsets, sizes, strides)

    def call(
        self, variant: Variant, function: str, *args: MemRef | Number | float, read_twice: MemRef | None = None
    ) -> None:
        """Call a tile function. Buffers are passed as memrefs, indices and ints as i32, floats as f32.

        Raises TypeError if it is given one buffer twice, because the compiler of tile functions is told that none is
        another. That is true of a buffer that the function only reads, so `read_twice` may be given twice.
        """
        values = [self._argument(arg) for arg in args]
        buffers = [value for value in values if isinstance(value.type, MemRefType)]
        if read_twice is not None:
            buffers.remove(self._argument(read_twice))
        if len(set(buffers)) < len(buffers):
            raise TypeError(f"{function} is given one buffer twice")
        symbol = variant.symbol(function)
        signature = FunctionType.from_lists([v.type for v in values], [])
        if self._declared.setdefault(symbol, signature) != signature:
            raise TypeError(f"{symbol} is called with two signatures")
        if symbol not in (op.sym_name.data for op in self.module.body.block.ops if isinstance(op, func.FuncOp)):
            self.module.body.block.add_op(declaration(symbol, signature, variant.object))
        self.variants.add(variant)
        self._scopes[-1].links.add(variant.object)
        self.emit(func.CallOp(symbol, values, []))

    def _argument(self, arg: MemRef | Number | float) -> SSAValue:
        if isinstance(arg, MemRef):
            return self.resolve(arg.value)
        if isinstance(arg, Index):
            return self.emit(arith.IndexCastOp(self.resolve(arg.value), i32)).results[0]
        return self.constant(arg, f32 if isinstance(arg, float) else i32)


def declaration(symbol: str, signature: FunctionType, link_with: str) -> func.FuncOp:
    """Return the declaration of an external function in object `link_with`."""
    op = func.FuncOp.external(symbol, list(signature.inputs), list(signature.outputs))
    op.attributes["link_with"] = StringAttr(link_with)
    op.attributes["llvm.emit_c_interface"] = UnitAttr()
    return op
