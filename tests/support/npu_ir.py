"""A stand-in for aircc: what its passes would leave of a module, made from the module alone, for fakes and faults.

Every stream is moved in descriptors of its own, one after the other; cores and memory tiles do nothing that counts.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import FuncOp

from stages import air
from stages.air import analysis, limits
from stages.air.access import Runs, accesses, in_order
from stages.air.dialect import LaunchOp, SegmentOp
from tests.support.objects import core_elf

Edit = Callable[[str], str]


def lowered(module: ModuleOp) -> str:
    """`npu.air.mlir`: a configuration and a sequence for each launch, the last first as the compiler leaves them,
    and the program that runs them in order."""
    function = analysis.public_function(module)
    made = analysis.launches(module)
    names = [_segment(launch) for launch in made]
    behind = reversed(list(zip(made, names, strict=True)))
    devices = [line for launch, name in behind for line in _device(function, launch, name)]
    given = ", ".join(f"%arg{i}" for i in range(len(function.body.block.args)))
    kinds = ", ".join(str(argument.type) for argument in function.body.block.args)
    steps = [
        line
        for name in names
        for line in (
            f"      aiex.configure @{name} {{",
            f"        aiex.run @{name}_sequence({given}) : ({kinds})",
            "      }",
        )
    ]
    main = f"    aie.runtime_sequence @{function.sym_name.data}({_arguments(function)}) {{"
    return "\n".join(["module {", *devices, "  aie.device(npu2) {", main, *steps, "    }", "  }", "}", ""])


def _segment(launch: LaunchOp) -> str:
    return next(analysis.name_of(op, "") for op in launch.body.block.ops if isinstance(op, SegmentOp))


def _arguments(function: FuncOp) -> str:
    return ", ".join(f"%arg{i}: {argument.type}" for i, argument in enumerate(function.body.block.args))


def _device(function: FuncOp, launch: LaunchOp, name: str) -> Iterator[str]:
    streams = list(_streams(launch))
    yield f"  aie.device(npu2) @{name} {{"
    yield "    %shim_noc_tile_0_0 = aie.tile(0, 0)"
    yield "    %tile_0_2 = aie.tile(0, 2)"
    yield "    %lock_0_2 = aie.lock(%tile_0_2, 0) {init = 1 : i32}"
    yield '    %buf0 = aie.buffer(%tile_0_2) {sym_name = "buf0"} : memref<64xbf16, 2 : i32>'
    yield "    %mem_0_2 = aie.mem(%tile_0_2) {"
    yield "      %0 = aie.dma_start(S2MM, 1, ^bb1, ^bb2)"
    yield "    ^bb1:  // 2 preds: ^bb0, ^bb1"
    yield "      aie.use_lock(%lock_0_2, AcquireGreaterEqual, 1)"
    yield "      aie.dma_bd(%buf0 : memref<64xbf16, 2 : i32>, 0, 64) {task_id = 0 : i32}"
    yield "      aie.use_lock(%lock_0_2, Release, 1)"
    yield "      aie.next_bd ^bb1"
    yield "    ^bb2:  // pred: ^bb0"
    yield "      %1 = aie.dma_start(MM2S, 0, ^bb3, ^bb4)"
    yield "    ^bb3:  // 2 preds: ^bb2, ^bb3"
    yield "      aie.dma_bd(%buf0 : memref<64xbf16, 2 : i32>, 0, 64)"
    yield "      aie.next_bd ^bb3"
    yield "    ^bb4:  // pred: ^bb2"
    yield "      aie.end"
    yield "    }"
    yield "    %core_0_2 = aie.core(%tile_0_2) {"
    yield "      cf.br ^bb1"
    yield f'    }} {{link_with = "x.o", stack_size = {limits.STACK_BYTES} : i32}}'
    yield "    aie.flow(%shim_noc_tile_0_0, DMA : 0, %tile_0_2, DMA : 1)"
    yield "    aie.flow(%tile_0_2, DMA : 0, %shim_noc_tile_0_0, DMA : 0)"
    for number, (_, written, _) in enumerate(streams):
        yield f"    aie.shim_dma_allocation @stream_{number}(%shim_noc_tile_0_0, {'S2MM' if written else 'MM2S'}, 0)"
    yield f"    aie.runtime_sequence @{name}_sequence({_arguments(function)}) {{"
    yield from _tasks(function, streams)
    yield "    }"
    yield "  } {dlti.dl_spec = #dlti.dl_spec<index = 32 : i64>}"


def _streams(launch: LaunchOp) -> Iterator[tuple[str, bool, Runs]]:
    """Yield the slot of each stream, whether it is written, and its runs in order.

    A row that goes to all cores is one stream, not one for each of its elements.
    """
    for access in accesses(launch, "launch"):
        ways = [way for way in access.ways if next(way.streams()).length > 1] or access.ways
        for runs in ways[-1].streams():
            yield access.slot, access.written, runs


def _tasks(function: FuncOp, streams: Sequence[tuple[str, bool, Runs]]) -> Iterator[str]:
    slots = {str(argument.name_hint): i for i, argument in enumerate(function.body.block.args)}
    task = 0
    for number, (slot, _, runs) in enumerate(streams):
        kind = function.body.block.args[slots[slot]].type
        for start, length in zip(*in_order([runs]), strict=True):
            yield f"      %{task} = aiex.dma_configure_task_for @stream_{number} {{"
            pattern = f"{start}, {length}, [<size = {length}, stride = 1>]"
            yield f"        aie.dma_bd(%arg{slots[slot]} : {kind}, {pattern})"
            yield "        aie.end"
            yield "      } {issue_token = true}"
            yield f"      aiex.dma_start_task(%{task})"
            yield f"      aiex.dma_await_task(%{task})"
            task += 1


def placed(text: str) -> str:
    """`input_with_addresses.mlir` of what `lowered` gave."""
    address = f'{{address = {limits.STACK_BYTES} : i32, mem_bank = 0 : i32, sym_name = "buf0"}}'
    return text.replace('{sym_name = "buf0"}', address)


def stream(resets: int) -> bytes:
    """Instructions that load two images in turn, and wait for a transfer behind each."""
    loads = (struct.pack("<8I", 8 | (2 - i % 2) << 16, 0, 0, 0, 0x80, 16, 0, 0) for i in range(resets))
    return struct.pack("<4I", 0, 0, 0, 0) + b"".join(loads)


def write_made(directory: Path, mlir: str, function: str, edit: Edit = lambda text: text) -> None:
    """What aircc and aiecc leave in their directory for temporary files. `edit` changes the lowered text."""
    directory.mkdir(parents=True, exist_ok=True)
    text = edit(lowered(air.parse_mlir(mlir)))
    (directory / "npu.air.mlir").write_text(text)
    (directory / "input_with_addresses.mlir").write_text(placed(text))
    for device in re.findall(r"aie\.device\(npu2\) @(\w+) \{", text):
        (directory / f"{device}_core_0_2.elf").write_bytes(core_elf())
    made = stream(text.count("aiex.configure") + text.count("aiex.npu.load_pdi"))
    (directory / f"main_{function}.bin").write_bytes(made)
    kernel = {"name": "main", "arguments": [], "PDIs": []}
    kernel["instance"] = [{"id": function, "TXN_ctrl_code_file": str(directory.absolute() / f"main_{function}.bin")}]
    (directory / "full_elf_config.json").write_text(json.dumps({"xrt-kernels": [kernel]}))
