"""A buffer object of XRT, the host's mapping of it, and which side has the newer bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llama_npu2.devices.spans import Timer
from llama_npu2.devices.xrt.bindings import failures

Range = tuple[int, int]
"""First byte, and the byte after the last."""


class Ranges:
    """Disjoint byte ranges. There are few at a time, so a list will do."""

    def __init__(self) -> None:
        self._parts: list[Range] = []

    def __bool__(self) -> bool:
        return bool(self._parts)

    def add(self, low: int, high: int) -> None:
        """Add `low..high`, joined with the ranges that it touches."""
        if low >= high:
            return
        separate = []
        for first, end in self._parts:
            if end < low or high < first:
                separate.append((first, end))
            else:
                low, high = min(first, low), max(end, high)
        self._parts = [*separate, (low, high)]

    def take(self, low: int, high: int) -> list[Range]:
        """Remove `low..high`; return the parts of it that were in the set, ascending."""
        taken, kept = [], []
        for first, end in self._parts:
            start, stop = max(first, low), min(end, high)
            if start >= stop:
                kept.append((first, end))
                continue
            taken.append((start, stop))
            kept += [part for part in ((first, start), (stop, end)) if part[0] < part[1]]
        self._parts = kept
        return sorted(taken)


@dataclass
class Counts:
    """The work of a session so far. Bytes of weights and zeroes at load time count too."""

    submissions: int = 0
    runs: int = 0
    to_device: int = 0
    """Bytes that were synced to the device."""
    from_device: int = 0
    """Bytes that were synced from the device."""


class XrtBuffer:
    """A buffer object and its mapping. It is unusable once released.

    Parts of one buffer may overlap. A part ignores the content of others in the same place: by the time that it is
    written, nobody reads that any more.
    """

    def __init__(self, pyxrt: Any, counts: Counts, bo: Any, nbytes: int, timed: Timer) -> None:
        self._pyxrt, self._counts, self._timed = pyxrt, counts, timed
        self.nbytes = nbytes
        self._whole: XrtBuffer | None = None
        self.parts: list[XrtBuffer] = []
        self.start = 0
        """Where a part begins in `whole`."""
        self.bo = bo
        with failures("mapping an NPU buffer"):
            self.bytes: Any = np.frombuffer(bo.map(), np.uint8)[:nbytes]
            """The mapping, at `address`."""
        self.address: int = self.bytes.ctypes.data
        self.host_newer, self.device_newer = Ranges(), Ranges()
        self.constant = False
        self.shown = False
        """Whether the host reads and writes it outside of programs."""

    def to_device(self, low: int, high: int) -> None:
        """Make what the host wrote in `low..high` visible to the device."""
        self._counts.to_device += self._sync("TO", self.host_newer.take(low, high))

    def from_device(self, low: int, high: int) -> None:
        """Make what the device wrote in `low..high` visible to the host."""
        self._counts.from_device += self._sync("FROM", self.device_newer.take(low, high))

    def fetch(self, low: int, high: int) -> np.ndarray:
        """Return the bytes `low..high` as programs have left them, valid until the next one runs."""
        self.from_device(low, high)
        content: np.ndarray = self.bytes[low:high]
        return content

    def store(self, low: int, content: np.ndarray) -> None:
        """Replace bytes from `low` on, for programs to read."""
        high = low + len(content)
        self.device_newer.take(low, high)
        self.bytes[low:high] = content
        self.host_newer.add(low, high)

    def push(self) -> None:
        """Make the whole buffer visible to the device, whichever side wrote it."""
        self._counts.to_device += self._sync("TO", [(0, self.nbytes)])

    def _sync(self, way: str, parts: Sequence[Range]) -> int:
        """Sync byte ranges in one direction; return their number of bytes."""
        direction = getattr(self._pyxrt.xclBOSyncDirection, f"XCL_BO_SYNC_BO_{way}_DEVICE")
        for low, high in parts:
            with failures("an NPU buffer cannot be synchronised"):
                about = {"bytes": high - low}
                self._timed("sync", f"{way} device".lower(), self.bo.sync, direction, high - low, low, about=about)
        return sum(high - low for low, high in parts)

    def view(self, offset: int, nbytes: int) -> Any:
        """Return a buffer object of a part."""
        if offset == 0 and nbytes == self.nbytes:
            return self.bo
        with failures("a view of an NPU buffer"):
            # Made from the whole: XRT gets the address of a part's part wrong (`buffer_sub::get_address`).
            return self._pyxrt.bo(self.whole.bo, nbytes, self.start + offset)

    @property
    def whole(self) -> XrtBuffer:
        """The buffer that this is a part of, or this one."""
        return self._whole or self

    def part(self, offset: int, nbytes: int) -> XrtBuffer:
        """Return a buffer in the memory of this one."""
        part = XrtBuffer(self._pyxrt, self._counts, self.view(offset, nbytes), nbytes, self._timed)
        part._whole, part.start = self, offset
        self.parts.append(part)
        return part

    def overlaps(self, other: XrtBuffer) -> bool:
        """Return whether both have bytes in the same place."""
        return (
            self.whole is other.whole
            and self.start < other.start + other.nbytes
            and other.start < self.start + self.nbytes
        )

    def release(self) -> None:
        """Release the buffer object and those of its parts."""
        for part in self.parts:
            part.release()
        self.parts.clear()
        self.bytes, self.bo, self.address = None, None, 0
