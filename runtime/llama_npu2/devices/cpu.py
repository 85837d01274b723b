"""The host CPU: programs are shared objects, a submission is one call into native code."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import starmap
from typing import Any, NamedTuple

import numpy as np

from llama_npu2.artifact.attended import pairs_attended, positions_read
from llama_npu2.artifact.manifest import Manifest
from llama_npu2.artifact.plan import BLOCK_POSITIONS, Positions, first_of
from llama_npu2.artifact.storage import File
from llama_npu2.devices import Call, Declared, HostBuffer, StoredWeight
from llama_npu2.devices.libraries import entry_point, open_library
from llama_npu2.devices.spans import Recorder, Span
from llama_npu2.devices.weights import Loaded, load
from llama_npu2.errors import REMEDY, UserError
from llama_npu2.frozen import frozen

_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


class _NativeCall(ctypes.Structure):
    _fields_ = [("entry", ctypes.c_void_p), ("slots", ctypes.c_void_p)]


_RUN, _DIMS = struct.Struct("qqqP"), struct.Struct("qqP")
"""`Run` and `Dims` of `kernel_src/cpu/team.h`."""


class _Range(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("bytes", ctypes.c_int64)]


_SIGNATURES: Mapping[str, tuple[Any, ...]] = {
    "team_create": (ctypes.c_void_p, ctypes.c_int),
    "team_run": (None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p),
    "team_laps": (None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64),
    "team_destroy": (None, ctypes.c_void_p),
    "team_threads": (ctypes.c_int, ctypes.c_void_p),
    "isa_name": (ctypes.c_char_p,),
    "measure_read_bandwidth": (ctypes.c_double, ctypes.c_void_p, ctypes.POINTER(_Range), ctypes.c_int64),
    "measure_bf16_peak": (ctypes.c_double, ctypes.c_void_p, ctypes.c_int64),
    "measure_f32_peak": (ctypes.c_double, ctypes.c_void_p, ctypes.c_int64),
}
"""Result and arguments of the library's functions (`kernel_src/cpu/team.h`). Older libraries have no `team_laps`."""


def open_device(library: File, threads: int, manifest: Manifest) -> CpuDevice:
    """Open the CPU device, whose host programs are in `library`. Raises UserError."""
    return CpuDevice(library, threads)


class Rows(NamedTuple):
    """Rows of one sequence in a submission."""

    rows: int
    pos: int
    """Position of the first of them."""
    blocks: Sequence[int] | np.ndarray
    """I32: where the blocks of the KV cache lie that hold the sequence's positions up to the last row's, in order."""
    address: int
    """The address of the first of `blocks`. It is kept, because numpy takes long to say it, beside all else of a
    submission."""

    @staticmethod
    def of(rows: int, pos: int, blocks: np.ndarray) -> Rows:
        """Return rows with the address of their table of blocks."""
        return Rows(rows, pos, blocks, blocks.ctypes.data)


@frozen
class CpuProgram:
    """An entry point of a shared object."""

    address: int
    declared: Declared
    launches: Sequence[Mapping[str, Any]] | None
    """The kernel of each launch, and the least that it moves and multiplies (`Laps`); None in libraries of an older
    version."""


def _no_code_for_this_cpu(library: os.PathLike[str]) -> UserError:
    """Return the error for a library that was built for CPUs with other instruction sets only."""
    chosen, remedy = os.environ.get("LLAMA_NPU2_ISA"), "run doit compile, which adds the code for all CPUs"
    if chosen:
        return UserError(f"{library} has no code for LLAMA_NPU2_ISA={chosen}: unset it, or {remedy}")
    return UserError(f"{library} has no code for this machine's CPU: where it was built, {remedy}, and copy it again")


class CpuDevice:
    """The device interface on the CPU, with a team of threads; `threads=0` uses every CPU that this process may use."""

    def __init__(self, host_library: File, threads: int = 0) -> None:
        self._loaded: list[Loaded] = []
        self.native_seconds = 0.0
        """Time spent in programs so far."""
        self.recorder: Recorder | None = None
        self._running = defaultdict[int, threading.Lock](threading.Lock)
        """Held while programs run, so that no other thread frees their memory. A forked process has its own."""
        self._laps = np.zeros((0, 0, 3), np.int64)
        self._in_order = Rows.of(0, 0, np.zeros(0, np.int32))
        library = open_library(host_library)
        if not hasattr(library, "team_create"):
            raise UserError(f"{host_library.path} is not the library of the host's programs: {REMEDY}")
        for name, (result, *arguments) in _SIGNATURES.items():
            if function := getattr(library, name, None):
                function.restype, function.argtypes = result, arguments
        self._native = library
        if library.isa_name() is None:
            raise _no_code_for_this_cpu(host_library.path)
        self._workers = library.team_create(threads)
        if not self._workers:
            raise UserError(f"cannot start {threads or os.cpu_count()} threads: lower --threads")
        # Python collects a model that nobody closes: its threads end then. Those that are left end with the process.
        self._end_threads = weakref.finalize(self, library.team_destroy, self._workers)
        self._end_threads.atexit = False

    @property
    def _team(self) -> int:
        """The address of the team of threads. Raises UserError once the device is closed."""
        if not self._workers:
            raise UserError("the model is closed: load it again")
        return int(self._workers)

    @property
    def threads(self) -> int:
        return int(self._native.team_threads(self._team))

    @property
    def description(self) -> str:
        return f"cpu, {self.instruction_set}, {self.threads} threads"

    @property
    def instruction_set(self) -> str:
        """The set of instructions that the library chose for this machine."""
        return str(self._native.isa_name().decode())

    def alloc(self, nbytes: int, host: bool = False) -> HostBuffer:
        """Reserve zero pages, which cost memory once touched: a cache for the whole context is free until it fills."""
        size = max(nbytes, 1)
        try:
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
        except (OSError, ValueError) as error:
            raise UserError(f"cannot reserve {size >> 20} MiB of memory ({error})") from None
        return HostBuffer(np.frombuffer(memory, np.uint8, nbytes))

    def load_weights(self, weights: Sequence[StoredWeight]) -> list[HostBuffer]:
        """Return each weight's content, in huge pages or mapped. Raises UserError."""
        loaded = load(weights, self.threads)
        self._loaded.append(loaded)
        return loaded.buffers

    def array(self, buffer: HostBuffer, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
        return buffer.bytes.view(dtype).reshape(shape)

    def load_program(self, file: File, entry: str, host: bool) -> CpuProgram:
        function, info = entry_point(open_library(file), entry)
        address = ctypes.cast(function, ctypes.c_void_p).value
        assert address is not None
        return CpuProgram(address, Declared(info["slots"], info["positions"]), info.get("launches"))

    def declared(self, program: CpuProgram) -> Declared:
        return program.declared

    def prepare(self, calls: Sequence[Call]) -> CpuSubmission:
        return CpuSubmission(self, calls)

    def in_order(self, rows: int, pos: int) -> Rows:
        """Return rows of a sequence alone in the cache, whose blocks lie in the order of their positions."""
        if pos + rows > BLOCK_POSITIONS * len(self._in_order.blocks):
            count = -(-(pos + rows) // BLOCK_POSITIONS)
            self._in_order = Rows.of(0, 0, np.arange(2 * count, dtype=np.int32))
        return self._in_order._replace(rows=rows, pos=pos)

    def run_native(self, calls: Any, count: int, dims: Any) -> None:
        with self._running[os.getpid()]:
            started = time.perf_counter()
            self._native.team_run(self._team, calls, count, dims)
            self.native_seconds += time.perf_counter() - started

    def record(self, recorder: Recorder | None) -> None:
        if not hasattr(self._native, "team_laps"):
            raise UserError(f"{self._native._name} cannot be profiled, it is of an older version: {REMEDY}")
        self.recorder = recorder
        self.laps(0)

    def laps(self, launches: int) -> np.ndarray:
        """Return the array in which every thread notes its launches of each submission from now on.

        It is i64 `[threads, launches, 3]`: begin and end of each launch, on the clock of `time.perf_counter_ns`, and
        how long the thread waited at barriers in between.

        Args:
            launches: for how many there must be room. 0: threads note nothing any more.
        """
        if not launches or launches > self._laps.shape[1]:
            self._laps = np.zeros((self.threads, launches, 3), np.int64)
            self._native.team_laps(self._team, self._laps.ctypes.data if launches else None, launches)
        return self._laps

    def measure_read(self, buffers: Sequence[HostBuffer]) -> float:
        """Return the bytes per second at which the team reads buffers one after the other.

        It reads them with the pattern that reads fastest.
        """
        ranges = (_Range * len(buffers))(*(_Range(buffer.address, len(buffer.bytes)) for buffer in buffers))
        return float(self._native.measure_read_bandwidth(self._team, ranges, len(buffers)))

    def measure_peak(self, dtype: str, iterations: int) -> float:
        """Return the team's floating-point operations per second in registers; `dtype` is bf16 or f32."""
        measure = {"bf16": self._native.measure_bf16_peak, "f32": self._native.measure_f32_peak}[dtype]
        return float(measure(self._team, iterations))

    def close(self) -> None:
        with self._running[os.getpid()]:
            if self._workers:
                self._end_threads()
                self._workers = None
                for loaded in self._loaded:  # at once: an engine is in cycles, which Python collects late
                    loaded.release()


class CpuSubmission:
    """The calls of a phase in one native array; only the addresses of views change between runs."""

    def __init__(self, device: CpuDevice, calls: Sequence[Call]) -> None:
        bindings = [binding for call in calls for binding in call.bindings]
        self._device = device
        self._addresses = np.array([b.buffer.address for b in bindings], np.uint64)
        self._moving = [(place, binding) for place, binding in enumerate(bindings) if binding.view]
        self._bindings = bindings  # keeps the buffers alive
        self._planned = calls
        self._launches = sum(len(call.program.launches or ()) for call in calls)
        self._calls = (_NativeCall * len(calls))()
        self._dims, self._runs = (ctypes.create_string_buffer(each.size) for each in (_DIMS, _RUN))
        slot = self._addresses.ctypes.data
        for native, call in zip(self._calls, calls, strict=True):
            native.entry, native.slots = call.program.address, slot
            slot += self._addresses.itemsize * len(call.bindings)

    def run(self, seq: int, pos: Positions) -> None:
        """Process rows of the sequence that is alone in the cache, or rows of which no call knows where they are."""
        self.run_rows([self._device.in_order(seq, first_of(pos))])

    def run_rows(self, runs: Sequence[Rows]) -> None:
        """Process rows of several sequences, each of which has as many positions as its table of blocks.

        Buffers hold the rows of the first run, then those of the next one. Their calls see no view by position.
        """
        seq, device = self._set_runs(runs), self._device
        for place, binding in self._moving:
            self._addresses[place] = binding.buffer.address + binding.offset(seq, runs[0].pos)
        laps = device.laps(self._launches) if device.recorder and self._launches else None
        started = time.perf_counter_ns()
        device.run_native(self._calls, len(self._calls), self._dims)
        if device.recorder and laps is not None:
            ended, copied = time.perf_counter_ns(), laps[:, : self._launches].copy()
            device.recorder.note(Laps(self._planned, copied, started, ended, runs))

    def _set_runs(self, runs: Sequence[Rows]) -> int:
        """Say to native code which rows there are; return how many."""
        if len(runs) * _RUN.size > len(self._runs):
            self._runs = ctypes.create_string_buffer(len(runs) * _RUN.size)
        seq = 0
        for number, (rows, pos, _, blocks) in enumerate(runs):
            _RUN.pack_into(self._runs, number * _RUN.size, seq, rows, pos, blocks)
            seq += rows
        _DIMS.pack_into(self._dims, 0, seq, len(runs), ctypes.addressof(self._runs))
        return seq

    def suspend(self) -> None:
        """Do nothing: a submission of the CPU holds nothing scarce."""


class Laps(NamedTuple):
    """The times at which each thread was in each launch of a submission."""

    calls: Sequence[Call]
    laps: np.ndarray
    """As `CpuDevice.laps` returns it."""
    started: int
    ended: int
    runs: Sequence[Rows]

    def spans(self) -> Iterator[Span]:
        """Yield a span of the submission, of its programs on thread 0, and of the launches of every thread.

        A program lasts until the next one begins, so that its time includes waiting after its last launch.
        """
        yield Span("native", "team", self.started, self.ended)
        first = 0
        for call in self.calls:
            count = len(call.program.launches or ())
            following = self.laps[0, first + count :, 0]
            if count:
                end = int(following[0]) if len(following) else self.ended
                yield Span("program", call.name, int(self.laps[0, first, 0]), end, 0, call.about)
                yield from self._launches(call, first)
            first += count

    def _launches(self, call: Call, first: int) -> Iterator[Span]:
        for index, launch in enumerate(call.program.launches):
            laps, where = self.laps[:, first + index], call.about | {"launch": index}
            start, end, waited = laps[0].tolist()
            busy = int((laps[:, 1] - laps[:, 0] - laps[:, 2]).sum())
            about = where | self._amounts(launch) | {"waited": waited, "busy": busy}
            yield Span("launch", launch["kernel"], start, end, 0, about)
            for thread, (start, end, waited) in enumerate(laps[1:].tolist(), 1):
                yield Span("launch", launch["kernel"], start, end, thread, where | {"waited": waited})

    def _amounts(self, launch: Mapping[str, Any]) -> dict[str, int]:
        """Return the least bytes that a launch moves and the operations that it does.

        Bytes are given per call, row and position that rows attend to; operations per call, row, and pair of a row and
        such a position.
        """
        of = [(run.pos, run.rows, launch.get("sees")) for run in self.runs]
        rows = sum(run.rows for run in self.runs)
        read, pairs = (sum(starmap(count, of)) for count in (positions_read, pairs_attended))
        counts = {"bytes": (1, rows, read), "operations": (1, rows, pairs)}
        return {name: sum(n * rate for n, rate in zip(ns, launch[name], strict=True)) for name, ns in counts.items()}
