"""A buffer object of XRT, the host's mapping of it, and which side has the newer bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llama_npu2.artifact.storage import File
from llama_npu2.devices.spans import Timer
from llama_npu2.devices.xrt.bindings import failures
from llama_npu2.devices.xrt.ranges import Range, Ranges
from llama_npu2.errors import UserError


@dataclass
class Counts:
    """What a session did so far. Bytes of weights and zeroes at load time count too."""

    submissions: int = 0
    runs: int = 0
    to_device: int = 0
    from_device: int = 0


class XrtBuffer:
    """The buffer object `bo` and its mapping: `bytes`, at `address`. Unusable once released.

    A part of another, which is `whole`, begins at its byte `start`. What other parts hold in the same place is of no
    concern to it: by the time that it is written, nobody wants that any more.
    """

    def __init__(self, pyxrt: Any, counts: Counts, bo: Any, nbytes: int, timed: Timer) -> None:
        self._pyxrt, self._counts, self._timed = pyxrt, counts, timed
        self.nbytes = nbytes
        self._whole: XrtBuffer | None = None
        self.parts: list[XrtBuffer] = []
        self.start = 0
        self.bo = bo
        with failures("mapping an NPU buffer"):
            self.bytes: Any = np.frombuffer(bo.map(), np.uint8)[:nbytes]
        self.address: int = self.bytes.ctypes.data
        self.host_newer, self.device_newer = Ranges(), Ranges()
        self.constant = False
        self.shown = False
        """The host reads and writes it outside programs."""

    def fill(self, file: File, offset: int) -> None:
        """With a file's content from `offset` on. UserError if it ends before."""
        filled, view = 0, memoryview(self.bytes)
        try:
            with file.container.open("rb", buffering=0) as whole:
                whole.seek(file.start + offset)
                while filled < len(view):
                    count = whole.readinto(view[filled : max(file.size - offset, 0)])
                    if not count:
                        short = len(view) - filled
                        raise UserError(f"{file.path} ends {short} bytes early: copy it again or run doit compile")
                    filled += count
        except OSError as error:
            raise UserError(f"{file.path}: {error.strerror}: copy it again or run doit compile") from None

    def to_device(self, low: int, high: int) -> None:
        """Make what the host wrote in `low..high` visible to the device."""
        self._counts.to_device += self._sync("TO", self.host_newer.take(low, high))

    def from_device(self, low: int, high: int) -> None:
        """Make what the device wrote in `low..high` visible to the host."""
        self._counts.from_device += self._sync("FROM", self.device_newer.take(low, high))

    def push(self) -> None:
        """Make all of it visible to the device, whoever wrote it."""
        self._counts.to_device += self._sync("TO", [(0, self.nbytes)])

    def _sync(self, way: str, parts: Sequence[Range]) -> int:
        """Returns the number of bytes."""
        direction = getattr(self._pyxrt.xclBOSyncDirection, f"XCL_BO_SYNC_BO_{way}_DEVICE")
        for low, high in parts:
            with failures("an NPU buffer cannot be synchronised"):
                about = {"bytes": high - low}
                self._timed("sync", f"{way} device".lower(), self.bo.sync, direction, high - low, low, about=about)
        return sum(high - low for low, high in parts)

    def view(self, offset: int, nbytes: int) -> Any:
        """The buffer object of a part."""
        if offset == 0 and nbytes == self.nbytes:
            return self.bo
        with failures("a view of an NPU buffer"):
            # Of the whole: a part of a part gets its address wrong in XRT (`buffer_sub::get_address`).
            return self._pyxrt.bo(self.whole.bo, nbytes, self.start + offset)

    @property
    def whole(self) -> XrtBuffer:
        return self._whole or self

    def part(self, offset: int, nbytes: int) -> XrtBuffer:
        made = XrtBuffer(self._pyxrt, self._counts, self.view(offset, nbytes), nbytes, self._timed)
        made._whole, made.start = self, offset
        self.parts.append(made)
        return made

    def overlaps(self, other: XrtBuffer) -> bool:
        return (
            self.whole is other.whole
            and self.start < other.start + other.nbytes
            and other.start < self.start + self.nbytes
        )

    def release(self) -> None:
        for part in self.parts:
            part.release()
        self.parts.clear()
        self.bytes, self.bo, self.address = None, None, 0
