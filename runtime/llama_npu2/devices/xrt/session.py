"""Everything that this process takes from the device (the lock, contexts, programs, buffers), and its release."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from llama_npu2.artifact.manifest import NpuProgram
from llama_npu2.artifact.storage import File
from llama_npu2.devices.cpu import CpuDevice
from llama_npu2.devices.libraries import anonymous_file, descriptor_path
from llama_npu2.devices.spans import Timer
from llama_npu2.devices.xrt.bindings import FAILURES, TOO_OLD, failures, import_pyxrt
from llama_npu2.devices.xrt.buffers import Counts, XrtBuffer
from llama_npu2.devices.xrt.limits import CONTEXTS, HEAP, RUNS_SHARE, check_duration, heap_bytes
from llama_npu2.errors import UserError

LOCK = "llama-npu2.lock"

_ALIGNMENT = 64
_NAME_CLASH = "kernel already exists"
"""The beginning of XRT's error when it refuses an ELF in a context that has a kernel of its name
(`xrt_hw_context.cpp`)."""


@dataclass(eq=False)
class XrtProgram:
    """A kernel instance."""

    name: str
    """For messages."""
    kernel: Any
    context: int
    """Number of its hardware context."""
    milliseconds: float
    """Estimated time of one call."""
    heap: int
    """Bytes of the device heap that a run of it takes."""
    run: Any = field(default=None, repr=False)
    """The run that its calls share, if there is no room for one each."""


class Releasable(Protocol):
    """A submission, as the session sees it."""

    calls: Counter[XrtProgram]
    suspended: bool

    def release(self) -> None:
        """Release everything that it takes from the device."""


class Session:
    """Everything that this process takes from the device; `close` releases it in the order that XRT requires."""

    def __init__(self, host_library: File, threads: int, programs: Mapping[File, NpuProgram]) -> None:
        self.pyxrt = import_pyxrt()
        self._about = programs
        self.cpu = CpuDevice(host_library, threads)
        self.lock: int | None = None
        self.counts, self.timed = Counts(), Timer()
        self.contexts: list[Any] = []
        self.files: dict[File, int] = {}
        """Number of the context of each ELF."""
        self.programs: list[XrtProgram] = []
        self.buffers: list[XrtBuffer] = []
        self.submissions: list[Releasable] = []
        self.running: Callable[[], object] | None = None
        """A function that waits for the submission that runs."""
        self.lost = ""
        """Why the device cannot be used any more; empty while it can."""
        self.device: Any = None
        try:
            self.lock = exclusive_use()
            with failures("the NPU cannot be opened", f"see doit doctor; {HEAP >> 20} MiB get locked ({_memlock()})"):
                self.device = self.pyxrt.device(0)
        except BaseException:
            self.close()
            raise

    def buffer(self, nbytes: int) -> XrtBuffer:
        """Allocate a buffer. Raises UserError."""
        self.buffers.append(XrtBuffer(self.pyxrt, self.counts, self._create_bo(nbytes), nbytes, self.timed))
        return self.buffers[-1]

    def _create_bo(self, nbytes: int) -> Any:
        used = sum(buffer.nbytes for buffer in self.buffers) >> 20
        size = max(-(-nbytes // _ALIGNMENT) * _ALIGNMENT, _ALIGNMENT)
        what = f"the NPU driver has no {_mib(size)} more beside the {used} MiB in use"
        with failures(what, f"close other programs, or raise the limit of locked memory ({_memlock()})"):
            return self.pyxrt.ext.bo(self.device, size)

    def load(self, file: File, entry: str) -> XrtProgram:
        """Load a program from its ELF. Raises UserError."""
        path, about = file.path, self._about.get(file, NpuProgram())
        check_duration(path.stem, about.milliseconds)
        with failures(f"{path} cannot be loaded", "it must come from doit compile target=npu2"):
            if file not in self.files:
                self.files[file] = self._context_for(path, self._elf(file))
            context = self.files[file]
            kernel = self.pyxrt.ext.kernel(self.contexts[context], f"{about.kernel}:{entry}")
        program = XrtProgram(path.stem, kernel, context, about.milliseconds, heap_bytes(about.instruction_bytes))
        self.programs.append(program)
        return program

    def _elf(self, file: File) -> Any:
        """Return XRT's ELF object. XRT takes a path, and has read the file when it returns."""
        descriptor = anonymous_file(file.read_bytes())
        try:
            return self.pyxrt.elf(descriptor_path(descriptor))
        finally:
            os.close(descriptor)

    def runs_of_their_own(self) -> set[XrtProgram]:
        """Return the programs that get a run for each of their calls.

        They are as many as the heap has room for, those that take least first; suspended submissions are not counted.
        Each of the other programs has one run, whose arguments are set for each call.
        """
        active = (submission.calls for submission in self.submissions if not submission.suspended)
        calls = sum(active, Counter[XrtProgram]())
        room = RUNS_SHARE - sum(program.heap for program in calls)
        extra = {program: program.heap * (count - 1) for program, count in calls.items()}
        chosen = set()
        for program in sorted(extra, key=lambda program: (extra[program], program.name)):
            if extra[program] > room:
                break
            room -= extra[program]
            chosen.add(program)
        return chosen

    def new_run(self, program: XrtProgram) -> Any:
        """Return a new run of a program. Raises UserError if the heap is full."""
        remedy = f"its heap has {_mib(HEAP)} in older drivers: compile fewer npu.buckets="
        with failures(f"{program.name}: the NPU's driver has no room for its instructions", remedy):
            return self.pyxrt.run(program.kernel)

    def shared_run(self, program: XrtProgram) -> Any:
        """Return the run that all calls of a program share."""
        if program.run is None:
            program.run = self.new_run(program)
        return program.run

    def _context_for(self, path: Path, elf: Any) -> int:
        """Return the number of a context with the ELF: an existing one if XRT adds the ELF to it, else a new one."""
        if hasattr(self.pyxrt.hw_context, "add_config"):
            for number in range(len(self.contexts)):
                if self._added(path, elf, number):
                    return number
        remedy = f"an NPU has {CONTEXTS}: end what else uses it, compile fewer npu.buckets=, see doit doctor on XRT; "
        remedy += "after a timeout, switch the machine off and on"
        try:
            with failures(f"{path}: no hardware context beside {len(self.contexts)} others", remedy):
                self.contexts.append(self.pyxrt.hw_context(self.device, elf))
        except TypeError:
            raise UserError(TOO_OLD) from None
        return len(self.contexts) - 1

    def _added(self, path: Path, elf: Any, context: int) -> bool:
        """Add the ELF to a context. Return False if that has a kernel of its name; other refusals are errors.

        No variable holds the context: one in the traceback of an error would keep it longer than the device.
        """
        with failures(f"{path} cannot be loaded beside other programs"):
            try:
                self.contexts[context].add_config(elf)
            except RuntimeError as error:
                if not str(error).startswith(_NAME_CLASH):
                    raise
                return False
        return True

    def drain(self) -> None:
        """Wait for the submission that an interrupt left running."""
        if self.running is not None:
            with contextlib.suppress(*FAILURES):
                self.running()
            self.running = None

    def close(self) -> None:
        """Release everything, in the order that XRT requires."""
        self.drain()
        for submission in self.submissions:
            submission.release()
        self.submissions.clear()
        for program in self.programs:
            program.run = program.kernel = None
        self.programs.clear()
        self.contexts.clear()
        for buffer in self.buffers:
            buffer.release()
        self.buffers.clear()
        self.device = None
        self.cpu.close()
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None
        self.lost = self.lost or "the model is closed: load it again"


def exclusive_use() -> int:
    """Wait until no other process uses the NPU; return the descriptor that keeps others away until it is closed."""
    path = Path(tempfile.gettempdir()) / LOCK
    try:
        # Somebody else's file in a shared directory may be opened but not created.
        lock = os.open(path, os.O_RDONLY) if path.exists() else os.open(path, os.O_RDONLY | os.O_CREAT, 0o644)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}: remove the file, or set TMPDIR") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("waiting for another process that uses the NPU", file=sys.stderr, flush=True)
        fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def _memlock() -> str:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return "now unlimited" if limit == resource.RLIM_INFINITY else f"now {_mib(limit)}, ulimit -l"


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):.4g} MiB"
