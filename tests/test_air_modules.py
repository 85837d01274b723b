"""Stitched modules and traffic estimates, checked on structure: wiring, symbols, roles, counts."""

from __future__ import annotations

import pytest
from xdsl.dialects import func
from xdsl.dialects.builtin import StringAttr
from xdsl.ir import BlockArgument

from runtime.errors import UserError
from stages.air.builder import Program, memref_type
from stages.air.dialect import ChannelGetOp, ChannelOp, ChannelPutOp, HerdOp, SegmentOp
from stages.air.estimate import count
from stages.air.stitch import stitch
from stages.kernels import add, gemm, gemv, rope
from stages.npu_estimate import decode_traffic, estimate, host_traffic
from stages.npu_modules import BUCKETS, GROUPINGS, NpuModule, build_module, groups, modules
from tests.npu_shapes import MODELS

LLAMA = MODELS["Llama-3.2-1B"]


def module(name: str, grouping: str, model: str = "Llama-3.2-1B", bucket: int = 2048) -> NpuModule:
    return build_module(next(g for g in groups(grouping) if g.name == name), MODELS[model], bucket)


def wiring(program: Program) -> list[list[str]]:
    """Per launch, the function arguments it is given."""
    assert all(isinstance(arg, BlockArgument) for launch in program.launches for arg in launch.args)
    return [[str(arg.name_hint) for arg in launch.args] for launch in program.launches]


def test_a_prefill_layer_is_fifteen_launches_wired_by_slot() -> None:
    layer = module("prefill_layer", "fused")
    assert wiring(layer.program) == [
        ["norm_w", "x_in", "normed"],
        ["normed", "wq", "q"],
        ["normed", "wk", "k"],
        ["normed", "wv", "kv"],
        ["q", "lut_q", "q_roped"],
        ["k", "lut_k", "kv"],
        ["q_roped", "kv", "attn_out"],
        ["attn_out", "wo", "proj"],
        ["x_in", "proj", "res1"],
        ["ffn_norm_w", "res1", "normed2"],
        ["normed2", "w_gate", "gate"],
        ["normed2", "w_up", "up"],
        ["gate", "up", "swiglu"],
        ["swiglu", "w_down", "down"],
        ["res1", "down", "output"],
    ]
    roles = {slot.name: slot.role for slot in layer.slots}
    assert [name for name, role in roles.items() if role == "output"] == ["kv", "output"]
    assert [name for name, role in roles.items() if role == "input"] == ["x_in"]


def test_decode_joins_a_layer_with_the_next() -> None:
    wired = wiring(module("decode_layer", "fused").program)
    assert len(wired) == 14
    assert wired[7] == ["res1", "down", "output"] and "output" in wired[8] and "wq" in wired[9]
    last = module("decode_last", "fused")
    assert wiring(last.program)[8] == ["final_norm_w", "output", "normed"]
    assert all(names == ["w_vocab", "normed", "logits"] for names in wiring(last.program)[9:])


@pytest.mark.parametrize("grouping", GROUPINGS)
@pytest.mark.parametrize("model", MODELS)
def test_every_model_maps_with_distinct_symbols(model: str, grouping: str) -> None:
    for built in modules(MODELS[model], grouping, 128):
        program = built.program
        declared = [op for op in program.module.body.block.ops if isinstance(op, func.FuncOp) and op.is_declaration]
        levels = [op for op in program.module.walk() if isinstance(op, SegmentOp | HerdOp | ChannelOp)]
        names = [op.sym_name.data for op in (*declared, *levels, program.function)]  # type: ignore[union-attr]
        assert len(names) == len(set(names))
        symbols = {op.sym_name.data: op.attributes["link_with"] for op in declared}
        objects = {variant.object for variant in built.variants}
        assert {link.data for link in symbols.values() if isinstance(link, StringAttr)} == objects
        for herd in (op for op in levels if isinstance(op, HerdOp)):
            calls = [op for op in herd.walk() if isinstance(op, func.CallOp)]
            assert {symbols[op.callee.string_value()] for op in calls} == {herd.attributes["link_with"]}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("bucket", BUCKETS)
def test_prefill_slots_follow_the_bucket_and_weights_do_not(model: str, bucket: int) -> None:
    dims = MODELS[model]
    slots = {slot.name: slot for slot in module("prefill_layer", "fused", model, bucket).slots}
    assert slots["kv"].shape == (bucket, 2 * dims["kv_dim"])
    assert slots["lut_q"].shape == (bucket, dims["head_dim"]) and slots["lut_q"].dtype == "f32"
    assert slots["w_down"].shape == (dims["emb"], dims["ffn"]) and slots["w_down"].layout == "blocks"
    assert slots["norm_w"].layout == "plain"


def test_prefill_and_decode_share_one_copy_of_the_weights() -> None:
    prefill = {s.name: s for s in module("prefill_layer", "fused").slots if s.role == "weight"}
    decode = {s.name: s for s in module("decode_layer", "fused").slots if s.role == "weight"}
    assert prefill == decode


def test_vocabulary_rows_are_padded_for_weight_and_logits_alike() -> None:
    slots = {slot.name: slot for slot in module("lm_head_gemv", "spec", "demo").slots}
    assert slots["logits"].shape == (2048,) and slots["w_vocab"].shape == (2048, 256)


def test_a_later_chunk_reads_all_keys_and_writes_its_own_rows() -> None:
    group = next(g for g in groups("fused") if g.prefill)
    built = build_module(group, MODELS["demo"], 128, pos=256)
    assert built.slot("kv").shape == (384, 256) and built.slot("x_in").shape == (128, 256)


def test_a_slot_of_another_type_is_refused() -> None:
    slots = {name: memref_type((128, 64)) for name in ("a", "b")} | {"out": memref_type((64, 64))}
    with pytest.raises(TypeError, match=r"add\.out"):
        stitch("f", slots, [(add.build(add.plan(128, 64)), {"a": "a", "b": "b", "out": "out"})])


def test_an_argument_left_unwired_is_refused() -> None:
    slots = {name: memref_type((128, 64)) for name in ("a", "b", "out")}
    with pytest.raises(TypeError, match="wired"):
        stitch("f", slots, [(add.build(add.plan(128, 64)), {"a": "a", "b": "b"})])


def test_one_symbol_with_two_signatures_is_refused() -> None:
    first, second = (add.build(add.plan(128, 64)) for _ in range(2))
    declaration = next(op for op in second.module.body.block.ops if isinstance(op, func.FuncOp) and op.is_declaration)
    declaration.attributes["link_with"] = StringAttr("other.o")
    slots = {name: memref_type((128, 64)) for name in ("a", "b", "out")}
    with pytest.raises(TypeError, match="declared twice"):
        stitch("f", slots, [(program, {name: name for name in slots}) for program in (first, second)])


def test_channels_keep_their_ends_when_stitched() -> None:
    program = module("o_ffn", "spec").program
    declared = [op.sym_name.data for op in program.module.walk() if isinstance(op, ChannelOp)]
    ends = {op.chan_name.string_value() for op in program.module.walk() if isinstance(op, ChannelPutOp | ChannelGetOp)}
    assert len(declared) == 1 and ends == set(declared)


@pytest.mark.parametrize("name", ["prefill_layer", "decode_layer"])
def test_block_floating_point_is_another_object_and_nothing_else(name: str) -> None:
    group = next(g for g in groups("fused") if g.name == name)
    exact, fast = (build_module(group, LLAMA, 128, bfp16=bfp16) for bfp16 in (False, True))
    assert fast.text().replace("_bfp1_", "_") == exact.text()
    changed = {v.stem for v in fast.variants} - {v.stem for v in set(fast.variants) & set(exact.variants)}
    assert changed == ({"gemm"} if name == "prefill_layer" else set())


def test_unknown_grouping_is_refused() -> None:
    with pytest.raises(UserError, match="fused"):
        groups("all")


def test_traffic_of_a_product_counted_by_hand() -> None:
    (traffic,) = count(gemm.build(gemm.plan(1024, 256, 256)))
    # Two blocks of 512 rows: x once, the weight per block; four row blocks of 128 columns are one broadcast each.
    assert traffic.read == {"x": 2 * 1024 * 256, "weight": 2 * 2 * 256 * 256}
    assert traffic.written == {"out": 2 * 1024 * 256}
    assert traffic.macs == 1024 * 256 * 256


def test_traffic_of_a_vector_product_counts_the_broadcast_once_per_step() -> None:
    plan = gemv.plan(512, 256)
    (traffic,) = count(gemv.build(plan))
    assert traffic.read == {"weight": 2 * 512 * 256, "x": 2 * 256 * plan.steps[0]} and traffic.macs == 512 * 256


def test_rope_writes_half_of_the_interleaved_slot() -> None:
    (traffic,) = count(rope.build(rope.plan(128, 2, 64, interleaved=True)))
    assert traffic.written == {"out": 2 * 128 * 128}


@pytest.mark.parametrize("model", MODELS)
def test_a_token_moves_hardly_more_than_the_weights(model: str) -> None:
    moved, weights = decode_traffic(MODELS[model])
    assert weights < moved <= 1.02 * weights


def test_prefill_moves_less_than_the_measured_system() -> None:
    totals = {row.elf: row for row in estimate(LLAMA) if not row.launch}
    for elf in ("rms_gemms_rope", "o_ffn", "rms_gemv_rope", "o_gemv_ffn", "lm_head_gemv"):
        row = totals[elf]
        assert row.spec_bytes is not None and row.minimum <= row.bytes < row.spec_bytes
        assert row.measured_ms is not None and 0 < row.ms < row.measured_ms


def test_attention_skips_the_arithmetic_that_causality_masks() -> None:
    row = next(row for row in estimate(LLAMA) if row.launch == "flash_attention")
    full = 2048 * 2048 * 2 * 64 * 32
    assert 0.5 * full < row.macs < 0.55 * full


def test_host_traffic_is_tokens_in_and_kv_out() -> None:
    crossing = host_traffic(LLAMA)
    kv = 16 * 2048 * 2 * 512 * 2
    assert kv < crossing["prompt"] < 1.2 * kv and crossing["token"] < 1 << 20
