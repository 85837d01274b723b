"""What a phase computes on its way: every buffer of a plan, after every call. `Llama.trace` turns it on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llama_npu2.artifact.manifest import Manifest
from llama_npu2.artifact.plan import BufferRef, Phase, PlannedCall, view_offset
from llama_npu2.devices import Call, Device, Submission
from llama_npu2.engine.memory import Memory

_NOTHING = 0xFF
"""Every byte of scratch before a call: NaN as bf16 and f32."""


@dataclass(frozen=True)
class TracedCall:
    """One call that has just run: `rows` tokens from `position` on, in `phase`. `layer`: from 0, None outside of the
    layers. What its slots hold is read by their names, while the watcher that was given this runs."""

    phase: Phase
    program: str
    layer: int | None
    rows: int
    position: int
    _slots: Mapping[str, Mapping[str, Any]]
    _buffers: Mapping[str, BufferRef]
    _memory: Memory

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of what the program reads and writes, in order."""
        return tuple(self._slots)

    def role(self, slot: str) -> str:
        """input, output, weight, table or scratch."""
        return str(self._slots[slot]["role"])

    def __getitem__(self, slot: str) -> np.ndarray:
        """A copy of what a slot holds, in its dtype: activations `[rows, width]` (`[width]` where a call has one row;
        with buckets, as many rows as the bucket), weights and caches as they lie in memory, of a cache in rows those up
        to the call's last. Scratch that a host program never stores is NaN; what an NPU's does not is what lay there.
        KeyError for a slot that the program does not have."""
        return self.seen(slot).copy()

    def seen(self, slot: str) -> np.ndarray:
        """The same without a copy: it changes with the next call."""
        spec, (name, view) = self._slots[slot], self._buffers[slot]
        held = self._memory.array(name)
        if spec["role"] in ("weight", "table"):
            return held
        known = {"seq": self.rows, "max_seq": self.position + self.rows}
        shape = tuple(known.get(size, size) for size in spec["shape"])
        first = view_offset(view, held[0].size, self.rows, self.position)
        return held.reshape(-1)[first:][: math.prod(shape)].reshape(shape)


Watch = Callable[[TracedCall], object]


class TracedPhase:
    """A phase whose calls are submitted one by one."""

    def __init__(self, phase: Phase, calls: Sequence[TracedSubmission], watch: Watch) -> None:
        self._phase, self._calls, self._watch = phase, calls, watch

    def run(self, seq: int, pos: int) -> None:
        for call in self._calls:
            self._watch(call.run(self._phase, seq, pos))

    def rest(self) -> None:
        for call in self._calls:
            call.submission.rest()


@dataclass(frozen=True)
class TracedSubmission:
    """One call of a plan. `scratch`: names of buffers that are filled before it, to show what it does not store."""

    call: PlannedCall
    slots: Mapping[str, Mapping[str, Any]]
    scratch: Sequence[str]
    submission: Submission
    memory: Memory

    def run(self, phase: Phase, seq: int, pos: int) -> TracedCall:
        call, buffers = self.call, dict(zip(self.slots, self.call.buffers, strict=True))
        for name in self.scratch:
            self.memory.array(name).view(np.uint8)[...] = _NOTHING
        self.submission.run(seq, pos)
        return TracedCall(phase, call.program, call.layer, seq, pos, self.slots, buffers, self.memory)


def traced_phases(
    manifest: Manifest, device: Device, memory: Memory, calls: Mapping[Phase, Sequence[Call]], watch: Watch
) -> dict[Phase, TracedPhase]:
    """Every phase of a manifest, call by call. On an NPU each is a submission of its own, behind which all that
    it wrote comes to the host."""
    on_array = manifest.target["device"] == "xrt"
    for name in manifest.buffers:
        memory.array(name)  # from now on the host sees it

    def traced(phase: Phase) -> Iterator[TracedSubmission]:
        for planned, call in zip(manifest.plans[phase], calls[phase], strict=True):
            program = manifest.programs[planned.program]
            slots = {slot["name"]: slot for slot in program["slots"]}
            scratch = [
                name
                for slot, name in zip(slots.values(), planned.names, strict=True)
                if slot["role"] == "scratch" and (program["host"] or not on_array)
            ]
            yield TracedSubmission(planned, slots, scratch, device.prepare([call]), memory)

    return {phase: TracedPhase(phase, list(traced(phase)), watch) for phase in calls}
