"""What an NPU2 offers, and the one way to refuse what exceeds it.

8 columns; per column a shim tile (DDR), a memory tile (L2) and four compute tiles (L1).
"""

from __future__ import annotations

from collections.abc import Iterable

from llama_npu2.errors import UserError

COLUMNS = 8
ROWS = 4
L1_BYTES = 64 * 1024
L2_BYTES = 512 * 1024
STACK_BYTES = 1024
SHIM_CHANNELS = 2
MEMTILE_CHANNELS = 6
TILE_CHANNELS = 2
SHIM_DESCRIPTORS = 16
MEMTILE_DESCRIPTORS = 48
TILE_DESCRIPTORS = 16
QUEUE_DEPTH = 4
GRANULARITY_BYTES = 4
WRAP = 512
"""Largest size of an inner dimension of a DMA descriptor of a memory or compute tile. The hardware's field takes 1023;
mlir-aie refuses more than 512, though its message says 1023, up to 2026-08-13 (mlir-aie #3548)."""

RUN_WORDS = 1023
"""Largest innermost dimension, in words of `GRANULARITY_BYTES`."""

VECTOR = 32
"""bf16 lanes of one vector register; chunks of elementwise work are multiples of it where the shape allows."""

BLOCK = 8
"""Edge of the square blocks that the matrix unit reads (`aie::mmul`)."""


def require(what: str, limit: str, used: int, available: int) -> None:
    """Refuse `what` by the name of the limit it breaks."""
    if used > available:
        raise UserError(f"{what}: needs {used} of {limit}, the NPU has {available}")


def require_multiple(what: str, size: str, value: int, step: int) -> None:
    """Refuse a size that cannot be cut into pieces of `step`."""
    if value % step:
        raise UserError(f"{what}: {size} = {value} is not a multiple of {step}")


def fits_l1(*buffers: int) -> bool:
    """Whether buffers of these byte sizes and the stack share a core's data memory."""
    return sum(buffers) + STACK_BYTES <= L1_BYTES


def copies(steps: int) -> int:
    """Buffers the compiler makes of one that a loop of `steps` fills: it unrolls in pairs, an odd step adds one."""
    return 1 if steps == 1 else 2 + steps % 2


def divisors(number: int, step: int = 1, most: int | None = None) -> list[int]:
    """Divisors of `number` that are multiples of `step` and at most `most`, largest first."""
    top = number if most is None else min(number, most)
    return [d for d in range(top - top % step, 0, -step) if number % d == 0]


def first(what: str, limit: str, candidates: Iterable[int]) -> int:
    """The best candidate, or a refusal that names the limit none of them meets."""
    for candidate in candidates:
        return candidate
    raise UserError(f"{what}: no tile size fits {limit}")
