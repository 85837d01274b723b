"""What a device offers the runtime: memory and the execution of a prepared list of calls.

A device is a module of this package with `open_device(library, threads, manifest)`; a manifest names its device by the
module. `library` holds the host programs, `threads` run them. To add a device is to add a module.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from llama_npu2.artifact.manifest import Manifest
from llama_npu2.artifact.plan import view_offset
from llama_npu2.artifact.storage import File
from llama_npu2.devices.spans import Recorder
from llama_npu2.errors import UserError


class HostBuffer:
    """Bytes of the host at a fixed address, kept alive by this object."""

    def __init__(self, content: np.ndarray) -> None:
        self.bytes = content
        self.address: int = content.ctypes.data

    def part(self, offset: int, nbytes: int) -> HostBuffer:
        """A buffer in the memory of this one, which may overlap with other parts of it: every device's have this."""
        return HostBuffer(self.bytes[offset : offset + nbytes])


@dataclass(frozen=True)
class Binding:
    """A buffer in a call's slot, in one of the views of `llama_npu2.artifact.plan`."""

    buffer: Any
    view: str
    row_bytes: int

    def offset(self, seq: int, pos: int) -> int:
        """Where the view begins, in bytes, in a call of `seq` rows from position `pos` on."""
        return view_offset(self.view, self.row_bytes, seq, pos)


@dataclass(frozen=True)
class Call:
    """One program and what is bound to its slots, in slot order."""

    program: Any
    bindings: Sequence[Binding]
    slots: Sequence[Mapping[str, Any]] = ()
    """Name, shape, role and dtype of each slot, as in the manifest."""
    place: str = ""
    """Where in the model it stands, for messages: `layer 3 of 16`."""
    name: str = ""
    """The program's, as the manifest has it."""
    layer: int | None = None
    """From 0; None outside of the layers."""

    @property
    def about(self) -> dict[str, int]:
        """What a span of it says."""
        return {} if self.layer is None else {"layer": self.layer}


@dataclass(frozen=True)
class Declared:
    """What a program's code says of itself. `slots`: in order, of the manifest's fields those that the code knows.
    `positions`: most that a context may have; None if that is all the same to it."""

    slots: Sequence[Mapping[str, Any]]
    positions: int | None = None


class Submission(Protocol):
    """Calls that the device runs in order."""

    def run(self, seq: int, pos: int) -> None:
        """Process `seq` rows, the first of which is at absolute position `pos`."""

    def rest(self) -> None:
        """Give back what can be had again, until the next run."""


class Device(Protocol):
    @property
    def description(self) -> str:
        """What it is, and what runs the host programs, for people."""

    def alloc(self, nbytes: int, host: bool = False) -> Any:
        """A zeroed buffer of the device; `host`: only host programs use it."""

    def load_weights(self, file: File, offset: int, nbytes: int, host: bool = False) -> Any:
        """A read-only buffer with part of a file's content; `host`: only host programs use it."""

    def array(self, buffer: Any, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
        """The host's view of a buffer."""

    def load_program(self, file: File, entry: str, host: bool) -> Any:
        """Load one entry point; `host` ones run on the host CPU on every device."""

    def declared(self, program: Any) -> Declared | None:
        """What a loaded program says of itself; None for what says nothing."""

    def prepare(self, calls: Sequence[Call]) -> Submission:
        """Fix a list of calls for repeated submission."""

    def record(self, recorder: Recorder | None) -> None:
        """Note spans of what runs from now on, or none any more. Raises UserError where programs cannot be timed."""

    def close(self) -> None:
        """Release everything. The device is unusable afterwards."""


def open_device(manifest: Manifest, threads: int) -> Device:
    """The device that the manifest names; no other is imported. Raises UserError."""
    name = manifest.target.get("device")
    known = name in [module.name for module in pkgutil.iter_modules(__path__)]
    create = getattr(importlib.import_module(f"{__name__}.{name}"), "open_device", None) if known else None
    if create is None:
        what = f"{manifest.directory} is for the device {name!r}, which this runtime does not have"
        raise UserError(f"{what}: update llama-npu2, or run doit compile")
    device: Device = create(manifest.host_library, threads, manifest)
    return device
