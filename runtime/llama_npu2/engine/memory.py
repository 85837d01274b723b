"""Allocates every buffer of a manifest once, loads its programs, and binds the calls of each phase."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from llama_npu2.artifact.dtypes import DTYPES
from llama_npu2.artifact.manifest import Manifest
from llama_npu2.artifact.plan import BufferRef, Phase, PlannedCall
from llama_npu2.devices import Binding, Call, Declared, Device
from llama_npu2.errors import REMEDY, UserError


class Memory:
    """The buffers of a manifest, by name, on one device.

    The content of a buffer in shared memory is defined only for calls in the order of a plan. With `shared_from`,
    another memory of the manifest, each of these buffers has memory of its own instead and keeps its content until it
    is written again; all others are those of `shared_from`.
    """

    def __init__(self, manifest: Manifest, device: Device, shared_from: Memory | None = None) -> None:
        self._device = device
        self._manifest, self._specs = manifest, manifest.buffers
        self._on_device = {
            name
            for calls in manifest.plans.values()
            for call in calls
            if not manifest.programs[call.program]["host"]
            for name in call.names
        }
        ends = [spec["at"] + manifest.nbytes(name) for name, spec in self._specs.items() if "at" in spec]
        self._shared: Any = device.alloc(max(ends)) if ends and not shared_from else None
        self._buffers = {name: self._create(name, shared_from) for name in manifest.buffers}

    def _create(self, name: str, shared_from: Memory | None) -> Any:
        manifest, device, spec = self._manifest, self._device, self._specs[name]
        host, nbytes = name not in self._on_device, manifest.nbytes(name)
        if shared_from and "at" not in spec:
            return shared_from._buffers[name]
        if "file" in spec:
            return device.load_weights(manifest.file(spec["file"]), spec["offset"], nbytes, host)
        if "at" in spec and not shared_from:
            return self._shared.part(spec["at"], nbytes)
        return device.alloc(nbytes, host)

    def unaliased(self) -> Memory:
        """Return memory with the same buffers, but none that share memory: each has its own."""
        return self if self._shared is None else Memory(self._manifest, self._device, self)

    def array(self, name: str) -> np.ndarray:
        """Return the host's view of a buffer, in its dtype and shape. ValueError for one in shared memory."""
        spec = self._specs[name]
        if "at" in spec and self._shared is not None:
            raise ValueError(f"{name} shares its memory with others: look at it in Memory.unaliased()")
        return self._viewed(name)

    def latest(self, name: str) -> np.ndarray:
        """Return a copy of a buffer that the host has just written: in shared memory, others overwrite it soon."""
        return self._viewed(name).copy()

    def _viewed(self, name: str) -> np.ndarray:
        spec = self._specs[name]
        array: np.ndarray = self._device.array(self._buffers[name], DTYPES[spec["dtype"]], tuple(spec["shape"]))
        return array

    def buffer(self, name: str) -> Any:
        """Return the device's buffer of that name."""
        return self._buffers[name]

    def bind(self, reference: BufferRef) -> Binding:
        """Return the buffer that a call refers to, in the view that it asks for."""
        rows = self._specs[reference.name]["shape"][0]
        return Binding(self._buffers[reference.name], reference.view, self._manifest.nbytes(reference.name) // rows)


def load_programs(manifest: Manifest, device: Device) -> dict[str, Any]:
    """Load every program of a manifest, by name. Raises UserError."""
    programs = {
        name: device.load_program(manifest.native_file(spec["file"]), spec["entry"], spec["host"])
        for name, spec in manifest.programs.items()
    }
    for name, program in programs.items():
        if declared := device.declared(program):
            _check_declared(manifest, name, declared)
    return programs


def bind_plans(manifest: Manifest, programs: Mapping[str, Any], memory: Memory) -> dict[Phase, list[Call]]:
    """Return the calls of the manifest's plans with buffers bound to their arguments (slots)."""
    return {phase: bind_calls(manifest, programs, memory, calls) for phase, calls in manifest.plans.items()}


def bind_calls(
    manifest: Manifest, programs: Mapping[str, Any], memory: Memory, calls: Sequence[PlannedCall]
) -> list[Call]:
    """Return `calls` with buffers of `memory` bound to their slots."""

    def bind(call: PlannedCall) -> Call:
        place = "" if call.layer is None else f"layer {call.layer + 1} of {manifest.model['layers']}"
        slots = manifest.programs[call.program]["slots"]
        return Call(
            programs[call.program], list(map(memory.bind, call.buffers)), slots, place, call.program, call.layer
        )

    return list(map(bind, calls))


def _check_declared(manifest: Manifest, name: str, declared: Declared) -> None:
    """Check that a program was compiled for the slots and the context of the manifest. Raises UserError."""
    slots, where = manifest.programs[name]["slots"], manifest.file(manifest.programs[name]["file"]).path
    same = len(slots) == len(declared.slots) and all(
        slot[key] == value for slot, code in zip(slots, declared.slots, strict=True) for key, value in code.items()
    )
    if not same:
        raise UserError(f"{where}: program {name} was not compiled for the slots in manifest.json: {REMEDY}")
    if declared.positions is not None and manifest.model["max_seq"] > declared.positions:
        raise UserError(
            f"{where}: program {name} was compiled for a context of {declared.positions}, manifest.json says "
            f"{manifest.model['max_seq']}: {REMEDY}"
        )
