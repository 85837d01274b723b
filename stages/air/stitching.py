"""Joins programs into one function: launches move, arguments are rewired by slot name. Operations, never text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from xdsl.dialects import func
from xdsl.dialects.builtin import FunctionType, ModuleOp, StringAttr, SymbolRefAttr
from xdsl.ir import Attribute, Block, BlockArgument, Region

from stages.air.builder import AirModule
from stages.air.dialect import ChannelGetOp, ChannelOp, ChannelPutOp, HerdOp, SegmentOp

Part = tuple[AirModule, Mapping[str, str]]
"""A module and its wiring: argument name -> slot name."""


def stitch(name: str, slots: Sequence[str], parts: Sequence[Part]) -> AirModule:
    """One function `name(slots)` that runs the launches of `parts` in order. A slot has the type of its arguments.

    The parts are consumed: their operations are moved. Symbols of segments, herds and channels get
    `launch<position of the part>_` in front. TypeError if arguments wired to one slot differ in type, if arguments and
    wiring or slots and wirings do not match, or if one symbol is declared with two signatures (object variants carry
    their shapes in their names, so none should be).
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
        channels += _detach_channels(module)
        _move(module.function, wiring, values, block)
    block.add_op(func.ReturnOp())
    function = func.FuncOp(name, FunctionType.from_lists(types, []), Region(block))
    stitched = ModuleOp([*channels, *(declared[symbol] for symbol in sorted(declared)), function])
    stitched.verify()
    return AirModule(stitched, frozenset().union(*(module.variants for module, _ in parts)))


def _slot_types(name: str, slots: Sequence[str], parts: Sequence[Part]) -> list[Attribute]:
    """The type of every slot, in order: that of the arguments wired to it."""
    found: dict[str, tuple[str, Attribute]] = {}
    for module, wiring in parts:
        function, arguments = module.function.sym_name.data, _arguments(module.function)
        if wiring.keys() != arguments.keys():
            raise TypeError(f"{function}: arguments {sorted(arguments)}, wired {sorted(wiring)}")
        for argument, slot in wiring.items():
            use = f"{function}.{argument}", arguments[argument].type
            first = found.setdefault(slot, use)
            if first[1] != use[1]:
                raise TypeError(f"{name}, slot {slot}: {first[0]} is {first[1]}, {use[0]} is {use[1]}")
    if found.keys() != set(slots):
        raise TypeError(f"{name}: slots {sorted(slots)}, wired {sorted(found)}")
    return [found[slot][1] for slot in slots]


def _arguments(function: func.FuncOp) -> dict[str, BlockArgument]:
    return {str(arg.name_hint): arg for arg in function.body.block.args}


def _merge_declarations(declared: dict[str, func.FuncOp], module: AirModule) -> None:
    for op in list(module.module.body.block.ops):
        if not isinstance(op, func.FuncOp) or not op.is_declaration:
            continue
        known = declared.setdefault(op.sym_name.data, op)
        if known is op:
            op.detach()
        elif (known.function_type, known.attributes) != (op.function_type, op.attributes):
            raise TypeError(f"external function {op.sym_name.data} is declared twice, differently")


def _rename(module: AirModule, prefix: str) -> None:
    """Symbols of one name would be taken for the same cores or the same stream; give each its own."""
    for op in module.module.walk():
        if isinstance(op, SegmentOp | HerdOp | ChannelOp) and op.sym_name is not None:
            op.sym_name = StringAttr(prefix + op.sym_name.data)
        elif isinstance(op, ChannelPutOp | ChannelGetOp):
            op.chan_name = SymbolRefAttr(prefix + op.chan_name.string_value())


def _detach_channels(module: AirModule) -> list[ChannelOp]:
    channels = [op for op in module.module.body.block.ops if isinstance(op, ChannelOp)]
    for op in channels:
        op.detach()
    return channels


def _move(function: func.FuncOp, wiring: Mapping[str, str], values: Mapping[str, BlockArgument], block: Block) -> None:
    for name, argument in _arguments(function).items():
        argument.replace_all_uses_with(values[wiring[name]])
    for op in list(function.body.block.ops):
        if not isinstance(op, func.ReturnOp):
            op.detach()
            block.add_op(op)
