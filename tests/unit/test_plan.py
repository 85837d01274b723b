"""Programs and plans as derived from parts: what shares a slot, what a slot's role is, what excludes what."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from llama_npu2.artifact.plan import Phase, sizes
from llama_npu2.engine.chunks import decode_phase
from llama_npu2.errors import UserError
from stages.graph import Build
from stages.graph.options import parse_options
from stages.model import families
from stages.model.buffers import tensors_of
from stages.model.config import FULL, ConfigFields
from stages.model.decoder import Attention, FeedForward, Layer, ShortConv
from stages.model.families import parse_config
from stages.model.grouping import Chain, Group, Grouping, Program, context_buckets, programs
from stages.model.plan import make_plan
from stages.model.policy import parse_policy
from stages.targets import targets
from stages.targets.npu2 import modules
from stages.targets.npu2.groupings import GROUPINGS
from stages.weights.formats import formats
from tests.conftest import A_LLAMA, CONFIG


def config(**changes: Any):
    return parse_config(CONFIG | changes, "test")


def named(found: list[Program]) -> dict[str, Program]:
    return {program.name: program for program in found}


def roles(program: Program) -> dict[str, str]:
    return {slot.name: slot.role for slot in program.slots}


def test_a_program_of_the_cpu_is_one_part() -> None:
    for program in programs(A_LLAMA, targets()["cpu"].grouping("separate")):
        (part,) = program.parts
        assert program.slots == part.slots and program.wiring == ({slot.name: slot.name for slot in part.slots},)


def test_hosts_take_networks_that_no_core_has_room_for() -> None:
    """How their weights would be cut for the NPU is no question for the CPU, and none of its refusals."""
    large = config(hidden_size=8192, intermediate_size=28672, num_attention_heads=64, num_key_value_heads=8)
    policy = parse_policy("int4")
    with pytest.raises(UserError, match="no tile size fits L1"):
        formats()["int4"].feed_forward(large.emb, large.ffn)  # type: ignore[misc]
    assert programs(large, targets()["cpu"].grouping("separate"), policy=policy)


def test_parts_that_bind_one_buffer_share_a_slot() -> None:
    layer = named(programs(A_LLAMA, GROUPINGS["fused"], [128]))["prefill_attend.128"]
    project, attend, add = layer.wiring
    assert attend == {"q": "q_roped", "kv_window": "kv_window", "attn_out": "attn_out"}, "the cache, seen in two ways"
    assert add["x_residual"] == project["x_in"] == "x_in"
    assert project["lut_q"] != project["lut_k"], "slots of one part stay apart"
    found = roles(layer)
    assert (found["q_roped"], found["attn_out"]) == ("scratch", "scratch"), "nobody reads them behind the program"
    assert (found["kv"], found["res1"]) == ("output", "output")


def test_roles_follow_who_reads_next() -> None:
    separate = named(programs(A_LLAMA, GROUPINGS["separate"], [128]))
    assert roles(separate["rms_gemms_rope.128"])["q_roped"] == "output"
    last = named(programs(A_LLAMA, GROUPINGS["fused"], [128]))["decode_last"]
    assert (roles(last)["output"], roles(last)["normed"], roles(last)["logits"]) == ("scratch", "scratch", "output")


def test_any_neighbours_can_share_a_program() -> None:
    """A grouping that no target has: attention joined to the feed-forward, and the head to the last layer."""
    fused = GROUPINGS["fused"]
    own = replace(
        fused,
        groups=(
            Group("project", ("rms_gemms_rope_kv",), prompt=True),
            Group("attend_ffn", ("flash_attn", "o_add", "gate_up", "down_add"), prompt=True),
            Group("rms_gemv_rope", ("rms_gemv_rope",)),
            Group("o_gemv_ffn", ("o_gemv_ffn",)),
            Group("lm_head_gemv", ("lm_head_gemv",)),
        ),
    )
    plan = make_plan(config(num_hidden_layers=3), own, "aie2p", [64])
    assert [call.program for call in plan.phases[Phase.parse("prefill@64")]][1:-2] == [
        "project.64",
        "attend_ffn.64",
    ] * 3
    for calls in plan.phases.values():
        slots = named(programs(A_LLAMA, own, [64]))
        assert all(len(call.buffers) == len(slots[call.program].slots) for call in calls)


def test_a_group_that_would_write_its_input_is_refused() -> None:
    fused = GROUPINGS["fused"]
    two_layers = Group("two_layers", fused.prompt.layers[Attention.kind] * 2, prompt=True)
    with pytest.raises(TypeError):
        programs(A_LLAMA, replace(fused, groups=(two_layers, *fused.groups)), [64])


ENDS = ("final_norm", "lm_head_gemv")


@pytest.mark.parametrize("start", ["embed_tokens", "embed_token_rows"])
def test_a_weight_in_layouts_that_exclude_each_other_is_refused(start: str) -> None:
    """One copy of the vocabulary: the head's panels are no rows, on any target."""
    chain = Chain((start,), {Attention.kind: ()}, ENDS)
    grouping = Grouping(chain, chain, (Group("lm_head_gemv", ("lm_head_gemv",)),))
    if start == "embed_tokens":
        plan = make_plan(config(), grouping, "cpu")
        assert plan.buffers["model.embed_tokens.weight"].layout == "panels"
        return
    with pytest.raises(TypeError, match=r"model\.embed_tokens\.weight.*panels"):
        make_plan(config(), grouping, "cpu")


def test_padded_rows_serve_who_reads_rows() -> None:
    bf16 = formats()["bf16"]
    assert bf16.common_layout("plain", "padded") == bf16.common_layout("padded", "plain") == "padded"
    with pytest.raises(ValueError, match="blocks cannot be read as panels"):
        bf16.common_layout("blocks", "panels")


def test_untied_heads_leave_the_embedding_its_layout() -> None:
    plan = make_plan(config(tie_word_embeddings=False), GROUPINGS["fused"], "aie2p", [64])
    assert plan.buffers["model.embed_tokens.weight"].layout == "plain"
    assert plan.buffers["lm_head.weight"].layout == "padded"


def test_products_are_joined_where_weights_are_stored_alike() -> None:
    fused = GROUPINGS["fused"]
    for weights, alike in (
        ("int4", True),
        ("int8,vocab=int4", True),
        ("bf16", False),
        ("int4,wv=int6", False),
        ("w8a8", False),
    ):
        found = fused.of(A_LLAMA, parse_policy(weights))
        assert (found is fused.joined) == alike, weights
    assert GROUPINGS["separate"].of(A_LLAMA, parse_policy("int4")) is GROUPINGS["separate"]


@pytest.mark.parametrize("weights, of_layer", [("int4", 4), ("int4,w_down=int8", 5)])
def test_a_feed_forward_network_is_one_launch_where_it_is_stored_alike(weights: str, of_layer: int) -> None:
    launches = {
        program.name: sum(len(part.launches) for part in program.parts)
        for program in programs(A_LLAMA, GROUPINGS["fused"], (128,), parse_policy(weights))
        if not program.host
    }
    tokens = {"decode_first.128": 2, "decode_layer.128": of_layer, "decode_last": of_layer - 1}
    prompts = {"prefill_attend.128": 9, "prefill_up.128": 2, "prefill_down.128": 2}
    assert launches == prompts | tokens


@pytest.mark.parametrize(
    "weights, gate_up, down",
    [("int4", "shared_pairs", "shared_lanes"), ("int4,w_down=int8", "paired_lanes", "lanes")],
)
def test_a_joined_weight_is_stored_once(weights: str, gate_up: str, down: str) -> None:
    """One buffer for Q, K and V, which tokens multiply with and prompts unpack; every tensor of the model is in one."""
    plan = make_plan(config(num_hidden_layers=2), GROUPINGS["fused"], "aie2p", [64], parse_policy(weights))
    held = [tensor for name in plan.buffers for tensor in tensors_of(name)]
    for layer in range(2):
        stem = f"model.layers.{layer}"
        names = [f"{stem}.self_attn.{which}_proj.weight" for which in "qkv"]
        assert plan.buffers["+".join(names)].layout == "lanes"
        pair = "+".join(f"{stem}.mlp.{which}_proj.weight" for which in ("gate", "up"))
        assert plan.buffers[pair].layout == gate_up and plan.buffers[f"{stem}.mlp.down_proj.weight"].layout == down
    assert sorted(held) == sorted(dict.fromkeys(held))
    assert set(held) >= set(families.tensors(config(num_hidden_layers=2)))
    *_, last = plan.phases[Phase.parse("decode@128")]
    assert last.program == "decode_last" and "model.norm.weight" in last.names


def test_windows_of_a_cache_double_until_they_hold_it() -> None:
    assert context_buckets(100) == context_buckets(128) == [128]
    assert context_buckets(600) == [128, 256, 512, 640]
    fused, policy = GROUPINGS["fused"], parse_policy("int8")
    plan = make_plan(config(max_position_embeddings=600), fused, "aie2p", [64], policy)
    phases = list(map(str, plan.phases))
    assert [phase for phase in phases if phase.startswith("decode")] == [
        f"decode@{size}" for size in context_buckets(600)
    ]
    assert plan.buffers["kv_cache.0"].shape[0] == 640
    assert {call.program for call in plan.phases[Phase.parse("decode@512")]} == {
        "embed_token_rows",
        "decode_first.512",
        "decode_layer.512",
        "decode_last",
    }
    held = sizes(plan.phases, "decode")
    assert [str(decode_phase(held, position)) for position in (0, 127, 128, 599)] == [
        "decode@128",
        "decode@128",
        "decode@256",
        "decode@640",
    ]
    assert str(decode_phase([], 5)) == "decode"


def test_a_token_goes_on_in_another_buffer_than_it_came_in() -> None:
    """One program makes a layer's result and the next one's attention: what it reads it does not write."""
    fused, policy = GROUPINGS["fused"], parse_policy("int4")
    for program in programs(A_LLAMA, fused, (128,), policy):
        if not program.host:
            bound = [slot for slot in program.slots if slot.role in ("input", "output")]
            assert len({(slot.buffer, slot.role) for slot in bound}) == len(bound), program.name


def test_caches_have_room_for_the_context() -> None:
    for context, positions in ((0, 128), (96, 128), (64, 64), (4096, 128)):
        plan = make_plan(config().within(context), GROUPINGS["fused"], "aie2p", [64])
        assert plan.buffers["kv_cache.0"].shape[0] == positions
    with pytest.raises(UserError, match="context=64: target cpu takes memory for positions as they are used"):
        Build(parse_options({"target": "cpu", "context": "64"})).context  # noqa: B018
    with pytest.raises(UserError, match="context=-1: must be at least 0"):
        parse_options({"context": "-1"})
    build = Build(parse_options({"target": "npu2-sim"}))
    assert build.context == 4096


def test_modules_of_the_npu_follow_the_version_of_xdsl(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """It prints them: another one may print them otherwise."""
    build = Build(parse_options({"target": "npu2-sim", "npu.buckets": "64", "artifacts": str(tmp_path)}))
    step = build.steps["module:prefill_attend.64"]
    before = step._key(None)["tool"]
    monkeypatch.setattr(modules, "version", lambda package: f"99 of {package}")
    modules.fingerprint.cache_clear()
    assert step._key(None)["tool"] == "xdsl 99 of xdsl" != before
    modules.fingerprint.cache_clear()


def test_programs_of_layers_that_differ_follow_from_a_period() -> None:
    """Every kind beside each that follows it, and the last: more layers of the same order change nothing."""
    window, everything = A_LLAMA.decoder.layers[0], A_LLAMA.decoder.layers[0]
    window = replace(window, mixer=replace(A_LLAMA.decoder.attention, window=16))

    def found(order: str) -> list[Program]:
        layers = tuple({"w": window, "a": everything}[kind] for kind in order)
        changed = replace(A_LLAMA, decoder=replace(A_LLAMA.decoder, layers=layers))
        return programs(changed, targets()["cpu"].grouping("separate"), policy=parse_policy("bf16,w_down.0=int8"))

    assert found("wwwaww") == found("wwwa" * 20 + "ww")
    assert {p.name for p in found("wa" * 9)} - {p.name for p in found("w" * 9)} == {
        "flash_attn_panels__w16",
        "rms_gemv_attn_panels__w16",
    }


@pytest.mark.parametrize(
    "change, named",
    [({"head_dim": 32}, "head_dim"), ({"kv_heads": 1}, "kv_heads"), ({"scalar": 3.0}, "scalar"), ({}, "inner")],
)
def test_layers_of_other_sizes_are_refused(change: dict[str, Any], named: str) -> None:
    """Parts take sizes for the same in all layers."""
    layer = A_LLAMA.decoder.layers[0]
    other = replace(layer, mixer=replace(layer.mixer, **change))
    other = other if change else replace(layer, feed_forward=FeedForward(3))
    with pytest.raises(UserError, match=f"layers differ in {named}"):
        ConfigFields(CONFIG, "test").config("llama", [layer, other], 100, tied=False)


def test_layers_that_are_not_known_are_refused() -> None:
    fields = ConfigFields({"layer_types": ["full_attention", "linear_attention"]}, "test")
    with pytest.raises(UserError, match=r'layer_types = "linear_attention".*rewound'):
        fields.kinds([FULL] * 2)
    with pytest.raises(UserError, match="at least one layer must have attention"):
        ConfigFields(CONFIG, "test").config("llama", [Layer(ShortConv(3), FeedForward(8))], 100, tied=False)
