"""The simulator refuses what the hardware would, each limit by name, and a wrong address shows in the result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16
from xdsl.dialects import arith, func, memref
from xdsl.dialects.builtin import IndexType, ModuleOp, StringAttr

from llama_npu2.errors import UserError
from stages.air import L1, L2, AirModule, Builder, MemRef, Variant, limits, memref_type, parse_mlir, to_mlir
from stages.air.analysis import launches
from stages.air.dialect import DmaMemcpyNdOp, HerdOp
from stages.air.stitching import reserve_channel_names
from stages.kernels import add, elementwise, flash_attention, gemm, gemv, rope
from stages.targets.npu2_sim.lower import lower
from stages.targets.npu2_sim.objects import FENCE_BYTES
from stages.weights.formats.bf16 import to_blocks
from tests.support.sim_kernels import attention_case
from tests.support.sim_support import aligned, compile_module, compile_with, run

N = 1024

ROOM = limits.BUFFER_BYTES // 2
"""bf16 elements that fit a core."""


class Case:
    """A one-launch program over DDR slots `a`, `b` and `out`, each `n` elements."""

    def __init__(self, n: int = N, dtype: str = "bf16") -> None:
        self.builder = Builder("program", {name: memref_type((n,), dtype) for name in ("a", "b", "out")})
        self.a, self.b, self.out = (self.builder.args[name] for name in ("a", "b", "out"))

    @contextmanager
    def herd(self, columns: int = 1, rows: int = 1) -> Iterator[Any]:
        with self.builder.launch(), self.builder.segment(), self.builder.herd(columns, rows) as tile:
            yield tile

    def add(self, x: MemRef, y: MemRef, z: MemRef, count: int = 64) -> None:
        self.builder.call(Variant.of("add", COUNT=count), "add", x, y, z)

    def module(self) -> ModuleOp:
        return self.builder.finish().module


def add_rows(rows: int) -> AirModule:
    return elementwise.build(elementwise.tile("add", rows, 64), ("a", "b", "out"))


def refusal(module: ModuleOp) -> str:
    """What the lowering says."""
    with pytest.raises(UserError) as refused:
        lower(module)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def refusal_when_run(module: ModuleOp, n: int = N) -> str:
    with pytest.raises(UserError) as refused:
        run(module, [np.ones(n, bfloat16)] * 3)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_l1_overflow() -> None:
    for elements, fits in ((ROOM, True), (ROOM + 2, False)):
        case = Case(65536)
        with case.herd(), case.builder.alloc(L1, (elements,)) as (x,):
            case.builder.dma(x, case.a.at((0, elements, 1)))
        if fits:
            assert lower(case.module()), "64 KiB less the stack fit"
        else:
            assert "L1 bytes" in refusal(case.module())


@pytest.mark.parametrize(
    "steps, elements, fits",
    [(2, ROOM // 2, True), (2, ROOM // 2 + 2, False), (3, ROOM // 2, False), (3, ROOM // 6 * 2, True)],
)
def test_l1_overflow_by_ping_pong(steps: int, elements: int, fits: bool) -> None:
    """A buffer in a loop is there twice, in a loop of an odd number of steps three times; one outside is there once."""
    inside, outside = Case(65536), Case(65536)
    with inside.herd(), inside.builder.loop(steps) as i, inside.builder.alloc(L1, (elements,)) as (x,):
        inside.builder.dma(x, inside.a.at((i * elements, elements, 1)))
    with outside.herd(), outside.builder.alloc(L1, (elements,)) as (x,), outside.builder.loop(steps) as i:
        outside.builder.dma(x, outside.a.at((i * elements, elements, 1)))
    if fits:
        assert lower(inside.module())
    else:
        assert "L1 bytes" in refusal(inside.module())
    assert lower(outside.module())


@pytest.mark.parametrize(
    "columns, dims, reason",
    [
        (2, lambda share: ((0, 2, share), (0, share, 1)), ""),
        (1, lambda share: ((0, share, 1),), "bytes of one memory tile"),
        (2, lambda share: ((0, 2 * share, 1),), "bytes of one memory tile"),
        (8, lambda share: ((0, 8, share), (0, share, 1)), "of L2 bytes"),
    ],
    ids=["fits", "one column", "not spread", "all columns"],
)
def test_l2_overflow(columns: int, dims: Callable[[int], Any], reason: str) -> None:
    share = 2**18 + 64 if columns == 8 else 2**18 // columns + 64
    case = Case(2**22)
    b = case.builder
    with b.launch(), b.segment(), b.alloc(L2, (columns, share)) as (m,):
        b.dma(m, case.a.at(*dims(share)))
        with b.herd(columns, 1) as (tx, _), b.alloc(L1, (64,)) as (x,):
            b.dma(x, m.at((tx, 1, share), (0, 64, 1)))
    if reason:
        assert reason in refusal(case.module())
    else:
        assert lower(case.module())


@pytest.mark.parametrize(
    "staged, direct, fits", [(2, 0, True), (3, 0, False), (2, 1, False), (1, 2, False), (0, 3, True)]
)
def test_compute_tile_channels(staged: int, direct: int, fits: bool) -> None:
    """Streams from DDR take turns on a channel, those of memory tiles cannot."""
    case = Case()
    b = case.builder
    slots = (case.a, case.b, case.out)
    with b.launch(), b.segment(), b.alloc(L2, *[(64,)] * 3) as memory:
        for buffer, slot in zip(memory[:staged], slots, strict=False):
            b.dma(buffer, slot.at((0, 64, 1)))
        with b.herd(1, 1) as _, b.alloc(L1, *[(64,)] * 3) as local:
            sources = [m.at((0, 64, 1)) for m in memory[:staged]] + [s.at((0, 64, 1)) for s in slots[staged:]]
            for buffer, source in zip(local, sources[: staged + direct], strict=False):
                b.dma(buffer, source)
    if fits:
        assert lower(case.module())
    else:
        assert "needs 3 of compute tile DMA channels in, the NPU has 2" in refusal(case.module())


def test_compute_tile_descriptors() -> None:
    case = Case()
    with case.herd(), case.builder.alloc(L1, (64,)) as (x,):
        for i in range(17):
            case.builder.dma(x, case.a.at((i * 2, 64, 1)))
    assert "compute tile descriptors" in refusal(case.module())


@pytest.mark.parametrize("elements, part, fits", [(32, None, True), (24, None, False), (64, (0, 32, 1), False)])
def test_cascades_take_whole_buffers(elements: int, part: tuple[int, int, int] | None, fits: bool) -> None:
    """From the first of two cores to the other, which alone has it then."""
    b = Builder("cascade", {name: memref_type((elements,)) for name in ("a", "out")})
    chain, end = b.cascade((1, 1)), b.channel((1, 1), (1, 1))
    with b.launch(), b.segment():
        with b.herd(2, 1) as (tx, _), b.alloc(L1, (elements,)) as (held,):
            said = held if part is None else held.at(part)
            with b.where(tx, "eq", 0):
                b.dma(held, b.args["a"].at((0, elements, 1)))
                b.put(chain, (0, 0), said)
            with b.where(tx, "ne", 0):
                b.get(chain, (0, 0), said)
                b.put(end, (0, 0), held)
        with b.alloc(L2, (elements,)) as (out,):
            b.get(end, (0, 0), out)
            b.dma(b.args["out"].at((0, elements, 1)), out)
    module = b.finish().module
    if not fits:
        assert "a cascade takes whole buffers of 64 bytes each time" in refusal(module)
        return
    a = np.arange(elements).astype(bfloat16)
    assert to_mlir(parse_mlir(to_mlir(module))) == to_mlir(module)
    (_, moved), _ = run(module, (a, np.zeros(elements, bfloat16)))
    np.testing.assert_array_equal(moved, a)


def test_shim_channels() -> None:
    case = Case(4096)
    with case.herd(8, 4) as (tx, ty), case.builder.alloc(L1, (64,)) as (x,):
        case.builder.dma(x, case.a.at(((tx * 4 + ty) * 64, 64, 1)))
    assert "needs 32 of shim DMA channels in, the NPU has 16" in refusal(case.module())


def test_a_broadcast_is_one_stream_and_counted_once() -> None:
    case = Case(64)
    with case.herd(8, 4) as _, case.builder.alloc(L1, (64,), (64,)) as (x, y):
        case.builder.dma(x, case.a.at((0, 64, 1)))
        case.builder.dma(y, case.b.at((0, 64, 1)))
    _, counters = run(case.module(), [np.ones(64, bfloat16)] * 3)
    assert counters.slots == [{"a": (128, 0), "b": (128, 0)}]


def test_memory_tile_channels() -> None:
    """Two buffers that every one of 32 tiles reads elsewhere."""
    case = Case(4096)
    b = case.builder
    with b.launch(), b.segment(), b.alloc(L2, (8, 64), (8, 64)) as staged, b.herd(8, 4) as (tx, ty):
        with b.alloc(L1, (64,)) as (x,):
            for source in staged:
                b.dma(x.at((0, 16, 1)), source.at((tx, 1, 64), (ty * 16, 16, 1)))
    assert "needs 64 of memory tile DMA channels out, the NPU has 48" in refusal(case.module())


def test_queue_depth() -> None:
    def module(unrolled: int) -> ModuleOp:
        case = Case()
        with case.herd(), case.builder.alloc(L1, (64,)) as (x,):
            for i in range(unrolled):
                case.builder.dma(x, case.a.at((i * 64, 64, 1)))
        return case.module()

    assert lower(module(4))
    assert "queue entries of a shim channel" in refusal(module(5))


@pytest.mark.parametrize(("steps", "message"), [(61, ""), (66, ""), (67, "loop of 67 steps around a DMA"), (128, "")])
def test_loops_that_the_compiler_cannot_cut(steps: int, message: str) -> None:
    case = Case(64 * steps)
    with case.herd(), case.builder.alloc(L1, (64,)) as (x,), case.builder.loop(steps) as i:
        case.builder.dma(x, case.a.at((i * 64, 64, 1)))
    if message:
        assert message in refusal(case.module())
    else:
        assert lower(case.module())


def test_loops_fold_into_a_descriptor_while_it_has_dimensions() -> None:
    def module(outer: int) -> ModuleOp:
        case = Case(16384, "f32")
        b = case.builder
        with case.herd(), b.alloc(L1, ((4, 4, 4), "f32")) as (x,), b.loop(outer) as i, b.loop(4) as j:
            b.dma(x, case.a.at((i, 4, 1024), (j, 4, 64), (0, 4, 8)))
        return case.module()

    assert lower(module(4)), "three dimensions and the inner loop, four tasks"
    assert "needs 8 of queue entries" in refusal(module(8))


@pytest.mark.parametrize(
    "dims, reason",
    [
        (((0, 32, 2),), "innermost stride 2 of bf16"),
        (((0, 16, 33), (0, 2, 1)), "stride of 66 bytes is not a multiple of 4"),
        (((0, 16, 32), (0, 3, 1)), "run of 6 bytes is not a multiple of 4"),
    ],
)
def test_dma_moves_words(dims: tuple[tuple[int, int, int], ...], reason: str) -> None:
    case = Case()
    with case.herd(), case.builder.alloc(L1, (int(np.prod([d[1] for d in dims])),)) as (x,):
        case.builder.dma(x, case.a.at(*dims))
    assert reason in refusal(case.module())


@pytest.mark.parametrize("local, memory, reason", [(3, 1, ""), (4, 1, "4 of DMA dimensions on the L1 side")])
def test_dma_dimensions_of_l1(local: int, memory: int, reason: str) -> None:
    check_dimensions(local, memory, reason)


@pytest.mark.parametrize("local, memory, reason", [(1, 4, ""), (1, 5, "5 of DMA dimensions on the L2 side")])
def test_dma_dimensions_of_l2(local: int, memory: int, reason: str) -> None:
    check_dimensions(local, memory, reason)


def check_dimensions(local: int, memory: int, reason: str) -> None:
    """L2 -> L1 with as many dimensions of two elements on each side; one dimension is contiguous."""
    case, elements = Case(4096), 2 ** max(local, memory)
    b = case.builder
    patterns = [
        ((0, elements, 1),) if rank == 1 else (*((0, 2, 4**p) for p in range(rank - 1, 0, -1)), (0, 2, 1))
        for rank in (local, memory)
    ]
    with b.launch(), b.segment(), b.alloc(L2, (8192,)) as (m,), b.herd(1, 1) as _, b.alloc(L1, (1024,)) as (x,):
        b.dma(x.at(*patterns[0]), m.at(*patterns[1]))
    if reason:
        assert reason in refusal(case.module())
    else:
        assert lower(case.module())


@pytest.mark.parametrize(
    "middle, run, reason",
    [(512, 2, ""), (513, 2, "513 of steps"), (2, 512, ""), (2, 514, "514 of steps")],
)
def test_size_of_a_dma_dimension(middle: int, run: int, reason: str) -> None:
    """An outermost dimension of 2, `middle` runs of `run` bf16, with gaps."""
    case = Case(2**16)
    b = case.builder
    pattern = ((0, 2, 2 * middle * (run + 2)), (0, middle, run + 2), (0, run, 1))
    with b.launch(), b.segment(), b.alloc(L2, (2**14,)) as (m,), b.herd(1, 1) as _, b.alloc(L1, (2**13,)) as (x,):
        b.dma(x.at((0, 2 * middle * run, 1)), m.at(*pattern))
    if reason:
        assert f"needs {reason} in one DMA dimension on the L2 side" in refusal(case.module())
    else:
        assert lower(case.module())


def test_a_long_ddr_pattern_is_several_descriptors() -> None:
    case = Case(2**16)
    with case.herd(), case.builder.alloc(L1, (8, 2, 2, 2, 2)) as (x,):
        case.builder.dma(x, case.a.at((0, 8, 4**6), *((0, 2, 4**p) for p in (4, 3, 2)), (0, 2, 1)))
    assert "needs 8 of queue entries" in refusal(case.module())


def test_bytes_are_copied_and_counted_as_bytes() -> None:
    case = Case(dtype="i8")
    with case.herd(2, 1) as (tx, _), case.builder.alloc(L1, ((64,), "i8")) as (x,):
        case.builder.dma(x.at((0, 16, 4), (0, 4, 1)), case.a.at((tx * 16, 16, 4), (0, 4, 1)))
        case.builder.dma(case.out.at((tx * 64, 64, 1)), x)
    arrays = [np.arange(N, dtype=np.int8), *np.zeros((2, N), np.int8)]
    slots, counters = run(case.module(), arrays)
    assert (slots[2][:128] == arrays[0][:128]).all() and not slots[2][128:].any()
    assert counters.slots == [{"a": (128, 0), "out": (0, 128)}]


def test_tiles_that_write_the_same_bytes() -> None:
    case = Case()
    with case.herd(2, 1), case.builder.alloc(L1, (64,)) as (x,):
        case.builder.dma(x, case.a.at((0, 64, 1)))
        case.builder.dma(case.out.at((0, 64, 1)), x)
    assert "tiles that differ only in their column write the same bytes" in refusal(case.module())


def test_unaligned_offset() -> None:
    case = Case()
    with case.herd(2, 1) as (tx, _), case.builder.alloc(L1, (64,)) as (x,):
        case.builder.dma(x, case.a.at((tx, 64, 1)))
    assert "source offset 2 is not a multiple of 4 bytes" in refusal_when_run(case.module())


def test_address_out_of_bounds() -> None:
    case = Case()
    with case.herd(8, 1) as (tx, _), case.builder.alloc(L1, (256,)) as (x,):
        case.builder.dma(x, case.a.at((tx * 128, 256, 1)))
    text = refusal_when_run(case.module())
    assert "source bytes 1792 .. 2304 are outside the buffer of 2048" in text
    assert "program launch 0" in text


def test_never_written_bytes() -> None:
    case = Case()
    with case.herd(), case.builder.alloc(L1, (64,)) as (x,):
        case.builder.dma(x.at((0, 60, 1)), case.a.at((0, 60, 1)))
        case.builder.dma(case.out.at((0, 64, 1)), x)
    assert "reads bytes that were never written" in refusal_when_run(case.module())


@pytest.mark.parametrize("used_behind", [False, True])
def test_what_only_a_loop_uses_does_not_outlive_its_step(used_behind: bool) -> None:
    """The compiler moves such a buffer into the loop and makes two of it."""
    case = Case()
    b = case.builder
    with case.herd(), b.alloc(L1, (2, 64)) as (kept,):
        with b.loop(2) as step:
            b.dma(kept.at((step * 64, 64, 1)), case.a.at((0, 64, 1)))
            b.dma(case.out.at((0, 64, 1)), kept.at((0, 64, 1)))
        if used_behind:
            b.dma(case.out.at((0, 128, 1)), kept)
    if used_behind:
        run(case.module(), [np.ones(N, bfloat16)] * 3)
    else:
        assert "reads bytes that were never written" in refusal_when_run(case.module())


def test_never_written_bytes_through_a_tile_function() -> None:
    case = Case()
    with case.herd(), case.builder.alloc(L1, (64,), (64,), (64,)) as (x, y, z):
        case.builder.dma(x, case.a.at((0, 64, 1)))
        case.add(x, y, z)
        case.builder.dma(case.out.at((0, 64, 1)), z)
    assert "reads bytes that were never written" in refusal_when_run(case.module())


def test_buffers_do_not_outlive_a_tile() -> None:
    """What one tile wrote is not there for the next."""
    case = Case()
    with case.herd(2, 1) as (tx, _), case.builder.loop(2) as i, case.builder.alloc(L1, (64,)) as (x,):
        case.builder.dma(x.at((i * 32, 32, 1)), case.a.at((0, 32, 1)))
        case.builder.dma(case.out.at((tx * 32, 32, 1)), x.at((0, 32, 1)))
    assert "never written" in refusal_when_run(case.module())


def test_tile_function_that_leaves_its_buffer() -> None:
    case = Case()
    with case.herd(), case.builder.alloc(L1, (64,), (64,), (32,)) as (x, y, z):
        for buffer, slot in ((x, case.a), (y, case.b)):
            case.builder.dma(buffer, slot.at((0, 64, 1)))
        case.add(x, y, z)
    text = "add_count64: wrote past the end of a buffer of 64 bytes, number 3 that it was given"
    assert text in refusal_when_run(case.module())


@pytest.mark.parametrize(
    "element, text",
    [
        (0, ""),
        (-1, "wrote before the start of a buffer of 256 bytes, number 1 that it was given"),
        (64, "wrote past the end of a buffer of 256 bytes, number 1 that it was given"),
        (64 + FENCE_BYTES // 2 - 1, "wrote before the start of a buffer of 128 bytes, which it was not given"),
    ],
)
def test_tile_function_that_writes_where_it_may_not(tmp_path: Path, element: int, text: str) -> None:
    """Before the first buffer lies the stack, between two buffers nothing."""
    case, variant = Case(), Variant.of("gemm", TK=8, TM=8, TN=8)
    with case.herd(), case.builder.alloc(L1, ((64,), "f32"), ((32,), "f32")) as (c, _):
        case.builder.call(variant, "gemm_zero", c)
    source = tmp_path / "astray.cc"
    source.write_text(f'extern "C" void {variant.symbol("gemm_zero")}(float *c) {{ c[{element}] = 0; }}')
    program = compile_with(case.module(), source, tmp_path)
    slots = [aligned(np.zeros(N, bfloat16)) for _ in range(3)]
    if text:
        with pytest.raises(UserError, match=text):
            program.run([slot.ctypes.data for slot in slots])
    else:
        program.run([slot.ctypes.data for slot in slots])


@pytest.mark.parametrize("first, reason", [(64, ""), (48, "unaligned vector access")])
def test_buffers_are_aligned_as_larger_ones_leave_them(first: int, reason: str) -> None:
    """Vectors of 64 bytes in buffers that the compiler packs behind one of `first` bf16."""
    case = Case()
    with case.herd(), case.builder.alloc(L1, (32,), (32,), (32,), (first,)) as (x, y, z, more):
        for buffer in (x, y):
            case.builder.dma(buffer, case.a.at((0, 32, 1)))
        case.builder.dma(more, case.b.at((0, first, 1)))
        case.add(x, y, z, 32)
    if reason:
        assert reason in refusal_when_run(case.module())
    else:
        run(case.module(), [random(N, seed=n) for n in range(3)])


def test_unaligned_vector_in_a_tile_function() -> None:
    case = Case()
    with case.herd(), case.builder.alloc(L1, (64,), (128,), ((1,), "f32")) as (a, x, acc):
        case.builder.dma(a, case.a.at((0, 64, 1)))
        case.builder.dma(x, case.b.at((0, 128, 1)))
        variant = Variant.of("gemv", BLOCKED=0, COLS=128, KC=64, ROWS=1)
        case.builder.call(variant, "gemv_step", a, x, 4, acc)
    assert "unaligned vector access" in refusal_when_run(case.module())


@pytest.mark.parametrize(
    "puts, gets, size, reason",
    [
        (2, 2, 64, ""),
        (1, 2, 64, "nothing more is put: the array would wait forever"),
        (2, 1, 64, "leaves items in a channel"),
        (1, 2, 32, ""),
        (2, 3, 32, "leaves items in a channel"),
        (2, 2, 64 + 32, "takes 192 bytes of a channel item that has 128"),
    ],
)
def test_channels_come_out_even(puts: int, gets: int, size: int, reason: str) -> None:
    """One column, two tiles that both get every item, as a whole or in parts."""
    case = Case()
    b = case.builder
    channel = b.channel((1, 1), (1, 2))
    with b.launch(), b.segment():
        with b.loop(puts), b.alloc(L2, (64,)) as (m,):
            b.dma(m, case.a.at((0, 64, 1)))
            b.put(channel, (0, 0), m.at((0, 64, 1)))
        with b.herd(1, 2) as tile, b.alloc(L1, (128,)) as (x,):
            with b.loop(gets):
                b.get(channel, tile, x.at((0, size, 1)))
            b.dma(case.out.at((tile[1] * 32, 32, 1)), x.at((0, 32, 1)))
    if reason:
        assert reason in refusal_when_run(case.module())
    else:
        slots, counters = run(case.module(), [random(N, seed=n) for n in range(3)])
        last = (gets - 1) * size % 64
        assert slots[2][:32].tobytes() == slots[2][32:64].tobytes() == slots[0][last : last + 32].tobytes()
        assert counters.slots == [{"a": (puts * 128, 0), "out": (0, 128)}]


def test_a_launch_needs_one_segment() -> None:
    module = add_rows(1).module
    segment = next(op for op in module.walk() if op.name == "air.segment")
    for op in list(segment.walk()):
        if isinstance(op, HerdOp):
            op.detach()
    segment.detach()
    assert "has 0 segments" in refusal(module)


def test_a_herd_links_the_object_it_calls() -> None:
    module = add_rows(1).module
    herd = next(op for op in module.walk() if isinstance(op, HerdOp))
    herd.link_with = StringAttr("other.o")
    assert "is not in the herd's object" in refusal(module)


def test_an_external_function_needs_its_interface() -> None:
    module = add_rows(1).module
    for op in module.walk():
        if isinstance(op, func.FuncOp):
            op.attributes.pop("llvm.emit_c_interface", None)
    assert "needs llvm.emit_c_interface" in refusal(module)


def test_an_unknown_operation_is_named() -> None:
    module = add_rows(1).module
    herd = next(op for op in module.walk() if isinstance(op, HerdOp))
    assert herd.body.block.last_op is not None
    herd.body.block.insert_op_before(arith.XOrIOp(herd.ids[0], herd.ids[0]), herd.body.block.last_op)
    assert "does not know arith.xori" in refusal(module)


def test_text_and_ir_are_the_same_program() -> None:
    """What aircc is given means what was built, down to the byte."""
    for program in (
        gemm.build(gemm.tile(64, 64, 32)),
        flash_attention.build(flash_attention.tile(64, 6, 2, 64)),
        rope.build(rope.tile(16, 2, 64, rope.KEYS)),
        gemm.build(replace(gemm.tile(64, 64, 32), x_chunk=32, tile_k=32)),
    ):
        text = to_mlir(program.module)
        parsed = parse_mlir(text)
        assert to_mlir(parsed) == text
        assert lower(parsed) == lower(program.module)
        reserve_channel_names(program.module)
        assert to_mlir(program.module) != text
        assert lower(program.module) == lower(parsed), "names that are for the compiler alone are no channels"
    with pytest.raises(UserError, match="MLIR text, line 3: "):
        parse_mlir("builtin.module {\n  air.launch (%x) in (%y=%z)\n}\n")


def random(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(bfloat16)


def _add() -> tuple[ModuleOp, list[np.ndarray], np.ndarray]:
    a, b = random(64, 64, seed=1), random(64, 64, seed=2)
    return add_rows(64).module, [a, b, np.zeros_like(a)], add.reference(a, b)


def _gemm() -> tuple[ModuleOp, list[np.ndarray], np.ndarray]:
    x, weight = random(64, 64, seed=3), random(64, 64, seed=4)
    module = gemm.build(gemm.tile(64, 64, 64)).module
    return module, [x, to_blocks(weight), np.zeros((64, 64), bfloat16)], gemm.reference(x, weight)


def _gemv() -> tuple[ModuleOp, list[np.ndarray], np.ndarray]:
    weight, x = random(64, 64, seed=5), random(64, seed=6)
    module = gemv.build(gemv.tile(64, 64)).module
    return module, [to_blocks(weight), x, np.zeros(64, bfloat16)], gemv.reference(weight, x)


def _attention() -> tuple[ModuleOp, list[np.ndarray], np.ndarray]:
    q, k, _, kv = attention_case(32, 32, 2, 1, 64, 0, 1.0)
    module = flash_attention.build(flash_attention.tile(32, 2, 1, 64)).module
    want = flash_attention.reference_placed(q, k, kv[:, 64:], 0, 2, 1)
    return module, [q, kv, np.zeros((32, 128), bfloat16)], want


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", [_add, _gemm, _gemv, _attention], ids=lambda c: c.__name__[1:])
def test_a_wrong_tile_offset_fails(case: Callable[[], tuple[ModuleOp, list[np.ndarray], np.ndarray]]) -> None:
    """Every DMA of a kernel in turn, moved by one 8-element block: refused, or the numbers are far off."""
    module, arrays, want = case()
    assert far_off(module, arrays, want) < 0.01, "the kernel itself"
    transfers = [op for op in module.walk() if isinstance(op, DmaMemcpyNdOp)]
    for position, transfer in enumerate(transfers):
        broken = module.clone()
        shift([op for op in broken.walk() if isinstance(op, DmaMemcpyNdOp)][position])
        try:
            error = far_off(broken, arrays, want)
            assert np.isnan(error) or error > 0.1, f"DMA {position} of {len(transfers)}: {transfer}"
        except UserError as refused:
            assert "outside the buffer" in str(refused) or "never written" in str(refused)


def far_off(module: ModuleOp, arrays: list[np.ndarray], want: np.ndarray) -> float:
    """Error of the last slot relative to the result."""
    got = run(module, arrays)[0][-1].astype(np.float64).reshape(want.shape)
    return float(np.linalg.norm(got - want.astype(np.float64)) / np.linalg.norm(want.astype(np.float64)))


def shift(transfer: DmaMemcpyNdOp) -> None:
    """Add 8 to the innermost offset of the side that has offsets (of DDR where both have)."""
    side = "src_offsets" if transfer.src_offsets else "dst_offsets"
    operands = list(getattr(transfer, side))
    eight = arith.ConstantOp.from_int_and_width(8, IndexType())
    moved = arith.AddiOp(operands[-1], eight)
    block = transfer.parent_block()
    assert block is not None
    block.insert_ops_before([eight, moved], transfer)
    index = list(transfer.operands).index(operands[-1], 1 + (0 if side == "dst_offsets" else len(transfer.dst_offsets)))
    transfer.operands[index] = moved.result


def test_checks_see_every_allocation() -> None:
    """The places of buffers come from the IR: as many as it allocates."""
    module = gemm.build(gemm.tile(64, 64, 64)).module
    allocations = sum(isinstance(op, memref.AllocOp) for op in module.walk())
    assert lower(module).count("->claim(") == allocations
    assert len(launches(module)) == 1
    assert compile_module(module).slot_bytes == [8192, 8192, 8192]
