"""The NPU through XRT's Python bindings (`pyxrt`): pinned buffers, hardware contexts, runs, and the syncs between.

A buffer that a device program reads or writes is one XRT buffer object; host programs work on its mapping. The two
sides do not see each other's writes until told: this module follows which bytes are newer where, and syncs just those,
just before the other side needs them. After ten idle seconds the NPU sleeps; the next call takes some 150 ms more,
which the time limit allows for.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import resource
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from runtime.devices import Binding, Call, Submission
from runtime.devices.cpu import CpuDevice
from runtime.devices.host_numpy import NumpyDevice
from runtime.devices.libraries import open_library
from runtime.devices.ranges import Range, Ranges
from runtime.errors import UserError

TIMEOUT_MS = 10_000
"""Longer than the driver's own deadline (6 s) and waking up, so that the driver's verdict is seen if there is one."""

LOCK = "llama-npu2.lock"
KERNEL = "main"
"""What the compiler calls the kernel of every ELF; the function's name is its instance."""

_ITEM_BYTES = {"bf16": 2, "f32": 4, "i32": 4}
_ALIGNMENT = 64
_BUSY = ("NEW", "QUEUED", "SUBMITTED")
_FAILURES = (RuntimeError, OSError, MemoryError, IndexError)
"""What the bindings turn C++ exceptions into."""


@dataclass
class Counts:
    """What a session did so far. Bytes of weights and zeroes at load time count too."""

    submissions: int = 0
    runs: int = 0
    to_device: int = 0
    from_device: int = 0


class XrtBuffer:
    """An XRT buffer object and its mapping: `bytes`, at `address`. Unusable once released."""

    def __init__(self, session: Session, nbytes: int) -> None:
        self._session = session
        self.nbytes = nbytes
        self.bo: Any = session.create_bo(nbytes)
        with failures("mapping an NPU buffer"):
            self.bytes: Any = np.frombuffer(self.bo.map(), np.uint8)[:nbytes]
        self.address: int = self.bytes.ctypes.data
        self.host_newer, self.device_newer = Ranges(), Ranges()
        self.constant = False
        self.shown = False
        """The host reads and writes it outside programs."""

    def to_device(self, low: int, high: int) -> None:
        """Make what the host wrote in `low..high` visible to the device."""
        self._sync("TO", self.host_newer.take(low, high))

    def from_device(self, low: int, high: int) -> None:
        """Make what the device wrote in `low..high` visible to the host."""
        self._sync("FROM", self.device_newer.take(low, high))

    def push(self) -> None:
        """Make all of it visible to the device, whoever wrote it."""
        self._sync("TO", [(0, self.nbytes)])

    def _sync(self, way: str, parts: Sequence[Range]) -> None:
        directions = self._session.pyxrt.xclBOSyncDirection
        direction = getattr(directions, f"XCL_BO_SYNC_BO_{way}_DEVICE")
        for low, high in parts:
            with failures("an NPU buffer cannot be synchronised"):
                self.bo.sync(direction, high - low, low)
            if way == "TO":
                self._session.counts.to_device += high - low
            else:
                self._session.counts.from_device += high - low

    def view(self, offset: int, nbytes: int) -> Any:
        """The buffer object of a part."""
        if offset == 0 and nbytes == self.nbytes:
            return self.bo
        with failures("a view of an NPU buffer"):
            return self._session.pyxrt.bo(self.bo, nbytes, offset)

    def release(self) -> None:
        self.bytes, self.bo, self.address = None, None, 0


@dataclass(eq=False)
class XrtProgram:
    """A kernel instance: `name` for messages, `context` the number of its hardware context."""

    name: str
    kernel: Any
    context: int


@dataclass(frozen=True)
class Access:
    """What a call does to one buffer: which bytes it reads, which it writes."""

    buffer: XrtBuffer
    binding: Binding
    slot: str
    rows: str
    """First dimension of the slot if it has a name; a `max_seq` slot is a cache, to which a call adds its rows."""
    nbytes: int
    """Of a slot of static shape, else 0."""
    reads: bool
    writes: bool

    @staticmethod
    def of(binding: Binding, slot: Mapping[str, Any]) -> Access:
        named = [dim for dim in slot["shape"] if isinstance(dim, str)]
        nbytes = 0 if named else math.prod(slot["shape"]) * _ITEM_BYTES[slot["dtype"]]
        first = slot["shape"][0] if named and slot["shape"] else ""
        writes = slot["role"] in ("output", "scratch")
        reads = not writes or first == "max_seq"
        return Access(binding.buffer, binding, slot["name"], str(first), nbytes, reads, writes)

    def read(self, seq: int, pos: int) -> Range:
        if self.rows == "max_seq":
            return 0, (pos if self.writes else pos + seq) * self.binding.row_bytes
        return self._range(seq, pos)

    def written(self, seq: int, pos: int) -> Range:
        if self.rows == "max_seq":
            return pos * self.binding.row_bytes, (pos + seq) * self.binding.row_bytes
        return self._range(seq, pos)

    def _range(self, seq: int, pos: int) -> Range:
        start = self.binding.offset(seq, pos)
        size = self.nbytes or (self.binding.row_bytes if self.binding.view else self.buffer.nbytes)
        if self.rows == "seq":
            size = seq * self.binding.row_bytes
        if start + size > self.buffer.nbytes:
            raise UserError(
                f"slot {self.slot} needs {size} bytes from {start} on, its buffer has {self.buffer.nbytes}: "
                "run doit compile"
            )
        return start, start + size


class Session:
    """Everything that is held of the device; `close` gives it back in the order that XRT wants."""

    def __init__(self, host_library: Path, threads: int, model: Mapping[str, Any]) -> None:
        self.pyxrt = import_pyxrt()
        self.cpu = host_device(host_library, threads, model)
        self.lock: int | None = None
        self.counts = Counts()
        self.contexts: list[Any] = []
        self.files: dict[Path, int] = {}
        """Context of each ELF."""
        self.programs: list[XrtProgram] = []
        self.buffers: list[XrtBuffer] = []
        self.submissions: list[XrtSubmission] = []
        self.running: Callable[[], object] | None = None
        """Waits for what is under way."""
        self.lost = ""
        self.device: Any = None
        try:
            self.lock = exclusive_use()
            with failures("the NPU cannot be opened", "see doit doctor"):
                self.device = self.pyxrt.device(0)
        except BaseException:
            self.close()
            raise

    def create_bo(self, nbytes: int) -> Any:
        held = sum(buffer.nbytes for buffer in self.buffers) >> 20
        size = max(-(-nbytes // _ALIGNMENT) * _ALIGNMENT, _ALIGNMENT)
        what = f"the NPU driver has no {_mib(size)} more beside the {held} MiB in use"
        with failures(what, f"close other programs, or raise the limit of locked memory ({memlock()})"):
            return self.pyxrt.ext.bo(self.device, size)

    def buffer(self, nbytes: int) -> XrtBuffer:
        self.buffers.append(XrtBuffer(self, nbytes))
        return self.buffers[-1]

    def load(self, path: Path, entry: str) -> XrtProgram:
        with failures(f"{path} cannot be loaded", "it must come from doit compile target=npu2"):
            if path not in self.files:
                self.files[path] = self._context_for(self.pyxrt.elf(str(path)))
            context = self.files[path]
            kernel = self.pyxrt.ext.kernel(self.contexts[context], f"{KERNEL}:{entry}")
        self.programs.append(XrtProgram(path.stem, kernel, context))
        return self.programs[-1]

    def _context_for(self, elf: Any) -> int:
        """Number of a context that holds the ELF: an old one if XRT can and will add to it, else a new one."""
        for number, context in enumerate(self.contexts if hasattr(self.pyxrt.hw_context, "add_config") else ()):
            # XRT refuses a second kernel of one name in a context.
            with contextlib.suppress(RuntimeError):
                context.add_config(elf)
                return number
        try:
            self.contexts.append(self.pyxrt.hw_context(self.device, elf))
        except TypeError:
            raise UserError("the installed XRT cannot load ELF programs from Python: see doit doctor") from None
        return len(self.contexts) - 1

    def drain(self) -> None:
        """Wait for what an interrupt left running."""
        if self.running is not None:
            with contextlib.suppress(*_FAILURES):
                self.running()
            self.running = None

    def close(self) -> None:
        self.drain()
        for submission in self.submissions:
            submission.release()
        self.submissions.clear()
        for program in self.programs:
            program.kernel = None
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


class XrtDevice:
    """The device interface on the NPU. `host_library` and `threads` are the CPU device's, for the host programs;
    `model` is the manifest's, for doing without them."""

    def __init__(self, host_library: Path, threads: int = 0, model: Mapping[str, Any] | None = None) -> None:
        self._session = Session(host_library, threads, model or {})
        self._cpu = self._session.cpu
        # Runs at the end of the process too, whatever way it ends, and before the bindings are unloaded.
        self._finalizer = weakref.finalize(self, self._session.close)

    @property
    def description(self) -> str:
        return f"npu2, host programs on {self._cpu.description}"

    @property
    def counts(self) -> Counts:
        return self._session.counts

    def alloc(self, nbytes: int, host: bool = False) -> Any:
        """`host`: no device program uses it, so it need not be pinned."""
        if host:
            return self._cpu.alloc(nbytes)
        buffer = self._session.buffer(nbytes)
        buffer.bytes[:] = 0
        buffer.push()
        return buffer

    def load_weights(self, path: Path, offset: int, nbytes: int, host: bool = False) -> Any:
        """Read from the file into the pinned memory; no second copy exists."""
        if host:
            return self._cpu.load_weights(path, offset, nbytes)
        buffer = self._session.buffer(nbytes)
        read_into(buffer.bytes, path, offset)
        buffer.push()
        buffer.constant = True
        return buffer

    def array(self, buffer: Any, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
        if isinstance(buffer, XrtBuffer):
            buffer.shown = True
        return buffer.bytes.view(dtype).reshape(shape)

    def load_program(self, path: Path, entry: str, host: bool) -> Any:
        return self._cpu.load_program(path, entry, host) if host else self._session.load(path, entry)

    def prepare(self, calls: Sequence[Call]) -> XrtSubmission:
        """The syncs are derived from the calls' slots."""
        submission = XrtSubmission(self._session, calls)
        self._session.submissions.append(submission)
        return submission

    def close(self) -> None:
        self._finalizer()


class XrtSubmission:
    """A phase as alternating stretches of host calls and device calls."""

    def __init__(self, session: Session, calls: Sequence[Call]) -> None:
        self._session = session
        self._stretches: list[_Device | _Host] = [
            _Device(session, list(part)) if device else _Host(session, list(part))
            for device, part in groupby(calls, lambda call: isinstance(call.program, XrtProgram))
        ]
        on_device = [call for call in calls if isinstance(call.program, XrtProgram)]
        self._inputs = [access for access in _accesses(on_device) if access.reads]

    def run(self, seq: int, pos: int) -> None:
        session = self._session
        if session.lost:
            raise UserError(session.lost)
        session.drain()
        try:
            for access in self._inputs:
                if access.buffer.shown:
                    access.buffer.host_newer.add(*access.read(seq, pos))
            for stretch in self._stretches:
                stretch.run(seq, pos)
            for buffer in session.buffers:
                if buffer.shown:
                    buffer.from_device(0, buffer.nbytes)
        except UserError as error:
            session.lost = str(error)
            raise

    def release(self) -> None:
        for stretch in self._stretches:
            stretch.release()
        self._stretches.clear()


def _accesses(calls: Sequence[Call]) -> Iterator[Access]:
    """What calls do, in order, to buffers that both sides can change."""
    for call in calls:
        for binding, slot in zip(call.bindings, call.slots, strict=True):
            if isinstance(binding.buffer, XrtBuffer) and not binding.buffer.constant:
                yield Access.of(binding, slot)


class _Host:
    """Calls of host programs, in one native call."""

    def __init__(self, session: Session, calls: Sequence[Call]) -> None:
        self._accesses = list(_accesses(calls))
        self._native: Submission = session.cpu.prepare(calls)

    def run(self, seq: int, pos: int) -> None:
        for access in self._accesses:
            buffer = access.buffer
            if access.reads:
                buffer.from_device(*access.read(seq, pos))
            if access.writes:
                written = access.written(seq, pos)
                buffer.device_newer.take(*written)
                buffer.host_newer.add(*written)
        self._native.run(seq, pos)

    def release(self) -> None:
        """Holds nothing of the device."""


class _Device:
    """Calls of device programs: one submission for each group that a run list can hold, else one each."""

    def __init__(self, session: Session, calls: Sequence[Call]) -> None:
        self._session = session
        self._calls = calls
        self._accesses = list(_accesses(calls))
        self._groups: list[_Single | _List] = []

    def run(self, seq: int, pos: int) -> None:
        if not self._groups:
            # At first use: every run holds its own copy of the instructions, and not every bucket gets used.
            self._groups = list(self._grouped())
        for access in self._accesses:
            self._hand_over(access, seq, pos)
        for group in self._groups:
            group.run(seq, pos)

    def release(self) -> None:
        for group in self._groups:
            group.release()

    def _hand_over(self, access: Access, seq: int, pos: int) -> None:
        buffer = access.buffer
        low, high = access.written(seq, pos)
        # Also what is only written: a cache line that the host still holds would land on top of the result.
        buffer.to_device(low, high)
        if access.writes:
            buffer.device_newer.add(low, high)

    def _grouped(self) -> Iterator[_Single | _List]:
        runs = [_Run(self._session, call) for call in self._calls]
        listed = hasattr(self._session.pyxrt, "runlist") and os.environ.get("LLAMA_NPU2_RUNLIST") != "0"
        for context, part in groupby(runs, lambda run: run.program.context):
            group = list(part)
            if listed and len(group) > 1:
                yield _List(self._session, context, group)
            else:
                yield from (_Single(self._session, run) for run in group)


class _Run:
    """One XRT run: a program with its arguments."""

    def __init__(self, session: Session, call: Call) -> None:
        self.program: XrtProgram = call.program
        self.where = f"{self.program.name}, {call.place}" if call.place else self.program.name
        self._moving: list[tuple[int, Access]] = []
        self._views: list[Any] = []
        with failures(self.where):
            self.run: Any = session.pyxrt.run(self.program.kernel)
        for index, (binding, slot) in enumerate(zip(call.bindings, call.slots, strict=True)):
            access = Access.of(binding, slot)
            if binding.view:
                self._moving.append((index, access))
            else:
                self._set(index, binding.buffer.bo)

    def _set(self, index: int, bo: Any) -> None:
        with failures(self.where):
            self.run.set_arg(index, bo)

    def move(self, seq: int, pos: int) -> None:
        """Point the arguments that follow the position at where it is."""
        views = []
        for index, access in self._moving:
            views.append(access.buffer.view(access.binding.offset(seq, pos), access.nbytes))
            self._set(index, views[-1])
        self._views = views

    def release(self) -> None:
        self.run, self._views = None, []

    def failed(self, state: str) -> UserError:
        late = "did not finish in time" if state.endswith("TIMEOUT") else "failed"
        return UserError(f"{self.where}: {late} on the NPU ({state}): see dmesg, and docs/ryzen-ai.md on timeouts")


class _Single:
    """One run, one submission."""

    def __init__(self, session: Session, run: _Run) -> None:
        self._session, self._run = session, run

    def run(self, seq: int, pos: int) -> None:
        session, run = self._session, self._run
        run.move(seq, pos)
        session.counts.submissions += 1
        session.counts.runs += 1
        with failures(f"{run.where}: cannot run", "see dmesg, the NPU may be gone"):
            run.run.start()
            session.running = partial(run.run.wait, TIMEOUT_MS)
            waited = session.running()
            state = run.run.state()
        if state == session.pyxrt.ert_cmd_state.ERT_CMD_STATE_COMPLETED:
            session.running = None
            return
        if not state.name.endswith(_BUSY):
            session.running = None
        # A run that is still under way keeps its state; that the wait ended is then the news.
        raise run.failed(waited.name if state.name.endswith(_BUSY) else state.name)

    def release(self) -> None:
        self._run.release()


class _List:
    """Several runs of one context, one submission."""

    def __init__(self, session: Session, context: int, runs: Sequence[_Run]) -> None:
        self._session, self._runs = session, runs
        with failures(f"{runs[0].where}: no run list"):
            self._list: Any = session.pyxrt.runlist(session.contexts[context])
            for run in runs:
                self._list.add(run.run)

    def run(self, seq: int, pos: int) -> None:
        session = self._session
        for run in self._runs:
            run.move(seq, pos)
        session.counts.submissions += 1
        session.counts.runs += len(self._runs)
        session.running = self._list.wait
        with failures(f"{self._runs[0].where} and the calls after it cannot run", "see dmesg, the NPU may be gone"):
            self._list.execute()
        try:
            # The bindings offer no usable time limit here; the driver's ends a run that hangs.
            self._list.wait()
        except _FAILURES as error:
            raise self._blame(error) from None
        finally:
            session.running = None

    def release(self) -> None:
        self._list = None
        for run in self._runs:
            run.release()

    def _blame(self, error: Exception) -> UserError:
        """XRT leaves the first failed run with its state and those after it aborted."""
        for run in self._runs:
            state = run.run.state().name
            if not state.endswith((*_BUSY, "COMPLETED", "ABORT")):
                return run.failed(state)
        return UserError(f"{self._runs[0].where} or a call after it failed on the NPU: {_first_line(error)}: see dmesg")


@contextlib.contextmanager
def failures(what: str, remedy: str = "see dmesg and doit doctor") -> Iterator[None]:
    """Turn an exception of the bindings into one line."""
    try:
        yield
    except _FAILURES as error:
        raise UserError(f"{what}: {_first_line(error)}: {remedy}") from None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".:")


def import_pyxrt() -> Any:
    try:
        import pyxrt
    except ImportError as error:
        raise UserError(
            f"target npu2 needs XRT's Python bindings ({error}): install XRT and run its setup.sh, see doit doctor"
        ) from None
    return pyxrt


def host_device(library: Path, threads: int, model: Mapping[str, Any]) -> CpuDevice | NumpyDevice:
    """What runs the host programs. Artifacts may come from a machine whose C library this one does not have."""
    try:
        open_library(library)
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


def read_into(target: Any, path: Path, offset: int) -> None:
    """Fill `target` from a file. UserError if it ends before."""
    filled, view = 0, memoryview(target)
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            while filled < len(view):
                count = file.readinto(view[filled:])
                if not count:
                    raise UserError(f"{path} ends {len(view) - filled} bytes early: copy it again or run doit compile")
                filled += count
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}: copy it again or run doit compile") from None


def memlock() -> str:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return "now unlimited" if limit == resource.RLIM_INFINITY else f"now {_mib(limit)}, ulimit -l"


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):.4g} MiB"
