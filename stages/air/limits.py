"""The resources of an NPU2, and the functions that refuse what exceeds them.

The array has 8 columns; each has a shim tile (DDR), a memory tile (L2) and four compute tiles (L1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from llama_npu2.errors import UserError
from llama_npu2.frozen import frozen

Candidate = TypeVar("Candidate")

COLUMNS = 8
ROWS = 4
L1_BYTES = 64 * 1024
"""Data memory of one compute tile."""

L2_BYTES = 512 * 1024
"""Memory of one memory tile."""

IN_L1, IN_L2 = f"L1 ({L1_BYTES} bytes)", f"L2 ({L2_BYTES} bytes)"
"""Names of these limits in messages."""

ALIGNMENT_BYTES = 64
"""Alignment of the address of a vector of 512 bits or more. The core ignores the low bits of an unaligned address
(aie_api, `vector_ldst_align`), and mlir-aie packs buffers after the stack without aligning them (until 2026-09-01,
#3662)."""

STACK_BYTES = 4096
"""Stack of a core. It lies in L1 in front of the buffers and overflows into them in silence. Upstream reserves 3328
bytes for products in block floating point (mlir-aie, `whole_array.py`: 0xD00), and 2048 for all else since compilers
take 1216 (mlir-air #1980). With 4096, all default plans are the same as with 2048 except some of SmolLM2's for 128
rows."""

CALLER_STACK_BYTES = 512
"""Part of `STACK_BYTES` for the callers and callees of tile functions: startup, the loop that the compiler makes of a
herd, which only waits and calls, and routines of scalar arithmetic (64 bytes each; mlir-air #1354)."""

assert STACK_BYTES % ALIGNMENT_BYTES == 0, "buffers begin after the stack"

STATIC_BYTES = 320
"""Bytes of L1 that tilings leave for a core's static data: two lines of 64 bytes for the table of attention, two for
constants that Peano keeps in memory, one for alignment. A core with more room can have more. With 0, a fuller core of
8B in `int4` and some in `int6` would have larger chunks, and no plan of Llama-3.2-1B would differ."""

BUFFER_BYTES = L1_BYTES - STACK_BYTES - STATIC_BYTES
"""Bytes of L1 for buffers."""

SHIM_CHANNELS = 2
MEMTILE_CHANNELS = 6
TILE_CHANNELS = 2
SHIM_DESCRIPTORS = 16
MEMTILE_DESCRIPTORS = 48
TILE_DESCRIPTORS = 16
QUEUE_DEPTH = 4
GRANULARITY_BYTES = 4
WRAP = 512
"""Most elements or steps in one dimension of a DMA descriptor of a memory or compute tile, if it has several
dimensions. The hardware's fields hold up to 1023 steps, or words, on a memory tile. Until 2026-08-13, mlir-aie refuses
more than 512, though its message says 1023 (mlir-aie #3548), and mlir-air only splits what is longer than 1023."""

RUNS = 256
"""How often a task can run its descriptors. The field has 8 bits; mlir-aie drops higher bits in silence
(`AIEDmaToNpu`)."""

ITERATIONS = 64
"""Most steps of a descriptor whose address advances with every run."""

LOCK_VALUE = 63
"""Largest value of a lock."""


@frozen
class Dma:
    """Fields of a DMA descriptor of one kind of tile, from aie-rt's `xaiemlgbl_reginit.c`."""

    dimensions: int
    """Number of dimensions."""
    counted: int
    """How many of the innermost dimensions have a field for their number of steps."""
    wrap: int
    """Most steps in one of those dimensions; words in the innermost."""
    stride: int
    """Most words from one step to the next."""


SHIM_DMA = Dma(3, 2, 1023, 1 << 20)
MEMTILE_DMA = Dma(4, 3, 1023, 1 << 17)
TILE_DMA = Dma(3, 2, 255, 1 << 13)


def dma(row: int) -> Dma:
    """Return the descriptor of the tiles in a row of the array: 0 the shim, 1 the memory tiles, others compute."""
    return SHIM_DMA if row == 0 else MEMTILE_DMA if row == 1 else TILE_DMA


VECTOR = 32
"""bf16 lanes of one vector register. Chunks of elementwise work are multiples of it if the shape allows it."""

BLOCK = 8
"""Edge of the square blocks that the matrix unit reads (`aie::mmul`)."""


def require(what: str, limit: str, used: int, available: int) -> None:
    """Raise UserError with the limit's name if `what` uses more than is available."""
    if used > available:
        raise UserError(f"{what}: needs {used} of {limit}, the NPU has {available}")


def require_multiple(what: str, size: str, value: float, step: int) -> None:
    """Raise UserError if `value`, the size called `size`, is not a multiple of `step`."""
    if value % step:
        raise UserError(f"{what}: {size} = {value} is not a multiple of {step}")


def fits_l1(*buffers: int) -> bool:
    """Return whether buffers of these byte sizes fit a core's data memory, together with stack and static data."""
    return sum(buffers) <= BUFFER_BYTES


def copies(steps: int) -> int:
    """Return how many buffers the compiler makes of one that a loop of `steps` fills.

    It unrolls the loop in pairs, so there are two, and a third if the number of steps is odd.
    """
    return 1 if steps == 1 else 2 + steps % 2


def steady(steps: int) -> bool:
    """Return whether a loop of a core that moves data needs no third buffer.

    It needs none if it runs once or an even number of times.
    """
    return steps == 1 or steps % 2 == 0


def in_turn(steps: int) -> bool:
    """Return whether a core uses the buffers of such a loop in the order in which its DMA goes through them.

    The compiler unrolls the loop in pairs. With an odd number of steps it makes three buffers. The DMA goes through all
    three in turn, but the core alternates between two of them and uses the third in the last step. The two orders agree
    for three steps only: upstream saw silent zeros with 15 (mlir-air, `EltwiseAdd_bf16.md`).
    """
    return steady(steps) or steps == 3


def steady_first(what: str, candidates: Iterable[Candidate], steps: Callable[[Candidate], int]) -> list[Candidate]:
    """Return the candidates whose steps are `in_turn`: first the `steady` ones, then the others, each in their order.

    Raises UserError if there are none.
    """
    usable = (candidate for candidate in candidates if in_turn(steps(candidate)))
    kept = require_any(what, "an even number of steps of a core", usable)
    return sorted(kept, key=lambda candidate: not steady(steps(candidate)))


def aligned(elements: int, element_bytes: int = 1) -> int:
    """Return `elements` rounded up so that a buffer that follows them is aligned (`ALIGNMENT_BYTES`)."""
    unit = ALIGNMENT_BYTES // element_bytes
    return -(-elements // unit) * unit


def divisors(number: int, step: int = 1, most: int | None = None) -> list[int]:
    """Return the divisors of `number` that are multiples of `step` and at most `most`, largest first."""
    top = number if most is None else min(number, most)
    return [d for d in range(top - top % step, 0, -step) if number % d == 0]


def require_any(what: str, limit: str, candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return the candidates that meet a limit, as a list. Raise UserError with the limit's name if there are none."""
    fitting = list(candidates)
    if not fitting:
        raise UserError(f"{what}: no tile size fits {limit}")
    return fitting


def descriptors(steps: int) -> int:
    """Return how many descriptors a loop around a DDR transfer takes.

    The compiler splits it into the longest equal parts of less than `ITERATIONS` steps.
    """
    return steps // max(part for part in range(1, ITERATIONS) if steps % part == 0)


def cuttable(steps: int) -> bool:
    """Return whether the compiler can split a loop around a DDR transfer into parts of less than `ITERATIONS` steps.

    It looks for the largest divisor below that. If that is 1, as for primes from 67 on, it does not terminate and takes
    all memory (mlir-air of 2026-05-08 and 2026-07-29, `tileIllegalWrapDim`).
    """
    return steps < ITERATIONS or descriptors(steps) < steps
