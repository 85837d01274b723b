"""Joins programs into one function: launches are moved, and arguments rewired by slot name, as operations, not text."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from xdsl.dialects import func
from xdsl.dialects.builtin import FunctionType, MemRefType, ModuleOp, StringAttr, SymbolRefAttr
from xdsl.ir import Attribute, Block, BlockArgument, Operation, Region

from stages.air import analysis
from stages.air.access import accesses
from stages.air.builder import AirModule, Builder
from stages.air.dialect import L1, ChannelEnd, ChannelOp, HerdOp, LaunchOp, Op, SegmentOp

Part = tuple[AirModule, Mapping[str, str]]
"""A module, and the program's argument (slot) for each of its own: name -> name."""

SETTLE = "settle"
"""Marks the names of the launch that makes the number of resets even."""

SETTLE_BYTES = 64
"""Most bytes that it copies: a line of the host's cache, some steps of the narrowest stream."""


def stitch(name: str, slots: Sequence[str], parts: Sequence[Part], settled: bool = True) -> AirModule:
    """Return a function `name(slots)` that runs the launches of `parts` in order. A slot has the type of its arguments.

    The parts are consumed: their operations are moved. Symbols of segments, herds and channels get the prefix
    `launch<position of the part>_`. If the number of launches is odd, one that settles them is added
    (`toggle_settling`), for which the last one has to write something; not if it is to be part of another function
    (`settled`).

    Raises:
        TypeError: The last launch writes nothing; arguments of one slot differ in type; arguments and wiring, or slots
            and wirings, do not match; or a symbol is declared with two signatures, which should not happen, because
            object variants have their shapes in their names.
    """
    types = _slot_types(name, slots, parts)
    block = Block(arg_types=types)
    values = dict(zip(slots, block.args, strict=True))
    for slot, value in values.items():
        value.name_hint = slot
    declared: dict[str, func.FuncOp] = {}
    channels: list[ChannelOp] = []
    for position, (module, wiring) in enumerate(parts):
        _merge_declarations(declared, module)
        _rename(module, f"launch{position}_")
        channels += _detached(op for op in module.module.body.block.ops if isinstance(op, ChannelOp))
        for argument, value in _arguments(module.function).items():
            value.replace_all_uses_with(values[wiring[argument]])
        block.add_ops(_detached(_body(module.function)))
    block.add_op(func.ReturnOp())
    function = func.FuncOp(name, FunctionType.from_lists(types, []), Region(block))
    stitched = ModuleOp([*channels, *(declared[symbol] for symbol in sorted(declared)), function])
    if settled and len(analysis.launches(stitched)) % 2:
        toggle_settling(stitched)
    else:
        _verify_joints(stitched)
    return AirModule(stitched, frozenset().union(*(module.variants for module, _ in parts)))


def part_of(launch: LaunchOp) -> int:
    """Return the position of the part that a stitched launch comes from."""
    segment = analysis.segment_of(launch)
    assert segment.sym_name is not None
    return int(segment.sym_name.data.partition("_")[0].removeprefix("launch"))


def _verify_joints(module: ModuleOp) -> None:
    """Verify what is outside of launches, and what they are given.

    What is inside was verified when it was built or parsed. To do so again takes a fifth of the time of a build.
    """
    function = analysis.public_function(module)
    for op in (module, *module.body.block.ops, *function.body.block.ops):
        op.verify(verify_nested_ops=False)


def _slot_types(name: str, slots: Sequence[str], parts: Sequence[Part]) -> list[Attribute]:
    """Return the type of every slot, in order: that of the arguments wired to it."""
    uses: dict[str, tuple[str, Attribute]] = {}
    for module, wiring in parts:
        function, arguments = module.function.sym_name.data, _arguments(module.function)
        if wiring.keys() != arguments.keys():
            raise TypeError(f"{function}: arguments {sorted(arguments)}, wired {sorted(wiring)}")
        for argument, slot in wiring.items():
            use = f"{function}.{argument}", arguments[argument].type
            first = uses.setdefault(slot, use)
            if first[1] != use[1]:
                raise TypeError(f"{name}, slot {slot}: {first[0]} is {first[1]}, {use[0]} is {use[1]}")
    if uses.keys() != set(slots):
        raise TypeError(f"{name}: slots {sorted(slots)}, wired {sorted(uses)}")
    return [uses[slot][1] for slot in slots]


def _arguments(function: func.FuncOp) -> dict[str, BlockArgument]:
    return {str(arg.name_hint): arg for arg in function.body.block.args}


def _merge_declarations(declared: dict[str, func.FuncOp], module: AirModule) -> None:
    for op in list(module.module.body.block.ops):
        if not isinstance(op, func.FuncOp) or not op.is_declaration:
            continue
        first = declared.setdefault(op.sym_name.data, op)
        if first is op:
            op.detach()
        elif (first.function_type, first.attributes) != (op.function_type, op.attributes):
            raise TypeError(f"external function {op.sym_name.data} is declared twice, differently")


def _rename(module: AirModule, prefix: str) -> None:
    """Prefix the names of symbols: equal names would be the same cores or the same stream."""
    for op in module.module.walk():
        if isinstance(op, SegmentOp | HerdOp | ChannelOp) and op.sym_name is not None:
            op.sym_name = StringAttr(prefix + op.sym_name.data)
        elif isinstance(op, ChannelEnd):
            op.chan_name = SymbolRefAttr(prefix + op.chan_name.string_value())


def _body(function: func.FuncOp) -> Iterator[Operation]:
    return (op for op in function.body.block.ops if not isinstance(op, func.ReturnOp))


def _detached(ops: Iterable[Op]) -> list[Op]:
    detached = list(ops)
    for op in detached:
        op.detach()
    return detached


def _segment_name(launch: LaunchOp) -> str:
    return analysis.name_of(analysis.segment_of(launch), "")


def settles(module: ModuleOp) -> bool:
    """Return whether the first launch only makes the number of resets even."""
    return f"{SETTLE}_" in _segment_name(analysis.launches(module)[0])


def _settling(slot: MemRefType, first: int, run: int) -> AirModule:
    """Build a launch that copies contiguous elements of a slot onto themselves: at most `run`, from `first` on."""
    dtype = str(slot.element_type)
    count = min(run, SETTLE_BYTES // analysis.element_bytes(slot))
    b = Builder(SETTLE, {"slot": slot})
    with b.launch(), b.segment(), b.herd(1, 1), b.alloc(L1, ((count,), dtype)) as (line,):
        place = b.args["slot"].at((first, count, 1))
        b.dma(line, place)
        b.dma(place, line)
    return b.finish()


def reserve_channel_names(module: ModuleOp) -> None:
    """Declare unused channels with the names that the compiler would give to its own.

    The compiler makes a channel of each transfer, `@channel_<n>` with the first number that is free in the module. For
    each launch it splits channels of several entries, and mlir-air of 2026-07-29 numbers the parts by what is free in
    the launch. To find out which column a memory tile serves, it looks up names in the whole module, and so counts the
    cores of another launch's channel of that name. Then the columns' shim tiles are not shared, and run out. So this
    declares as many channels as a launch can have parts.
    """
    names = max(_channel_entries(launch) for launch in analysis.launches(module))
    first = module.body.block.first_op
    assert first is not None
    reserved = [ChannelOp(f"channel_{n}", (1, 1), (1, 1)) for n in range(names)]
    module.body.block.insert_ops_before(reserved, first)
    for channel in reserved[:1]:  # the others are alike
        channel.verify()


def _channel_entries(launch: LaunchOp) -> int:
    """Return the most streams that the compiler makes of a launch: one for each tile of each transfer."""
    return sum(math.prod(analysis.tile_grid(move)) for move in analysis.moves(launch))


def toggle_settling(module: ModuleOp) -> None:
    """Add a first launch that changes nothing, or remove it.

    Each launch resets the array by loading one of two empty images, which alternate, and the firmware does not load an
    image that is loaded already. So a dispatch must end with another image than it begins with: the number of resets
    must be even (mlir-aie, `AIEExpandLoadPdi`, up to #3622). The added launch copies 64 bytes, which the last launch
    will write, onto themselves, through one core that computes nothing. It is the first because mlir-air of 2026-07-29
    gives shim tiles to launches from the last to the first, each from where the one after it ended, and attention needs
    all of them.
    """
    launches = analysis.launches(module)
    if settles(module):
        launches[0].detach()
        launches[0].erase()
        _verify_joints(module)
        return
    last = launches[-1]
    stitched = re.match(r"launch(\d+)_", _segment_name(last))
    position = int(stitched[1]) + 1 if stitched else 1
    function = analysis.public_function(module)
    written = next((access for access in accesses(last, SETTLE) if access.written), None)
    if written is None:
        raise TypeError(f"{function.sym_name.data}: its last launch writes nothing")
    slot = _arguments(function)[written.slot]
    assert isinstance(slot.type, MemRefType)
    settling = _settling(slot.type, int(written.runs.starts.min()), written.runs.length)
    _rename(settling, f"launch{position}_")
    _arguments(settling.function)["slot"].replace_all_uses_with(slot)
    first = function.body.block.first_op
    assert first is not None
    function.body.block.insert_ops_before(_detached(_body(settling.function)), first)
    _verify_joints(module)
