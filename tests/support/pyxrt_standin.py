"""A stand-in for XRT's Python bindings and the NPU behind them that executes the simulator's shared objects, fails
loudly on misuse and as the hardware does where that is silent.

Its interface is `pyxrt_declarations.txt`, nothing more. Host and device each have their own copy of every buffer
object, so what is not synchronised is not seen: a program bound to bytes which the host changed since the last sync is
refused, and bytes that a program wrote are poison (0xFF, a NaN) to the host until they are synchronised. What a shared
object cannot say of the ELF that it stands for (`Facts`) is in a trailer behind it. Driver and firmware: the watchdog
on the modelled time of a command, the heap for instruction buffers, commands in flight, contexts, the reset that is
ignored because the image is loaded already. `install` puts a fresh one into `sys.modules`, with switches for older
releases and for faults.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from llama_npu2.artifact.storage import File
from llama_npu2.devices.libraries import open_library
from llama_npu2.devices.sim import SimProgram

DECLARATIONS = Path(__file__).parent / "pyxrt_declarations.txt"
POISON, RELEASED, GARBAGE = 0xFF, 0xDB, 0x1B
NEWEST = "2.25.0"
TRAILER = b"llama-npu2-standin:"

# Of driver and XRT, see `llama_npu2.devices.xrt.limits`; said again because this is what the runtime is held against.
CHAIN, IN_FLIGHT, GRANULE, IMAGES = 24, 4, 32 << 10, 2  # IN_FLIGHT: `HWCTX_MAX_CMDS`


@dataclass(frozen=True)
class Facts:
    """What an ELF says beside its code: XRT's name of the kernel, configuration resets per dispatch, bytes of the
    instruction stream, modelled time of a dispatch."""

    kernel: str = "main"
    resets: int = 2
    instruction_bytes: int = 0
    milliseconds: float = 0.0

    @staticmethod
    def of(content: bytes) -> Facts:
        """From the last trailer in a file's bytes; more keys than these are somebody else's."""
        _, found, text = content.rpartition(TRAILER)
        values = json.JSONDecoder().raw_decode(text.decode(errors="replace"))[0] if found else {}
        return Facts(**{field.name: values[field.name] for field in fields(Facts) if field.name in values})

    def trailer(self) -> bytes:
        """To be put behind a shared object."""
        return TRAILER + json.dumps(asdict(self)).encode()


@dataclass
class World:
    """One installed stand-in: its switches, what is alive, what was done wrong where no exception can be raised."""

    version: str = NEWEST
    """The release of XRT: what it does not have yet is not there."""
    runlist: bool = True
    watchdog: float = 2000.0
    """Milliseconds after which the driver ends a command and recovers the context."""
    slow: float = 1.0
    """How many times as long as modelled the programs take."""
    heap: int = 64 << 20
    contexts: int = 16
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
    commands: list[float] = field(default_factory=list)
    """Modelled milliseconds of each command that came to its end."""
    violations: list[str] = field(default_factory=list)
    counts: Counter = field(default_factory=Counter)

    def born(self, thing: Any) -> None:
        self.live.setdefault(type(thing).__name__.lstrip("_"), weakref.WeakSet()).add(thing)

    def alive(self) -> dict[str, int]:
        return {kind: len(things) for kind, things in self.live.items() if len(things)}

    def has(self, since: str) -> bool:
        return release(self.version) >= release(since)

    def living(self, *kinds: str) -> list[Any]:
        return [thing for kind in kinds for thing in self.live.get(kind, ())]

    def allocate(self, granules: int) -> None:
        """On the device heap, beside what is there; freed when what holds it dies."""
        granules += sum(thing.granules for thing in self.living("run", "kernel", "Context", "hw_context"))
        self.counts["heap"] = max(self.counts["heap"], granules * GRANULE)
        if granules * GRANULE > self.heap:
            raise RuntimeError("DRM_IOCTL_AMDXDNA_CREATE_BO IOCTL failed (err=-28): No space left on device")

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
        file = Path(_typed(path, str))
        content = file.read_bytes() if file.is_file() else b""
        if content[:4] != b"\x7fELF":
            raise RuntimeError(f"{path}: not an ELF file")
        self.library = open_library(File.at(file))
        self.facts = Facts.of(content)
        self.instances = {name.decode() for name in re.findall(rb"\0(\w+)_info\0", content)}
        self.image: int | None = None
        """Which of its two empty images the array was reset with last. That what else runs in between makes the
        firmware forget it is written nowhere."""
        WORLD.born(self)

    def reset(self) -> bool:
        """The resets of a dispatch, alternating between the images from the first on. Whether the array was reset: the
        firmware ignores a load of the image that is loaded."""
        done = self.image != 0
        if self.facts.resets:
            self.image = (self.facts.resets - 1) % 2
        return done


class _Xclbin:
    """A context of releases that take no ELF."""

    def __init__(self, device_: device, uuid: Any) -> None:
        """__init__(self: pyxrt.hw_context, arg0: xrt::device, arg1: pyxrt.uuid) -> None"""
        raise TypeError(f"__init__(): incompatible constructor arguments: {uuid!r} is no uuid")


class _Context:
    def __init__(self, device_: device, elf_: elf) -> None:
        """__init__(self: pyxrt.hw_context, arg0: xrt::device, arg1: xrt::elf) -> None"""
        _typed(device_, device)
        WORLD.driver_call()
        if len(WORLD.living("Context", "hw_context")) >= WORLD.contexts:
            raise RuntimeError("DRM_IOCTL_AMDXDNA_CREATE_HWCTX IOCTL failed (err=-2): No such file or directory")
        self.device = weakref.ref(device_)
        self.kernels = {_typed(elf_, elf).facts.kernel: elf_}
        self.in_flight: list[_Command] = []
        WORLD.allocate(granules=IN_FLIGHT)
        self.granules = IN_FLIGHT
        WORLD.born(self)

    def _submit(self, command: _Command) -> None:
        """Blocks while the driver has as many commands of this context as it takes."""
        WORLD.driver_call()
        if len(self.in_flight) == IN_FLIGHT:
            WORLD.counts["blocked"] += 1
            self.in_flight.pop(0).finish()
        self.in_flight.append(command)

    def _finish(self, last: _Command) -> None:
        """Run commands, in order, up to the last."""
        while last in self.in_flight:
            self.in_flight.pop(0).finish()

    def _recover(self) -> None:
        """What the driver does about a command that hangs: all that is under way is lost, and what was loaded."""
        WORLD.counts["recoveries"] += 1
        for command in self.in_flight:
            for run_ in command.runs:
                run_.now = ert_cmd_state.ERT_CMD_STATE_ABORT
            command.runs.clear()
        self.in_flight.clear()
        for elf_ in self.kernels.values():
            elf_.image = None


class hw_context(_Context):
    def add_config(self, elf_: elf) -> None:
        if WORLD.fail_config:
            del self  # XRT is no Python: an error's traceback holds nothing of it
            raise RuntimeError(WORLD.fail_config)
        if _typed(elf_, elf).facts.kernel in self.kernels:
            raise RuntimeError("kernel already exists, cannot use this ELF with this hw ctx\n")
        self.kernels[elf_.facts.kernel] = elf_


class _Command:
    """What is one job to the driver: a run, or the chain that XRT makes of so many runs of a list."""

    def __init__(self, runs: list[run]) -> None:
        self.runs = runs

    def finish(self) -> None:
        elapsed, runs, self.runs = 0.0, self.runs, []
        for index, run_ in enumerate(runs):
            if run_.now is not ert_cmd_state.ERT_CMD_STATE_SUBMITTED:
                return
            WORLD.counts["runs"] += 1
            if WORLD.counts["runs"] == WORLD.hang:
                return
            elapsed += run_.milliseconds * WORLD.slow
            if elapsed > WORLD.watchdog or WORLD.counts["runs"] == WORLD.time_out:
                for later in runs[index + 1 :]:
                    later.now = ert_cmd_state.ERT_CMD_STATE_ABORT
                run_.now = ert_cmd_state.ERT_CMD_STATE_TIMEOUT
                run_._context()._recover()
                return
            run_._execute()
            run_.now = ert_cmd_state.ERT_CMD_STATE_COMPLETED
        WORLD.commands.append(elapsed)


class bo:
    def __init__(self, parent: bo, size: int, offset: int) -> None:
        _typed(parent, bo)
        if offset < 0 or size < 1 or offset + size > parent.nbytes:
            raise RuntimeError("sub buffer size and offset: Invalid argument")
        if parent is not parent.root:
            WORLD.violations.append("part of a part: its address lacks where the outer one begins")
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
        self.elf = _typed(context, _Context).kernels.get(kind)
        if self.elf is None:
            raise RuntimeError("no ELF found with given kernel name in ctx")
        if instance not in self.elf.instances:
            raise RuntimeError(f"Unable to find group idx for given kernel: {name}")
        self.context = weakref.ref(context)
        self.program = SimProgram(self.elf.library, instance)
        self.name = instance
        self.granules = 0 if WORLD.has("2.23") else IMAGES
        """The device images of its runs, in releases where not each run has its own."""
        WORLD.born(self)


class run:
    def __init__(self, kernel_: kernel) -> None:
        self.kernel = weakref.ref(_typed(kernel_, kernel))
        self.arguments: dict[int, Any] = {}
        self.now = ert_cmd_state.ERT_CMD_STATE_NEW
        self.listed = self.unchecked = False
        self.command: _Command | None = None
        facts = kernel_.elf.facts
        self.milliseconds = facts.milliseconds
        granules = -(-facts.instruction_bytes // GRANULE) + IMAGES - kernel_.granules
        # The bindings leave no frame behind that holds it when this fails.
        del kernel_
        WORLD.allocate(granules)
        self.granules = granules
        WORLD.born(self)

    def _kernel(self) -> kernel:
        found = self.kernel()
        if found is None or found.context() is None or found.context().device() is None:
            raise RuntimeError("run used after its kernel, context or device was released")
        return found

    def _context(self) -> _Context:
        return self._kernel().context()

    def set_arg(self, index: int, item: bo | int) -> None:
        if self.now is ert_cmd_state.ERT_CMD_STATE_SUBMITTED:
            raise RuntimeError("xrt::run::set_arg called while command is still in progress")
        if not 0 <= _typed(index, int) < len(self._kernel().program.slots):
            raise IndexError(f"argument index {index} out of range")
        self.arguments[index] = _typed(item, bo | int)

    def start(self) -> None:
        if self.listed:
            raise RuntimeError("Run object belongs to a runlist and cannot be explicitly started")
        self._prepare()
        self.unchecked = True
        self.command = _Command([self])
        self._context()._submit(self.command)
        WORLD.counts["submissions"] += 1

    def _prepare(self) -> None:
        if self.unchecked:
            raise RuntimeError(f"{self._kernel().name}: started again before its state was looked at")
        if missing := set(range(len(self._kernel().program.slots))) - self.arguments.keys():
            raise RuntimeError(f"{self._kernel().name}: argument {min(missing)} is not set")
        self.now = ert_cmd_state.ERT_CMD_STATE_SUBMITTED

    def _execute(self) -> None:
        kernel_ = self._kernel()
        execute(kernel_.program, [self.arguments[i] for i in sorted(self.arguments)], not kernel_.elf.reset())

    def wait(self, timeout_ms: int = 0) -> ert_cmd_state:
        _typed(timeout_ms, int)
        if self.command is None:
            raise RuntimeError("waiting for a run that was not started")
        WORLD.driver_call()
        self._context()._finish(self.command)
        still_running = self.now is ert_cmd_state.ERT_CMD_STATE_SUBMITTED
        return ert_cmd_state.ERT_CMD_STATE_TIMEOUT if still_running else self.now

    def state(self) -> ert_cmd_state:
        self.unchecked = False
        return self.now


class runlist:
    def __init__(self, context: hw_context) -> None:
        self.context = weakref.ref(_typed(context, _Context))
        self.runs: list[run] = []
        self.commands: list[_Command] = []
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
        for run_ in self.runs:
            run_._prepare()
        self.running = True
        WORLD.counts["submissions"] += 1
        self.commands = [_Command(self.runs[at : at + CHAIN]) for at in range(0, len(self.runs), CHAIN)]
        for command in self.commands:
            self.context()._submit(command)

    def wait(self) -> None:
        if not self.running:
            return
        WORLD.driver_call()
        self.running = False
        for command in self.commands:
            self.context()._finish(command)
        for index, run_ in enumerate(self.runs):
            if run_.now is not ert_cmd_state.ERT_CMD_STATE_COMPLETED:
                if run_.now is ert_cmd_state.ERT_CMD_STATE_SUBMITTED:
                    run_.now = ert_cmd_state.ERT_CMD_STATE_TIMEOUT
                for later in self.runs[index + 1 :]:
                    later.now = ert_cmd_state.ERT_CMD_STATE_ABORT
                raise RuntimeError(f"runlist failed execution ({run_.now.name})")


def execute(program: SimProgram, arguments: list[bo], garbage: bool) -> None:
    for index, (argument, slot, nbytes) in enumerate(zip(arguments, program.slots, program.slot_bytes, strict=True)):
        if argument.nbytes < nbytes:
            raise RuntimeError(f"{program.name}: argument {index} ({slot}) has {argument.nbytes} bytes, not {nbytes}")
        root, part = argument.root, slice(argument.start, argument.start + nbytes)
        if not np.array_equal(root.on_host[part], root.synced[part]):
            where = argument.start + int(np.argmax(root.on_host[part] != root.synced[part]))
            raise RuntimeError(f"{program.name}: {slot} byte {where} was written by the host and not synchronised")
    before = program.written
    parts = [a.root.on_device[a.start : a.start + n] for a, n in zip(arguments, program.slot_bytes, strict=True)]
    old = [part.copy() for part in parts]
    program.run([part.ctypes.data for part in parts])
    for argument, was_written, written, part, was in zip(arguments, before, program.written, parts, old, strict=True):
        if written > was_written:
            if garbage:
                part ^= GARBAGE
            changed = argument.start + np.flatnonzero(part != was)
            argument.root.on_host[changed] = argument.root.synced[changed] = POISON


def release(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def declared() -> Iterator[tuple[str, list[str], str]]:
    """Name, arguments and first release of each overload."""
    for line in DECLARATIONS.read_text().splitlines():
        if match := re.fullmatch(r"([\w.]+)\((.*)\)(?: -> \w+)? \| ([\d.]+)", line):
            yield match[1], [part for part in match[2].split(", ") if part], match[3]


def install(**switches: Any) -> World:
    """A fresh stand-in as `pyxrt`; returns its world."""
    global WORLD
    WORLD = World(**switches)
    since = {name: first for name, _, first in declared()}
    contexts = {"hw_context.add_config": hw_context, "hw_context": _Context}
    module, ext = ModuleType("pyxrt"), ModuleType("pyxrt.ext")
    for thing in (device, elf, bo, kernel, run, runlist):
        if WORLD.has(since[thing.__name__]) and (WORLD.runlist or thing is not runlist):
            setattr(module, thing.__name__, thing)
    for thing in (xclBOSyncDirection, ert_cmd_state):
        setattr(module, thing.__name__, thing)
    module.hw_context = next((kind for name, kind in contexts.items() if WORLD.has(since[name])), _Xclbin)
    if WORLD.has(since["ext.kernel"]):
        ext.bo, ext.kernel, module.ext = ext_bo, kernel, ext
    sys.modules["pyxrt"] = module
    return WORLD


if switches := os.environ.get("PYXRT_STANDIN"):
    install(**json.loads(switches))
