"""The NPU through XRT's Python bindings (`pyxrt`): pinned buffers, hardware contexts, runs, and the syncs between.

A buffer that a device program reads or writes is one XRT buffer object; host programs work on its mapping. Neither side
sees the other's writes before a sync: this package tracks which side has the newer bytes, and syncs only those, just
before the other side needs them. After ten idle seconds the NPU sleeps; the next call takes some 150 ms more, which the
time limit allows for.

    limits         limits of driver and XRT, with sources
    bindings       XRT's Python bindings, and their exceptions as one line
    buffers        a buffer object, its mapping, and which side has the newer bytes
    session        everything that this process takes from the device, and its release
    submissions    a phase: stretches of host calls, runs and run lists, and the bytes that a call reads and writes
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from llama_npu2.artifact.manifest import Manifest, NpuProgram
from llama_npu2.artifact.storage import File
from llama_npu2.devices import Call, Declared, StoredWeight
from llama_npu2.devices.spans import Recorder
from llama_npu2.devices.xrt.buffers import Counts, XrtBuffer
from llama_npu2.devices.xrt.session import Session, XrtProgram
from llama_npu2.devices.xrt.submissions import XrtSubmission


def open_device(library: File, threads: int, manifest: Manifest) -> XrtDevice:
    """Open the NPU; its host programs are in `library`. Raises UserError."""
    return XrtDevice(library, threads, manifest.npu_programs)


class XrtDevice:
    """The device interface on the NPU.

    Args:
        host_library: the host programs, as for the CPU device.
        threads: as for the CPU device.
        programs: the costs of the NPU's programs, by file; a missing one costs nothing.
    """

    def __init__(self, host_library: File, threads: int = 0, programs: Mapping[File, NpuProgram] | None = None) -> None:
        self._session = Session(host_library, threads, programs or {})
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
        """Return a zeroed buffer. With `host` no device program uses it, so it need not be pinned."""
        if host:
            return self._cpu.alloc(nbytes)
        buffer = self._session.buffer(nbytes)
        buffer.bytes[:] = 0
        buffer.push()
        return buffer

    def load_weights(self, weights: Sequence[StoredWeight]) -> list[Any]:
        """Read what device programs use into pinned memory, of which no second copy exists; the rest is the host's."""
        of_host = iter(self._cpu.load_weights([weight for weight in weights if weight.host]))
        return [next(of_host) if weight.host else self._pinned(weight) for weight in weights]

    def _pinned(self, weight: StoredWeight) -> XrtBuffer:
        buffer = self._session.buffer(weight.nbytes)
        weight.file.read_into(memoryview(buffer.bytes), weight.offset)
        buffer.push()
        buffer.constant = True
        return buffer

    def array(self, buffer: Any, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
        if isinstance(buffer, XrtBuffer) and not buffer.shown:
            buffer.shown = True
            buffer.from_device(0, buffer.nbytes)
        array: np.ndarray = buffer.bytes.view(dtype).reshape(shape)
        return array

    def load_program(self, file: File, entry: str, host: bool) -> Any:
        return self._cpu.load_program(file, entry, host) if host else self._session.load(file, entry)

    def declared(self, program: Any) -> Declared | None:
        return None if isinstance(program, XrtProgram) else self._cpu.declared(program)

    def prepare(self, calls: Sequence[Call]) -> XrtSubmission:
        """Prepare calls for submission. The syncs are derived from the calls' slots."""
        submission = XrtSubmission(self._session, calls)
        self._session.submissions.append(submission)
        return submission

    def record(self, recorder: Recorder | None) -> None:
        self._cpu.record(recorder)
        self._session.timed.recorder = recorder

    def close(self) -> None:
        self._finalizer()
