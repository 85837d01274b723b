"""The interface of a device to the runtime: memory, and the execution of a prepared list of calls.

A device is a module of this package with `open_device(library, threads, manifest)`; a manifest names its device by the
module. `library` holds the host programs, `threads` run them. To add a device is to add a module.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from llama_npu2.artifact.manifest import Manifest
from llama_npu2.artifact.plan import Positions, View
from llama_npu2.artifact.storage import File
from llama_npu2.devices.spans import Recorder
from llama_npu2.errors import UserError
from llama_npu2.frozen import frozen


class HostBuffer:
    """Bytes of the host at a fixed address, kept alive by this object. Every device's buffers have its methods."""

    def __init__(self, content: np.ndarray) -> None:
        self.bytes = content
        self.address: int = content.ctypes.data

    def part(self, offset: int, nbytes: int) -> HostBuffer:
        """Return a buffer in the memory of this one, which may overlap with other parts."""
        return HostBuffer(self.bytes[offset : offset + nbytes])

    def fetch(self, low: int, high: int) -> np.ndarray:
        """Return the bytes `low..high` as programs have left them, valid until the next one runs."""
        return self.bytes[low:high]

    def store(self, low: int, content: np.ndarray) -> None:
        """Replace bytes from `low` on, for programs to read."""
        self.bytes[low : low + len(content)] = content


class StoredWeight(NamedTuple):
    """Where a weight or a table lies in a file, and who reads it."""

    file: File
    offset: int
    """Bytes of the file in front of it."""
    nbytes: int
    host: bool = True
    """Whether host programs alone use it."""
    in_full: bool = True
    """Whether each token reads all of it, not some rows or some experts."""


@frozen
class Binding:
    """A buffer that is bound to an argument (slot) of a call, in one of the views of `llama_npu2.artifact.plan`."""

    buffer: Any
    view: View
    row_bytes: int

    def offset(self, seq: int, pos: Positions) -> int:
        """Return where the view begins, in bytes, in a call of `seq` rows from position `pos` on."""
        return self.view.row(seq, pos) * self.row_bytes


@frozen
class Call:
    """One program and the buffers that are bound to its slots, in their order."""

    program: Any
    bindings: Sequence[Binding]
    slots: Sequence[Mapping[str, Any]] = ()
    """Name, shape, role and dtype of each slot, as in the manifest."""
    place: str = ""
    """Its place in the model, for messages: `layer 3 of 16`."""
    name: str = ""
    """The program's name in the manifest."""
    layer: int | None = None
    """From 0; None outside of the layers."""

    @property
    def about(self) -> dict[str, int]:
        """The numbers that a span of this call carries."""
        return {} if self.layer is None else {"layer": self.layer}


@frozen
class Declared:
    """The declaration that a program's code carries."""

    slots: Sequence[Mapping[str, Any]]
    """The slots in order, each with those fields of the manifest's that the code knows."""
    positions: int | None = None
    """The longest context that it was compiled for; None if it runs with any."""


class Submission(Protocol):
    """Calls that the device runs in order."""

    def run(self, seq: int, pos: Positions) -> None:
        """Process `seq` rows, the first of which is at absolute position `pos`, or each at its own in its sequence."""

    def suspend(self) -> None:
        """Release scarce resources until the next run, which takes them again."""


class Device(Protocol):
    """Memory and execution. `host` says that only host programs, which run on the CPU, use a buffer or are loaded."""

    @property
    def description(self) -> str:
        """The device, and the CPU that runs the host programs, for people."""

    def alloc(self, nbytes: int, host: bool = False) -> Any:
        """Return a zeroed buffer of the device."""

    def load_weights(self, weights: Sequence[StoredWeight]) -> list[Any]:
        """Return a read-only buffer of each. Raises UserError if a file ends early or cannot be read."""

    def array(self, buffer: Any, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
        """Return the host's view of a buffer."""

    def load_program(self, file: File, entry: str, host: bool) -> Any:
        """Load one entry point."""

    def declared(self, program: Any) -> Declared | None:
        """Return the declaration of a loaded program; None if it has none."""

    def prepare(self, calls: Sequence[Call]) -> Submission:
        """Prepare a list of calls for repeated submission."""

    def record(self, recorder: Recorder | None) -> None:
        """Give `recorder` spans of all that runs from now on; None ends that.

        Raises UserError where programs cannot be timed.
        """

    def close(self) -> None:
        """Release everything. The device is unusable afterwards."""


def open_device(manifest: Manifest, threads: int) -> Device:
    """Open the device that the manifest names; no other is imported. Raises UserError."""
    name = manifest.target.get("device")
    exists = name in [module.name for module in pkgutil.iter_modules(__path__)]
    create = getattr(importlib.import_module(f"{__name__}.{name}"), "open_device", None) if exists else None
    if create is None:
        what = f"{manifest.directory} is for the device {name!r}, which this runtime does not have"
        raise UserError(f"{what}: update llama-npu2, or run doit compile")
    device: Device = create(manifest.host_library, threads, manifest)
    return device
