"""The dialect as a library: its text, element types, what is counted from operations, stitching by slot name."""

from __future__ import annotations

import ast
import math
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from xdsl.builder import ImplicitBuilder
from xdsl.dialects import func
from xdsl.dialects.arith import ConstantOp
from xdsl.dialects.builtin import IndexType, StringAttr
from xdsl.ir import Block, Operation
from xdsl.utils.exceptions import VerifyException

from llama_npu2.errors import UserError
from stages import air
from stages.air import analysis, limits
from stages.air.dialect import AIR, DmaMemcpyNdOp, HerdOp
from stages.air.stitching import toggle_settling
from stages.targets.npu2_sim.lower import lower
from stages.targets.npu2_sim.objects import FENCE_BYTES
from tests.support.air_programs import PROGRAMS, norm_twice

ROOT = Path(__file__).parents[2]


def copy(
    sizes: tuple[int, ...], dtype: str = "bf16", local: int | None = None, strides: tuple[int, ...] = (1,)
) -> air.AirModule:
    """One tile copies what `sizes` and `strides` walk of `x` into a buffer of `local` elements, if not just as many."""
    total = math.prod(sizes)
    b = air.Builder("copy", {"x": air.memref_type((1 << 17,), dtype)})
    with b.launch(), b.segment(), b.herd(1, 1), b.alloc(air.L1, ((local or total,), dtype)) as (tile,):
        b.dma(tile.at((0, total, 1)), b.args["x"].at(*((0, n, s) for n, s in zip(sizes, strides, strict=True))))
    return b.finish()


def scale() -> air.AirModule:
    """Everything that has a text: a grid, channels, loops, all levels, calls with every kind of argument."""
    b = air.Builder("scale", {"x": air.memref_type((4096,)), "out": air.memref_type((4096,), "f32")})
    channel = b.channel((2, 1), (2, 4))
    with b.launch(2, 4) as (i, j), b.segment(), b.alloc(air.L2, (2, 64)) as (staged,):
        b.dma(staged, b.args["x"].at(((i * 4 + j) * 128, 128, 1)))
        for column in range(2):
            b.put(channel, (column, 0), staged.at((column * 64, 64, 1)))
        with b.herd(2, 4) as (tx, ty), b.alloc(air.L1, (64,), ((64,), "f32")) as (x, out):
            b.get(channel, (tx, ty), x)
            with b.loop(3) as step:
                b.call(air.Variant.of("scale", N=64), "scale", x, out, step, 7, 0.5)
            b.dma(b.args["out"].at(((tx * 4 + ty) * 64, 64, 1)), out)
    return b.finish()


# text


@pytest.mark.sampled(12)
@pytest.mark.parametrize("made", [*PROGRAMS.values(), norm_twice, scale], ids=[*PROGRAMS, "stitched", "scale"])
def test_what_is_printed_parses_and_prints_the_same(made: Callable[[], air.AirModule]) -> None:
    text = air.to_mlir(made().module)
    parsed = air.parse_mlir(text)
    assert air.to_mlir(parsed) == text


def test_texts_are_read_in_threads() -> None:
    """xDSL's implicit builders are of the process, not of a thread."""
    text = air.to_mlir(scale().module)
    with ThreadPoolExecutor(8) as pool:
        assert {air.to_mlir(module) for module in pool.map(air.parse_mlir, [text] * 24)} == {text}


def test_every_operation_reads_its_own_text() -> None:
    """No second set of classes for the parser: what is read back are the operations that the builder makes."""
    parsed = air.parse_mlir(air.to_mlir(scale().module))
    found = {type(op) for op in parsed.walk() if op.name.startswith("air.")}
    assert found == set(AIR.operations)


def test_attributes_survive_the_text() -> None:
    module = scale().module
    for op in module.walk():
        if op.name in ("air.dma_memcpy_nd", "air.channel.put", "air.channel.get", "air.herd", "air.launch"):
            op.attributes["note"] = StringAttr("kept")
    text = air.to_mlir(module)
    assert air.to_mlir(air.parse_mlir(text)) == text and text.count('note = "kept"') == 7


@pytest.mark.parametrize(
    "line, reason",
    [
        ("air.segment args(%a=%b) : index, index {}", "expected 2 operand types but had 1"),
        ("air.launch (%x, %y) on (%z=%w, %z=%w)", "in"),
        ("air.channel @c [1, 1] {wide = [1, 1]}", "broadcast_shape"),
        ("air.dma_memcpy_nd (%a[] [], %b[] [] [])", "Expected '['"),
        ("air.channel.put c[] (%a[] [] []) : (memref<4xbf16>)", "attribute expected"),
        ("air.fly ()", "air.fly is not registered"),
    ],
)
def test_malformed_text_is_refused_with_its_line(line: str, reason: str) -> None:
    with pytest.raises(UserError, match=r"MLIR text, line 2: ") as refused:
        air.parse_mlir(f"builtin.module {{\n  {line}\n}}\n")
    assert reason in str(refused.value)


def test_levels_are_nested_in_order() -> None:
    module = scale().module
    herd = next(op for op in module.walk() if isinstance(op, HerdOp))
    segment = herd.parent_op()
    assert isinstance(segment, Operation)
    herd.detach()
    launch = segment.parent_op()
    assert launch is not None
    block = launch.regions[0].block
    block.insert_op_before(herd, segment)
    with pytest.raises(VerifyException, match=r"air\.herd: must be inside air\.segment"):
        herd.verify_()


# element types


@pytest.mark.parametrize("dtype, size", [("bf16", 2), ("f32", 4), ("i32", 4), ("i8", 1)])
def test_elements_take_what_their_type_says(dtype: str, size: int) -> None:
    """Bytes of slots, of traffic, of what is lowered, and of L1."""
    made = copy((256,), dtype)
    (traffic,) = air.count(made)
    assert traffic.slots == {"x": size << 17} and traffic.read == {"x": 256 * size}
    source = lower(made.module)
    assert (
        f'\\"bytes\\": {size << 17}' in source
        and f"claim({FENCE_BYTES}, {256 * size}, {str(size == 1).lower()})" in source
    )
    text = air.to_mlir(made.module)
    assert f"memref<256x{dtype}, 2 : i32>" in text and air.to_mlir(air.parse_mlir(text)) == text
    most = limits.BUFFER_BYTES // size
    air.check(copy((256,), dtype, local=most).module)
    with pytest.raises(UserError, match=f"needs {limits.L1_BYTES + 4} of L1 bytes"):
        air.check(copy((256,), dtype, local=most + 4 // size).module)


@pytest.mark.parametrize(
    "dtype, sizes, strides, reason",
    [
        ("i8", (6,), (1,), "run of 6 bytes is not a multiple of 4 bytes"),
        ("i8", (2, 4), (6, 1), "stride of 6 bytes is not a multiple of 4 bytes"),
        ("i8", (8,), (4,), "innermost stride 4 of i8; DMA cannot take single i8 apart"),
        ("i8", (2, 4), (8, 1), ""),
        ("bf16", (3,), (1,), "run of 6 bytes is not a multiple of 4 bytes"),
        ("bf16", (8,), (2,), "innermost stride 2 of bf16; DMA cannot take single bf16 apart"),
        ("f32", (8,), (3,), ""),
    ],
)
def test_a_dma_moves_whole_words(dtype: str, sizes: tuple[int, ...], strides: tuple[int, ...], reason: str) -> None:
    made = copy(sizes, dtype, strides=strides)
    if reason:
        with pytest.raises(UserError, match=f"copy launch 0 .*{reason}"):
            lower(made.module)
    else:
        assert lower(made.module)


def test_an_unknown_element_type_is_refused() -> None:
    with pytest.raises(TypeError, match="dtype 'f16' is none of bf16, f32, i32, i8"):
        air.memref_type((4,), "f16")


# analysis


def test_executions_are_grids_times_loops() -> None:
    made = scale()
    call = next(op for op in made.module.walk() if isinstance(op, func.CallOp))
    assert analysis.executions(call, "scale") == 2 * 4 * 3
    (traffic,) = air.count(made)
    assert traffic.calls == 2 * 4 * 3 * 8
    assert traffic.read == {"x": 2 * 4096 // 4} and traffic.written == {"out": 8 * 8 * 64 * 4}


@pytest.mark.parametrize(
    "dims, folded",
    [
        (((1, 9), (4, 8), (8, 1)), ((32, 1),)),
        (((2, 100), (4, 8), (8, 1)), ((2, 100), (32, 1))),
        (((1, 5), (1, 1)), ((1, 1),)),
    ],
)
def test_dimensions_that_continue_each_other_are_one(dims: analysis.Dims, folded: analysis.Dims) -> None:
    assert analysis.fold(dims) == folded


def test_sides_know_their_runs_and_axes() -> None:
    module = scale().module
    last = [op for op in module.walk() if isinstance(op, DmaMemcpyNdOp)][-1]
    to, source = analysis.sides(last, "scale")
    assert (to.space, source.space, to.run, to.bytes, source.bytes) == (air.L3, air.L1, 256, 256, 256)
    assert to.axes() == {0, 1} and source.axes() == set()


# stitching


def test_a_slot_has_the_type_of_its_arguments() -> None:
    parts = [(copy((64,), "i8"), {"x": "bytes"}), *[(copy((64,)), {"x": "values"}) for _ in range(3)]]
    made = air.stitch("f", ("values", "bytes"), parts)
    assert [str(t) for t in made.function.function_type.inputs] == ["memref<131072xbf16>", "memref<131072xi8>"]
    assert [[str(a.name_hint) for a in launch.args] for launch in made.launches] == [["bytes"], *[["values"]] * 3]


@pytest.mark.parametrize(
    "slots, wirings, reason",
    [
        (("a",), ({"x": "a"}, {"x": "a"}), r"slot a: copy\.x is memref<131072xbf16>, copy\.x is memref<131072xi8>"),
        (("a", "b", "c"), ({"x": "a"}, {"x": "b"}), r"slots \['a', 'b', 'c'\], wired \['a', 'b'\]"),
        (("a",), ({"x": "a"}, {"x": "b"}), r"slots \['a'\], wired \['a', 'b'\]"),
        (("a",), ({"x": "a"}, {}), r"arguments \['x'\], wired \[\]"),
    ],
    ids=["types differ", "unused slot", "unknown slot", "unwired argument"],
)
def test_what_does_not_fit_is_refused(slots: tuple[str, ...], wirings: tuple[dict[str, str], ...], reason: str) -> None:
    parts = list(zip((copy((64,)), copy((64,), "i8")), wirings, strict=True))
    with pytest.raises(TypeError, match=reason):
        air.stitch("f", slots, parts)


def test_what_is_outside_of_launches_is_verified_once_more() -> None:
    """A function that does not return, and a launch that is given more than it takes."""
    for spoil in (
        lambda made: made.function.body.block.last_op.detach(),
        lambda made: setattr(made.launches[0], "operands", [*made.launches[0].operands, made.function.args[0]]),
    ):
        made = norm_twice()
        spoil(made)
        with pytest.raises(VerifyException):
            toggle_settling(made.module)


# the package


@pytest.mark.parametrize(
    "imports", ["stages.air, stages.air.limits, stages.air.externs", "stages.kernels as k; k.kernels()"]
)
def test_a_build_that_is_up_to_date_loads_no_mlir(imports: str) -> None:
    script = f"import sys, {imports}; assert not any(name.partition('.')[0] == 'xdsl' for name in sys.modules)"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, env={"PYTHONPATH": "runtime"}, check=True)


def test_type_checkers_know_what_the_package_offers() -> None:
    tree = ast.parse((ROOT / "stages/air/__init__.py").read_text())
    typed = {
        alias.name: node.module
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert typed == {name: f"stages.air.{module}" for name, module in air._HOME.items()}
    assert all(getattr(air, name) is not None for name in typed)
    with pytest.raises(AttributeError, match="has no attribute 'Program'"):
        air.Program  # noqa: B018


def test_threads_build_at_the_same_time() -> None:
    """Terminators are inserted once, whatever other threads do at the time: steps run in threads."""

    def build(number: int) -> int:
        block = Block()
        with ImplicitBuilder(block):
            ConstantOp.from_int_and_width(number, IndexType())
        return len(block.ops)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            assert set(pool.map(build, range(4000))) == {1}
    finally:
        sys.setswitchinterval(interval)
