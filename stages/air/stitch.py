"""Joins programs into one function: launches move, arguments are rewired by slot name. Operations, never text.

Knows modules and names; must not know which kernels they hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from xdsl.dialects import func
from xdsl.dialects.builtin import FunctionType, MemRefType, ModuleOp, StringAttr, SymbolRefAttr
from xdsl.ir import Block, BlockArgument, Region

from stages.air.builder import Program
from stages.air.dialect import ChannelGetOp, ChannelOp, ChannelPutOp, HerdOp, SegmentOp


def stitch(name: str, slots: Mapping[str, MemRefType], parts: Sequence[tuple[Program, Mapping[str, str]]]) -> Program:
    """One function `name(slots)` that runs the launches of `parts` in order.

    Each part comes with its wiring, argument name -> slot name. The parts are consumed: their operations are moved.
    Symbols of segments, herds and channels get `launch<position of the part>_` in front. TypeError if an argument does
    not fit its slot, or if one symbol is declared with two signatures (object variants carry their shapes in their
    names, so none should be).
    """
    block = Block(arg_types=list(slots.values()))
    values = dict(zip(slots, block.args, strict=True))
    for slot, value in values.items():
        value.name_hint = slot
    declared: dict[str, func.FuncOp] = {}
    channels: list[ChannelOp] = []
    for position, (program, wiring) in enumerate(parts):
        _merge_declarations(declared, program)
        _rename(program, f"launch{position}_")
        channels += _detach_channels(program)
        _move(program.function, wiring, values, block)
    block.add_op(func.ReturnOp())
    function = func.FuncOp(name, FunctionType.from_lists(list(slots.values()), []), Region(block))
    module = ModuleOp([*channels, *(declared[symbol] for symbol in sorted(declared)), function])
    module.verify()
    return Program(module, frozenset().union(*(program.variants for program, _ in parts)))


def _merge_declarations(declared: dict[str, func.FuncOp], program: Program) -> None:
    for op in list(program.module.body.block.ops):
        if not isinstance(op, func.FuncOp) or not op.is_declaration:
            continue
        known = declared.setdefault(op.sym_name.data, op)
        if known is op:
            op.detach()
        elif (known.function_type, known.attributes) != (op.function_type, op.attributes):
            raise TypeError(f"external function {op.sym_name.data} is declared twice, differently")


def _rename(program: Program, prefix: str) -> None:
    """Symbols of one name would be taken for the same cores or the same stream; give each its own."""
    for op in program.module.walk():
        if isinstance(op, SegmentOp | HerdOp | ChannelOp) and op.sym_name is not None:
            op.sym_name = StringAttr(prefix + op.sym_name.data)
        elif isinstance(op, ChannelPutOp | ChannelGetOp):
            op.chan_name = SymbolRefAttr(prefix + op.chan_name.string_value())


def _detach_channels(program: Program) -> list[ChannelOp]:
    channels = [op for op in program.module.body.block.ops if isinstance(op, ChannelOp)]
    for op in channels:
        op.detach()
    return channels


def _move(function: func.FuncOp, wiring: Mapping[str, str], values: Mapping[str, BlockArgument], block: Block) -> None:
    arguments = {str(arg.name_hint): arg for arg in function.body.block.args}
    if wiring.keys() != arguments.keys():
        raise TypeError(f"{function.sym_name.data}: arguments {sorted(arguments)}, wired {sorted(wiring)}")
    for name, argument in arguments.items():
        value = values[wiring[name]]
        if value.type != argument.type:
            raise TypeError(f"{function.sym_name.data}.{name} is {argument.type}, slot {wiring[name]} is {value.type}")
        argument.replace_all_uses_with(value)
    for op in list(function.body.block.ops):
        if not isinstance(op, func.ReturnOp):
            op.detach()
            block.add_op(op)
