"""Builds an AIR module for the simulator and runs it on numpy arrays."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from xdsl.dialects.builtin import ModuleOp

from runtime.devices.libraries import open_library
from runtime.devices.sim import SimProgram, Traffic
from stages import sim_build
from stages.air.printer import to_mlir
from stages.air_checks import public_function

_WORK = Path(tempfile.mkdtemp(prefix="sim-tests-"))


def aligned(array: np.ndarray) -> np.ndarray:
    """A copy that starts on a cache line, as device buffers do."""
    raw = np.empty(array.nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    out = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    out[...] = array
    return out


def compile_module(module: ModuleOp, flags: Sequence[str] = (), checks: bool = True) -> SimProgram:
    mlir = to_mlir(module)
    key = hashlib.sha256(f"{mlir}{flags}{checks}".encode()).hexdigest()[:16]
    target = _WORK / f"{key}.so"
    if not target.exists():
        sim_build.build(mlir, target, _WORK / key, _WORK / "objects", checks, ["-O1", *flags])
    return SimProgram(open_library(target), public_function(module).sym_name.data)


def run(
    module: ModuleOp, arrays: Sequence[np.ndarray], flags: Sequence[str] = (), reverse: bool = False
) -> tuple[list[np.ndarray], Traffic]:
    """Execute a module on copies of `arrays`, one per slot in order; what the slots hold afterwards, and the counts."""
    program = compile_module(module, flags)
    slots = [aligned(a) for a in arrays]
    for slot, nbytes, name in zip(slots, program.slot_bytes, program.slots, strict=True):
        assert slot.nbytes == nbytes, f"slot {name}: array of {slot.nbytes} bytes for {nbytes}"
    program.run([s.ctypes.data for s in slots], reverse)
    return slots, program.traffic()
