"""Joins programs into one function: launches move, arguments are rewired by slot name. Operations, never text.

Knows modules and names; must not know which kernels they hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from xdsl.dialects import func
from xdsl.dialects.builtin import FunctionType, MemRefType, ModuleOp, StringAttr
from xdsl.ir import Block, BlockArgument, Region

from stages.air.builder import Program
from stages.air.dialect import HerdOp, SegmentOp


def stitch(name: str, slots: Mapping[str, MemRefType], parts: Sequence[tuple[Program, Mapping[str, str]]]) -> Program:
    """One function `name(slots)` that runs the launches of `parts` in order.

    Each part comes with its wiring, argument name -> slot name. The parts are consumed: their operations are moved.
    Symbols of segments and herds get `launch<position of the part>_` in front. TypeError if an argument does not fit its slot, or if
    one symbol is declared with two signatures (object variants carry their shapes in their names, so none should be).
    """
    block = Block(arg_types=list(slots.values()))
    values = dict(zip(slots, block.args, strict=True))
    for slot, value in values.items():
        value.name_hint = slot
    declared: dict[str, func.FuncOp] = {}
    for position, (program, wiring) in enumerate(parts):
        _merge_declarations(declared, program)
        _rename(program, f"launch{position}_")
        _move(program.function, wiring, values, block)
    block.add_op(func.ReturnOp())
    function = func.FuncOp(name, FunctionType.from_lists(list(slots.values()), []), Region(block))
    module = ModuleOp([*(declared[symbol] for symbol in sorted(declared)), function])
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
    """Segments and herds of one name would be taken for the same cores; give each its own."""
    for launch in program.launches:
        for op in launch.walk():
            if isinstance(op, SegmentOp | HerdOp) and op.sym_name is not None:
                op.sym_name = StringAttr(prefix + op.sym_name.data)


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
