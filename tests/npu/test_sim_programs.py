"""Stitched modules, executed from their MLIR on the simulator, against the kernels' references composed by the parts'
descriptions. Nothing here knows how a module was tiled or stitched: only its slots.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16

from llama_npu2.artifact.dtypes import DTYPES
from stages.air import parse_mlir
from stages.model.config import Config, position_rows, table
from stages.model.grouping import Program
from stages.model.part import Launch
from stages.targets.npu2.modules import Module, build_module
from stages.weights.constants import HEAD_POSITION
from stages.weights.formats import formats
from tests.support.npu_shapes import DEMO, device_program, layout, model
from tests.support.sim_support import run

Values = dict[str, np.ndarray]

TINY = model(150, 64, 128, heads=4, kv_heads=2, head_dim=32)
ODD = model(130, 192, 448, heads=3, kv_heads=1, head_dim=64, eps=1e-6)

HALVES = {"rope_kv": 0, "gemm_kv": 1}
"""Kernels that write one half of the interleaved cache, and which."""


def dimensions(config: Config, rows: int, positions: int, pos: int = 0) -> dict[str, Any]:
    return config.dimensions() | {"seq": rows, "max_seq": positions, "window": positions, "pos": pos}


def inputs(program: Program, config: Config, dims: dict[str, Any]) -> Values:
    """Values of everything that a program takes from outside, by slot name, in plain layout."""
    rng, values = np.random.default_rng(5), {}
    for slot in program.slots:
        if slot.role == "table":
            values[slot.name] = table(config, slot.buffer.format(rope=""), dims["max_seq"])
        elif slot.role in ("input", "weight"):
            shape = tuple(dims[d] if isinstance(d, str) else d for d in slot.shape)
            scale = 1 / math.sqrt(shape[-1]) if len(shape) == 2 and slot.role == "weight" else 1.0
            values[slot.name] = (rng.normal(size=shape) * scale).astype(bfloat16)
            if slot.buffer == "q_roped" and len(shape) == 2:
                heads = values[slot.name].reshape(shape[0], dims["heads"], -1)
                heads[..., -HEAD_POSITION:] = position_rows(dims["pos"], shape[0]).view(bfloat16)[
                    :, None, :HEAD_POSITION
                ]
    return values


def compose(program: Program, dims: dict[str, Any], values: Values) -> Values:
    """What every slot holds after the kernels' references, run in the order of the parts' launches."""
    values = dict(values)
    if "kv_window" in values:
        # What is behind the rows is what others left: nobody sees it.
        values["kv"] = values["kv_window"].reshape(by_head(dims)).copy()
        values["kv_window"] = values["kv"][: dims["pos"] + dims["seq"]]
    for part, wired in zip(program.parts, program.wiring, strict=True):
        for launch in part.launches:
            reference(launch, {arg: wired[slot] for arg, slot in launch.args.items()}, dims, values)
    return values


def by_head(dims: dict[str, Any]) -> tuple[int, ...]:
    """Shape of an interleaved cache."""
    return (-1, dims["kv_heads"], 2, dims["head_dim"])


def reference(launch: Launch, slots: dict[str, str], dims: dict[str, Any], values: Values) -> None:
    kernel = launch.kernel
    known: dict[str, Any] = {k: dims[v] if isinstance(v, str) else v for k, v in launch.scalars.items()}
    known |= {arg.name: values[slots[arg.name]] for arg in kernel.args if not arg.written}
    if "kv" in known:
        k, v = np.moveaxis(known["kv"], 2, 0)
        known |= {"k": k.reshape(len(k), -1), "v": v.reshape(len(v), -1)}
    if "table" in known:
        known["x"] = np.atleast_2d(known["x"])
    parameters = inspect.signature(kernel.reference).parameters
    out = kernel.reference(**{name: value for name, value in known.items() if name in parameters})
    if kernel.name in HALVES:
        cache = values.setdefault(slots["out"], np.full((dims["max_seq"], *by_head(dims)[1:]), np.nan, bfloat16))
        cache[dims["pos"] :][: len(out), :, HALVES[kernel.name]] = out.reshape(len(out), dims["kv_heads"], -1)
    else:
        values[slots["out"]] = out


def slot_arrays(module: Module, dims: dict[str, Any], values: Values) -> list[np.ndarray]:
    """What the host would put in each slot; all else is NaN, so that what nobody writes shows."""
    arrays = []
    for slot, described in zip(module.program.slots, module.described_slots(), strict=True):
        shape = described["shape"]
        if slot.role in ("scratch", "output"):
            array = np.full(shape, np.nan, DTYPES[described["dtype"]])
        elif slot.role == "table":
            array = values[slot.name][dims["pos"] :].reshape(-1)[: math.prod(shape)].reshape(shape)
        else:
            array = formats()[slot.format].pack(values[slot.name], layout(module.program, slot.name))
        assert array.size == math.prod(shape), slot
        arrays.append(array)
    return arrays


def execute(module: Module, dims: dict[str, Any], values: Values) -> Values:
    """Slots after the run. New rows of a cache are a part of the window that is attended over."""
    names = [slot.name for slot in module.program.slots]
    views = {names.index("kv"): (names.index("kv_window"), dims["pos"])} if {"kv", "kv_window"} <= {*names} else None
    slots, traffic = run(parse_mlir(module.text()), slot_arrays(module, dims, values), views=views)
    assert traffic.submissions == 1
    return {slot.name: array for slot, array in zip(module.program.slots, slots, strict=True)}


def check(grouping: str, name: str, config: Config, outputs: tuple[str, ...], bucket: int = 128, pos: int = 0) -> None:
    """`pos`: of the first row, in the smallest window that has it."""
    program = device_program(name, grouping, bucket, pos + bucket)
    dims = dimensions(config, program.bucket or 1, program.context or bucket, pos)
    values = inputs(program, config, dims)
    got = execute(build_module(program, config.dimensions()), dims, values)
    want = compose(program, dims, values)
    launches = sum(len(part.launches) for part in program.parts)
    for output in outputs:
        expected = want[output][pos:][:bucket] if output == "kv" else want[output]
        # Where two roundings fall apart, a number is off by at most a unit in the last place: 2^-8 in the root mean
        # square. Roundings of different launches are independent, so their errors add in squares.
        actual = got[output].astype(np.float64).reshape(-1)[: expected.size].reshape(expected.shape)
        error = np.linalg.norm(actual - expected.astype(np.float64)) / np.linalg.norm(expected.astype(np.float64))
        assert error < math.sqrt(launches) * 2.0**-8, f"{name}.{output}: relative error {error:.4f}"


PREFILL = ("q_roped", "kv")
DECODE = ("q_roped", "k_roped", "v")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("config", [TINY, ODD], ids=["tiny", "odd"])
@pytest.mark.parametrize(
    "name, outputs",
    [
        ("rms_gemms_rope", PREFILL),
        ("o_ffn", ("res1", "output")),
        ("rms_gemv_rope", DECODE),
        ("o_gemv_ffn", ("res1", "output")),
        ("lm_head_gemv", ("logits",)),
    ],
)
def test_separate_grouping(name: str, outputs: tuple[str, ...], config: Config) -> None:
    check("separate", name, config, outputs)


@pytest.mark.parametrize("pos", [0, 77])
def test_separate_attention(pos: int) -> None:
    check("separate", "flash_attn", TINY, ("attn_out",), pos=pos)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("config", [TINY, ODD], ids=["tiny", "odd"])
def test_a_prompt_goes_on_from_any_position(config: Config) -> None:
    check("fused", "prefill_attend", config, ("kv", "res1"), pos=101)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("config", [TINY, ODD, pytest.param(DEMO, marks=pytest.mark.slow)], ids=["tiny", "odd", "demo"])
@pytest.mark.parametrize(
    "name, outputs",
    [
        ("prefill_attend", ("kv", "res1")),
        ("prefill_up", ("swiglu",)),
        ("prefill_down", ("output",)),
        ("decode_layer", (*DECODE, "output")),
        ("decode_last", ("logits",)),
    ],
)
def test_fused_grouping(name: str, outputs: tuple[str, ...], config: Config) -> None:
    check("fused", name, config, outputs)


@pytest.mark.parametrize(
    "config, buckets", [(TINY, (64, 128)), pytest.param(DEMO, (128, 512), marks=pytest.mark.slow)], ids=["tiny", "demo"]
)
@pytest.mark.thorough
def test_a_prompt_gives_the_same_bytes_in_every_bucket(config: Config, buckets: tuple[int, int]) -> None:
    """The last prompt position (and all before) does not see the padding, whatever is in it."""
    prompt, results = 50, []
    for bucket in buckets:
        found: Values = {}
        for third in ("prefill_attend", "prefill_up", "prefill_down"):
            program = device_program(third, "fused", bucket)
            values = inputs(program, config, dimensions(config, 512, 512)) | found
            if third == "prefill_attend":
                values["x_in"] = values["x_in"][:bucket]
                values["x_in"][prompt:] = bfloat16(bucket)
                values["kv_window"] = values["kv_window"][:bucket]
            made = execute(build_module(program, config.dimensions()), dimensions(config, bucket, bucket), values)
            found |= {slot.name: made[slot.name] for slot in program.slots if slot.role == "output"}
        results.append((found["output"][:prompt].tobytes(), found["kv"][:prompt].tobytes()))
    assert results[0] == results[1]
