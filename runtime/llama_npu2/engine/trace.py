"""Shows the buffers of a plan after every call, for `Llama.trace`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from llama_npu2.artifact.manifest import Manifest
from llama_npu2.artifact.plan import BufferRef, Phase, PlannedCall, Positions, first_of
from llama_npu2.devices import Call, Device, Submission
from llama_npu2.engine.memory import Memory
from llama_npu2.frozen import frozen

_UNWRITTEN = 0xFF
"""The value of every byte of scratch before a call: NaN as bf16 and f32."""


@frozen
class TracedCall:
    """A call that has just run. The content of its arguments (slots) is read by their names, while its watcher runs."""

    phase: Phase
    program: str
    layer: int | None
    """From 0; None outside of the layers."""
    rows: int
    """Number of tokens."""
    position: int
    """Position of the first token."""
    _slots: Mapping[str, Mapping[str, Any]]
    _buffers: Mapping[str, BufferRef]
    _memory: Memory

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the slots, in order."""
        return tuple(self._slots)

    def role(self, slot: str) -> str:
        """Return `input`, `output`, `weight`, `table` or `scratch`."""
        return str(self._slots[slot]["role"])

    def __getitem__(self, slot: str) -> np.ndarray:
        """Return a copy of a slot's content, in its dtype.

        Activations are `[rows, width]`: `[width]` where a call has one row; with buckets, as many rows as the bucket.
        Weights and caches are as they lie in memory; of a cache in rows, those up to the call's last. Scratch that a
        host program never stores is NaN; scratch that an NPU program never stores has its old content.

        Raises:
            KeyError: if the program has no such slot.
        """
        return self.view(slot).copy()

    def view(self, slot: str) -> np.ndarray:
        """Return a slot's content as `[]` does, but without a copy, so that the next call changes it."""
        spec, buffer = self._slots[slot], self._memory.array(self._buffers[slot].name)
        if spec["role"] in ("weight", "table"):
            return buffer
        sizes = {"seq": self.rows, "max_seq": self.position + self.rows}
        shape = tuple(sizes.get(size, size) for size in spec["shape"])
        first = self.first_row(slot) * buffer[0].size
        return buffer.reshape(-1)[first:][: math.prod(shape)].reshape(shape)

    def first_row(self, slot: str) -> int:
        """Return the row of its buffer with which a slot's content begins."""
        return self._buffers[slot].view.row(self.rows, self.position)


Watch = Callable[[TracedCall], object]


class TracedPhase:
    """A phase whose calls are submitted one by one."""

    def __init__(self, phase: Phase, calls: Sequence[TracedSubmission], watch: Watch) -> None:
        self._phase, self._calls, self._watch = phase, calls, watch

    def run(self, seq: int, pos: Positions) -> None:
        """Run the calls. What they see is shown for the first sequence where a row each of several is processed."""
        for call in self._calls:
            self._watch(call.run(self._phase, seq, pos))

    def suspend(self) -> None:
        for call in self._calls:
            call.submission.suspend()


@frozen
class TracedSubmission:
    """One call of a plan, as a submission of its own."""

    call: PlannedCall
    slots: Mapping[str, Mapping[str, Any]]
    """The slots of its program, by name."""
    scratch: Sequence[str]
    """Names of the buffers that are filled with `_UNWRITTEN` before it, to show what it does not store."""
    submission: Submission
    memory: Memory

    def run(self, phase: Phase, seq: int, pos: Positions) -> TracedCall:
        call, buffers = self.call, dict(zip(self.slots, self.call.buffers, strict=True))
        for name in self.scratch:
            self.memory.array(name).view(np.uint8)[...] = _UNWRITTEN
        self.submission.run(seq, pos)
        return TracedCall(phase, call.program, call.layer, seq, first_of(pos), self.slots, buffers, self.memory)


def traced_phases(
    manifest: Manifest, device: Device, memory: Memory, calls: Mapping[Phase, Sequence[Call]], watch: Watch
) -> dict[Phase, TracedPhase]:
    """Return every phase of a manifest, with each call as a submission of its own.

    On an NPU all that a call wrote is copied to the host after it.
    """
    on_array = manifest.target["device"] == "xrt"
    for name in manifest.buffers:
        memory.array(name)  # from now on the host sees the buffer

    def submissions(phase: Phase) -> Iterator[TracedSubmission]:
        for planned, call in zip(manifest.plans[phase], calls[phase], strict=True):
            program = manifest.programs[planned.program]
            slots = {slot["name"]: slot for slot in program["slots"]}
            scratch = [
                name
                for slot, name in zip(slots.values(), planned.names, strict=True)
                if slot["role"] == "scratch" and (program["host"] or not on_array)
            ]
            yield TracedSubmission(planned, slots, scratch, device.prepare([call]), memory)

    return {phase: TracedPhase(phase, list(submissions(phase)), watch) for phase in calls}
