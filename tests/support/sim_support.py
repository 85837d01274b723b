"""Builds an AIR module for the simulator and runs it on numpy arrays."""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from xdsl.dialects import func
from xdsl.dialects.builtin import ModuleOp

from llama_npu2.artifact.storage import File
from llama_npu2.devices.libraries import open_library
from llama_npu2.devices.sim import Counters, SimProgram
from stages.air import Variant, to_mlir
from stages.air.analysis import public_function
from stages.engine.object_cache import copy_cached
from stages.engine.objects import compile_object
from stages.engine.places import KERNELS
from stages.targets.cpu.toolchain import need_host_compiler
from stages.targets.npu2_sim.modules import DEVICE
from stages.targets.npu2_sim.objects import compile_tile, options
from stages.targets.npu2_sim.programs import cached_program, link
from tests.support.kept_objects import cache_of_runs

_HELD = tempfile.TemporaryDirectory(prefix="sim-tests-")
_WORK = Path(_HELD.name)


def aligned(array: np.ndarray) -> np.ndarray:
    """A copy that starts on a cache line, as device buffers do."""
    raw = np.empty(array.nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    out = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    out[...] = array
    return out


def variant(name: str) -> Variant:
    """What an object's name spells out: `gemm_tk32_tm64_tn128.o` -> gemm with TK=32, TM=64, TN=128."""
    stem = max((p.stem for p in (KERNELS / "aie2p").glob("*.cc") if name.startswith(f"{p.stem}_")), key=len)
    pairs = re.findall(r"_([a-z_]+?)(\d+)(?=_|\.o$)", name.removeprefix(stem))
    found = Variant.of(stem, **{macro.upper(): int(value) for macro, value in pairs})
    assert found.object == name
    return found


def objects(module: ModuleOp, chosen: Sequence[str]) -> list[Path]:
    """What a module's declarations link, and the device."""
    names = {
        op.attributes["link_with"].data  # type: ignore[attr-defined]
        for op in module.body.block.ops
        if isinstance(op, func.FuncOp) and op.is_declaration
    }
    cache = cache_of_runs("sim", _WORK)
    made = [compile_tile(f"aie2p/{v.stem}", cache, v.object, v.flags(), chosen) for v in map(variant, sorted(names))]
    return [each.path for each in (*made, compile_tile(DEVICE, cache, "device.o", (), chosen))]


def compile_module(module: ModuleOp, flags: Sequence[str] = (), checks: bool = True) -> SimProgram:
    chosen = options(checks, flags)
    key = hashlib.sha256(f"{to_mlir(module)}{chosen}".encode()).hexdigest()[:16]
    target = _WORK / f"{key}.so"
    if not target.exists():
        made = partial(cached_program, module, objects(module, chosen), "program", cache_of_runs("sim", _WORK), chosen)
        copy_cached(made, target)
    return SimProgram(open_library(File.at(target)), public_function(module).sym_name.data)


def compile_with(module: ModuleOp, source: Path, work: Path) -> SimProgram:
    """A module whose tile functions are those of a C++ source of the test's own."""
    chosen, made = options(), source.with_suffix(".o")
    compile_object([*need_host_compiler(), *chosen], source, made, "the test's source does not compile")
    device = compile_tile(DEVICE, cache_of_runs("sim", _WORK), "device.o", (), chosen)
    library = link(module, [made, device.path], work / "program.so", work / "generated", chosen)
    return SimProgram(open_library(File.at(library)), public_function(module).sym_name.data)


def run(
    module: ModuleOp,
    arrays: Sequence[np.ndarray],
    flags: Sequence[str] = (),
    reverse: bool = False,
    views: Mapping[int, tuple[int, int]] | None = None,
) -> tuple[list[np.ndarray], Counters]:
    """Execute a module on copies of `arrays`, one per slot in order; what the slots hold afterwards, and the counts.
    `views`: slots that are another's rows, of the same width, from one on."""
    program = compile_module(module, flags)
    slots = [aligned(a) for a in arrays]
    for slot, (other, first) in (views or {}).items():
        slots[slot] = slots[other][first : first + len(slots[slot])]
    for slot, nbytes, name in zip(slots, program.slot_bytes, program.slots, strict=True):
        assert slot.nbytes == nbytes, f"slot {name}: array of {slot.nbytes} bytes for {nbytes}"
    program.run([s.ctypes.data for s in slots], reverse)
    return slots, program.counters()
