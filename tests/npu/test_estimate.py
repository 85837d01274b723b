"""The estimate: its arithmetic, what it reads from programs, its rates against what others published."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llama_npu2.artifact.plan import BufferRef, Phase, PlannedCall
from llama_npu2.cli.table import amount
from llama_npu2.devices.xrt.limits import CHAIN, COMMAND
from llama_npu2.errors import UserError
from stages import air
from stages.air import Builder, Channel, limits
from stages.air.placement import CORES, MEMORY, SHIM, Tile
from stages.air.stitching import SETTLE, part_of
from stages.commands.estimate import run as estimate
from stages.engine.files import read_json, write_json
from stages.engine.places import CONFIG, MODULES
from stages.estimate.constants import Machine, constants
from stages.estimate.flow import call_work, launch_work
from stages.estimate.phases import commands, phase_milliseconds
from stages.estimate.price import compiled_code, description
from stages.estimate.ranges import between, ranges
from stages.estimate.systems import FITTED, KERNELS, PREDICTED
from stages.estimate.work import (
    CALL,
    DDR,
    ELEMENTWISE,
    HOST,
    STREAM,
    Amount,
    Overlap,
    Repeat,
    Serial,
    Time,
    multiply,
    spend,
)
from stages.graph import Build
from stages.graph.options import parse_options
from stages.kernels import (
    Cost,
    append_v,
    feed_forward,
    flash_attention,
    gemm,
    gemv,
    grouped_gemv,
    kernels,
    kv_rows,
    rms_norm,
    rope,
    short_conv,
    token_attention,
)
from stages.model.grouping import programs
from stages.model.policy import parse_policy
from stages.model.presets import PRESETS
from stages.reports.estimate_figures import figures
from stages.reports.estimated import Estimate, Sizes, host_traffic
from stages.targets.npu2.groupings import GROUPINGS
from stages.targets.npu2.modules import write_module
from tests.conftest import doit
from tests.support.npu_shapes import JUDGED, MODELS
from tests.support.vector_ops import buffer, count

LLAMA = MODELS["llama-3.2-1b"]
MACHINE = Machine()
GBPS = 1e9


@functools.cache
def estimated(grouping: str) -> Estimate:
    """Return the estimate of a Llama with this grouping, which all tests share."""
    return Estimate(LLAMA, grouping, [128], MACHINE)


def time_of(module: air.AirModule, costs: Any, machine: Machine = MACHINE) -> Time:
    (launch,) = module.launches
    return spend(launch_work(launch, costs, shared_steps=(64, 64))[0], machine)


# the table


def test_every_rate_is_within_what_was_published() -> None:
    table = constants(MACHINE)
    assert {each.name for each in table} == set(Machine.__dataclass_fields__) - {"measured"}
    for each in table:
        assert each.low <= each.value <= each.high and each.unit and each.source, each.name


def test_the_fitted_programs() -> None:
    """The six programs within a quarter, a prompt and a token within 15 %."""
    bounds = {"prompt of 2048": 0.15, "token": 0.15}
    assert len(FITTED) == 8
    for row in FITTED:
        assert abs(row.error(MACHINE)) <= bounds.get(row.what, 0.25), row.what


def test_a_prediction_that_misses_by_more_than_a_quarter_says_why() -> None:
    missed = [row for row in (*KERNELS, *PREDICTED) if abs(row.error(MACHINE)) > 0.25]
    assert all(row.note for row in missed)
    assert len(missed) <= len((*KERNELS, *PREDICTED)) // 10


@pytest.mark.parametrize(
    ("rate", "row"),
    [
        ("macs_bf16_generated", "o_ffn"),
        ("macs_bf16_bfp16", "flash_attn"),
        ("vector_cycles", "flash_attn"),
        ("stream_gbps", "lm_head_gemv"),
        ("configuration_us", "rms_gemv_rope"),
        ("configuration_core_us", "rms_gemv_rope"),
        ("step_us", "flash_attn"),
        ("submission_us", "rms_gemv_rope"),
        ("clock_ghz", "o_ffn"),
        ("ddr_gbps", "o_ffn"),
        ("host_copy_gbps", "rms_gemms_rope"),
    ],
)
def test_a_rate_moves_the_programs_that_need_it(rate: str, row: str) -> None:
    (found,) = (each for each in FITTED if each.what == row)
    halved = replace(MACHINE, **{rate: getattr(MACHINE, rate) / 2})
    assert abs(found.model(halved) / found.model(MACHINE) - 1) > 0.005


# how far times may be off


def test_a_range_is_what_independent_errors_leave_open() -> None:
    def times(machine: Machine) -> dict[str, float]:
        return {"a": 1e3 / machine.ddr_gbps + machine.step_us, "b": 7.0}

    ddr, step = (next(each for each in constants(MACHINE) if each.name == name) for name in ("ddr_gbps", "step_us"))
    found = ranges(times, MACHINE)
    middle = times(MACHINE)["a"]
    slower = [1e3 / ddr.low - 1e3 / ddr.value, step.high - step.value]
    faster = [1e3 / ddr.value - 1e3 / ddr.high, step.value - step.low]
    assert found["a"].middle == middle
    assert found["a"].high == pytest.approx(middle + math.hypot(*slower))
    assert found["a"].low == pytest.approx(middle - math.hypot(*faster))
    assert [swing.rate for swing in found["a"].swings] == ["step_us", "ddr_gbps"]
    assert found["b"].low == found["b"].high == 7.0 and not found["b"].swings
    alone = ranges(times, replace(MACHINE, measured=frozenset({"step_us"})))["a"]
    assert [swing.rate for swing in alone.swings] == ["ddr_gbps"] and alone.high < found["a"].high


@pytest.mark.thorough
def test_an_estimate_with_other_rates_is_the_one_made_with_them() -> None:
    slow = replace(MACHINE, ddr_gbps=5.0, configuration_us=100, host_read_gbps=3.0)
    made, moved = Estimate(LLAMA, "fused", [128], slow), Estimate(LLAMA, "fused", [128], MACHINE).at(slow)
    assert moved.times() == pytest.approx(made.times()) and made.times()["token"] > 100
    assert moved.at(MACHINE).times() == pytest.approx(Estimate(LLAMA, "fused", [128], MACHINE).times())


# arithmetic


def test_what_runs_at_once_takes_as_long_as_its_longest_part() -> None:
    short, long = Amount(HOST, 1.0), Amount(DDR, 2 * MACHINE.ddr_gbps * GBPS)
    assert spend(Overlap(short, long), MACHINE).by == {DDR: 2.0}
    both = spend(Serial(short, long), MACHINE)
    assert both.by == {HOST: 1.0, DDR: 2.0} and both.seconds == 3.0 and both.limit == DDR
    assert spend(Repeat(3, Serial(short, Overlap(short, long))), MACHINE).by == {HOST: 3.0, DDR: 6.0}
    assert spend(Overlap(), MACHINE).seconds == spend(Serial(), MACHINE).seconds == 0


@pytest.mark.parametrize("mode", ["bf16", "bf16_generated", "bf16_bfp16", "bf16_x_bfp16", "bfp16", "int8"])
def test_products_take_their_modes_rate(mode: str) -> None:
    rate = getattr(MACHINE, f"macs_{mode}") * MACHINE.clock_ghz * 1e9
    assert spend(multiply(rate, mode), MACHINE).by == {"multiply": pytest.approx(1.0)}


# programs


def test_a_gemv_step_fills_l2_and_then_drains_it() -> None:
    """L2 of a launch step is there once: its fill waits for the last drain, which waits for x."""
    tiling = gemv.tile(2048, 2048)
    rows, step = tiling.herd_rows * tiling.tile_m, tiling.costs["gemv_step"]
    stream = MACHINE.stream_gbps * GBPS
    fill, fetch_x = 2 * rows * 2048 / stream, 2 * 2048 / stream
    call = spend(Serial(Amount(ELEMENTWISE, step.vectors), Amount(CALL, 1)), MACHINE).seconds
    chunk = max(call, 2 * tiling.tile_m * tiling.chunk / stream)
    least = sum(tiling.steps) * (fill + fetch_x + 2048 // tiling.chunk * chunk)
    time = time_of(gemv.build(tiling), tiling.costs)
    configured = 1e-6 * (MACHINE.configuration_us + 32 * MACHINE.configuration_core_us)
    assert least < time.seconds - configured < 1.05 * least
    assert time.by[STREAM] > sum(tiling.steps) * fill


@pytest.mark.parametrize("together", [True, False])
def test_a_channel_fills_a_second_buffer_where_one_loop_fills_and_reads(
    together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler makes no second buffer where two loops over tiles fill and read one: it is filled, then read."""
    if not together:
        monkeypatch.setattr(feed_forward, "pass_on", in_two_loops)
    tiling = kernels()["int4_feed_forward"].tiling({"cols": 2048, "ffn": 8192, "eps": 1e-5})  # type: ignore[misc]
    machine = replace(MACHINE, ddr_gbps=1e9, configuration_us=0, configuration_core_us=0)
    time = time_of(feed_forward.build(tiling), dict.fromkeys(tiling.costs, Cost()), machine)
    fill, steps = tiling.staging.step_bytes / (MACHINE.stream_gbps * GBPS), sum(tiling.steps)
    assert time.by == {STREAM: pytest.approx((steps + 1 if together else 2 * steps) * fill)}


def in_two_loops(b: Builder, stream: Channel, fed: Channel, staging: feed_forward.Staging) -> None:
    size, chunk = staging.step_bytes, staging.chunk_bytes
    with b.alloc(air.L2, ((feed_forward.SHARES, size), "i8")) as (chunks,), b.loop(sum(staging.steps)):
        with b.parallel(feed_forward.SHARES, 1) as (tx, ty):
            b.get(stream, (tx, ty), chunks.at((tx, 1, size), (0, size, 1)))
        with b.parallel(feed_forward.SHARES, 1) as (tx, ty), b.loop(staging.together) as j:
            b.put(fed, (tx, ty), chunks.at((tx, 1, size), (j * chunk, chunk, 1)))


def test_a_product_whose_x_passes_through_hides_it() -> None:
    tiling = gemm.tile(2048, 8192, 2048)
    by = time_of(gemm.build(tiling), tiling.costs).by
    assert by["multiply"] == pytest.approx(spend(multiply(2048 * 2048 * 8192 / 32, "bf16"), MACHINE).seconds)
    assert by[STREAM] < 0.05 * by["multiply"]
    slow = replace(MACHINE, stream_gbps=0.5)
    assert time_of(gemm.build(tiling), tiling.costs, slow).limit == STREAM


@pytest.mark.parametrize(("shared", "awaited"), [((1, 1), 63), ((1, 3), 4 * 8 - 1), ((1, 16), 3)])
def test_steps_that_share_no_descriptors_are_awaited(shared: tuple[int, int], awaited: int) -> None:
    tiling = gemm.tile(2048, 2048, 8192)
    assert tiling.steps == (4, 16)
    (launch,) = gemm.build(tiling).launches
    time = spend(launch_work(launch, tiling.costs, shared)[0], MACHINE)
    assert time.by.get("step", 0.0) == pytest.approx(1e-6 * MACHINE.step_us * awaited)


def test_block_floating_point_products_are_faster() -> None:
    exact, block = gemm.tile(512, 2048, 2048), gemm.tile(512, 2048, 2048, bfp16=True)
    times = [spend(call_work(each.costs["gemm_step"]), MACHINE).by["multiply"] / each.tile_k for each in (exact, block)]
    assert times[0] / times[1] == pytest.approx(MACHINE.macs_bf16_x_bfp16 / MACHINE.macs_bf16)
    assert gemm.ddr_bytes(block) < gemm.ddr_bytes(exact)
    whole = [time_of(gemm.build(each), each.costs).seconds for each in (exact, block)]
    assert whole[1] < whole[0] / 2


def test_columns_of_the_array_are_filled_at_the_same_time() -> None:
    """What passes through one column's L2 does not wait for what passes through the others'."""
    tiling = gemm.tile(512, 2048, 512, bfp16=True)
    time = time_of(gemm.build(tiling), dict.fromkeys(tiling.costs, Cost()), replace(MACHINE, ddr_gbps=1e9))
    of_a_column = 2 * tiling.tile_m * tiling.cols / MACHINE.stream_gbps / 1e9
    assert of_a_column < time.by["stream"] < 1.5 * of_a_column


def test_attention_skips_the_arithmetic_that_causality_masks() -> None:
    tiling = flash_attention.tile(2048, 32, 8, 64)
    full = 2048 * 2048 * 2 * 64 * 32
    assert 0.5 * full < tiling.macs < 0.55 * full
    time = time_of(flash_attention.build(tiling), tiling.costs)
    assert time.by["multiply"] == pytest.approx(spend(multiply(tiling.macs / 32, "bf16"), MACHINE).seconds)
    # What is masked still streams by.
    masked = (1 - tiling.costs["fa_step"].share) * 2048 / 64 * 32
    assert time.by[STREAM] > masked * 2 * tiling.tile_k * 2 * 64 / (MACHINE.stream_gbps * GBPS)


def test_elementwise_work_is_limited_by_memory_or_by_the_cores() -> None:
    limit = []
    for kernel in (kernels()["add"], kernels()["silu_and_mul"]):
        assert kernel.tiling and kernel.program
        tiling = kernel.tiling({"rows": 2048, "cols": 8192})
        limit.append(time_of(kernel.program(tiling), tiling.costs).limit)
    assert limit == [DDR, ELEMENTWISE]


def test_a_tile_function_without_a_cost_is_refused() -> None:
    tiling = gemv.tile(512, 256)
    with pytest.raises(TypeError, match="gemv_zero"):
        time_of(gemv.build(tiling), {"gemv_step": Cost(), "gemv_out": Cost()})


@pytest.mark.sampled(1)
@pytest.mark.parametrize("grouping", ["separate", "fused"])
def test_a_programs_rows_are_its_described_launches(grouping: str) -> None:
    estimate = estimated(grouping)
    for name, module in estimate.modules.items():
        rows = estimate.rows[name]
        described, added = rows[: len(module.kernels)], rows[len(module.kernels) :]
        assert [row.name for row in described] == [kernel.name for kernel in module.kernels]
        assert all(SETTLE in row.name and row.time.limit == "configuration" for row in added) and len(added) <= 1
        assert sum(row.launches for row in rows) == len(module.air.launches)
        assert part_of(module.air.launches[0 if added else -1]) == len(rows) - 1
        assert description(module)["milliseconds"] == pytest.approx(sum(row.time.milliseconds for row in rows))
        assert sum(row.traffic.bytes for row in rows) == sum(each.bytes for each in air.count(module.air))


# a token, a prompt


@pytest.mark.sampled(1)
@pytest.mark.parametrize("model", MODELS)
def test_a_token_moves_hardly_more_than_the_weights(model: str) -> None:
    moved, weights = Estimate(MODELS[model], "fused", [128], MACHINE).traffic()
    assert weights < moved <= 1.02 * weights


def test_host_traffic_is_tokens_in_and_kv_out() -> None:
    crossing = host_traffic(LLAMA)
    kv = 16 * 2048 * 2 * 512 * 2
    assert kv < crossing["prompt"] < 1.2 * kv and crossing["token"] < 1 << 20


def test_commands_are_cut_by_number_and_by_time() -> None:
    assert commands([]) == 0
    assert commands([1e-6] * CHAIN) == 1 and commands([1e-6] * (CHAIN + 1)) == 2
    assert commands([0.4 * COMMAND] * 5) == 3


def test_the_host_works_beside_the_array_unless_it_waits_for_it() -> None:
    """A host call is free while it takes less time than the device calls before it and shares no buffer with them."""

    def program(host: bool, **estimated: float) -> dict[str, Any]:
        slots = [{"role": role, "dtype": "bf16", "shape": [1 << 20]} for role in ("activation", "output")]
        return {"host": host, "slots": slots, **estimated}

    def milliseconds(*calls: tuple[str, str, str]) -> float:
        programs = {"device": program(False, milliseconds=1e3), "host": program(True)}
        content = {"programs": programs, "buffers": {"tokens": {"shape": [64]}}, "model": {"max_seq": 64}}
        planned = [PlannedCall(name, (BufferRef(read), BufferRef(made))) for name, read, made in calls]
        return phase_milliseconds(content, {Phase("decode"): planned})["decode"]

    alone = milliseconds(("device", "a", "b"))
    assert alone > 1e3
    assert milliseconds(("device", "a", "b"), ("host", "c", "d")) == alone
    first = milliseconds(("host", "c", "d"), ("device", "a", "b"))
    assert milliseconds(("device", "a", "b"), ("host", "b", "d")) > first > alone


def test_a_token_is_its_calls_submissions_and_host_work() -> None:
    estimate = estimated("fused")
    stretches = list(estimate.stretches())
    assert sum(bool(each.device) for each in stretches) == LLAMA.layers + 1
    token = estimate.time(Sizes(after=1024))
    assert token.by["submission"] == pytest.approx((LLAMA.layers + 1) * MACHINE.submission_us / 1e6)
    calls = [name for each in stretches for name in each.device]
    on_device = sum(row.time.seconds for name in calls for row in estimate.rows[name])
    assert token.seconds == pytest.approx(on_device + token.by["submission"] + token.by["host"])
    # Attention streams the cache: 1024 positions of 2 x 512 values in 16 layers.
    deeper = estimate.time(Sizes(after=2048)).by["host"] - token.by["host"]
    assert deeper == pytest.approx(16 * 1024 * 2 * 512 * 2 / (MACHINE.host_read_gbps * GBPS))


def test_a_token_at_the_end_of_the_context_reads_all_of_it() -> None:
    config, policy = JUDGED["demo"], parse_policy("int4")
    estimate = Estimate(config, "fused", [128], MACHINE, policy, positions=4096)
    sizes = dict(estimate.phases())["token after 4095 others"]
    called = [[n for stretch in estimate.stretches(each) for n in stretch.device] for each in (Sizes(), sizes)]
    assert [{name.partition(".")[2] for name in names} for names in called] == [{"", "1024"}, {"", "4096"}]
    moved = [sum(row.traffic.bytes for name in names for row in estimate.rows[name]) for names in called]
    row_bytes = 2 * 2 * config.kv_heads * config.head_dim
    assert moved[1] - moved[0] == config.layers * (4096 - 1024) * row_bytes
    assert estimate.time(sizes).seconds > estimate.token().seconds
    assert not [name for name in Estimate(config, "fused", [128], MACHINE, policy).times() if "token after" in name]


def test_loading_takes_as_long_as_the_code_of_compiled_programs_says(tmp_path: Path) -> None:
    config, policy = JUDGED["demo"], parse_policy("int4")
    small = Estimate(config, "fused", [128], MACHINE, policy)
    launches = [row for row in small.rows["decode_layer.1024"] if row.tiling]
    (tmp_path / "elf").mkdir()
    (tmp_path / "elf/decode_layer.1024.json").write_text(json.dumps({"code_bytes": [80 << 10] * len(launches)}))
    (tmp_path / "elf/decode_last.json").write_text(json.dumps({"code_bytes": []}))
    known = replace(small, code_bytes=compiled_code(tmp_path))
    assert known.code_bytes.keys() == {"decode_layer.1024"}, "what no core was linked for is not known"
    for row, other in zip(known.rows["decode_layer.1024"], launches, strict=False):
        expected = 1e-6 * (MACHINE.configuration_us + 80 * MACHINE.configuration_kib_us)
        assert row.time.by["configuration"] == pytest.approx(expected) != other.time.by["configuration"]
    assert known.rows["decode_last"][0].time.by == small.rows["decode_last"][0].time.by
    longer = {swing.rate for swing in known.ranges["token"].swings}
    assert "configuration_kib_us" in longer and "configuration_kib_us" not in {
        swing.rate for swing in small.ranges["token"].swings
    }


def test_several_tokens_are_the_programs_that_are_compiled_for_them() -> None:
    config, policy = JUDGED["demo"], parse_policy("int4")
    estimate = Estimate(config, "fused", [128], MACHINE, policy, positions=2048, counts=[4])
    sizes = dict(estimate.phases())["4 tokens at once"]
    names = [name for each in estimate.stretches(sizes) for name in each.device]
    # Every third context bucket has programs: 1027 positions take those of 2048.
    assert {name.partition(".")[2] for name in names} == {"4", "4.2048"}
    compiled = programs(config, replace(GROUPINGS["fused"], counts=(4,)), [128], policy, 2048)
    assert {*names} <= {program.name for program in compiled}
    token, several = estimate.token(), estimate.time(sizes)
    assert token.seconds < several.seconds < 4 * token.seconds
    on_device = sum(row.time.seconds for name in names for row in estimate.rows[name])
    assert several.seconds == pytest.approx(on_device + several.by["submission"] + several.by["host"])
    assert "4 tokens at once" not in Estimate(config, "separate", [128], MACHINE, policy, counts=[4]).times()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("matmul", ["bfp16", "bf16"])
@pytest.mark.parametrize("copy_gbps", [MACHINE.host_copy_gbps, 0.001])
def test_what_the_host_does_beside_the_array_counts_as_far_as_it_is_longer(matmul: str, copy_gbps: float) -> None:
    """It unpacks what each program multiplies with while the one before runs."""
    machine = replace(MACHINE, host_copy_gbps=copy_gbps)
    estimate = Estimate(JUDGED["demo"], "fused", [128], machine, parse_policy("int4", matmul=matmul))
    moments = list(estimate.moments(Sizes(128)))
    unpacked = [moment.time.seconds for moment in moments if "unpack" in moment.what]
    before = sum(row.time.seconds for row in estimate.rows["prefill_down.128"])
    # The first stretch embeds as well, and waits for nothing in any case.
    first, *later = unpacked[::3]
    assert len(unpacked) == 3 * JUDGED["demo"].layers and min(first, before) > 0
    assert later == pytest.approx([max(0.0, first - before)] * len(later), rel=0.1, abs=5e-6)
    assert [seconds > 0 for seconds in unpacked[1:]] == [copy_gbps == 0.001] * len(unpacked[1:])


def test_a_prompts_logits_are_made_where_the_grouping_says() -> None:
    vocabulary = LLAMA.vocab * 2048 * 2 / (MACHINE.host_read_gbps * GBPS)
    host = {name: estimated(name).prompt(128).by["host"] for name in ("separate", "fused")}
    assert host["fused"] > vocabulary > host["separate"]


# what launches take of the array


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    estimates = {name: estimated(name) for name in GROUPINGS}
    return figures("llama", estimates, "fused")


def test_times_of_phases_are_those_of_their_moments(found: dict[str, Any]) -> None:
    estimate = estimated("fused")
    for phase, time in (("token", estimate.token()), ("prompt of 128", estimate.prompt(128))):
        times = found["phases"][phase]
        assert times["milliseconds"] == pytest.approx(time.milliseconds) == found["groupings"]["fused"][phase]
        assert sum(moment["milliseconds"] for moment in times["moments"]) == pytest.approx(time.milliseconds)
        layers = [moment["what"] for moment in times["moments"] if moment["what"] == "silu_and_mul"]
        assert len(layers) == LLAMA.layers


def test_tiles_take_together_what_their_launch_takes(found: dict[str, Any]) -> None:
    """Drawn wherever: no tile holds more than it can, and rows add up to the counts by which checks refuse."""
    launches = [launch for program in found["programs"].values() for launch in program["launches"]]
    for launch in launches:
        taken = {use["limit"]: use for use in launch["limits_taken"]}
        assert all(use["used"] <= use["available"] for use in taken.values()), launch["kernel"]
        tiles = [Tile(*tile) for tile in launch["tiles"]]
        rows = {row: [tile for tile in tiles if tile.row == row] for row in (SHIM, MEMORY)}
        for row, name in ((SHIM, "shim"), (MEMORY, "memory tile")):
            for attribute, limit in (
                ("channels_in", f"{name} DMA channels in"),
                ("channels_out", f"{name} DMA channels out"),
                ("descriptors", f"{name} descriptors"),
            ):
                parts = [getattr(tile, attribute) for tile in rows[row]]
                assert sum(parts) == taken[limit]["used"]
                assert max(parts, default=0) <= taken[limit]["available"] // limits.COLUMNS
        assert sum(tile.bytes for tile in rows[MEMORY]) == taken["L2 bytes"]["used"]
        cores = [tile for tile in tiles if tile.row >= CORES]
        assert len(cores) == sum(columns * rows for columns, rows in launch["herds"])
        assert max(tile.bytes for tile in cores) == taken["L1 bytes (with stack and static data)"]["used"]


def test_buffers_are_named_by_what_passes_through_them(found: dict[str, Any]) -> None:
    (down,) = (each for each in found["programs"]["decode_layer"]["launches"] if "w_down" in each["slots"])
    held = [(each["memory"], each["way"], each["slots"]) for each in down["buffers"]]
    assert held == [
        ("L2", "in", ("w_down",)),
        ("L2", "out", ("down",)),
        ("L1", "in", ("swiglu",)),
        ("L1", "", ()),
        ("L1", "in", ("w_down",)),
        ("L1", "out", ("down",)),
    ]


# vector operations


def _elementwise(name: str, cols: int, activation: int = 0) -> tuple[Any, str, list[Any], int]:
    cut = kernels()[name].tiling
    assert cut
    tiling: Any = cut({"rows": 1, "cols": cols, "activation": activation})
    arguments = [buffer(2 * tiling.chunk) for _ in range(3)]
    return air.Variant.of(name, COUNT=tiling.chunk, **tiling.macros), name, arguments, tiling.costs[name].vectors


def _norm(rows: int, cols: int, adds: bool = False, **more: float) -> tuple[Any, str, list[Any], int]:
    tiling = rms_norm.Tiling(rows, cols, rms_norm.Norm(1e-5, **more), 1, rows, adds)
    (name, cost), whole = *tiling.costs.items(), [buffer(2 * rows * cols) for _ in range(2)]
    return tiling.variant, name, [whole[0], buffer(2 * cols), whole[1], 1e-5], cost.vectors


def _rope(rows: int, heads: int, head_dim: int, out: str = rope.ROWS) -> tuple[Any, str, list[Any], int]:
    tiling = rope.Tiling(rows, heads, head_dim, out, 1, rows)
    sizes = 2 * rows * tiling.width, 4 * rows * tiling.angles, 2 * tiling.tile_elements
    return tiling.variant, "rope", [buffer(size) for size in sizes], tiling.costs["rope"].vectors


def _short_conv(rows: int, cols: int, taps: int) -> tuple[Any, str, list[Any], int]:
    tiling = short_conv.Tiling(rows, cols, taps, 1, rows)
    sizes = 3 * rows, taps, taps - 1 + rows, rows, rows
    arguments = [buffer(2 * cols * size) for size in sizes]
    return tiling.variant, "short_conv", arguments, tiling.costs["short_conv"].vectors


def _gemv(function: str, rows: int, chunk: int, blocked: bool) -> tuple[Any, str, list[Any], int]:
    tiling = gemv.Tiling(rows, 2 * chunk, "bf16", blocked, 1, rows, chunk, (1,))
    accumulators = buffer(4 * max(rows, 16))
    arguments = {
        "gemv_step": [buffer(2 * rows * chunk), buffer(4 * chunk), 0, accumulators],
        "gemv_out": [accumulators, buffer(2 * max(rows, 16))],
    }
    return tiling.variant, function, arguments[function], tiling.costs[function].vectors


def _grouped_gemv(kernel: str, rows: int, cols: int, last: bool = False) -> tuple[Any, str, list[Any], int]:
    """Of a step's first chunk, or of its `last`, of which outputs are made."""
    sizes = {"out_cols": rows, "cols": cols, **({"eps": 1e-5} if "norm" in kernel else {})}
    tiling = kernels()[kernel].tiling(sizes)  # type: ignore[misc]
    sums, out = buffer(4 * tiling.sums), buffer(tiling.element * tiling.kept)
    index, row = (tiling.core_chunks - 1 if last else 0), [0] if tiling.adds else []
    arguments = [buffer(tiling.cut.chunk_bytes), buffer(2 * tiling.width), index, *row, sums, out]
    outputs = tiling.output_vectors if last else 0
    return tiling.variant, "grouped_gemv_step", arguments, tiling.costs["grouped_gemv_step"].scheduled + outputs


def _grouped_norm(rows: int, cols: int) -> tuple[Any, str, list[Any], int]:
    tiling = kernels()["int4_norm_gemv"].tiling({"out_cols": rows, "cols": cols, "eps": 1e-5})  # type: ignore[misc]
    cost = tiling.costs["grouped_gemv_begin"].vectors
    arguments = [buffer(2 * tiling.width), buffer(4 * tiling.sums), 1e-5]
    return tiling.variant, "grouped_gemv_begin", arguments, cost


def _feed_forward(function: str, form: str, cols: int, inner: int) -> tuple[Any, str, list[Any], int]:
    """Of a step: the last chunk of a pair of panels, of which the activation is made."""
    tiling = kernels()[f"{form}_feed_forward"].tiling({"cols": cols, "ffn": inner, "eps": 1e-5})  # type: ignore[misc]
    pairs, x = tiling.network.pairs, buffer(2 * max(tiling.network.pairs.inputs, tiling.outputs))
    normed, held, acc = buffer(2 * pairs.inputs), buffer(2 * tiling.inner), buffer(4 * tiling.acc)
    sums, part = buffer(4 * tiling.outputs), buffer(4 * tiling.outputs // feed_forward.PARTS)
    arguments = {
        "feed_forward_begin": [x, normed, acc, held, 1e-5],
        "feed_forward_step": [buffer(pairs.chunk_bytes), normed, 2 * pairs.chunks - 1, acc, held, sums],
        "feed_forward_first": [x, 0, sums, part],
        "feed_forward_join": [sums, 1, part],
        "feed_forward_last": [part, 1, x],
    }
    cost = tiling.costs[function]
    expected = cost.scheduled + tiling.panel_vectors if cost.scheduled else cost.vectors
    return tiling.variant, function, arguments[function], expected


def _gemm(function: str, m: int, n: int, k: int, **more: bool) -> tuple[Any, str, list[Any], int]:
    tiling = gemm.Tiling(m, k, n, 1, m, n, k, k, **more)
    arguments = {"gemm_zero": [], "gemm_step": [buffer(2 * m * k), buffer(2 * k * n)], "gemm_out": []}
    # 2x2 blocks of 8x8: c in and out, 12 each; per step of 8, four operands of two loads, or two that are converted.
    fed = m * n // 256 * (4 * 12 + k // 8 * (2 * 4 if tiling.bfp16 else 4 * 2 * 2)) if function == "gemm_step" else 0
    return tiling.variant, function, [*arguments[function], buffer(4 * m * n)], tiling.costs[function].vectors + fed


INT8 = "int8_rows"


def _sums(queries: int, keys: int, stored: str) -> list[np.ndarray]:
    """What a core keeps of queries besides their results, and scores."""
    shapes = flash_attention.stats_shape(queries, stored), flash_attention.scores_shape(queries, keys, stored)
    return [buffer(4 * math.prod(shape)) for shape in shapes]


def _attention(function: str, q: int, k: int, d: int, stored: str = "bf16") -> tuple[Any, str, list[Any], int]:
    tiling = flash_attention.Tiling(max(q, k), max(q, k), 1, 1, d, 1, 1, 1, q, k, stored=stored)
    queries, acc, (stats, scores) = buffer(2 * q * tiling.width), buffer(4 * q * d), _sums(q, k, stored)
    arguments = {
        "fa_init": [queries, acc, stats],
        "fa_step": [k, queries, buffer(2 * k * tiling.kv_head), acc, stats, scores],
        "fa_out": [acc, stats, queries],
    }
    if kv_rows.in_numbers(stored):
        # No key is masked.
        queries.view(np.int32)[d // 8 * 32] = 2 * k
        return tiling.variant, function, arguments[function], _operations(tiling.costs[function])
    blocks_q, blocks_k, blocks_d = q // 8, k // 8, d // 8
    scores = blocks_q // 4 * blocks_k * (blocks_d * (16 + 4 * 2) + 4 * 6)
    # Two blocks of V are held at a time: results go in and out for each pair.
    values = blocks_d * blocks_k * (16 + blocks_q * (12 // 2 + 2))
    fed = scores + values if function == "fa_step" else 0
    return tiling.variant, function, arguments[function], tiling.costs[function].vectors + fed


def _append_v(rows: int, heads: int, d: int) -> tuple[Any, str, list[Any], int]:
    tiling = append_v.Tiling(rows, heads, d, INT8, 1, rows)
    arguments = [buffer(2 * rows * tiling.width), buffer(tiling.tile_elements)]
    return tiling.variant, "append_v", arguments, tiling.costs["append_v"].vectors


def _operations(cost: Cost) -> int:
    return cost.vectors + cost.scheduled


def _token_attention(function: str, group: int, d: int, stored: str = "bf16") -> tuple[Any, str, list[Any], int]:
    tiling = token_attention.tile(1024, group, 1, d, stored=stored)
    queries, k = tiling.queries, tiling.tile_k
    rows, q, acc = buffer(2 * tiling.width), buffer(2 * queries * d), buffer(4 * queries * d)
    table, row, (stats, scores) = buffer(4 * tiling.angles), buffer(4 * d), _sums(queries, k, stored)
    table.view(np.int32)[d] = 1023
    arguments = {
        "ta_init": [rows, table, 0, q, acc, stats, row],
        "ta_step": [table, 0, row, q, buffer(2 * k * tiling.kv_head), acc, stats, scores],
        "ta_out": [acc, stats, q, buffer(2 * group * d)],
    }
    if kv_rows.in_numbers(stored):
        return tiling.variant, function, arguments[function], _operations(tiling.costs[function])
    blocks_q, blocks_k, blocks_d = queries // 8, k // 8, d // 8
    shared = next(n for n in (4, 2, 1) if blocks_q % n == 0)
    scores = blocks_q // shared * blocks_k * (blocks_d * (16 + shared * 2) + shared * 6)
    values = blocks_d * blocks_k * (16 + blocks_q * (12 // 2 + 2))
    fed = scores + values if function == "ta_step" else 0
    return tiling.variant, function, arguments[function], tiling.costs[function].vectors + fed


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "case",
    [
        lambda: _elementwise("add", 8192),
        lambda: _elementwise("add", 48),
        lambda: _elementwise("silu_and_mul", 8192),
        lambda: _elementwise("silu_and_mul", 8192, activation=1),
        lambda: _elementwise("silu_and_mul", 48, activation=1),
        lambda: _norm(1, 2048),
        lambda: _norm(3, 576, offset=1.0),
        lambda: _norm(1, 640, once=1),
        lambda: _norm(2, 640, adds=True, offset=1.0, once=1),
        lambda: _rope(1, 32, 64),
        lambda: _rope(2, 8, 128),
        lambda: _rope(2, 8, 64, rope.QUERIES),
        lambda: _rope(2, 24, 128, rope.QUERIES),
        lambda: _short_conv(8, 256, 3),
        lambda: _short_conv(1, 48, 4),
        lambda: _gemv("gemv_step", 8, 1024, True),
        lambda: _gemv("gemv_step", 16, 512, False),
        lambda: _gemv("gemv_step", 2, 512, False),
        lambda: _gemv("gemv_out", 8, 512, True),
        lambda: _grouped_gemv("int4_gemv", 2048, 2048),
        lambda: _grouped_gemv("int4_gemv", 48, 576),
        lambda: _grouped_gemv("int6_gemv", 2048, 2048),
        lambda: _grouped_gemv("int6_gemv", 2048, 14336),
        lambda: _grouped_gemv("int8_gemv", 2048, 2048),
        lambda: _grouped_gemv("int8_gemv", 48, 576),
        lambda: _grouped_gemv("int4_gemv", 2048, 2048, last=True),
        lambda: _grouped_gemv("int8_gemv_add", 48, 576, last=True),
        lambda: _grouped_gemv("int4_norm_gemv_swiglu", 8192, 2048, last=True),
        lambda: _grouped_gemv("int8_norm_gemv_swiglu", 48, 576, last=True),
        lambda: _grouped_gemv("int6_norm_gemv_f32", 1024, 256, last=True),
        lambda: _feed_forward("feed_forward_begin", "int4", 2048, 8192),
        lambda: _feed_forward("feed_forward_step", "int4", 2048, 8192),
        lambda: _feed_forward("feed_forward_step", "int8", 576, 1536),
        lambda: _feed_forward("feed_forward_first", "int4", 2048, 8192),
        lambda: _feed_forward("feed_forward_join", "int4", 2048, 8192),
        lambda: _feed_forward("feed_forward_last", "int4", 576, 1536),
        lambda: _grouped_norm(2048, 2048),
        lambda: _grouped_norm(48, 576),
        lambda: _gemm("gemm_zero", 64, 128, 32),
        lambda: _gemm("gemm_step", 64, 128, 32),
        lambda: _gemm("gemm_out", 64, 128, 32),
        lambda: _gemm("gemm_step", 64, 128, 32, bfp16=True),
        lambda: _gemm("gemm_out", 64, 128, 32, swiglu=True),
        lambda: _attention("fa_init", 64, 64, 64),
        lambda: _attention("fa_step", 64, 64, 64),
        lambda: _attention("fa_step", 32, 64, 128),
        lambda: _attention("fa_out", 64, 64, 64),
        lambda: _token_attention("ta_init", 4, 64),
        lambda: _token_attention("ta_step", 4, 64),
        lambda: _token_attention("ta_step", 9, 128),
        lambda: _token_attention("ta_out", 3, 64),
        lambda: _attention("fa_init", 32, 64, 64, INT8),
        lambda: _attention("fa_step", 32, 64, 64, INT8),
        lambda: _attention("fa_step", 32, 32, 128, INT8),
        lambda: _attention("fa_out", 32, 64, 64, INT8),
        lambda: _token_attention("ta_init", 4, 64, INT8),
        lambda: _token_attention("ta_step", 4, 64, INT8),
        lambda: _token_attention("ta_step", 9, 128, INT8),
        lambda: _token_attention("ta_out", 3, 64, INT8),
        lambda: _append_v(2, 8, 128),
    ],
)
def test_costs_are_what_the_tile_functions_do(
    case: Callable[[], tuple[Any, str, list[Any], int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Counted by running them on the stand-in for the AIE API."""
    variant, function, arguments, expected = case()
    work = tmp_path_factory.getbasetemp() / "vector_ops"
    work.mkdir(exist_ok=True)
    if function == "fa_step":
        count(variant, "fa_init", [arguments[1], *arguments[3:5]], work)
        count(variant, function, [0, *arguments[1:]], work)
    if function == "ta_step":
        table, _, row, q, _, acc, stats, _ = arguments
        count(variant, "ta_init", [buffer(1 << 16), table, 0, q, acc, stats, row], work)
        count(variant, function, arguments, work)
    assert math.isclose(count(variant, function, arguments, work), expected, rel_tol=0.02), function


def test_cores_are_loaded_while_they_pay() -> None:
    """The tiling's price of a core is the estimate's."""
    seconds = MACHINE.configuration_core_us * 1e-6
    assert round(seconds * MACHINE.hertz / MACHINE.scheduled_cycles) == grouped_gemv.LOAD_OPERATIONS
    cores = []
    for rows in (64, 512, 2048, 16384):
        tiling = kernels()["int4_gemv"].tiling({"out_cols": rows, "cols": 2048})  # type: ignore[misc]
        cores.append(tiling.columns * tiling.herd_rows)
    assert cores == sorted(cores) and cores[0] <= 2 and cores[-1] == 8, "with 8, DDR is what takes the time"


# reports


def report(path: Path, content: Any) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_a_report_takes_the_tables_place_where_it_has_values(tmp_path: Path) -> None:
    path = report(tmp_path / "report.json", {"measured": {"stream_gbps": 4.5, "heap_runs": 12}, "rungs": []})
    machine = Machine.from_report(path)
    assert machine.stream_gbps == 4.5 and machine.measured == {"stream_gbps"}
    assert replace(machine, stream_gbps=MACHINE.stream_gbps, measured=frozenset()) == MACHINE


@pytest.mark.parametrize(
    ("content", "fragment"),
    [
        (None, "No such file"),
        ("{", "is not JSON"),
        ("[]", "has no object called measured"),
        ({"measured": [1]}, "has no object called measured"),
        ({"measured": {"heap_runs": 3}}, "has none of clock_ghz"),
        ({"measured": {"ddr_gbps": 0}}, "ddr_gbps is 0, not a positive number"),
        ({"measured": {"ddr_gbps": "60"}}, "ddr_gbps is '60', not a positive number"),
        ({"measured": {"ddr_gbps": True}}, "ddr_gbps is True, not a positive number"),
        ('{"measured": {"ddr_gbps": Infinity}}', "ddr_gbps is inf, not a positive number"),
    ],
)
def test_a_bad_report_is_one_line(tmp_path: Path, content: Any, fragment: str) -> None:
    path = tmp_path / "report.json"
    if content is not None:
        report(path, content)
    with pytest.raises(UserError) as refused:
        Machine.from_report(path)
    assert fragment in str(refused.value) and "\n" not in str(refused.value)
    assert str(refused.value).startswith(f"measured={path}: ")


# the build, the command


def module_step(tmp_path: Path, model: str, grouping: str, entry: str, bucket: int | None) -> Path:
    write_json(tmp_path / CONFIG, PRESETS[model])
    library = f"{entry}.{bucket}" if bucket else entry
    write_module(tmp_path, library, tmp_path / "work", grouping, entry, bucket, bucket, "bf16", "bf16")
    return tmp_path / "work" / MODULES / library


def test_a_modules_cost_lies_beside_it(tmp_path: Path) -> None:
    path = module_step(tmp_path, "llama-3.2-1b", "fused", "prefill_attend", 128)
    cost = read_json(path.with_name(f"{path.name}.cost.json"))
    assert cost["milliseconds"] == pytest.approx(sum(each["milliseconds"] for each in cost["launches"]))
    assert [each["kernel"] for each in cost["launches"]][6] == "flash_attention"
    assert {each["limit"] for each in cost["launches"]} <= {"multiply", "configuration", "elementwise", "DDR", "stream"}


def test_a_program_near_the_watchdog_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^prefill_attend\.32768 .* 2 s: .*buckets="):
        module_step(tmp_path, "llama-3.2-1b", "fused", "prefill_attend", 32768)


def test_estimate_says_what_takes_how_long_and_why(tmp_path: Path) -> None:
    measured = report(tmp_path / "report.json", {"measured": {"ddr_gbps": 30}})
    nowhere = tmp_path / "none"
    given = ("model=random:smollm2-360m", "npu.buckets=128", f"measured={measured}", f"output={tmp_path / 'report'}")
    given = (*given, "streams=1,3")
    run = doit("estimate", *given, f"artifacts={nowhere}")
    assert run.returncode == 0, run.stderr
    assert not nowhere.exists(), "shapes are enough: no weights are made"
    assert "Rates measured by the selftest: ddr_gbps; all others as published." in run.stdout
    headline, token, last, prompt, *_ = run.stdout.splitlines()
    assert headline.endswith("weights bf16, grouping fused")
    found = json.loads((tmp_path / "report/estimate.json").read_text())["ranges"]["token"]
    said = re.search(
        r": ([\d.]+)-([\d.]+) ms, middle ([\d.]+) \(.*; ([\d.]+)-([\d.]+) tokens/s, middle ([\d.]+)$", token
    )
    assert said and [float(number) for number in said.groups()] == pytest.approx(
        [found["low"], found["high"], found["middle"], *(1e3 / found[end] for end in ("high", "low", "middle"))],
        rel=0.01,
    )
    assert found["low"] < found["middle"] < found["high"] and "ddr_gbps" not in [
        rate["rate"] for rate in found["rates"]
    ]
    narrowed = re.search(r"^What doit selftest would narrow first on an NPU: (\w+) ", run.stdout, re.MULTILINE)
    assert narrowed and narrowed[1] == next(rate["rate"] for rate in found["rates"] if rate["measured_by_selftest"])
    assert last.startswith("  token after 4095 others: ") and prompt.startswith("  prompt of 128: ")
    assert "\n  with grouping separate instead: token " in run.stdout
    assert 1 <= float(run.stdout.partition("through DDR, ")[2].partition("x")[0]) <= 1.05
    assert " ms at 30 GB/s" in run.stdout
    assert "\nIt locks " in run.stdout and "the cache of 4096 positions" in run.stdout
    held = json.loads((tmp_path / "report/estimate.json").read_text())["locked"]
    assert held["driver"] == 64 << 20 and f"weights {amount(held['weights'])}, " in run.stdout
    alone, three = json.loads((tmp_path / "report/estimate.json").read_text())["streams"]
    assert alone["middle"] == pytest.approx(found["middle"]) and alone["tokens"] == three["tokens"]
    assert 3 * found["middle"] < three["middle"] < 3.5 * found["middle"], "copying takes a tenth of the time"
    assert f"\n  3 at a time: {between(three['low'], three['high'])} ms from token to token of each, " in run.stdout
    assert three["host_bytes"] == 3 * held["KV cache"]
    rows = [line.split() for line in run.stdout.splitlines() if line.startswith("  gemv ")]
    assert rows and all(row[2] in {"configuration", "stream", "elementwise", "DDR"} for row in rows)


@pytest.mark.parametrize("weights", ["bf16", "int4"])
def test_a_family_without_programs_is_refused(weights: str, tmp_path: Path) -> None:
    options = {"model": "random:olmo2-1b", "weights": weights, "target": "cpu", "artifacts": str(tmp_path)}
    with pytest.raises(UserError, match=r"^model family olmo2: target npu2 has no kernels for norms of whole rows"):
        estimate(Build(parse_options(options)))


def test_check_puts_model_and_measurement_side_by_side() -> None:
    run = doit("estimate", "published=1")
    assert run.returncode == 0, run.stderr
    for row in (*FITTED, *KERNELS, *PREDICTED):
        (line,) = (line for line in run.stdout.splitlines() if line.startswith(f"{row.what}  "))
        assert f"{row.measured:.3f}" in line and f"{row.model(MACHINE):.3f}" in line and row.note in line


def test_a_bad_report_ends_the_command_with_one_line(tmp_path: Path) -> None:
    run = doit("estimate", f"measured={tmp_path / 'none.json'}")
    assert run.returncode != 0
    (line,) = run.stderr.strip().splitlines()
    assert "none.json: No such file or directory: give a report of doit selftest" in line
