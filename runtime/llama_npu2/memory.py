"""From a manifest to memory and submissions: allocates every buffer once and binds the calls of each phase."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from llama_npu2.devices import Binding, Call, Declared, Device
from llama_npu2.dtypes import DTYPES
from llama_npu2.errors import REMEDY, UserError
from llama_npu2.manifest import Manifest


class Memory:
    """The buffers of a manifest, by name, on one device. What a buffer in shared memory holds is known only to calls
    that follow one another as they do in a plan; `beside`: all the same buffers, but each of those has its own memory,
    and holds what it holds until it is written again."""

    def __init__(self, manifest: Manifest, device: Device, beside: Memory | None = None) -> None:
        self._device = device
        self._manifest, self._specs = manifest, manifest.buffers
        self._on_device = {
            reference.partition("@")[0]
            for calls in manifest.plans.values()
            for call in calls
            if not manifest.programs[call["program"]]["host"]
            for reference in call["buffers"]
        }
        ends = [spec["at"] + manifest.nbytes(name) for name, spec in self._specs.items() if "at" in spec]
        self._shared: Any = device.alloc(max(ends)) if ends and not beside else None
        self._buffers = {name: self._create(name, beside) for name in manifest.buffers}

    def _create(self, name: str, beside: Memory | None) -> Any:
        manifest, device, spec = self._manifest, self._device, self._specs[name]
        host, nbytes = name not in self._on_device, manifest.nbytes(name)
        if beside and "at" not in spec:
            return beside._buffers[name]
        if "file" in spec:
            return device.load_weights(manifest.file(spec["file"]), spec["offset"], nbytes, host)
        if "at" in spec and not beside:
            return self._shared.part(spec["at"], nbytes)
        return device.alloc(nbytes, host)

    def apart(self) -> Memory:
        """The same without shared memory."""
        return self if self._shared is None else Memory(self._manifest, self._device, self)

    def array(self, name: str) -> np.ndarray:
        """The host's view of a buffer, in its dtype and shape. ValueError for one in shared memory."""
        spec = self._specs[name]
        if "at" in spec and self._shared is not None:
            raise ValueError(f"{name} shares its memory with others: look at it in Memory.apart()")
        return self._device.array(self._buffers[name], DTYPES[spec["dtype"]], tuple(spec["shape"]))

    def bind(self, reference: str) -> Binding:
        """Resolve `name`, `name@pos` or `name@last`."""
        name, _, view = reference.partition("@")
        rows = self._specs[name]["shape"][0]
        return Binding(self._buffers[name], view, self._manifest.nbytes(name) // rows)


def load_programs(manifest: Manifest, device: Device) -> dict[str, Any]:
    """By name. Raises UserError."""
    programs = {
        name: device.load_program(manifest.native_file(spec["file"]), spec["entry"], spec["host"])
        for name, spec in manifest.programs.items()
    }
    for name, program in programs.items():
        if declared := device.declared(program):
            _check_declared(manifest, name, declared)
    return programs


def bind_calls(manifest: Manifest, programs: Mapping[str, Any], memory: Memory) -> dict[str, list[Call]]:
    """The calls of the manifest's plans, whose slots are bound."""

    def bound(call: Mapping[str, Any]) -> Call:
        name = call["program"]
        place = f"layer {call['layer'] + 1} of {manifest.model['layers']}" if "layer" in call else ""
        bindings = [memory.bind(reference) for reference in call["buffers"]]
        return Call(programs[name], bindings, manifest.programs[name]["slots"], place, name, call.get("layer"))

    return {phase: [bound(call) for call in calls] for phase, calls in manifest.plans.items()}


def _check_declared(manifest: Manifest, name: str, declared: Declared) -> None:
    """A program was compiled for the slots and the context that the manifest says. Raises UserError."""
    slots, where = manifest.programs[name]["slots"], manifest.file(manifest.programs[name]["file"]).path
    same = len(slots) == len(declared.slots) and all(
        slot[key] == value for slot, own in zip(slots, declared.slots, strict=True) for key, value in own.items()
    )
    if not same:
        raise UserError(f"{where}: program {name} was not compiled for the slots in manifest.json: {REMEDY}")
    if declared.positions is not None and manifest.model["max_seq"] > declared.positions:
        raise UserError(
            f"{where}: program {name} was compiled for a context of {declared.positions}, manifest.json says "
            f"{manifest.model['max_seq']}: {REMEDY}"
        )
