"""Stitched modules and traffic estimates, checked on structure: wiring, symbols, roles, counts."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from dataclasses import replace

import pytest
from xdsl.dialects import func, scf
from xdsl.dialects.builtin import MemRefType, ModuleOp, StringAttr
from xdsl.ir import BlockArgument, SSAValue

from llama_npu2.errors import UserError
from stages import air
from stages.air import limits
from stages.air.access import accesses
from stages.air.analysis import launches, moves, trip_count, walk_ops
from stages.air.dialect import ChannelGetOp, ChannelOp, ChannelPutOp, HerdOp, LaunchOp, SegmentOp
from stages.kernels import elementwise, flash_attention, gemm, gemv, kernels, rope
from stages.model.config import Config
from stages.model.grouping import programs
from stages.model.part import Slot
from stages.model.policy import parse_policy
from stages.targets.npu2 import TARGET
from stages.targets.npu2.groupings import GROUPINGS
from stages.targets.npu2.modules import Module, build_module, step_transfers
from tests.conftest import A_LLAMA, outputs_of_two_runs
from tests.support.npu_shapes import (
    BUCKETS,
    DEMO,
    FAMILIES,
    JUDGED,
    MODELS,
    device_program,
    device_programs,
    family_programs,
    layout,
)

LLAMA = MODELS["llama-3.2-1b"]
SMALLEST = ("qwen2.5-0.5b", "qwen3-0.6b", "gemma3-1b", "lfm2-350m")
"""The smallest model of each family in `FAMILIES`."""


def module(name: str, grouping: str, model: str = "llama-3.2-1b", bucket: int = 2048) -> Module:
    return build_module(device_program(name, grouping, bucket), MODELS[model].dimensions())


def described(made: Module) -> dict[str, dict]:
    return {slot["name"]: slot for slot in made.described_slots()}


def wiring(made: Module) -> list[list[str]]:
    """Per launch, the function arguments it is given."""
    assert all(isinstance(arg, BlockArgument) for launch in made.air.launches for arg in launch.args)
    return [[str(arg.name_hint) for arg in launch.args] for launch in made.air.launches]


def test_a_layer_of_a_prompt_is_three_programs_wired_by_slot_and_launches_that_settle_them() -> None:
    attend, up, down = (module(name, "fused") for name in ("prefill_attend", "prefill_up", "prefill_down"))
    assert wiring(attend) == [
        ["res1"],
        ["norm_w", "x_in", "normed"],
        ["normed", "wq", "q"],
        ["normed", "wk", "k"],
        ["normed", "wv", "kv"],
        ["q", "lut_q", "q_roped"],
        ["k", "lut_k", "kv"],
        ["q_roped", "kv_window", "attn_out"],
        ["attn_out", "wo", "proj"],
        ["x_in", "proj", "res1"],
    ]
    assert wiring(up) == [
        ["ffn_norm_w", "res1", "normed2"],
        ["normed2", "w_gate", "gate"],
        ["normed2", "w_up", "up"],
        ["gate", "up", "swiglu"],
    ]
    assert wiring(down) == [["swiglu", "w_down", "down"], ["res1", "down", "output"]]
    passed = [("input", ["x_in", "kv_window"]), ("output", ["kv", "res1"])]
    passed += [("input", ["res1"]), ("output", ["swiglu"]), ("input", ["swiglu", "res1"]), ("output", ["output"])]
    for made, (role, names) in zip((attend, attend, up, up, down, down), passed, strict=True):
        assert [name for name, slot in described(made).items() if slot["role"] == role] == names


def test_decode_joins_a_layer_with_the_next() -> None:
    wired = wiring(module("decode_layer", "fused"))
    assert len(wired) == 14
    assert wired[7] == ["res1", "down", "output"] and "output" in wired[8] and "wq" in wired[9]
    last = module("decode_last", "fused")
    settling, *behind = wiring(last)
    assert behind[8] == ["final_norm_w", "output", "normed"]
    partitions = behind[9:]
    assert all(names == ["w_vocab", "normed", "logits"] for names in partitions) and settling == ["logits"]


USUAL = {("demo", "fused"), ("tinyllama-1.1b", "separate")}
"""Small and large, of few and of more KV heads. Others differ from them in sizes alone, and are thorough."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(pair, id="-".join(pair), marks=[] if pair in USUAL else pytest.mark.thorough)
        for pair in itertools.product(MODELS, GROUPINGS)
    ],
)
def modules(request: pytest.FixtureRequest) -> tuple[Config, list[Module]]:
    """A model and its modules in a grouping, for all buckets. Not to be changed by a test."""
    model, grouping = request.param
    config = MODELS[model]
    return config, [build_module(program, config.dimensions()) for program in device_programs(grouping, *BUCKETS)]


@pytest.mark.sampled(2)
def test_every_program_is_even(modules: tuple[Config, list[Module]]) -> None:
    """In resets of the array: else its second dispatch begins with the image that its first one ended on, which is not
    loaded again. In steps of every core."""
    for built in modules[1]:
        assert len(built.air.launches) % 2 == 0, built.program.name
        assert all(limits.steady(steps) for steps in core_steps(built.air)), built.program.name


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "grouping, weights", [("separate", "bf16"), ("fused", "bf16"), ("fused", "int4"), ("fused", "int4,w_down=int8")]
)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in SMALLEST)) for name in FAMILIES]
)
def test_programs_of_other_families(name: str, grouping: str, weights: str) -> None:
    """They pass the checks and are even; a layer of a token is four launches for each pass over the KV heads."""
    config = FAMILIES[name]
    if (name, weights) == ("gemma-2b", "int4,w_down=int8"):
        with pytest.raises(UserError, match="gemv 2048x16384: no tile size fits L2"):
            [build_module(program, config.dimensions()) for program in family_programs(name, grouping, weights)]
        return
    for program in family_programs(name, grouping, weights):
        built = build_module(program, config.dimensions())
        air.check(built.air.module)
        assert len(built.air.launches) % 2 == 0, program.name
        assert not any(map(tells_its_step, built.air.launches)), program.name
        # Biases of GLM-4 and norms of its results take launches of their own.
        if program.entry.startswith("decode_layer") and weights == "int4" and not name.startswith("glm4"):
            assert len(built.tilings) == 4
            # More heads than columns take several passes, whose count may be odd.
            assert not air.settles(built.air.module) or config.kv_heads > limits.COLUMNS


@pytest.mark.sampled(1)
@pytest.mark.parametrize("grouping", GROUPINGS)
def test_no_core_is_told_its_step(grouping: str) -> None:
    """Steps share descriptors, and the compiler tells cores of all these at once: one then waits for ever for what it
    missed."""
    for program in device_programs(grouping, 512):
        assert not any(map(tells_its_step, build_module(program, DEMO.dimensions()).air.launches)), program.name


def tells_its_step(launch: LaunchOp) -> bool:
    """Whether a core computes with the position in the grid, apart from addresses."""
    herds = [op for op in launch.walk() if isinstance(op, HerdOp)]
    given = [arg for herd in herds for arg in herd.body_args if not isinstance(arg.type, MemRefType)]
    return any(reaches_a_call(arg) for arg in given)


def reaches_a_call(value: SSAValue) -> bool:
    uses = [use.operation for use in value.uses]
    return any(isinstance(op, func.CallOp) or any(map(reaches_a_call, op.results)) for op in uses)


def core_steps(made: air.AirModule) -> list[int]:
    """Of the innermost loops of cores."""
    loops = [
        op for herd in made.module.walk() if isinstance(herd, HerdOp) for op in herd.walk() if isinstance(op, scf.ForOp)
    ]
    inner = [loop for loop in loops if not any(isinstance(op, scf.ForOp) for op in loop.walk() if op is not loop)]
    return [trip_count(loop, "") for loop in inner]


def test_an_odd_number_of_steps_is_taken_where_there_is_no_other() -> None:
    tiling = gemv.tile(64, 1056)
    assert 1056 // tiling.chunk == 3, "chunks of whole vectors: 3, 11 or 33"
    assert gemv.tile(64, 3072).chunk == 768, "not a third, which would fit"
    assert gemv.tile(4096, 3072, "f32", blocked=False).chunk == 512, "not 768, which no descriptor takes beside rows"
    assert elementwise.tile("add", 8 * 9, 1024).inner_steps == 2, "rows in halves, not three of nine at a time"
    assert elementwise.tile("add", 8 * 9, 32).inner_steps == 1


CUT = {
    "gemv of 64 rows": (lambda: gemv.build(gemv.tile(64, 256)), "memref<8x8x256xbf16, 1"),
    "gemm of 48 columns": (lambda: gemm.build(gemm.tile(512, 256, 48)), "memref<8x64x48xbf16, 1"),
    "a head of its own": (
        lambda: flash_attention.build(flash_attention.tile(128, 8, 8, 64)),
        "memref<8x128x64xbf16, 1",
    ),
}


@pytest.mark.parametrize("case", CUT)
def test_what_the_compiler_cuts_has_no_dimension_of_one_element(case: str) -> None:
    """mlir-air takes such a dimension for its neighbour, and each column then moves what all of them should."""
    made, buffer = CUT[case]
    text = air.to_mlir(made().module)
    assert buffer in text
    air.check(air.parse_mlir(text))
    with pytest.raises(UserError, match="a dimension of one element between DDR and L2"):
        air.check(air.parse_mlir(text.replace(buffer, buffer.replace("<8x", "<8x1x"))))


def test_settling_is_added_and_taken_away() -> None:
    module = build_module(device_program("flash_attn", "separate"), DEMO.dimensions()).air.module
    assert air.settles(module) and len(launches(module)) == 2
    air.toggle_settling(module)
    assert not air.settles(module) and len(launches(module)) == 1
    air.toggle_settling(module)
    assert air.settles(module)
    air.check(module)
    assert [(a.slot, a.written, a.runs.elements) for a in accesses(launches(module)[0], "")] == [
        ("attn_out", False, 32),
        ("attn_out", True, 32),
    ], "64 bytes, onto themselves"


def declarations(made: air.AirModule) -> list[func.FuncOp]:
    return [op for op in made.module.body.block.ops if isinstance(op, func.FuncOp) and op.is_declaration]


@pytest.mark.sampled(2)
def test_every_model_maps_with_distinct_symbols(modules: tuple[Config, list[Module]]) -> None:
    for built in modules[1]:
        declared = declarations(built.air)
        levels = [op for op in built.air.module.walk() if isinstance(op, SegmentOp | HerdOp | ChannelOp)]
        names = [op.sym_name.data for op in (*declared, *levels, built.air.function)]  # type: ignore[union-attr]
        assert len(names) == len(set(names))
        symbols = {op.sym_name.data: op.attributes["link_with"] for op in declared}
        objects = {variant.object for variant in built.variants}
        assert {link.data for link in symbols.values() if isinstance(link, StringAttr)} == objects
        for herd in (op for op in levels if isinstance(op, HerdOp)):
            calls = [op for op in herd.walk() if isinstance(op, func.CallOp)]
            linked = {herd.attributes["link_with"]} if "link_with" in herd.attributes else set()
            assert {symbols[op.callee.string_value()] for op in calls} == linked


def test_prefill_slots_follow_the_bucket_and_weights_do_not(modules: tuple[Config, list[Module]]) -> None:
    dims = modules[0].dimensions()
    made = {(built.program.entry, built.program.bucket): built for built in modules[1]}
    layers = [built for (entry, _), built in made.items() if entry == "prefill_attend"]
    assert [attend.program.bucket for attend in layers] in ([], list(BUCKETS))
    for attend in layers:
        down = made["prefill_down", attend.program.bucket]
        bucket, slots = attend.program.bucket, described(attend)
        assert slots["kv"]["shape"] == [bucket, 2 * dims["kv_dim"]]
        assert slots["lut_q"]["shape"] == [bucket, dims["placed_head_dim"]] and slots["lut_q"]["dtype"] == "f32"
        assert layout(attend.program, "norm_w") == "plain"
        assert described(down)["output"]["shape"] == [bucket, dims["emb"]]
        assert described(down)["w_down"]["shape"] == [dims["emb"], dims["ffn"]]
        assert layout(down.program, "w_down") == "blocks"


def test_prefill_and_decode_share_one_copy_of_the_weights() -> None:
    thirds = (weights(module(f"prefill_{name}", "fused")) for name in ("attend", "up", "down"))
    prefill = functools.reduce(operator.or_, thirds)
    assert len(prefill) == 9 and prefill == weights(module("decode_layer", "fused"))


def weights(made: Module) -> dict[str, tuple[Slot, dict, str]]:
    """What a weight is bound to, its shape, its layout."""
    slots = {slot.name: slot for slot in made.program.slots if slot.role == "weight"}
    return {name: (slot, described(made)[name], layout(made.program, name)) for name, slot in slots.items()}


def test_vocabulary_rows_are_padded_for_weight_and_logits_alike() -> None:
    slots = described(module("lm_head_gemv", "separate", "demo"))
    assert slots["logits"]["shape"] == [2048] and slots["w_vocab"]["shape"] == [2048, 256]


def test_a_later_chunk_reads_a_window_and_writes_its_own_rows() -> None:
    """Through the smallest window it is the program of a prompt from position 0 on."""
    found = [p for p in device_programs("fused", 128, positions=1000) if p.entry == "prefill_attend"]
    assert [(p.name, p.context) for p in found] == [
        ("prefill_attend.128", 128),
        ("prefill_attend.128.1024", 1024),
    ]
    slots = described(build_module(found[1], MODELS["demo"].dimensions()))
    assert [slots[name]["shape"] for name in ("kv", "kv_window", "x_in")] == [[128, 256], [1024, 256], [128, 256]]


def test_tilings_state_themselves_in_one_line() -> None:
    for program in device_programs("fused", 512):
        for tiling in build_module(program, MODELS["smollm2-360m"].dimensions()).tilings:
            assert "herd" in str(tiling) and "\n" not in str(tiling)


@pytest.mark.thorough
def test_text_is_the_same_on_every_run() -> None:
    script = (
        "import sys, hashlib; from stages.targets.npu2.modules import build_module\n"
        "from tests.support.npu_shapes import MODELS, device_programs\n"
        "made = [build_module(program, MODELS['demo'].dimensions()) for program in device_programs('fused')]\n"
        "sys.stdout.write(hashlib.sha256(''.join(m.text() for m in made).encode()).hexdigest())"
    )
    assert len(outputs_of_two_runs(script)) == 1


def add(rows: int, cols: int) -> air.AirModule:
    kernel = kernels()["add"]
    assert kernel.tiling and kernel.program
    return kernel.program(kernel.tiling({"rows": rows, "cols": cols}))


def test_a_slot_of_another_shape_is_refused() -> None:
    parts = [(add(128, 64), {"a": "x", "b": "y", "out": "sum"}), (add(64, 64), {"a": "sum", "b": "z", "out": "out"})]
    with pytest.raises(TypeError, match=r"slot sum: add\.out is memref<128x64xbf16>, add\.a is memref<64x64xbf16>"):
        air.stitch("f", ["x", "y", "sum", "z", "out"], parts)


def test_one_symbol_with_two_signatures_is_refused() -> None:
    first, second = (add(128, 64) for _ in range(2))
    declarations(second)[0].attributes["link_with"] = StringAttr("other.o")
    slots = ("a", "b", "out")
    with pytest.raises(TypeError, match="declared twice"):
        air.stitch("f", slots, [(made, {name: name for name in slots}) for made in (first, second)])


def channels(made: Module) -> list[str]:
    return [op.sym_name.data for op in made.air.module.walk() if isinstance(op, ChannelOp)]


def reserved(made: Module) -> list[str]:
    """Of them those that nothing uses."""
    return [name for name in channels(made) if name.startswith("channel_")]


def test_channels_keep_their_ends_when_stitched() -> None:
    made = module("o_ffn", "separate")
    ops = list(made.air.module.walk())
    declared = [name for name in channels(made) if name not in reserved(made)]
    ends = {op.chan_name.string_value() for op in ops if isinstance(op, ChannelPutOp | ChannelGetOp)}
    assert len(declared) == 4 and ends == set(declared), "one for each product"


def test_a_prompt_reserves_names_of_channels_for_the_launch_that_has_most() -> None:
    """One for each tile of each transfer at least; a token's program needs none."""
    made = module("prefill_attend", "fused")
    found = reserved(made)
    assert found == [f"channel_{n}" for n in range(len(found))]
    for launch in made.air.launches:
        (herd,) = walk_ops(launch, HerdOp)
        inside, all_moves = (sum(1 for _ in moves(op)) for op in (herd, launch))
        assert len(found) >= inside * math.prod(herd.shape()) + all_moves - inside
    assert not reserved(module("decode_layer", "fused"))


def test_block_floating_point_is_what_prompts_are_multiplied_with() -> None:
    """Gate and up are one launch then, whatever the weights are stored in. Tokens know nothing of it."""
    for weights in ("bf16", "int4"):
        exact, fast = (
            {p.name: p for p in programs(A_LLAMA, GROUPINGS["fused"], (128,), parse_policy(weights, matmul=matmul))}
            for matmul in ("bf16", "bfp16")
        )
        thirds = ("prefill_attend.128", "prefill_up.128", "prefill_down.128")
        launched = [launch.kernel.name for third in thirds for part in fast[third].parts for launch in part.launches]
        assert [name for name in launched if "gemm" in name] == [
            *("bfp16_gemm", "bfp16_gemm", "bfp16_gemm_kv"),
            *("bfp16_gemm", "bfp16_gemm_swiglu", "bfp16_gemm"),
        ]
        tokens = [name for name, program in exact.items() if not program.host and program.bucket is None]
        assert tokens and all(exact[name] == fast[name] for name in tokens)


def test_unknown_grouping_is_refused() -> None:
    with pytest.raises(UserError, match="fused"):
        TARGET.grouping("all")


def test_traffic_of_a_product_counted_by_hand() -> None:
    tiling = gemm.tile(1024, 256, 256)
    (traffic,) = air.count(gemm.build(tiling))
    # Two blocks of 512 rows: x once, the weight per block; four row blocks of 128 columns are one broadcast each.
    assert traffic.read == {"x": 2 * 1024 * 256, "weight": 2 * 2 * 256 * 256}
    assert traffic.written == {"out": 2 * 1024 * 256}
    assert tiling.macs == 1024 * 256 * 256
    tile = tiling.tile_m * tiling.tile_n
    assert traffic.calls == tiling.macs // (tile * tiling.tile_k) + 2 * 1024 * 256 // tile, "a start and an end each"


def test_traffic_of_a_vector_product_counts_the_broadcast_once_per_step() -> None:
    tiling = gemv.tile(512, 256)
    (traffic,) = air.count(gemv.build(tiling))
    assert traffic.read == {"weight": 2 * 512 * 256, "x": 2 * 256 * tiling.steps[0]} and tiling.macs == 512 * 256
    assert traffic.calls == tiling.macs // (tiling.tile_m * tiling.chunk) + 2 * 512 // tiling.tile_m


def test_rope_writes_half_of_the_interleaved_slot() -> None:
    (traffic,) = air.count(rope.build(rope.tile(128, 2, 64, rope.KEYS)))
    assert traffic.written == {"out": 2 * 128 * 128}


@pytest.mark.parametrize("steps, reason", [(2, ""), (3, ""), (4, ""), (5, "in 5 steps a core takes its 3 buffers")])
def test_a_core_of_many_odd_steps_is_refused(steps: int, reason: str) -> None:
    b = air.Builder("copy", {"x": air.memref_type((64 * steps,)), "out": air.memref_type((64 * steps,))})
    with b.launch(), b.segment(), b.herd(1, 1), b.loop(steps) as i, b.alloc(air.L1, (64,)) as (tile,):
        b.dma(tile, b.args["x"].at((i * 64, 64, 1)))
        b.dma(b.args["out"].at((i * 64, 64, 1)), tile)
    refused_for(reason, b.finish().module)


@pytest.mark.parametrize("again, reason", [(1, ""), (2, "needs 256 of bytes out of a buffer of L2")])
def test_a_memory_tile_sends_what_it_is_given_once(again: int, reason: str) -> None:
    b = air.Builder("copy", {"x": air.memref_type((64,)), "out": air.memref_type((again * 64,))})
    with b.launch(), b.segment(), b.alloc(air.L2, (64,)) as (stays,):
        b.dma(stays, b.args["x"].at((0, 64, 1)))
        with b.loop(again) as i, b.herd(1, 1), b.alloc(air.L1, (64,)) as (tile,):
            b.dma(tile, stays.at((0, 64, 1)))
            b.dma(b.args["out"].at((i * 64, 64, 1)), tile)
    refused_for(reason, b.finish().module)


def staged(*buffers: tuple[int, ...], parts: bool = False) -> ModuleOp:
    """Two rows of cores that receive rows of `x` by way of L2: a buffer for each tuple of cores that receive it, on two
    channels in turn. `parts`: each core gets its half of the buffer."""
    size = 64 if parts else 32
    shapes = {"x": (len(buffers), size), "out": (2, len(buffers) * 32)}
    b = air.Builder("copy", {name: air.memref_type(shape) for name, shape in shapes.items()})
    with b.launch(), b.segment():
        stage, rows = b.channel((2, 1), (2, 1)), b.channel((1, 2), (1, 2))
        for number in range(len(buffers)):
            b.put(stage, (number % 2, 0), b.args["x"].at((number, 1, size), (0, size, 1)))
        for number, cores in enumerate(buffers):
            with b.alloc(air.L2, (size,)) as (held,):
                b.get(stage, (number % 2, 0), held)
                for core in cores:
                    b.put(rows, (0, core), held.at((core * 32, 32, 1)) if parts else held)
        with b.herd(1, 2) as (tx, ty), b.alloc(air.L1, (32,)) as (tile,):
            b.get(rows, (tx, ty), tile)
            b.dma(b.args["out"].at((ty, 1, len(buffers) * 32), (0, 32, 1)), tile)
    return b.finish().module


@pytest.mark.parametrize(
    ("buffers", "parts", "reason"),
    [
        ([(0, 1), (0,), (1,)], False, ""),
        ([(0,), (1,), (0, 1)], False, r"needs 2 of memory tiles with ends of channel copy_channel_\d\[0, 1\]"),
        ([(0, 1)], True, "parts of a buffer of L2 leave on 2 channels"),
    ],
)
def test_a_channel_ends_in_one_memory_tile(buffers: list[tuple[int, ...]], parts: bool, reason: str) -> None:
    """The buffer that all rows of cores receive comes first, and none is divided among channels."""
    refused_for(reason, staged(*buffers, parts=parts))


def refused_for(reason: str, module: ModuleOp) -> None:
    if reason:
        with pytest.raises(UserError, match=reason):
            air.check(module)
    else:
        air.check(module)


@pytest.mark.parametrize("bucket", [512, 2048])
def test_all_steps_of_a_row_of_blocks_share_descriptors(bucket: int) -> None:
    """They go in the dimension that advances whenever a descriptor is run, which holds less than 64 of them."""
    for entry in ("prefill_attend", "prefill_up"):
        module = prompt_module("llama-3.2-1b", entry, bucket)
        assert any(launch.shape()[1] > 1 for launch in module.air.launches)
        assert module.shared_steps == (1, limits.ITERATIONS - 1)
        assert module.options == [
            "--air-runtime-loop-tiling-sizes=1",
            f"--air-runtime-loop-tiling-sizes={limits.ITERATIONS - 1}",
        ]


def prompt_module(name: str, entry: str, bucket: int) -> Module:
    found = programs(A_LLAMA, GROUPINGS["fused"], (bucket,), parse_policy("int4", matmul="bfp16"))
    (program,) = (each for each in found if each.entry == entry and each.context in (None, bucket))
    return build_module(program, JUDGED[name].dimensions())


@pytest.mark.parametrize(
    ("name", "entry", "bucket"),
    [
        pytest.param("llama-3.2-1b", "prefill_down", 512, id="a step skips 512 rows of 8192: more words than a stride"),
        pytest.param("llama-3.2-1b", "prefill_attend", 128, id="runs of 1152 elements take two dimensions"),
    ],
)
def test_steps_without_a_dimension_have_descriptors_of_their_own(name: str, entry: str, bucket: int) -> None:
    assert prompt_module(name, entry, bucket).shared_steps == (1, limits.QUEUE_DEPTH)


def test_transfers_that_share_a_channel_queue_one_after_the_other() -> None:
    """The weight of a norm that is added to the residual comes on the channel of the residual, in each step."""
    (program,) = (each for each in family_programs("gemma3-4b", "fused", "bf16") if each.entry == "prefill_down")
    module = build_module(program, FAMILIES["gemma3-4b"].dimensions())
    assert module.shared_steps == (1, limits.QUEUE_DEPTH // 2)


def test_a_tile_function_is_given_a_buffer_once() -> None:
    b = air.Builder("copy", {"x": air.memref_type((64,))})
    variant = air.Variant.of("add", COUNT=64)
    with b.launch(), b.segment(), b.herd(1, 1), b.alloc(air.L1, (64,), (64,)) as (x, y):
        for read_twice in (None, y):
            with pytest.raises(TypeError, match="add is given one buffer twice"):
                b.call(variant, "add", x, y, x, read_twice=read_twice)
        b.call(variant, "add", x, x, y, read_twice=x)


def test_a_grid_of_one_dimension_is_one_of_the_second() -> None:
    for grid, made in {(1, 4): (1, 4), (4, 1): (1, 4), (4, 2): (4, 2)}.items():
        b = air.Builder("copy", {"x": air.memref_type((4, 2, 32)), "out": air.memref_type((4, 2, 32))})
        with b.launch(*grid), b.segment():
            pass
        assert b.finish().launches[0].shape() == made


@pytest.mark.parametrize("tile_k", [32, 64])
@pytest.mark.parametrize("cols", [2048, 8192, 14336])
def test_a_loop_is_cut_where_no_dimension_is_left(cols: int, tile_k: int) -> None:
    """By the module's text, as the tiling says of itself."""
    tiling = replace(gemm.tile(128, cols, 2048, bfp16=True), tile_k=tile_k)
    (launch,) = launches(gemm.build(tiling).module)
    most = max(sum(each.descriptors for each in channel) for channel in step_transfers(launch).values())
    assert most == tiling.weight_descriptors
