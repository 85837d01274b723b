"""What an NPU2 offers, and the one way to refuse what exceeds it.

8 columns; per column a shim tile (DDR), a memory tile (L2) and four compute tiles (L1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from llama_npu2.errors import UserError

Candidate = TypeVar("Candidate")

COLUMNS = 8
ROWS = 4
L1_BYTES = 64 * 1024
L2_BYTES = 512 * 1024
ALIGNMENT_BYTES = 64
"""Of the address of a vector of 512 bits and more; the core ignores the low bits of any other (aie_api,
`vector_ldst_align`), and mlir-aie packs buffers behind the stack without aligning them (until 2026-09-01, #3662)."""

STACK_BYTES = 4096
"""Stack of a core, in L1 before its buffers, into which it overflows in silence. Upstream gives products in block
floating point 3328 (mlir-aie, `whole_array.py`: 0xD00), all else 2048 since compilers take 1216 (mlir-air #1980).
What this leaves is enough for the default plans as they would be with 2048, but for some of 128 rows of SmolLM2."""

CALLER_STACK_BYTES = 512
"""Of `STACK_BYTES`, what is left to those who call tile functions and whom they call: startup, the loop that the
compiler makes of a herd, which only waits and calls, and routines of scalar arithmetic (64 each; mlir-air #1354)."""

assert STACK_BYTES % ALIGNMENT_BYTES == 0, "buffers begin behind the stack"

SHIM_CHANNELS = 2
MEMTILE_CHANNELS = 6
TILE_CHANNELS = 2
SHIM_DESCRIPTORS = 16
MEMTILE_DESCRIPTORS = 48
TILE_DESCRIPTORS = 16
QUEUE_DEPTH = 4
GRANULARITY_BYTES = 4
WRAP = 512
"""Most elements or steps in one dimension of a DMA descriptor of a memory or compute tile that has several. The
hardware's fields take 1023 steps, or words, on a memory tile; mlir-aie refuses more than 512, though its message says
1023, up to 2026-08-13 (mlir-aie #3548), and mlir-air cuts only what is longer than 1023."""

RUNS = 256
"""How often a task can run its descriptors: 8 bits, the rest is cut off in silence (mlir-aie, `AIEDmaToNpu`)."""

ITERATIONS = 64
"""Steps of a descriptor that moves on with every run."""

LOCK_VALUE = 63


@dataclass(frozen=True)
class Dma:
    """What a descriptor of one kind of tile can say: `dimensions`, of the innermost `counted` the number of steps up to
    `wrap` (words in the innermost), from step to step up to `stride` words. From aie-rt's `xaiemlgbl_reginit.c`."""

    dimensions: int
    counted: int
    wrap: int
    stride: int


SHIM_DMA = Dma(3, 2, 1023, 1 << 20)
MEMTILE_DMA = Dma(4, 3, 1023, 1 << 17)
TILE_DMA = Dma(3, 2, 255, 1 << 13)


def dma(row: int) -> Dma:
    """Of the tiles in a row of the array: 0 the shim, 1 the memory tiles, others compute."""
    return SHIM_DMA if row == 0 else MEMTILE_DMA if row == 1 else TILE_DMA


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


def steady(steps: int) -> bool:
    """Whether a loop of a core that moves data runs once or an even number of times: odd ones cost a third buffer."""
    return steps == 1 or steps % 2 == 0


def in_turn(steps: int) -> bool:
    """Whether a core uses the buffers of such a loop in the order in which its DMA goes through them. The compiler
    unrolls the loop in pairs. With an odd number of steps it makes three buffers, which the DMA takes in turn; the core
    uses two of them by turns and the third in the last step, which is the same for three steps and for no more:
    upstream saw silent zeros with 15 (mlir-air, `EltwiseAdd_bf16.md`)."""
    return steady(steps) or steps == 3


def steady_first(what: str, candidates: Iterable[Candidate], steps: Callable[[Candidate], int]) -> list[Candidate]:
    """Those whose steps are `in_turn`, in their order, but the `steady` before the others. UserError if none is."""
    kept = [candidate for candidate in candidates if in_turn(steps(candidate))]
    first(what, "an even number of steps of a core", range(len(kept)))
    return sorted(kept, key=lambda candidate: not steady(steps(candidate)))


def aligned(elements: int, element_bytes: int = 1) -> int:
    """Elements up to where what lies behind so many is aligned."""
    unit = ALIGNMENT_BYTES // element_bytes
    return -(-elements // unit) * unit


def divisors(number: int, step: int = 1, most: int | None = None) -> list[int]:
    """Divisors of `number` that are multiples of `step` and at most `most`, largest first."""
    top = number if most is None else min(number, most)
    return [d for d in range(top - top % step, 0, -step) if number % d == 0]


def first(what: str, limit: str, candidates: Iterable[int]) -> int:
    """The best candidate, or a refusal that names the limit none of them meets."""
    for candidate in candidates:
        return candidate
    raise UserError(f"{what}: no tile size fits {limit}")


def descriptors(steps: int) -> int:
    """Descriptors that a loop around a transfer of DDR takes: it is cut into the longest parts of less than
    `ITERATIONS` steps."""
    return steps // max(part for part in range(1, ITERATIONS) if steps % part == 0)


def cuttable(steps: int) -> bool:
    """Whether a loop around a transfer of DDR can be cut into `ITERATIONS` steps and fewer. The compiler looks for the
    largest divisor below that and does not end where it is 1, as for primes from 67 on: it takes all memory (mlir-air
    of 2026-05-08 and 2026-07-29, `tileIllegalWrapDim`)."""
    return steps < ITERATIONS or descriptors(steps) < steps
