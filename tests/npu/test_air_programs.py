"""The dialect's rules, the printed form, and programs and plans checked on their operations."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from ml_dtypes import bfloat16
from xdsl.dialects import memref, scf
from xdsl.ir import Operation
from xdsl.utils.exceptions import VerifyException

from llama_npu2.errors import UserError
from stages import air
from stages.air import limits
from stages.air.dialect import DmaMemcpyNdOp, HerdOp, LaunchOp, SegmentOp, constant_of, memory_space
from stages.kernels import Tiling, elementwise, flash_attention, gemm, gemv, rms_norm, rope
from stages.weights.formats.bf16 import pad_rows, to_blocks
from tests.conftest import outputs_of_two_runs
from tests.support.air_programs import PROGRAMS, TILINGS


@pytest.fixture(scope="module", params=PROGRAMS)
def program(request: pytest.FixtureRequest) -> air.AirModule:
    return PROGRAMS[request.param]()


def _copy(size: int, sizes: tuple[int, ...]) -> air.AirModule:
    b = air.Builder("copy", {"x": air.memref_type((size,))})
    with b.launch(), b.segment(), b.herd(1, 1), b.alloc(air.L1, (32,)) as (tile,):
        b.dma(tile, b.args["x"].at(*((0, n, 1) for n in sizes)))
    return b.finish()


def test_both_sides_of_a_copy_must_move_the_same_number_of_elements() -> None:
    _copy(64, (32,))
    with pytest.raises(VerifyException, match="takes 32 elements, source gives 16"):
        _copy(64, (16,))


def test_hierarchy_hands_in_what_is_used_and_nothing_else() -> None:
    b = air.Builder("f", {"used": air.memref_type((64,)), "unused": air.memref_type((64,))})
    with b.launch(2) as (step, _), b.segment(), b.herd(1, 1), b.alloc(air.L1, (32,)) as (tile,):
        b.dma(tile, b.args["used"].at((step * 32, 32, 1)))
    launch = b.finish().launches[0]
    assert list(launch.args) == [b.args["used"].value]
    herd = next(op for op in launch.walk() if isinstance(op, HerdOp))
    assert [str(arg.name_hint) for arg in herd.body_args if memory_of(arg) == 0] == ["used"]


def memory_of(value: object) -> int | None:
    kind = getattr(value, "type", None)
    return memory_space(kind) if isinstance(kind, type(air.memref_type((1,)))) else None


def test_a_wrong_block_argument_is_refused() -> None:
    program = _copy(64, (32,))
    herd = next(op for op in program.module.walk() if isinstance(op, HerdOp))
    herd.body.block.erase_arg(herd.size_args[0])
    with pytest.raises(VerifyException, match="block arguments do not match"):
        herd.verify()


def test_every_level_is_nested_and_every_copy_crosses_one(program: air.AirModule) -> None:
    for launch in program.launches:
        (segment,) = (op for op in launch.body.block.ops if isinstance(op, SegmentOp))
        assert any(isinstance(op, HerdOp) for op in segment.walk())
    herds = [op for op in program.module.walk() if isinstance(op, HerdOp)]
    assert all(op.shape()[0] <= limits.COLUMNS and op.shape()[1] <= limits.ROWS for op in herds)


def test_memory_stays_within_the_tiles(program: air.AirModule) -> None:
    for op in program.module.walk():
        if isinstance(op, HerdOp):
            assert _allocated(op, air.L1) <= limits.BUFFER_BYTES
        if isinstance(op, SegmentOp):
            columns = max(herd.shape()[0] for herd in op.walk() if isinstance(herd, HerdOp))
            assert _allocated(op, air.L2) <= columns * limits.L2_BYTES


def _allocated(scope: HerdOp | SegmentOp, space: int) -> int:
    """Bytes of buffers; those made in a loop count twice, because the compiler alternates between two."""
    total = 0
    for op in scope.walk():
        if isinstance(op, memref.AllocOp) and memory_space(op.memref.type) == space:
            kind = op.memref.type
            size = math.prod(kind.get_shape()) * kind.element_type.size
            total += size * (2 if isinstance(op.parent_op(), scf.ForOp) else 1)
    return total


def test_copies_are_whole_words(program: air.AirModule) -> None:
    for op in program.module.walk():
        if isinstance(op, DmaMemcpyNdOp):
            size = op.dst.type.element_type.size  # type: ignore[attr-defined]
            for sizes, strides in ((op.dst_sizes, op.dst_strides), (op.src_sizes, op.src_strides)):
                if sizes:
                    assert constant_of(strides[-1]) == 1
                    assert (constant_of(sizes[-1]) or 0) * size % limits.GRANULARITY_BYTES == 0


def test_the_dimension_that_the_compiler_splits_has_no_offset(program: air.AirModule) -> None:
    """The outermost dimension of a DDR pattern that fills all columns: mlir-air replaces its offset by the column."""
    for op in program.module.walk():
        if not isinstance(op, DmaMemcpyNdOp) or _in_herd(op):
            continue
        for side, offsets, sizes in ((op.dst, op.dst_offsets, op.dst_sizes), (op.src, op.src_offsets, op.src_sizes)):
            if memory_space(side.type) == 0 and (constant_of(sizes[0]) or 0) > 1 and len(sizes) > 2:
                assert constant_of(offsets[0]) == 0


def _in_herd(op: Operation) -> bool:
    parent = op.parent_op()
    return parent is not None and (isinstance(parent, HerdOp) or _in_herd(parent))


@pytest.mark.parametrize(
    ("tile", "limit"),
    [
        (lambda: rms_norm.tile(8, 65536, rms_norm.Norm(1e-5)), "L1"),
        (lambda: gemv.tile(2048, 1 << 18), "no tile size fits L1"),
        (lambda: gemv.tile(64, 32), "no tile size fits cols = 32 into two chunks of whole vectors"),
        (lambda: gemm.tile(128, 256, 1024, head_dim=1024), "no tile size fits whole heads of 1024 into 512 columns"),
        (lambda: gemm.tile(64, 64, 16 * 1031), "no tile size fits descriptors of at most 64 steps"),
        (lambda: gemm.tile(64, 16 * 131, 64), "no tile size fits descriptors of at most 64 steps"),
        (lambda: rope.tile(8, 1, 16384), "L1"),
        (lambda: flash_attention.tile(512, 8, 8, 512), "L1"),
        (lambda: gemm.tile(100, 64, 64), "rows = 100"),
        (lambda: gemm.tile(128, 60, 64), "cols = 60"),
        (lambda: gemv.tile(200, 64), "out_cols = 200"),
        (lambda: flash_attention.tile(128, 5, 2, 64), "heads = 5"),
        (lambda: flash_attention.tile(128, 4, 2, 40), "head_dim = 40"),
        (lambda: elementwise.tile("add", 4, 100), "cols = 100"),
    ],
)
def test_a_shape_that_does_not_fit_is_refused_by_name(tile: Callable[[], Tiling], limit: str) -> None:
    with pytest.raises(UserError, match=limit):
        tile()


@pytest.mark.parametrize("name", TILINGS)
def test_tilings_state_themselves_in_one_line(name: str) -> None:
    text = str(TILINGS[name]())
    assert "herd" in text and "\n" not in text


def test_gemm_reads_x_once_per_block_of_columns() -> None:
    """What a memory tile is given it sends once: rows of x cannot stay there for the next block."""
    tiling = gemm.tile(512, 2048, 2048)
    (traffic,) = air.count(gemm.build(tiling))
    assert traffic.read["x"] == 2 * 512 * 2048 * tiling.steps[1] and tiling.steps[1] == 2048 // tiling.block_n > 1
    assert traffic.bytes == gemm.ddr_bytes(tiling) and tiling.x_chunk <= gemm.CHUNK


def test_text_is_the_same_on_every_run_and_uses_the_custom_form() -> None:
    script = (
        "import sys, hashlib; from stages import air; from tests.support.air_programs import PROGRAMS, norm_twice\n"
        "made = (norm_twice(), *(program() for program in [*PROGRAMS.values()][::4]))\n"
        "text = ''.join(air.to_mlir(each.module) for each in made)\n"
        "sys.stdout.write(hashlib.sha256(text.encode()).hexdigest())"
    )
    assert len(outputs_of_two_runs(script)) == 1
    text = air.to_mlir(gemv.build(gemv.tile(576, 576)).module)
    assert '"air.' not in text and text.isascii()


def test_variants_name_their_shapes() -> None:
    variant = air.Variant.of("gemm", TN=128, TK=32, TM=64)
    assert variant.object == "gemm_tk32_tm64_tn128.o" and variant.symbol("gemm_out") == "gemm_out_tk32_tm64_tn128"
    assert variant.flags() == ["-DTK=32", "-DTM=64", "-DTN=128", "-DVARIANT=tk32_tm64_tn128"]


def test_blocks_hold_inputs_by_outputs() -> None:
    weight = np.arange(24 * 16, dtype=np.float32).reshape(24, 16).astype(bfloat16)
    blocks = to_blocks(weight)
    assert blocks[2, 1, 3, 5] == weight[2 * 8 + 5, 1 * 8 + 3]
    assert (blocks.transpose(0, 3, 1, 2).reshape(24, 16) == weight).all()
    with pytest.raises(ValueError, match="whole number"):
        to_blocks(weight[:20])


def test_padded_vocabulary_rows_are_zero() -> None:
    padded = pad_rows(np.ones((65, 8), bfloat16))
    assert padded.shape == (128, 8) and not padded[65:].any() and padded[:65].all()


def test_launch_grids_are_constant(program: air.AirModule) -> None:
    assert all(math.prod(op.shape()) >= 1 for op in program.module.walk() if isinstance(op, LaunchOp))


@pytest.mark.parametrize("rows", [128, 256])
@pytest.mark.parametrize("cols", [4608, 5632, 7168])
def test_no_dimension_of_a_transfer_is_longer_than_the_compiler_takes(rows: int, cols: int) -> None:
    """TinyLlama's rows have 704 blocks of 8x8, which are one dimension of the transfer if all pass at once; it takes
    512."""
    tiling = gemm.tile(rows, cols, 2048)
    air.check(gemm.build(tiling).module)
    with pytest.raises(UserError, match=f"needs {cols // limits.BLOCK} of steps in one DMA dimension on the L2 side"):
        air.check(gemm.build(replace(tiling, x_chunk=cols)).module)


@pytest.mark.parametrize(("cols", "run"), [(2048, 1152), (8192, 576), (14336, 576)])
def test_a_step_takes_a_weight_by_one_descriptor(cols: int, run: int) -> None:
    """In block floating point 64 inputs are 1152 bytes, cut in two, which leaves a loop no more than the 63 steps of a
    descriptor; of several descriptors the compiler frees one (mlir-air of 2026-05-08)."""
    tiling = gemm.tile(128, cols, 2048, bfp16=True)
    assert tiling.run == run and tiling.weight_descriptors == 1 and tiling.steps[1] > 1
    wide = replace(tiling, tile_k=64)
    assert wide.weight_descriptors == (1 if cols == 2048 else 4) and gemm.ddr_bytes(wide) == gemm.ddr_bytes(tiling)
