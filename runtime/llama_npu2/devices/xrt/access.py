"""The bytes that a call reads and writes in the buffers that are bound to its slots."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llama_npu2.artifact.dtypes import nbytes
from llama_npu2.devices import Binding, Call
from llama_npu2.devices.xrt.buffers import XrtBuffer
from llama_npu2.devices.xrt.ranges import Range
from llama_npu2.errors import UserError


@dataclass(frozen=True)
class Access:
    """A call's access to one buffer."""

    buffer: XrtBuffer
    binding: Binding
    slot: str
    rows: str
    """The name of the slot's first dimension, if it has one; a `max_seq` slot is a cache, to which a call adds rows."""
    nbytes: int
    """Bytes of a slot of static shape, else 0."""
    reads: bool
    writes: bool

    @staticmethod
    def of(binding: Binding, slot: Mapping[str, Any]) -> Access:
        """Return the access of a call that binds a buffer to `slot`, as the manifest describes it."""
        shape = slot["shape"]
        named = any(isinstance(dim, str) for dim in shape)
        first = str(shape[0]) if named else ""
        writes = slot["role"] in ("output", "scratch")
        reads = not writes or first == "max_seq"
        size = 0 if named else nbytes(slot["dtype"], shape)
        return Access(binding.buffer, binding, slot["name"], first, size, reads, writes)

    def read(self, seq: int, pos: int) -> Range:
        """Return the bytes that a call of `seq` rows from position `pos` on reads."""
        if self.rows == "max_seq":
            return 0, (pos if self.writes else pos + seq) * self.binding.row_bytes
        return self._range(seq, pos)

    def written(self, seq: int, pos: int) -> Range:
        """Return the bytes that a call of `seq` rows from position `pos` on writes."""
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


def accesses(calls: Sequence[Call]) -> Iterator[Access]:
    """Yield the accesses of calls, in order, to buffers that both sides can change."""
    for call in calls:
        for binding, slot in zip(call.bindings, call.slots, strict=True):
            if isinstance(binding.buffer, XrtBuffer) and not binding.buffer.constant:
                yield Access.of(binding, slot)
