"""What the NPU's driver and XRT allow, and where each figure stands. Build time and run time keep to the same ones.

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
"""A command may live that many watchdog periods: before Linux 6.17 the driver looks once a period, and wants to have
seen no progress twice in a row since the look that saw some (`aie2_tdr.c`)."""

RECOVERY = 5.0
"""Seconds that the driver waits for an answer of the firmware while it restarts a context: `RX_TIMEOUT`."""

COMMAND = WATCHDOG / 2
"""Longest command, in seconds by the estimate, which may be wrong by two before the watchdog bites."""

CHAIN = 24
"""Runs that XRT makes one command of: a run list is submitted in pieces of `submit_size` (`xrt_kernel.cpp`), each a
job of its own to the driver and its watchdog."""

IN_FLIGHT = 4
"""Commands of a context that the driver takes before it lets the next one wait: `HWCTX_MAX_CMDS`."""

CONTEXTS = 16
"""Hardware contexts that exist at a time: `hwctx_limit` of NPU2."""

HEAP = 64 << 20
"""Bytes of the device heap, from which instruction buffers come: `AIE2_DEVM_SIZE`, fixed in older drivers; newer ones
let it grow to 512 MiB."""

HEAP_GRANULE = 32 << 10
"""Bytes to which an allocation on the device heap is aligned: `dev_mem_buf_shift`."""

RUN_IMAGES = 2
"""Device images that a run holds on the heap beside its instructions: the two empty ones between which the compiler's
resets alternate. One copy per kernel in XRT 2.21, one per run since."""

RUNS_SHARE = HEAP // 2
"""Bytes of the heap that our runs may take; contexts and what else uses the NPU need some."""


def heap_bytes(instruction_bytes: int) -> int:
    """Bytes of the device heap that one run takes whose instruction stream is that long."""
    return (-(-instruction_bytes // HEAP_GRANULE) + RUN_IMAGES) * HEAP_GRANULE


def check_duration(program: str, milliseconds: float) -> None:
    """UserError if one call of a program comes near the watchdog. `milliseconds`: by the estimate."""
    if milliseconds >= 1000 * COMMAND:
        raise UserError(
            f"{program} takes {milliseconds / 1000:.2g} s a call by the estimate, and the NPU's driver ends what takes "
            f"{WATCHDOG:g} s: compile smaller npu.buckets="
        )
