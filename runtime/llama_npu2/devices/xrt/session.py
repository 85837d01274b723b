"""Everything that is held of the device: the lock on it, contexts, programs, buffers; and giving it back."""

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
from llama_npu2.artifact.storage import Altered, File
from llama_npu2.devices.cpu import CpuDevice
from llama_npu2.devices.host_numpy import NumpyDevice
from llama_npu2.devices.libraries import anonymous_file, descriptor_path, open_library
from llama_npu2.devices.spans import Timer
from llama_npu2.devices.xrt.bindings import FAILURES, TOO_OLD, failures, import_pyxrt
from llama_npu2.devices.xrt.buffers import Counts, XrtBuffer
from llama_npu2.devices.xrt.limits import CONTEXTS, HEAP, RUNS_SHARE, check_duration, heap_bytes
from llama_npu2.errors import UserError

LOCK = "llama-npu2.lock"

_ALIGNMENT = 64
_NAME_CLASH = "kernel already exists"
"""How XRT begins to refuse an ELF in a context that has a kernel of that name (`xrt_hw_context.cpp`)."""


@dataclass(eq=False)
class XrtProgram:
    """A kernel instance: `name` for messages, `context` the number of its hardware context."""

    name: str
    kernel: Any
    context: int
    milliseconds: float
    """Of one call, by the estimate."""
    heap: int
    """Bytes of the device heap that a run of it takes."""
    run: Any = field(default=None, repr=False)
    """The run that its calls share, if there is no room for one each."""


class Releasable(Protocol):
    calls: Counter[XrtProgram]
    resting: bool

    def release(self) -> None:
        """Let go of what it holds of the device."""


class Session:
    """Everything that is held of the device; `close` gives it back in the order that XRT wants."""

    def __init__(
        self, host_library: File, threads: int, model: Mapping[str, Any], programs: Mapping[File, NpuProgram]
    ) -> None:
        self.pyxrt = import_pyxrt()
        self._about = programs
        self.cpu = host_device(host_library, threads, model)
        self.lock: int | None = None
        self.counts, self.timed = Counts(), Timer()
        self.contexts: list[Any] = []
        self.files: dict[File, int] = {}
        """Context of each ELF."""
        self.programs: list[XrtProgram] = []
        self.buffers: list[XrtBuffer] = []
        self.submissions: list[Releasable] = []
        self.running: Callable[[], object] | None = None
        """Waits for what is under way."""
        self.lost = ""
        """Why the device cannot be used any more."""
        self.device: Any = None
        try:
            self.lock = exclusive_use()
            with failures("the NPU cannot be opened", f"see doit doctor; {HEAP >> 20} MiB get locked ({_memlock()})"):
                self.device = self.pyxrt.device(0)
        except BaseException:
            self.close()
            raise

    def buffer(self, nbytes: int) -> XrtBuffer:
        self.buffers.append(XrtBuffer(self.pyxrt, self.counts, self._create_bo(nbytes), nbytes, self.timed))
        return self.buffers[-1]

    def _create_bo(self, nbytes: int) -> Any:
        held = sum(buffer.nbytes for buffer in self.buffers) >> 20
        size = max(-(-nbytes // _ALIGNMENT) * _ALIGNMENT, _ALIGNMENT)
        what = f"the NPU driver has no {_mib(size)} more beside the {held} MiB in use"
        with failures(what, f"close other programs, or raise the limit of locked memory ({_memlock()})"):
            return self.pyxrt.ext.bo(self.device, size)

    def load(self, file: File, entry: str) -> XrtProgram:
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
        """XRT takes a name, and has read the file when it returns."""
        descriptor = anonymous_file(file.read_bytes())
        try:
            return self.pyxrt.elf(descriptor_path(descriptor))
        finally:
            os.close(descriptor)

    def runs_of_their_own(self) -> set[XrtProgram]:
        """The programs with a run for each of their calls: as many as the heap has room for, those first that take
        least. Each of the others has one run, whose arguments are set for each call. What rests is not counted."""
        calls = sum((each.calls for each in self.submissions if not each.resting), Counter[XrtProgram]())
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
        remedy = f"its heap has {_mib(HEAP)} in older drivers: compile fewer npu.buckets="
        with failures(f"{program.name}: the NPU's driver has no room for its instructions", remedy):
            return self.pyxrt.run(program.kernel)

    def shared_run(self, program: XrtProgram) -> Any:
        if program.run is None:
            program.run = self.new_run(program)
        return program.run

    def _context_for(self, path: Path, elf: Any) -> int:
        """Number of a context that holds the ELF: an old one if XRT can and will add to it, else a new one."""
        if hasattr(self.pyxrt.hw_context, "add_config"):
            for number, context in enumerate(self.contexts):
                if _added(path, elf, context):
                    return number
        remedy = f"an NPU has {CONTEXTS}: end what else uses it, compile fewer npu.buckets=, see doit doctor on XRT"
        try:
            with failures(f"{path}: no hardware context beside {len(self.contexts)} others", remedy):
                self.contexts.append(self.pyxrt.hw_context(self.device, elf))
        except TypeError:
            raise UserError(TOO_OLD) from None
        return len(self.contexts) - 1

    def drain(self) -> None:
        """Wait for what an interrupt left running."""
        if self.running is not None:
            with contextlib.suppress(*FAILURES):
                self.running()
            self.running = None

    def close(self) -> None:
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
        self.lost = self.lost or "the device is closed"


def _added(path: Path, elf: Any, context: Any) -> bool:
    """Whether the context took the ELF, or has a kernel of its name already. Any other refusal is an error."""
    with failures(f"{path} cannot be loaded beside other programs"):
        try:
            context.add_config(elf)
        except RuntimeError as error:
            if not str(error).startswith(_NAME_CLASH):
                raise
            return False
    return True


def host_device(library: File, threads: int, model: Mapping[str, Any]) -> CpuDevice | NumpyDevice:
    """What runs the host programs. Artifacts may come from a machine whose C library this one does not have."""
    try:
        open_library(library)
    except Altered:
        raise
    except UserError as error:
        print(f"{error}; until then, host programs run on numpy, slower", file=sys.stderr, flush=True)
        return NumpyDevice(model)
    return CpuDevice(library, threads)


def exclusive_use() -> int:
    """Wait until no other process uses the NPU; returns the descriptor that holds it until closed."""
    path = Path(tempfile.gettempdir()) / LOCK
    try:
        # Somebody else's file in a shared directory may be opened but not created.
        held = os.open(path, os.O_RDONLY) if path.exists() else os.open(path, os.O_RDONLY | os.O_CREAT, 0o644)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}: remove the file, or set TMPDIR") from None
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("waiting for another process that uses the NPU", file=sys.stderr, flush=True)
        fcntl.flock(held, fcntl.LOCK_EX)
    return held


def _memlock() -> str:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return "now unlimited" if limit == resource.RLIM_INFINITY else f"now {_mib(limit)}, ulimit -l"


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):.4g} MiB"
