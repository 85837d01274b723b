"""The NPU simulated on the host: the NPU's own programs, lowered to shared objects, with every limit checked.

Buffers and host programs are the CPU device's. It counts the bytes and operations of the NPU, per program.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from llama_npu2.artifact.manifest import Manifest
from llama_npu2.artifact.plan import Positions
from llama_npu2.artifact.storage import File
from llama_npu2.devices import Call, Declared, HostBuffer, StoredWeight, Submission
from llama_npu2.devices.cpu import CpuDevice
from llama_npu2.devices.libraries import entry_point, open_library
from llama_npu2.devices.spans import Recorder, Timer
from llama_npu2.errors import UserError

_ERROR_BYTES = 512

NEVER_WRITTEN = 0xFF
"""The value of bytes that nobody has written: NaN as bf16 and f32. `kernel_src/sim/device.cc` looks for it."""


def open_device(library: File, threads: int, manifest: Manifest) -> SimDevice:
    """Open the simulator, whose host programs are in `library`. Raises UserError."""
    return SimDevice(library, threads)


@dataclass
class Counters:
    """Sums over all runs of one program."""

    launches: list[str]
    """Names; the lists below have an item for each."""
    submissions: int
    calls: list[int]
    macs: list[int]
    slots: list[dict[str, tuple[int, int]]]
    """Bytes read and bytes written in DDR, by slot."""

    @property
    def read(self) -> int:
        """Bytes read in DDR."""
        return sum(r for launch in self.slots for r, _ in launch.values())

    @property
    def written(self) -> int:
        """Bytes written in DDR."""
        return sum(w for launch in self.slots for _, w in launch.values())


class SimProgram:
    """One lowered ELF."""

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        self._entry, info = entry_point(library, name)
        self.name = name
        self.declared = Declared([{key: slot[key] for key in ("name", "shape", "dtype")} for slot in info["slots"]])
        self.slots: list[str] = [slot["name"] for slot in info["slots"]]
        self.slot_bytes: list[int] = [slot["bytes"] for slot in info["slots"]]
        """The bytes that the program addresses in each slot."""
        self.written_first: list[bool] = [slot["written_first"] for slot in info["slots"]]
        """Whether the program writes a slot before it reads it."""
        self.launches: list[str] = [launch["name"] for launch in info["launches"]]
        self._counters = np.zeros((len(self.launches), 2 + 2 * len(self.slots)), np.int64)
        self._submissions = 0
        self._entry.restype = ctypes.c_int
        self._entry.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_char_p, ctypes.c_int64]

    def run(self, addresses: Sequence[int], reverse: bool = False) -> None:
        """Execute the program with its slots at these addresses. `reverse` runs grid steps and tiles backwards.

        Raises:
            UserError: if the program does something that the hardware would refuse.
        """
        slots = np.array(addresses, np.uint64)
        error = ctypes.create_string_buffer(_ERROR_BYTES)
        self._submissions += 1
        if self._entry(slots.ctypes.data, self._counters.ctypes.data, int(reverse), error, _ERROR_BYTES):
            raise UserError(f"npu2-sim refuses {error.value.decode()}")

    @property
    def written(self) -> list[int]:
        """Bytes written in each slot so far."""
        written: list[int] = self._counters[:, 3::2].sum(axis=0).tolist()
        return written

    def counters(self) -> Counters:
        per_slot = self._counters[:, 2:].reshape(len(self.launches), len(self.slots), 2).tolist()
        return Counters(
            launches=self.launches,
            submissions=self._submissions,
            calls=self._counters[:, 0].tolist(),
            macs=self._counters[:, 1].tolist(),
            slots=[
                {name: (r, w) for name, (r, w) in zip(self.slots, launch, strict=True) if r or w} for launch in per_slot
            ],
        )


@dataclass
class SimDevice:
    """The device interface; `host_library` and `threads` are the CPU device's."""

    host_library: File
    threads: int = 0
    programs: dict[str, SimProgram] = field(default_factory=dict)
    """The loaded programs by file, because buckets of one program have one entry point."""

    def __post_init__(self) -> None:
        self._cpu = CpuDevice(self.host_library, self.threads)
        self._timed = Timer()

    @property
    def description(self) -> str:
        return f"npu2-sim on {self._cpu.description}"

    def alloc(self, nbytes: int, host: bool = False) -> HostBuffer:
        return self._cpu.alloc(nbytes)

    def load_weights(self, weights: Sequence[StoredWeight]) -> list[HostBuffer]:
        return self._cpu.load_weights(weights)

    def array(self, buffer: HostBuffer, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
        return self._cpu.array(buffer, dtype, shape)

    def load_program(self, file: File, name: str, host: bool) -> Any:
        if host:
            return self._cpu.load_program(file, name, host)
        program = self.programs[file.path.stem] = SimProgram(open_library(file), name)
        return program

    def declared(self, program: Any) -> Declared:
        declared: Declared = program.declared
        return declared

    def prepare(self, calls: Sequence[Call]) -> Submission:
        return SimSubmission(self._cpu, calls, self._timed)

    def counters(self) -> dict[str, Counters]:
        """Return the sums so far, by program."""
        return {name: program.counters() for name, program in self.programs.items()}

    def record(self, recorder: Recorder | None) -> None:
        self._cpu.record(recorder)
        self._timed.recorder = recorder

    def close(self) -> None:
        self._cpu.close()


class SimSubmission:
    """Calls in order: host programs on the CPU device, each of the others as one simulated submission."""

    def __init__(self, cpu: CpuDevice, calls: Sequence[Call], timed: Timer) -> None:
        self._steps: list[Submission] = [
            _SimCall(call, timed) if isinstance(call.program, SimProgram) else cpu.prepare([call]) for call in calls
        ]

    def run(self, seq: int, pos: Positions) -> None:
        for step in self._steps:
            step.run(seq, pos)

    def suspend(self) -> None:
        """Do nothing: the simulator holds nothing scarce."""


class _SimCall:
    def __init__(self, call: Call, timed: Timer) -> None:
        self._program: SimProgram = call.program
        self._bindings = call.bindings
        self._name, self._about, self._timed = call.name, call.about, timed

    def run(self, seq: int, pos: Positions) -> None:
        self._timed("program", self._name, self._simulate, seq, pos, about=self._about)

    def _simulate(self, seq: int, pos: Positions) -> None:
        contents: list[np.ndarray] = []
        program = self._program
        for binding, slot, nbytes in zip(self._bindings, program.slots, program.slot_bytes, strict=True):
            offset = binding.offset(seq, pos)
            if offset + nbytes > binding.buffer.bytes.nbytes:
                raise UserError(
                    f"npu2-sim refuses {program.name}: slot {slot} needs {nbytes} bytes from {offset} on, "
                    f"its buffer has {binding.buffer.bytes.nbytes}"
                )
            contents.append(binding.buffer.bytes[offset : offset + nbytes])
        _mark_unwritten(contents, program.written_first)
        program.run([content.ctypes.data for content in contents])

    def suspend(self) -> None:
        """Do nothing: the simulator holds nothing scarce."""


def _mark_unwritten(slots: Sequence[np.ndarray], written_first: Sequence[bool]) -> None:
    """Overwrite the content of slots that a program writes first, so that a transfer that reads it is refused."""
    read = [slot for slot, written in zip(slots, written_first, strict=True) if not written]
    for slot, written in zip(slots, written_first, strict=True):
        if written and not any(np.shares_memory(slot, other) for other in read):
            slot[:] = NEVER_WRITTEN
