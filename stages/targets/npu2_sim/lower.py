"""Lowers an AIR module to host C++ that executes it: the launch grid, segments, herd tiles and every DMA as written.

Only the MLIR is read. The C++ calls the tile functions. Its entry `NAME` has the signature of `ENTRY` below; its string
`NAME_info` (JSON) describes the arguments (slots) and launches. A program that the hardware would refuse is refused
here or by the entry, in one line.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from xdsl.dialects import arith, func, memref, scf
from xdsl.dialects.builtin import FloatAttr, IntegerAttr, MemRefType, ModuleOp, StringAttr
from xdsl.ir import Block, BlockArgument, Operation, SSAValue
from xdsl.traits import IsTerminator

from llama_npu2.errors import UserError
from stages.air import analysis, limits
from stages.air.analysis import Side, buffer_bytes, element_bytes, name_of
from stages.air.checks import check
from stages.air.dialect import (
    L1,
    L2,
    ChannelEnd,
    ChannelGetOp,
    ChannelOp,
    ChannelPutOp,
    DmaMemcpyNdOp,
    HerdOp,
    LaunchOp,
    SegmentOp,
    constant_of,
    memory_space,
)
from stages.targets.npu2_sim.objects import FENCE_BYTES

ENTRY = "int NAME(void **slots, int64_t *counters, int32_t reverse, char *error, int64_t error_bytes)"
"""`counters`: per launch the tile calls, MACs, then (bytes read, bytes written) of each slot. `reverse` runs grid steps
and tiles backwards: results must not depend on it. Returns 0, or 1 with the message in `error`."""

_INTEGER_OPS = {arith.AddiOp: "+", arith.SubiOp: "-", arith.MuliOp: "*", arith.DivUIOp: "/", arith.RemUIOp: "%"}


def lower(module: ModuleOp) -> str:
    """Return the host C++ of a verified module. Raises UserError for what `stages.air.checks` refuses."""
    check(module)
    return _Lowering(module).source()


def _c_type(kind: object) -> str:
    return {"index": "int64_t", "i32": "int32_t", "f32": "float", "i1": "bool"}[str(kind)]


def _packed(value: SSAValue) -> str:
    """Return the C++ boolean: whether a buffer's elements are bytes, which may hold several numbers."""
    assert isinstance(value.type, MemRefType)
    return "true" if element_bytes(value.type) == 1 else "false"


@dataclass
class _Lowering:
    module: ModuleOp
    lines: list[str] = field(default_factory=list)
    names: dict[SSAValue, str] = field(default_factory=dict)
    depth: int = 0
    where: str = ""
    """Program, launch, segment and herd, for messages."""
    patterns: int = 0
    """Number of access patterns so far."""
    offsets: dict[SSAValue, int] = field(default_factory=dict)
    """Offset of each buffer in its memory."""
    herd: HerdOp | None = None

    def source(self) -> str:
        function = analysis.public_function(self.module)
        name = function.sym_name.data
        launches = analysis.launches(self.module)
        self._emit("#include <device.hpp>", "", "using std::int32_t, std::int64_t;", "")
        self._declare_tile_functions()
        for channel in self._channels():
            sizes = [n.value.data for part in (channel.size, channel.broadcast_shape) for n in part]
            self._emit(f"static sim::Channel {channel.sym_name.data}({', '.join(map(str, sizes))});")
        self._emit("", "static sim::Memory *l1, *l2;", "")
        for index, launch in enumerate(launches):
            self._launch(index, launch, function)
        self._entry(name, function, launches)
        return "\n".join(self.lines) + "\n"

    # text

    def _emit(self, *lines: str) -> None:
        self.lines.extend("    " * self.depth + line if line else "" for line in lines)

    @contextlib.contextmanager
    def _braces(self, *heads: str) -> Iterator[None]:
        """Write what the context writes inside braces after each of `heads`, one in the other."""
        for head in heads:
            self._emit(f"{head} {{".lstrip())
            self.depth += 1
        yield
        for _ in heads:
            self.depth -= 1
            self._emit("}")

    def _name(self, value: SSAValue) -> str:
        return self.names.setdefault(value, f"v{len(self.names)}")

    # structure

    def _channels(self) -> list[ChannelOp]:
        """Return the channels that something passes through: of some, only the compiler needs the names."""
        used = {op.chan_name.string_value() for op in self.module.walk() if isinstance(op, ChannelEnd)}
        return [op for op in self.module.body.block.ops if isinstance(op, ChannelOp) and op.sym_name.data in used]

    def _declare_tile_functions(self) -> None:
        for op in self.module.body.block.ops:
            if isinstance(op, func.FuncOp) and op.is_declaration:
                if "llvm.emit_c_interface" not in op.attributes:
                    raise UserError(f"{op.sym_name.data}: an external function needs llvm.emit_c_interface")
                kinds = ["void *" if isinstance(t, MemRefType) else _c_type(t) for t in op.function_type.inputs]
                self._emit(f'extern "C" void {op.sym_name.data}({", ".join(kinds)});')

    def _launch(self, index: int, launch: LaunchOp, function: func.FuncOp) -> None:
        name = function.sym_name.data
        arguments = "sim::Buffer *slots", "sim::Launch &launch", "bool reverse"
        with self._braces(f"static void launch_{index}({', '.join(f'[[maybe_unused]] {a}' for a in arguments)})"):
            self.where = f"{name} launch {index}"
            slots = list(function.body.block.args)
            for inner, outer in zip(launch.body_args, launch.args, strict=True):
                if not (isinstance(outer, BlockArgument) and outer in slots):
                    raise UserError(f"{self.where}: takes a value that is not an argument of the function")
                self._emit(f"[[maybe_unused]] const sim::Buffer {self._name(inner)} = slots[{slots.index(outer)}];")
            with self._grid(launch):
                self._block(launch.body.block)
            used = {op.chan_name.string_value() for op in launch.walk() if isinstance(op, ChannelEnd)}
            if used:
                self._emit(f"sim::where = {json.dumps(self.where)};", *(f"{name}.finish();" for name in sorted(used)))
        self._emit("")

    @contextlib.contextmanager
    def _grid(self, op: LaunchOp | HerdOp) -> Iterator[None]:
        """Write what the context writes into a loop per dimension, the first dimension innermost."""
        backwards = _backwards(op)
        with contextlib.ExitStack() as loops:
            for axis, size in reversed(list(enumerate(op.shape()))):
                position = self._name(op.ids[axis])
                index = f"i_{position}"
                loops.enter_context(self._braces(f"for (int64_t {index} = 0; {index} < {size}; ++{index})"))
                self._emit(f"[[maybe_unused]] const int64_t {position} = sim::step({index}, {size}, {backwards});")
            for value, size in zip(op.size_args, op.shape(), strict=True):
                self._emit(f"[[maybe_unused]] const int64_t {self._name(value)} = {size};")
            yield

    def _entry(self, name: str, function: func.FuncOp, launches: list[LaunchOp]) -> None:
        args, written = function.body.block.args, self._written_first()
        info = {
            "name": name,
            "slots": [_slot(name, i, argument, argument in written) for i, argument in enumerate(args)],
            "launches": [{"name": _launch_name(launch)} for launch in launches],
        }
        width = 2 + 2 * len(args)
        buffers = ", ".join(
            f"{{static_cast<uint8_t *>(slots[{i}]), {buffer_bytes(a)}, {i}, {_packed(a)}}}" for i, a in enumerate(args)
        )
        with self._braces("static void program(void **slots, int64_t *counters, bool reverse)"):
            self._emit(
                f"sim::Memory tile({self._arena(L1)}), memory({self._arena(L2)});",
                "l1 = &tile, l2 = &memory;",
                *(f"{channel.sym_name.data}.clear();" for channel in self._channels()),
                f"sim::Buffer buffers[] = {{{buffers}}};",
                "sim::Launch launch;",
            )
            for index in range(len(launches)):
                at = f"counters + {index * width}"
                self._emit(f"launch = {{{at}, {at} + 1, {at} + 2}};", f"launch_{index}(buffers, launch, reverse);")
        self._emit("", f'extern "C" const char {name}_info[] = {json.dumps(json.dumps(info))};', "")
        with self._braces(f'extern "C" {ENTRY.replace("NAME", name)}'):
            self._emit("return sim::guarded(program, slots, counters, reverse != 0, error, error_bytes);")

    def _written_first(self) -> set[SSAValue]:
        """Return the arguments whose first transfer writes, so that their old contents do not matter."""
        written_first: dict[SSAValue, bool] = {}
        for op in analysis.moves(self.module):
            for side, written in reversed(analysis.ends(op, "")):
                written_first.setdefault(analysis.root(side.value), written)
        return {value for value, written in written_first.items() if written}

    def _arena(self, space: int) -> int:
        ends = [self.offsets[v] + buffer_bytes(v) for v in self.offsets if memory_space(v.type) == space]
        return max(ends, default=0) + FENCE_BYTES

    # operations

    def _block(self, block: Block) -> None:
        for op in block.ops:
            self._op(op)

    def _op(self, op: Operation) -> None:
        match op:
            case SegmentOp() | HerdOp():
                self._level(op)
            case scf.ForOp():
                self._loop(op)
            case scf.ParallelOp():
                self._parallel(op)
            case scf.IfOp():
                with self._braces(f"if ({self._name(op.cond)})"):
                    self._block(op.true_region.block)
            case memref.AllocOp():
                self._alloc(op)
            case DmaMemcpyNdOp():
                self._dma(op)
            case ChannelEnd():
                self._channel_end(op)
            case func.CallOp():
                self._call(op)
            case _ if not isinstance(op, memref.DeallocOp) and not op.has_trait(IsTerminator):
                self._scalar(op)

    def _level(self, op: SegmentOp | HerdOp) -> None:
        outer = self.where
        self.where = f"{outer} {name_of(op, op.name)}"
        self._place(op, L2 if isinstance(op, SegmentOp) else L1)
        with self._braces(""):
            for inner, value in zip(op.body_args, op.args, strict=True):
                kind = "sim::Buffer" if isinstance(inner.type, MemRefType) else _c_type(inner.type)
                self._emit(f"[[maybe_unused]] const {kind} {self._name(inner)} = {self._name(value)};")
            if isinstance(op, HerdOp):
                self.herd = op
                with self._grid(op):
                    self._emit("sim::start_core(*l1);")
                    self._block(op.body.block)
                self.herd = None
            else:
                self._block(op.body.block)
        self.where = outer

    def _place(self, op: SegmentOp | HerdOp, space: int) -> None:
        """Give the buffers of one memory fixed offsets with fences, with no better alignment than on the array.

        The compiler packs them, largest first, into any bank that has room, so a buffer may lie after any that are at
        least as large.
        """
        values = analysis.allocations(op, space)
        free = FENCE_BYTES
        for value in values:
            # A buffer in a loop also lies after its own copies.
            others = [v for v in values if v is not value or isinstance(value.owner.parent_op(), scf.ForOp)]
            larger = [buffer_bytes(v) for v in others if buffer_bytes(v) >= buffer_bytes(value)]
            self.offsets[value] = free + math.gcd(limits.ALIGNMENT_BYTES, *larger) % limits.ALIGNMENT_BYTES
            end = self.offsets[value] + buffer_bytes(value) + 2 * FENCE_BYTES
            free = -(-end // limits.ALIGNMENT_BYTES) * limits.ALIGNMENT_BYTES

    def _loop(self, op: scf.ForOp) -> None:
        if op.iter_args:
            raise UserError(f"{self.where}: loops carry no values on the NPU")
        low, high, step = (self._name(v) for v in (op.lb, op.ub, op.step))
        index = self._name(op.body.block.args[0])
        with self._braces(f"for (int64_t {index} = {low}; {index} < {high}; {index} += {step})"):
            for value in self._moved_into(op):
                self._emit(f"{self._claim(value)};")
            self._block(op.body.block)

    def _moved_into(self, loop: scf.ForOp) -> list[SSAValue]:
        """Return the buffers of a core that only this loop uses.

        The compiler moves them into the loop and doubles them, so that no step finds the contents that the previous one
        left (mlir-air, `air-fuse-alloc-dealloc`, `air-ping-pong-transform`).
        """
        outside = analysis.allocations(self.herd, L1) if self.herd else []
        return [value for value in outside if _only_inside(loop, value)]

    def _parallel(self, op: scf.ParallelOp) -> None:
        grid = zip(map(self._name, op.body.block.args), analysis.grid(op), strict=True)
        with self._braces(*(f"for (int64_t {index} = 0; {index} < {size}; ++{index})" for index, size in grid)):
            self._block(op.body.block)

    def _alloc(self, op: memref.AllocOp) -> None:
        value = op.results[0]
        if value not in self.offsets:
            raise UserError(f"{self.where}: allocates memory space {memory_space(value.type)}, which it does not own")
        self._emit(f"[[maybe_unused]] const sim::Buffer {self._name(value)} = {self._claim(value)};")

    def _claim(self, value: SSAValue) -> str:
        memory = "l1" if memory_space(value.type) == L1 else "l2"
        return f"{memory}->claim({self.offsets[value]}, {buffer_bytes(value)}, {_packed(value)})"

    def _dma(self, op: DmaMemcpyNdOp) -> None:
        dst, src = analysis.sides(op, self.where)
        run = math.gcd(dst.run, src.run)
        names = [self._pattern(side, run) for side in (dst, src)]
        to, source = (
            f"{self._name(side.value)}, {self._start(side)}, {name}"
            for side, name in zip((dst, src), names, strict=True)
        )
        self._emit(
            f"sim::where = {json.dumps(self.where)};",
            f"sim::dma(launch, {to},",
            f"         {source}, {dst.bytes // run}, {run}, {self._counted(dst, src)});",
        )

    def _channel_end(self, op: ChannelEnd) -> None:
        side = analysis.end(op, self.where)
        name, way = op.chan_name.string_value(), "put" if isinstance(op, ChannelPutOp) else "get"
        counted = "launch, " if way == "put" else ""
        x, y = (self._name(index) for index in op.indices)
        pattern = self._pattern(side, side.run)
        self._emit(
            f"sim::where = {json.dumps(f'{self.where} channel {name}')};",
            f"{name}.{way}({counted}{x}, {y}, {self._name(side.value)}, {self._start(side)}, {pattern}, "
            f"{side.bytes // side.run}, {side.run});",
        )

    def _pattern(self, side: Side, run: int) -> str:
        size = element_bytes(side.kind)
        dims = [(n, stride * size) for n, stride in side.dims]
        if side.run > run:
            dims[-1:] = [(side.run // run, run)]
        elif side.run == run and side.dims[-1][1] == 1:
            dims.pop()
        name = f"p{self.patterns}"
        self.patterns += 1
        numbers = [", ".join(str(d[i]) for d in dims) for i in (0, 1)]
        self._emit(f"static constexpr sim::Pattern {name} = {{{len(dims)}, {{{numbers[0]}}}, {{{numbers[1]}}}}};")
        return name

    def _start(self, side: Side) -> str:
        terms = [f"{self._name(o)} * {s}" for o, s in zip(side.offsets, side.strides, strict=True)]
        return f"{element_bytes(side.kind)} * ({' + '.join(terms) or '0'})"

    def _counted(self, dst: Side, src: Side) -> str:
        """Return the C++ condition for counting a transfer.

        A read that does not depend on a tile coordinate is one broadcast stream, which is counted at the first tile
        only.
        """
        if self.herd is None or dst.space != L1:
            return "true"
        idle = [i for axis, i in enumerate(self.herd.ids) if axis not in src.axes()]
        return " && ".join(f"{self._name(i)} == 0" for i in idle) or "true"

    def _call(self, op: func.CallOp) -> None:
        if self.herd is None:
            raise UserError(f"{self.where}: calls {op.callee.string_value()} outside a herd")
        callee = op.callee.string_value()
        self._check_link(callee)
        buffers = [self._name(a) for a in op.arguments if isinstance(a.type, MemRefType)]
        values = [f"{self._name(a)}.data" if isinstance(a.type, MemRefType) else self._name(a) for a in op.arguments]
        self._emit(
            f"sim::where = {json.dumps(f'{self.where} {callee}')};",
            f"{callee}({', '.join(values)});",
            f"sim::called(launch, *l1, {{{', '.join(buffers)}}});",
        )

    def _check_link(self, callee: str) -> None:
        """Check that the herd links the object in which the function is declared: a core runs one object."""
        assert self.herd is not None
        declarations = (op for op in self.module.body.block.ops if isinstance(op, func.FuncOp))
        links = [op.attributes.get("link_with") for op in declarations if op.sym_name.data == callee]
        if not links or not isinstance(links[0], StringAttr) or links[0] != self.herd.link_with:
            raise UserError(f"{self.where}: calls {callee}, which is not in the herd's object {self.herd.link_with}")

    def _scalar(self, op: Operation) -> None:
        if isinstance(op, arith.ConstantOp):
            value = op.value
            assert isinstance(value, IntegerAttr | FloatAttr)
            text = f"{value.value.data!r}f" if isinstance(value, FloatAttr) else str(constant_of(op.result))
        elif type(op) in _INTEGER_OPS:
            text = f"{self._name(op.operands[0])} {_INTEGER_OPS[type(op)]} {self._name(op.operands[1])}"
        elif isinstance(op, arith.CmpiOp):
            relation, _ = analysis.RELATIONS[op.predicate.value.data]
            text = f"{self._name(op.lhs)} {relation} {self._name(op.rhs)}"
        elif isinstance(op, arith.IndexCastOp):
            text = f"static_cast<{_c_type(op.result.type)}>({self._name(op.input)})"
        else:
            raise UserError(f"{self.where}: the simulator does not know {op.name}")
        kind = _c_type(op.results[0].type)
        self._emit(f"[[maybe_unused]] const {kind} {self._name(op.results[0])} = {text};")


def _slot(program: str, index: int, argument: SSAValue, written_first: bool) -> dict[str, Any]:
    """Return the description of a program's argument (slot)."""
    kind = argument.type
    if not isinstance(kind, MemRefType):
        raise UserError(f"{program}: every argument of a program is a memref")
    return {
        "name": argument.name_hint or f"arg{index}",
        "shape": list(kind.get_shape()),
        "dtype": str(kind.element_type),
        "bytes": buffer_bytes(argument),
        "written_first": written_first,
    }


def _backwards(op: LaunchOp | HerdOp) -> str:
    """Return the C++ condition for running the steps backwards.

    It is the caller's choice, but never holds where tiles of a herd send to the next tile.
    """
    names = [{end.chan_name.string_value() for end in analysis.walk_ops(op, k)} for k in (ChannelPutOp, ChannelGetOp)]
    return "false" if isinstance(op, HerdOp) and names[0] & names[1] else "reverse"


def _only_inside(loop: scf.ForOp, value: SSAValue) -> bool:
    """Tell whether all uses of a buffer are in a loop but its allocation is not."""
    assert isinstance(value.owner, Operation)
    uses = [use.operation for use in value.uses if not isinstance(use.operation, memref.DeallocOp)]
    return not loop.is_ancestor(value.owner) and bool(uses) and all(map(loop.is_ancestor, uses))


def _launch_name(launch: LaunchOp) -> str:
    return next(
        (name_of(op, "") for op in launch.walk() if isinstance(op, SegmentOp | HerdOp) and op.sym_name), "launch"
    )
