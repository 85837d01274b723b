"""Limits of the NPU's driver and of XRT, each with its source. Build time and run time use the same ones.

Sources: amd/xdna-driver as of 2026-08-21 (`drivers/accel/amdxdna`, which Linux carries too; `src/driver`, which the
driver packages of 2.21 have; `src/shim`), Xilinx/XRT as of 2026-08-20.
"""

from __future__ import annotations

from llama_npu2.errors import UserError

WATCHDOG = 2.0
"""Seconds without progress after which the driver ends a command and restarts its context: its parameter
`tdr_timeout_ms`, `timeout_in_sec` in older ones. Progress is a command that starts or ends, whatever runs inside one.
The drivers of Linux up to 6.18 waited 60 s."""

WATCHDOG_PERIODS = 3
"""Watchdog periods that a command may live: before Linux 6.17 the driver checks once a period, and ends a command after
two checks in a row without progress since the last check that saw some (`aie2_tdr.c`)."""

RECOVERY = 5.0
"""Seconds that the driver waits for an answer of the firmware while it restarts a context: `RX_TIMEOUT`."""

COMMAND = WATCHDOG / 2
"""Longest command, in estimated seconds. The estimate may be wrong by a factor of two before the watchdog ends it."""

CHAIN = 24
"""Runs of which XRT makes one command: it submits a run list in pieces of `submit_size` (`xrt_kernel.cpp`), each of
which is a job of its own for the driver and its watchdog."""

CONTEXTS = 16
"""Most hardware contexts at a time: `hwctx_limit` of NPU2."""

HEAP = 64 << 20
"""Bytes of the device heap, from which instruction buffers come: `AIE2_DEVM_SIZE`, fixed in older drivers; newer ones
let it grow to 512 MiB."""

HEAP_GRANULE = 32 << 10
"""Bytes to which an allocation on the device heap is aligned: `dev_mem_buf_shift`."""

RUN_IMAGES = 2
"""Device images that a run holds on the heap with its instructions: the two empty ones between which the compiler's
resets alternate. XRT 2.21 has one copy per kernel, later versions have one per run."""

RUNS_SHARE = HEAP // 2
"""Bytes of the heap that our runs may take; contexts and other users of the NPU need the rest."""


def heap_bytes(instruction_bytes: int) -> int:
    """Return the bytes of the device heap that a run takes whose instruction stream is that long."""
    return (-(-instruction_bytes // HEAP_GRANULE) + RUN_IMAGES) * HEAP_GRANULE


def check_duration(program: str, milliseconds: float) -> None:
    """Raise UserError if the estimated time of one call of a program comes near the watchdog."""
    if milliseconds >= 1000 * COMMAND:
        raise UserError(
            f"{program} takes {milliseconds / 1000:.2g} s a call by the estimate, and the NPU's driver ends what takes "
            f"{WATCHDOG:g} s: compile smaller npu.buckets="
        )
