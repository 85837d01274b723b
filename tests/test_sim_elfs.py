"""Stitched modules, executed from their MLIR on the simulator, against the kernels' references composed by the ELF
descriptions. Nothing here knows how a module was planned or stitched: only its slots.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16

from stages.air_text import parse_mlir
from stages.elfs import Launch, all_elfs
from stages.kernels import add, flash_attention, gemm, gemv, rms_norm, rope, silu_and_mul
from stages.layouts_npu import pad_rows, to_blocks
from stages.npu_modules import Group, NpuModule, build_module, groups
from tests.sim_support import run

Values = dict[str, np.ndarray]

TINY = {"emb": 64, "ffn": 128, "heads": 4, "kv_heads": 2, "head_dim": 32, "vocab": 150, "eps": 1e-5}
DEMO = {"emb": 256, "ffn": 768, "heads": 4, "kv_heads": 2, "head_dim": 64, "vocab": 2000, "eps": 1e-5}
ODD = {"emb": 192, "ffn": 448, "heads": 3, "kv_heads": 1, "head_dim": 64, "vocab": 130, "eps": 1e-6}


def dimensions(shape: dict[str, float]) -> dict[str, Any]:
    heads = {"q_dim": shape["heads"] * shape["head_dim"], "kv_dim": shape["kv_heads"] * shape["head_dim"]}
    return {**shape, **heads, "layers": 1}


def group(grouping: str, name: str) -> Group:
    return next(g for g in groups(grouping) if g.name == name)


def inputs(module: Group, dims: dict[str, Any]) -> Values:
    """Values of everything the descriptions of a module take from outside, by slot name, in plain layout."""
    rng, values = np.random.default_rng(5), {}
    for part, renamed in module.parts:
        for slot in all_elfs()[part].slots:
            if slot.role not in ("input", "weight", "table"):
                continue
            shape = tuple(int(dims[d]) if isinstance(d, str) else d for d in slot.shape)
            scale = 1 / math.sqrt(shape[-1]) if len(shape) == 2 and slot.role == "weight" else 1.0
            value = rng.normal(size=shape) * scale
            if slot.role == "table":
                angles = np.outer(np.arange(shape[0]), 10000.0 ** -np.linspace(0, 1, shape[1] // 2, endpoint=False))
                value = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
            name = renamed.get(slot.name, slot.name)
            kind = np.float32 if slot.dtype == "f32" else bfloat16
            values.setdefault(slot.name if name == "kv" else name, value.astype(kind))
    return values


def compose(module: Group, dims: dict[str, Any], values: Values) -> Values:
    """Run the kernels' references in the order of the descriptions. K and V stay apart."""
    values = dict(values)
    for part, renamed in module.parts:
        for launch in all_elfs()[part].launches:
            apart = {name: new for name, new in renamed.items() if new != "kv"}
            args = {arg: apart.get(slot, slot) for arg, slot in launch.args.items()}
            if launch.kernel.name == "flash_attention":
                args |= {arg: source for arg, source in (("k", "k_roped"), ("v", "v")) if source in values}
            reference(launch, args, dims, values)
    return values


def reference(launch: Launch, args: dict[str, str], dims: dict[str, Any], values: Values) -> None:
    scalars = {k: dims[v] if isinstance(v, str) else v for k, v in launch.scalars.items()}
    given = {arg: values[slot] for arg, slot in args.items() if arg != "out"}
    match launch.kernel.name:
        case "add":
            out = add.reference(given["a"], given["b"])
        case "silu_and_mul":
            out = silu_and_mul.reference(given["gate"], given["up"])
        case "rms_norm":
            out = rms_norm.reference(given["x"], given["weight"], scalars["eps"])
        case "gemm":
            out = gemm.reference(given["x"], given["weight"])
        case "gemv":
            out = gemv.reference(given["weight"], given["x"])
        case "gemv_f32":
            out = gemv.reference(given["weight"], given["x"], np.float32)
        case "rope":
            rows = given["x"].reshape(-1, given["x"].shape[-1])
            out = rope.reference(rows, given["table"], scalars["pos"], scalars["head_dim"]).reshape(given["x"].shape)
        case "flash_attention":
            pos = scalars["pos"]
            out = flash_attention.reference(
                given["q"], given["k"], given["v"], pos, scalars["heads"], scalars["kv_heads"]
            )
        case other:
            raise AssertionError(other)
    values[args["out"]] = out


def slot_arrays(module: NpuModule, dims: dict[str, Any], values: Values) -> list[np.ndarray]:
    """What the host would put in each slot; all else is NaN, so that what nobody writes shows."""
    arrays = []
    for slot in module.slots:
        kind = np.float32 if slot.dtype == "f32" else bfloat16
        value = values.get(slot.name)
        if slot.role in ("scratch", "output"):
            array = np.full(slot.shape, np.nan, kind)
        elif slot.name == "kv":
            array = interleave(values["k"], values["v"], dims)
        elif slot.layout == "blocks":
            array = to_blocks(value)
        elif slot.role == "table":
            rows = value[int(dims["pos"]) :][: slot.shape[0] if len(slot.shape) == 2 else 1]
            array = rows.reshape(slot.shape)
        else:
            array = pad_rows(value) if slot.name == "w_vocab" else value
        assert array.size == math.prod(slot.shape), slot
        arrays.append(array)
    return arrays


def interleave(k: np.ndarray, v: np.ndarray, dims: dict[str, Any]) -> np.ndarray:
    split = [t.reshape(len(t), int(dims["kv_heads"]), -1) for t in (k, v)]
    return np.stack(split, axis=2).reshape(len(k), -1)


def execute(grouping: str, name: str, shape: dict[str, float], bucket: int = 128) -> tuple[Values, Values]:
    """(slots after the run, composed reference) for one module of a grouping."""
    which = group(grouping, name)
    dims = dimensions(shape) | {"seq": bucket if which.prefill else 1, "max_seq": bucket, "pos": 0}
    module = build_module(which, dims, bucket)
    values = inputs(which, dims)
    slots, traffic = run(parse_mlir(module.text()), slot_arrays(module, dims, values))
    assert traffic.submissions == 1
    return {s.name: array for s, array in zip(module.slots, slots, strict=True)}, compose(which, dims, values)


def check(grouping: str, name: str, shape: dict[str, float], outputs: tuple[str, ...], bucket: int = 128) -> None:
    got, want = execute(grouping, name, shape, bucket)
    launches = sum(len(all_elfs()[part].launches) for part, _ in group(grouping, name).parts)
    for output in outputs:
        expected = want[output] if output in want else interleave(want["k_roped"], want["v"], dimensions(shape))
        # Where two roundings fall apart, a number is off by at most a unit in the last place: 2^-8 in the root mean
        # square. Roundings of different launches are independent, so their errors add in squares.
        actual = got[output].astype(np.float64).reshape(-1)[: expected.size].reshape(expected.shape)
        error = np.linalg.norm(actual - expected.astype(np.float64)) / np.linalg.norm(expected.astype(np.float64))
        assert error < math.sqrt(launches) * 2.0**-8, f"{name}.{output}: relative error {error:.4f}"


PREFILL = ("q_roped", "kv")
DECODE = ("q_roped", "k_roped", "v")


@pytest.mark.parametrize("shape", [TINY, ODD], ids=["tiny", "odd"])
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
def test_spec_grouping(name: str, outputs: tuple[str, ...], shape: dict[str, float]) -> None:
    check("spec", name, shape, outputs)


def test_spec_attention() -> None:
    check("spec", "flash_attn", TINY, ("attn_out",))


@pytest.mark.parametrize("shape", [TINY, ODD, pytest.param(DEMO, marks=pytest.mark.slow)], ids=["tiny", "odd", "demo"])
@pytest.mark.parametrize(
    "name, outputs",
    [
        ("prefill_layer", ("kv", "output")),
        ("decode_layer", (*DECODE, "output")),
        ("decode_last", ("logits",)),
    ],
)
def test_fused_grouping(name: str, outputs: tuple[str, ...], shape: dict[str, float]) -> None:
    check("fused", name, shape, outputs)


@pytest.mark.parametrize("shape, buckets", [(TINY, (64, 128)), pytest.param(DEMO, (128, 512), marks=pytest.mark.slow)])
def test_a_prompt_gives_the_same_bytes_in_every_bucket(shape: dict[str, float], buckets: tuple[int, int]) -> None:
    """The last prompt position (and all before) does not see the padding, whatever is in it."""
    prompt, results = 50, []
    for bucket in buckets:
        which = group("fused", "prefill_layer")
        dims = dimensions(shape) | {"seq": bucket, "max_seq": bucket, "pos": 0}
        module = build_module(which, dims, bucket)
        values = inputs(which, dimensions(shape) | {"seq": 512, "max_seq": 512, "pos": 0})
        values = {name: v[:bucket] if name in ("x_in", "lut_q", "lut_k") else v for name, v in values.items()}
        values["x_in"][prompt:] = bfloat16(bucket)
        slots, _ = run(parse_mlir(module.text()), slot_arrays(module, dims, values))
        found = {s.name: array for s, array in zip(module.slots, slots, strict=True)}
        results.append((found["output"][:prompt].tobytes(), found["kv"][:prompt].tobytes()))
    assert results[0] == results[1]
