"""A stand-in for XRT's Python bindings that executes the simulator's shared objects and fails loudly on misuse.

Its interface is `pyxrt_declarations.txt`, nothing more. Host and device each have their own copy of every buffer
object, so what is not synchronised is not seen: a program bound to bytes which the host changed since the last sync is
refused, and bytes that a program wrote are poison (0xFF, a NaN) to the host until they are synchronised.
`install` puts a fresh one into `sys.modules`, with switches for older releases and for faults.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import sys
import weakref
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from llama_npu2.devices.libraries import open_library
from llama_npu2.devices.sim import SimProgram

DECLARATIONS = Path(__file__).parent / "pyxrt_declarations.txt"
POISON, RELEASED = 0xFF, 0xDB


@dataclass
class World:
    """One installed stand-in: its switches, what is alive, what was done wrong where no exception can be raised."""

    runlist: bool = True
    add_config: bool = True
    merge: bool = False
    """Whether a context takes ELFs whose kernels have one name if the instances differ; XRT does not."""
    fail_config: str = ""
    """What XRT says when an ELF is added to a context, if not that a name is taken."""
    fail_alloc: int = 0
    """The n-th buffer object cannot be allocated."""
    time_out: int = 0
    """The n-th run is ended by the driver's deadline."""
    hang: int = 0
    """The n-th run never ends."""
    vanish: int = 0
    """From the n-th call of the driver on there is no device."""
    live: dict[str, weakref.WeakSet] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    counts: Counter = field(default_factory=Counter)

    def born(self, thing: Any) -> None:
        self.live.setdefault(type(thing).__name__.lstrip("_"), weakref.WeakSet()).add(thing)

    def alive(self) -> dict[str, int]:
        return {kind: len(things) for kind, things in self.live.items() if len(things)}

    def driver_call(self) -> None:
        self.counts["driver_calls"] += 1
        if self.vanish and self.counts["driver_calls"] >= self.vanish:
            raise RuntimeError("DRM_IOCTL_AMDXDNA_EXEC_CMD IOCTL failed (err=-19): No such device")


WORLD = World()


class xclBOSyncDirection(Enum):
    XCL_BO_SYNC_BO_TO_DEVICE = 0
    XCL_BO_SYNC_BO_FROM_DEVICE = 1


class ert_cmd_state(Enum):
    ERT_CMD_STATE_NEW = 1
    ERT_CMD_STATE_QUEUED = 2
    ERT_CMD_STATE_COMPLETED = 4
    ERT_CMD_STATE_ERROR = 5
    ERT_CMD_STATE_ABORT = 6
    ERT_CMD_STATE_SUBMITTED = 7
    ERT_CMD_STATE_TIMEOUT = 8
    ERT_CMD_STATE_NORESPONSE = 9
    ERT_CMD_STATE_SKERROR = 10
    ERT_CMD_STATE_SKCRASHED = 11


def _typed(value: Any, kind: Any) -> Any:
    """Overload resolution of the bindings: a wrong type is a TypeError."""
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f"incompatible function arguments: {value!r} is not {kind}")
    return value


class device:
    def __init__(self, index: int) -> None:
        WORLD.driver_call()
        if _typed(index, int) != 0:
            raise RuntimeError(f"Could not open device with index '{index}'")
        WORLD.born(self)

    def __del__(self) -> None:
        # Of the rest, frames of an exception on its way may hold something for a moment.
        held = {kind: count for kind, count in WORLD.alive().items() if kind in ("kernel", "hw_context", "Context")}
        if held:
            WORLD.violations.append(f"device released before {held}")


class elf:
    def __init__(self, path: str) -> None:
        self.path = Path(_typed(path, str))
        if not self.path.is_file() or self.path.read_bytes()[:4] != b"\x7fELF":
            raise RuntimeError(f"{path}: not an ELF file")
        self.instances = {name.decode() for name in re.findall(rb"\0(\w+)_info\0", self.path.read_bytes())}
        WORLD.born(self)


class _Context:
    def __init__(self, device_: device, elf_: elf) -> None:
        _typed(device_, device)
        WORLD.driver_call()
        self.device = weakref.ref(device_)
        self.elfs = [_typed(elf_, elf)]
        WORLD.born(self)


class hw_context(_Context):
    def add_config(self, elf_: elf) -> None:
        if WORLD.fail_config:
            raise RuntimeError(WORLD.fail_config)
        if not WORLD.merge or {name for old in self.elfs for name in old.instances} & elf_.instances:
            raise RuntimeError("kernel already exists, cannot use this ELF with this hw ctx\n")
        self.elfs.append(_typed(elf_, elf))


class bo:
    def __init__(self, parent: bo, size: int, offset: int) -> None:
        _typed(parent, bo)
        if offset < 0 or size < 1 or offset + size > parent.nbytes:
            raise RuntimeError("sub buffer size and offset: Invalid argument")
        self.parent = parent
        self.nbytes, self.start = size, parent.start + offset
        WORLD.born(self)

    @property
    def root(self) -> Any:
        return self.parent.root

    def sync(self, direction: xclBOSyncDirection, size: int | None = None, offset: int = 0) -> None:
        _typed(direction, xclBOSyncDirection)
        WORLD.driver_call()
        size = self.nbytes if size is None else size
        if offset < 0 or offset + size > self.nbytes:
            raise RuntimeError("Invalid offset and size when syncing buffer: Invalid argument")
        part = slice(self.start + offset, self.start + offset + size)
        root = self.root
        if direction is xclBOSyncDirection.XCL_BO_SYNC_BO_TO_DEVICE:
            root.on_device[part] = root.on_host[part]
            WORLD.counts["to_device"] += size
        else:
            root.on_host[part] = root.on_device[part]
            WORLD.counts["from_device"] += size
        root.synced[part] = root.on_host[part]

    def map(self) -> memoryview:
        return memoryview(self.root.memory)[self.start : self.start + self.nbytes]

    def size(self) -> int:
        return self.nbytes


class ext_bo(bo):
    def __init__(self, device_or_context: device | hw_context, size: int) -> None:
        _typed(device_or_context, device | _Context)
        WORLD.driver_call()
        WORLD.counts["allocated"] += 1
        if WORLD.counts["allocated"] == WORLD.fail_alloc:
            raise RuntimeError("DRM_IOCTL_AMDXDNA_CREATE_BO IOCTL failed (err=-12): Cannot allocate memory")
        self.nbytes, self.start = _typed(size, int), 0
        self.memory = mmap.mmap(-1, size)
        self.on_host = np.frombuffer(self.memory, np.uint8)
        # Fresh memory holds anything.
        self.on_host[:] = 0x5A
        device_memory = np.frombuffer(mmap.mmap(-1, size), np.uint8)
        device_memory[:] = 0xA5
        self.on_device = device_memory
        self.synced = self.on_host.copy()
        WORLD.born(self)

    @property
    def root(self) -> ext_bo:
        return self

    def __del__(self) -> None:
        if hasattr(self, "on_host"):
            self.on_host[:] = RELEASED


class kernel:
    def __init__(self, context: hw_context, name: str) -> None:
        kind, _, instance = _typed(name, str).partition(":")
        if kind != "main" or not instance:
            raise RuntimeError("no ELF found with given kernel name in ctx")
        self.context = weakref.ref(_typed(context, _Context))
        self.program = self._find(context, instance)
        self.name = instance
        WORLD.born(self)

    @staticmethod
    def _find(context: hw_context, instance: str) -> SimProgram:
        for elf_ in context.elfs:
            library = open_library(elf_.path)
            if hasattr(library, instance):
                return SimProgram(library, instance)
        raise RuntimeError(f"cannot get kernel instance {instance}")


class run:
    def __init__(self, kernel_: kernel) -> None:
        self.kernel = weakref.ref(_typed(kernel_, kernel))
        self.arguments: dict[int, Any] = {}
        self.now = ert_cmd_state.ERT_CMD_STATE_NEW
        self.listed = self.unchecked = False
        WORLD.born(self)

    def _kernel(self) -> kernel:
        found = self.kernel()
        if found is None or found.context() is None or found.context().device() is None:
            raise RuntimeError("run used after its kernel, context or device was released")
        return found

    def set_arg(self, index: int, item: bo | int) -> None:
        if self.now is ert_cmd_state.ERT_CMD_STATE_SUBMITTED:
            raise RuntimeError("xrt::run::set_arg called while command is still in progress")
        if not 0 <= _typed(index, int) < len(self._kernel().program.slots):
            raise IndexError(f"argument index {index} out of range")
        self.arguments[index] = _typed(item, bo | int)

    def start(self) -> None:
        if self.listed:
            raise RuntimeError("a run of a run list cannot be started")
        self._submit()
        WORLD.counts["submissions"] += 1

    def _submit(self) -> None:
        WORLD.driver_call()
        if self.unchecked:
            raise RuntimeError(f"{self._kernel().name}: started again before its state was looked at")
        if missing := set(range(len(self._kernel().program.slots))) - self.arguments.keys():
            raise RuntimeError(f"{self._kernel().name}: argument {min(missing)} is not set")
        self.now = ert_cmd_state.ERT_CMD_STATE_SUBMITTED
        self.unchecked = not self.listed

    def _finish(self) -> None:
        if self.now is not ert_cmd_state.ERT_CMD_STATE_SUBMITTED:
            return
        WORLD.counts["runs"] += 1
        if WORLD.counts["runs"] == WORLD.hang:
            return
        if WORLD.counts["runs"] == WORLD.time_out:
            self.now = ert_cmd_state.ERT_CMD_STATE_TIMEOUT
            return
        _execute(self._kernel().program, [self.arguments[i] for i in sorted(self.arguments)])
        self.now = ert_cmd_state.ERT_CMD_STATE_COMPLETED

    def wait(self, timeout_ms: int = 0) -> ert_cmd_state:
        _typed(timeout_ms, int)
        if self.now is ert_cmd_state.ERT_CMD_STATE_NEW:
            raise RuntimeError("waiting for a run that was not started")
        WORLD.driver_call()
        self._finish()
        still_running = self.now is ert_cmd_state.ERT_CMD_STATE_SUBMITTED
        return ert_cmd_state.ERT_CMD_STATE_TIMEOUT if still_running else self.now

    def wait2(self) -> None:
        self.unchecked = False
        if self.wait() is not ert_cmd_state.ERT_CMD_STATE_COMPLETED:
            raise RuntimeError(f"Command failed to complete successfully ({self.now.name})")

    def state(self) -> ert_cmd_state:
        self.unchecked = False
        return self.now


class runlist:
    def __init__(self, context: hw_context) -> None:
        self.context = weakref.ref(_typed(context, _Context))
        self.runs: list[run] = []
        self.running = False
        WORLD.born(self)

    def add(self, run_: run) -> None:
        if _typed(run_, run)._kernel().context() is not self.context():
            raise RuntimeError("run is of another hardware context than the run list")
        run_.listed = True
        self.runs.append(run_)

    def execute(self) -> None:
        if self.running:
            raise RuntimeError("runlist must be idle before submitting for execution, current state: running")
        self.running = True
        WORLD.counts["submissions"] += 1
        for run_ in self.runs:
            run_._submit()

    def wait(self) -> None:
        if not self.running:
            return
        self.running = False
        for index, run_ in enumerate(self.runs):
            run_._finish()
            if run_.now is not ert_cmd_state.ERT_CMD_STATE_COMPLETED:
                if run_.now is ert_cmd_state.ERT_CMD_STATE_SUBMITTED:
                    run_.now = ert_cmd_state.ERT_CMD_STATE_TIMEOUT
                for later in self.runs[index + 1 :]:
                    later.now = ert_cmd_state.ERT_CMD_STATE_ABORT
                raise RuntimeError(f"runlist failed execution ({run_.now.name})")


def _execute(program: SimProgram, arguments: list[bo]) -> None:
    for index, (argument, slot, nbytes) in enumerate(zip(arguments, program.slots, program.slot_bytes, strict=True)):
        if argument.nbytes < nbytes:
            raise RuntimeError(f"{program.name}: argument {index} ({slot}) has {argument.nbytes} bytes, not {nbytes}")
        root, part = argument.root, slice(argument.start, argument.start + nbytes)
        if not np.array_equal(root.on_host[part], root.synced[part]):
            where = argument.start + int(np.argmax(root.on_host[part] != root.synced[part]))
            raise RuntimeError(f"{program.name}: {slot} byte {where} was written by the host and not synchronised")
    before = [_written(program, slot) for slot in program.slots]
    parts = [a.root.on_device[a.start : a.start + n] for a, n in zip(arguments, program.slot_bytes, strict=True)]
    old = [part.copy() for part in parts]
    program.run([part.ctypes.data for part in parts])
    for argument, slot, count, part, was in zip(arguments, program.slots, before, parts, old, strict=True):
        if _written(program, slot) > count:
            changed = argument.start + np.flatnonzero(part != was)
            argument.root.on_host[changed] = argument.root.synced[changed] = POISON


def _written(program: SimProgram, slot: str) -> int:
    return sum(launch.get(slot, (0, 0))[1] for launch in program.counters().slots)


def install(**switches: Any) -> World:
    """A fresh stand-in as `pyxrt`; returns its world."""
    global WORLD
    WORLD = World(**switches)
    module, ext = ModuleType("pyxrt"), ModuleType("pyxrt.ext")
    for thing in (device, elf, bo, kernel, run, xclBOSyncDirection, ert_cmd_state):
        setattr(module, thing.__name__, thing)
    module.hw_context = hw_context if WORLD.add_config else _Context
    if WORLD.runlist:
        module.runlist = runlist
    ext.bo, ext.kernel, module.ext = ext_bo, kernel, ext
    sys.modules["pyxrt"] = module
    return WORLD


if switches := os.environ.get("PYXRT_STANDIN"):
    install(**json.loads(switches))
