"""Checkpoints of every kind: what is read equals what the format's own library reads, element by element, what is
stored is kept bit for bit, and a damaged file is one line."""

from __future__ import annotations

import dataclasses
import json
import shutil
import struct
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16, float8_e4m3fn
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from llama_npu2.errors import UserError
from stages.model.artifact_weights import ArtifactWeights
from stages.model.checkpoint import Checkpoint, container
from stages.model.config import ConfigFields, inverse_frequencies
from stages.model.decoder import Rope
from stages.model.families import locations, parse_config, tensors
from stages.model.importers.directory import SINGLE, Tensors
from stages.model.importers.gguf_blocks import TYPES
from stages.model.importers.gguf_tokenizer import end_tokens, tokenizer_files
from stages.model.packing import conversions
from stages.model.plan import make_plan
from stages.model.policy import LayerSlot, Policy, held_policy
from stages.model.sources import resolve
from stages.proof.comparison.gguf_file import write_gguf
from stages.targets import targets
from stages.weights.formats import formats
from tests.conftest import CONFIG, ROOT, build, random_tensors, write_checkpoint
from tests.support.quantised_files import (
    CONFIG_OF_TESTS,
    MATRICES,
    SHAPES,
    gguf,
    metadata_of,
    write_file,
)

LINEAR = [name for name in MATRICES if "_proj" in name]


def check_stored(checkpoint: Checkpoint, name: str) -> None:
    """What is stored gives the values again, in every bit, and has the shape that packing counts on."""
    form, values = formats()[checkpoint.stored_format(name)], checkpoint.tensor(name)
    stored = checkpoint.stored(name)
    assert stored.shape == form.stored_shape(values.shape)
    again = form.dequantise(stored, values.shape[-1])
    np.testing.assert_array_equal(again.view(np.uint32), values.astype(np.float32).view(np.uint32))


# GGUF


@pytest.mark.parametrize("kind", [kind.name for kind in TYPES.values()])
def test_gguf_equals_its_library(kind: str, tmp_path: Path) -> None:
    expected = write_file(tmp_path / "m.gguf", dict.fromkeys(MATRICES, kind))
    checkpoint = Checkpoint.open(tmp_path / "m.gguf", ())
    for name, values in expected.items():
        np.testing.assert_array_equal(checkpoint.tensor(name).astype(np.float32), values)
        if checkpoint.stored_format(name) != "f16":
            check_stored(checkpoint, name)
    assert checkpoint.stored_format(LINEAR[0]) == next(t.format for t in TYPES.values() if t.name == kind)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_gguf_of_its_own_quantiser(kind: str, tmp_path: Path) -> None:
    """Real values, with the signed zeros and empty blocks that random bytes do not have."""
    values = np.random.default_rng(0).standard_normal((8, 256), np.float32)
    values[0], values[1, :40], values[2] = 0, -1, 1e-7
    raw = gguf.quantize(values, gguf.GGMLQuantizationType[kind])
    type_ = TYPES[gguf.GGMLQuantizationType[kind]]
    assert type_.stored
    stored = type_.stored(raw.reshape(8, -1, type_.bytes))
    again = formats()[type_.format].dequantise(stored, 256)
    np.testing.assert_array_equal(again, gguf.dequantize(raw, gguf.GGMLQuantizationType[kind]))
    if kind == "Q8_0":
        np.testing.assert_array_equal(formats()["int8"].quantise(values), stored)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": False, "head_dim": 32, "eos_token_id": [2, 7]},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ],
    ids=["default", "untied", "linear", "llama3"],
)
def test_gguf_round_trip(changes: dict, tmp_path: Path) -> None:
    """Our own writer's file is the checkpoint again: configuration, rows of Q and K, rotation."""
    config = write_checkpoint(tmp_path / "model", **changes)
    before = Checkpoint.open(tmp_path / "model")
    write_gguf(before, tmp_path / "model.gguf")
    after = Checkpoint.open(tmp_path / "model.gguf", ())
    for name in tensors(config):
        np.testing.assert_array_equal(after.tensor(name).astype(bfloat16), before.tensor(name))
    decoder = dataclasses.replace(after.config.decoder, layers=config.decoder.layers, eps=config.eps)
    assert dataclasses.replace(after.config, decoder=decoder, eos=config.eos) == config
    unscaled = [dataclasses.replace(c.decoder.attention, rope=Rope()) for c in (after.config, config)]
    assert unscaled[0] == unscaled[1] and after.config.layers == config.layers
    assert after.config.eps == pytest.approx(config.eps, rel=1e-6)
    frequencies = inverse_frequencies(after.config.decoder.attention.rope, config.head_dim)
    np.testing.assert_allclose(
        frequencies, inverse_frequencies(config.decoder.attention.rope, config.head_dim), rtol=1e-6
    )


def test_gguf_tensors_of_two_types_and_f16(tmp_path: Path) -> None:
    types = dict.fromkeys(MATRICES, "Q4_K") | {MATRICES[0]: "Q6_K", LINEAR[0]: "F16"}
    write_file(tmp_path / "m.gguf", types)
    checkpoint = Checkpoint.open(tmp_path / "m.gguf")
    found = [checkpoint.stored_format(name) for name in (MATRICES[0], LINEAR[0], LINEAR[1], "model.norm.weight")]
    assert found == ["int8_f32_16", "f16", "int4_f32", "f32"]
    assert checkpoint.tensor(LINEAR[0]).dtype == np.float16


@pytest.mark.thorough
def test_artifacts_hold_what_the_checkpoint_holds(tmp_path: Path, artifacts: Path) -> None:
    types = dict.fromkeys(MATRICES, "Q4_K") | {MATRICES[0]: "Q6_K", LINEAR[-1]: "Q5_K"}
    expected = write_file(tmp_path / "held_exactly.gguf", types)
    build(tmp_path / "held_exactly.gguf", artifacts)
    weights = ArtifactWeights(artifacts / "held_exactly" / "cpu")
    found = {name: weights.manifest.buffers[name]["format"] for name in MATRICES}
    assert found == dict.fromkeys(MATRICES, "int4_f32") | {MATRICES[0]: "int8_f32_16", LINEAR[-1]: "int8_f32"}
    for name in MATRICES:
        np.testing.assert_array_equal(weights.values(name), expected[name])


# Kernels of Q8_0 are those of int8, which other tests use as well.
@pytest.mark.parametrize(
    ("most", "some", "formats_held"),
    [
        ("Q8_0", "BF16", ("int8", "bf16")),
        pytest.param("Q4_K", "Q6_K", ("int4_f32", "int8_f32_16"), marks=pytest.mark.thorough),
    ],
)
def test_layers_and_vocabulary_of_two_formats_are_kept(
    most: str, some: str, formats_held: tuple[str, str], tmp_path: Path, artifacts: Path
) -> None:
    """As in Q4_K_M: the value and down projections of some layers, and the LM head but not the embedding."""
    usual, other = formats_held
    wider = ["lm_head.weight", "model.layers.0.mlp.down_proj.weight", "model.layers.2.self_attn.v_proj.weight"]
    changes = {"num_hidden_layers": 3, "tie_word_embeddings": False}
    shapes = tensors(parse_config(CONFIG_OF_TESTS | changes, "test"))
    matrices = [name for name, shape in shapes.items() if len(shape) == 2]
    types = dict.fromkeys(matrices, most) | dict.fromkeys(wider, some)
    file = tmp_path / f"mixed_{most}.gguf"
    expected = write_file(file, types, **changes)
    policy = held_policy(Checkpoint.open(file), targets()["cpu"].runs)
    in_layers = dict.fromkeys((LayerSlot("w_down", 0), LayerSlot("wv", 2)), other)
    assert policy == Policy(usual, {"vocab": other, "w_embed": usual}, in_layers=in_layers)
    weights = ArtifactWeights(build(file, artifacts))
    for name in matrices:
        assert weights.manifest.buffers[name]["format"] == (other if name in wider else usual)
        np.testing.assert_array_equal(weights.values(name), expected[name])


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf")])
def test_gguf_rotation_is_checked(factor: float, tmp_path: Path) -> None:
    scaling = {"rope_type": "linear", "factor": 1.5}
    write_checkpoint(tmp_path / "model", rope_scaling=scaling)
    write_gguf(Checkpoint.open(tmp_path / "model"), tmp_path / "m.gguf")
    data = (tmp_path / "m.gguf").read_bytes()
    factors = np.full(CONFIG["head_dim"] // 2, 1.5, np.float32)
    assert data.count(factors.tobytes()) == 1
    damaged = factors.copy()
    damaged[3] = factor
    (tmp_path / "m.gguf").write_bytes(data.replace(factors.tobytes(), damaged.tobytes()))
    assert "rope_freqs.weight must be F32 and hold positive numbers" in refused(tmp_path / "m.gguf")


def test_gguf_is_a_source(tmp_path: Path) -> None:
    write_file(tmp_path / "Some model Q8_0.gguf", {})
    source = resolve(str(tmp_path / "Some model Q8_0.gguf"), tmp_path / "artifacts")
    assert (source.name, source.fetch()) == ("Some-model-Q8_0", tmp_path / "Some model Q8_0.gguf")
    assert source.files() == [source.fetch()]


# Tensors in parts


def test_gguf_in_parts(tmp_path: Path) -> None:
    """Any part names all; they are read as the whole file is. Names and numbers that do not agree are refused."""
    types = dict.fromkeys(MATRICES, "Q8_0")
    expected = write_file(tmp_path / "Some.gguf", types, split=3)
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == [f"Some-0000{i}-of-00004.gguf" for i in (1, 2, 3, 4)]
    source = resolve(str(files[2]), tmp_path / "artifacts")
    assert (source.name, source.fetch(), source.files()) == ("Some", files[0], files)
    checkpoint = Checkpoint.open(files[1], ())
    assert list(checkpoint.files) == files
    for name, values in expected.items():
        np.testing.assert_array_equal(checkpoint.tensor(name).astype(np.float32), values)
    contents = [file.read_bytes() for file in files]
    up = next(number for number, content in enumerate(contents) if b"ffn_up" in content)
    for damage, reason in (
        ({1: contents[2]}, "split.no = 2 and split.count = 4 in it, its name means 1 and 4"),
        ({3: None}, "Some-00004-of-00004.gguf is missing: Some-00001-of-00004.gguf is one of 4 parts"),
        ({3: contents[3][: len(contents[3]) // 2]}, "is not all in the file"),
        ({up: contents[up].replace(b"ffn_up", b"attn_k")}, "tensor blk.0.attn_k.weight is in another part, too"),
    ):
        for number, content in damage.items():
            files[number].unlink() if content is None else files[number].write_bytes(content)
        assert reason in refused(files[0])
        for file, content in zip(files, contents, strict=True):
            file.write_bytes(content)
    alone = tmp_path / "alone.gguf"
    alone.write_bytes(contents[0])
    assert "split.no = 0 and split.count = 4 in it, its name means 0 and 1" in refused(alone)


def pack_words(numbers: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """Numbers `[rows, n]` into i32 along the rows, as the formats' descriptions have it; `order`: which number of a
    word is in its i-th place."""
    per_word = 32 // bits
    words = np.zeros((numbers.shape[0], -(-numbers.shape[1] // per_word)), np.uint64)
    for place in range(per_word):
        some = numbers[:, (order[place] if order else place) :: per_word].astype(np.uint64)
        words[:, : some.shape[1]] |= some << np.uint64(bits * place)
    return words.astype(np.uint32).view(np.int32)


Parts = dict[str, np.ndarray]


def write_quantised(
    directory: Path,
    settings: dict[str, Any],
    parts: Callable[[np.random.Generator, tuple[int, int]], tuple[Parts, Any]],
    **shapes: int,
) -> dict[str, np.ndarray]:
    """A checkpoint whose projections are made by `parts`: (generator, shape) -> parts and values."""
    config = write_checkpoint(directory, **SHAPES | shapes, quantization_config=settings)
    rng = np.random.default_rng(3)
    written, expected = {}, {}
    for name, values in random_tensors(config).items():
        if name in LINEAR:
            made, expected[name] = parts(rng, values.shape)
            written |= {name.removesuffix("weight") + part: np.ascontiguousarray(array) for part, array in made.items()}
        else:
            written[name] = values.astype(bfloat16)
    save_file(written, directory / "model.safetensors")
    return expected


def random_scales(rng: np.random.Generator, shape: tuple[int, int], dtype: Any) -> np.ndarray:
    return (rng.random(shape, np.float32) / 16 + 1e-3).astype(dtype)


def gptq_parts(
    bits: int = 4, size: int = 64, dtype: Any = np.float16, v2: bool = False, sym: bool = False, order: str = "none"
) -> Callable[[np.random.Generator, tuple[int, int]], tuple[Parts, np.ndarray]]:
    def make(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[Parts, np.ndarray]:
        rows, cols = shape
        width = cols if size == -1 else size
        groups = -(-cols // width)
        g_idx = np.arange(cols) // width
        if order == "act":
            g_idx = rng.permutation(g_idx)
        q = rng.integers(0, 1 << bits, (rows, cols))
        z = np.full((rows, groups), 1 << bits - 1) if sym else rng.integers(1, 1 << bits, (rows, groups))
        s = random_scales(rng, (rows, groups), dtype)
        parts = {
            "qweight": pack_words(q, bits).T,
            "qzeros": pack_words((z if v2 else z - 1).T, bits),
            "scales": s.T,
            "bias": np.zeros(rows, np.float16),
        }
        if order != "none":
            parts["g_idx"] = g_idx.astype(np.int32)
        values = s.astype(np.float32)[:, g_idx] * (q - z[:, g_idx]).astype(np.float32)
        return parts, values

    return make


def gptq_settings(**changes: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": False, "desc_act": False} | changes


GPTQ = {
    "plain": ({}, {}, "int4_f32"),
    "g_idx": ({}, {"order": "equal"}, "int4_f32"),
    "act order": ({"desc_act": True}, {"order": "act"}, "f32"),
    "v2": ({"checkpoint_format": "gptq_v2"}, {"v2": True}, "int4_f32"),
    "symmetric": ({"sym": True}, {"sym": True}, "int4_f32"),
    "symmetric, says v1, is v2": ({"sym": True}, {"sym": True, "v2": True}, "int4_f32"),
    "8 bits": ({"bits": 8}, {"bits": 8}, "int8_f32"),
    "rows": ({"group_size": -1}, {"size": -1}, "int4_f32"),
    "short last group": ({"group_size": 96}, {"size": 96}, "int4_f32"),
    "small groups": ({"group_size": 16}, {"size": 16}, "f32"),
    "f32 scales": ({}, {"dtype": np.float32}, "int8_f32"),
    "f32 scales, 8 bits": ({"bits": 8}, {"bits": 8, "dtype": np.float32}, "f32"),
    "bf16 scales": ({}, {"dtype": bfloat16}, "int4_f32"),
}


@pytest.mark.parametrize("case", GPTQ)
def test_gptq(case: str, tmp_path: Path) -> None:
    settings, options, form = GPTQ[case]
    expected = write_quantised(tmp_path, gptq_settings(**settings), gptq_parts(**options))
    check_all(tmp_path, expected, form)


def check_all(directory: Path, expected: dict[str, np.ndarray], form: str) -> None:
    checkpoint = Checkpoint.open(directory, ())
    assert expected
    for name, values in expected.items():
        np.testing.assert_array_equal(checkpoint.tensor(name), values)
        assert checkpoint.tensor(name).dtype == np.float32
        assert checkpoint.stored_format(name) == form
        check_stored(checkpoint, name)
    assert checkpoint.stored_format("model.norm.weight") == "bf16"


def test_gptq_zeros_that_borrow(tmp_path: Path) -> None:
    """Stored with one subtraction from whole words, a zero of 0 takes from its neighbours; GPTQModel adds it back."""

    def parts(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[Parts, np.ndarray]:
        made, _ = gptq_parts(v2=True)(rng, shape)
        q, z = rng.integers(0, 16, shape), rng.integers(0, 16, (shape[0], shape[1] // 64))
        zeros = pack_words(z.T, 4).view(np.uint32) - np.uint32(0x11111111)
        made |= {"qweight": pack_words(q, 4).T, "qzeros": zeros.view(np.int32)}
        return made, made["scales"].T.astype(np.float32).repeat(64, 1) * (q - z.repeat(64, 1)).astype(np.float32)

    check_all(tmp_path, write_quantised(tmp_path, gptq_settings(), parts), "int4_f32")


def test_gptq_by_autogptq(tmp_path: Path) -> None:
    """Its settings are in a file of their own, and its weights in one whose name says bits and group size."""
    expected = write_quantised(tmp_path, gptq_settings(), gptq_parts())
    config = json.loads((tmp_path / "config.json").read_text())
    settings = config.pop("quantization_config")
    del settings["quant_method"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "quantize_config.json").write_text(json.dumps(settings))
    (tmp_path / "model.safetensors").rename(tmp_path / "gptq_model-4bit-64g.safetensors")
    check_all(tmp_path, expected, "int4_f32")


def awq_parts(size: int = 64) -> Callable[[np.random.Generator, tuple[int, int]], tuple[Parts, np.ndarray]]:
    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def make(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[Parts, np.ndarray]:
        rows, cols = shape
        q, z = rng.integers(0, 16, shape), rng.integers(0, 16, (rows, -(-cols // size)))
        s = random_scales(rng, z.shape, np.float16)
        parts = {"qweight": pack_words(q.T, 4, order), "qzeros": pack_words(z.T, 4, order), "scales": s.T}
        groups = np.arange(cols) // size
        return parts, s.astype(np.float32)[:, groups] * (q - z[:, groups]).astype(np.float32)

    return make


AWQ_SETTINGS = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True}


OF_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"]},
    "gemma3_text": {"architectures": ["Gemma3ForCausalLM"], "hidden_activation": "gelu_pytorch_tanh"},
    "phi3": {"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.75},
}
"""Biases, norms of heads, others around halves, fused tensors whose rows are reordered."""


@pytest.mark.parametrize("family", OF_FAMILIES)
@pytest.mark.parametrize("method", ["gptq", "awq", "compressed", "w8a8", "fp8"])
def test_methods_of_families(method: str, family: str, tmp_path: Path) -> None:
    """Each weight is those rows of the tensor that it lies in which the family says; what is not quantised is there."""
    settings, parts, form = {
        "gptq": (gptq_settings(sym=True), gptq_parts(sym=True), "int4_f32"),
        "awq": (AWQ_SETTINGS, awq_parts(), "int4_f32"),
        "compressed": (compressed_settings(), compressed_parts("W4A16"), "int4_f32"),
        "w8a8": (
            compressed_settings("int-quantized", **COMPRESSED["W8A8 rows"][0]),
            compressed_parts("W8A8 rows"),
            "w8a8",
        ),
        "fp8": (fp8_settings(), fp8_parts((128, 128), scale="weight_scale_inv"), "f32"),
    }[method]
    raw = CONFIG_OF_TESTS | {"model_type": family, "quantization_config": settings} | OF_FAMILIES[family]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config, rng = parse_config(raw, "test"), np.random.default_rng(0)
    written, values = {}, {}
    for name, pieces in locations(config).items():
        if len(pieces[0][1].shape) == 2 and "_proj" in name:
            made, values[name] = parts(rng, pieces[0][1].shape)
            written |= {name.removesuffix("weight") + part: np.ascontiguousarray(array) for part, array in made.items()}
        else:
            written[name] = values[name] = rng.standard_normal(pieces[0][1].shape, np.float32).astype(bfloat16)
    save_file(written, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path, ())
    for name, pieces in locations(config).items():
        for weight, at in pieces:
            np.testing.assert_array_equal(checkpoint.tensor(weight.name), values[name][at.rows])
            assert checkpoint.stored_format(weight.name) == (
                form if "_proj" in name and values[name].ndim == 2 else "bf16"
            )
            if form != "f32":
                check_stored(checkpoint, weight.name)


@pytest.mark.parametrize("size", [32, 64, 128])
def test_awq(size: int, tmp_path: Path) -> None:
    expected = write_quantised(tmp_path, AWQ_SETTINGS | {"group_size": size}, awq_parts(size))
    check_all(tmp_path, expected, "int4_f32")


def fp8_parts(
    block: tuple[int, int], dtype: Any = np.float32, scale: str = "weight_scale", powers: bool = False
) -> Callable[[np.random.Generator, tuple[int, int]], tuple[Parts, np.ndarray]]:
    """`block`: rows and columns that share a scale, 0 for all of them."""

    def make(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[Parts, np.ndarray]:
        height, width = (size or length for size, length in zip(block, shape, strict=True))
        wide = rng.standard_normal(shape, np.float32) * 2.0 ** rng.integers(-9, 8, shape)
        q = np.clip(wide, -448, 448).astype(float8_e4m3fn)
        grid = (-(-shape[0] // height), -(-shape[1] // width))
        s = (2.0 ** rng.integers(-20, 3, grid)).astype(dtype) if powers else random_scales(rng, grid, dtype)
        wide = s.astype(np.float32)[np.arange(shape[0]) // height][:, np.arange(shape[1]) // width]
        return {"weight": q, scale: s.reshape(-1) if s.size == 1 else s}, q.astype(np.float32) * wide

    return make


def fp8_settings(**changes: Any) -> dict[str, Any]:
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    return settings | {"modules_to_not_convert": ["lm_head"]} | changes


FP8 = {
    "blocks": ({}, (128, 128), "f32"),
    "odd blocks": ({"weight_block_size": [48, 100]}, (48, 100), "f32"),
    "rows": ({"weight_block_size": None}, (1, 0), "f32"),
    "tensor": ({"weight_block_size": None, "activation_scheme": "static"}, (0, 0), "f32"),
    "powers of two": ({}, (128, 128), "bf16"),
}


@pytest.mark.parametrize("case", FP8)
def test_fp8(case: str, tmp_path: Path) -> None:
    """Values are as transformers dequantises them. Where all are bf16 that is what they are held as."""
    settings, block, form = FP8[case]
    parts = fp8_parts(block, bfloat16, "weight_scale_inv", powers=form == "bf16")
    expected = write_quantised(tmp_path, fp8_settings(**settings), parts)
    checkpoint = Checkpoint.open(tmp_path, ())
    for name, values in expected.items():
        np.testing.assert_array_equal(checkpoint.tensor(name).astype(np.float32), values)
        assert checkpoint.stored_format(name) == form
        assert checkpoint.tensor(name).dtype == form.replace("f32", "float32").replace("bf16", "bfloat16")
    plan = make_plan(checkpoint.config, targets()["cpu"].grouping(targets()["cpu"].default_grouping), "cpu")
    lines = [f"{len(expected)} matrices that the checkpoint holds as FP8 are rounded to bf16"]
    assert conversions(checkpoint, plan.buffers) == (lines if form == "f32" else [])


def compressed_settings(kind: str = "pack-quantized", **weights: Any) -> dict[str, Any]:
    args = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 64} | weights
    token = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    activations = token if kind == "int-quantized" and args["symmetric"] else None
    groups = {"group_0": {"targets": ["Linear"], "weights": args, "input_activations": activations}}
    return {"quant_method": "compressed-tensors", "format": kind, "ignore": ["lm_head"], "config_groups": groups}


W8A8 = {"num_bits": 8, "strategy": "channel", "group_size": None}
COMPRESSED = {
    "W4A16": ({}, bfloat16, "int4_f32"),
    "W4A16 f16": ({"group_size": 128}, np.float16, "int4_f32"),
    "W4A16 f32": ({}, np.float32, "int8_f32"),
    "W4A16 rows": ({"strategy": "channel", "group_size": None}, bfloat16, "int4_f32"),
    "W4A16 zeros": ({"symmetric": False}, bfloat16, "int4_f32"),
    "W4A16 f32 zeros": ({"symmetric": False}, np.float32, "int8_f32"),
    "W8A16": ({"num_bits": 8, "group_size": 32}, bfloat16, "int8_f32"),
    "W8A16 zeros": ({"num_bits": 8, "symmetric": False}, np.float16, "int8_f32"),
    "W8A16 f32 zeros": ({"num_bits": 8, "symmetric": False}, np.float32, "f32"),
    "W8A8 rows": (W8A8, bfloat16, "w8a8"),
    "W8A8 rows f32": (W8A8, np.float32, "w8a8"),
    "W8A8 tensor": ({"num_bits": 8, "strategy": "tensor", "group_size": None}, np.float32, "w8a8"),
}
_FLOAT = {"num_bits": 8, "type": "float", "group_size": None}
COMPRESSED_FP8 = {
    "FP8 rows": (_FLOAT | {"strategy": "channel"}, bfloat16, "f32"),
    "FP8 tensor": (_FLOAT | {"strategy": "tensor"}, np.float32, "f32"),
    "FP8 blocks": (_FLOAT | {"strategy": "block", "block_structure": [128, 128]}, np.float32, "f32"),
}
COMPRESSED |= COMPRESSED_FP8


def compressed_parts(case: str) -> Callable[[np.random.Generator, tuple[int, int]], tuple[Parts, np.ndarray]]:
    weights, dtype, _ = COMPRESSED[case]
    if case in COMPRESSED_FP8:
        return fp8_parts({"channel": (1, 0), "tensor": (0, 0), "block": (128, 128)}[weights["strategy"]], dtype)
    args = compressed_settings(**weights)["config_groups"]["group_0"]["weights"]
    bits, half, packed = args["num_bits"], 1 << args["num_bits"] - 1, "W8A8" not in case

    def make(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[Parts, np.ndarray]:
        rows, cols = shape
        width = args["group_size"] or cols
        q = rng.integers(-half, half, shape)
        s = random_scales(rng, (1, 1) if args["strategy"] == "tensor" else (rows, -(-cols // width)), dtype)
        z = np.zeros(s.shape, int) if args["symmetric"] else rng.integers(-half, half, s.shape)
        parts = {"weight_scale": s.reshape(-1) if s.size == 1 else s}
        if packed:
            parts |= {"weight_packed": pack_words(q + half, bits), "weight_shape": np.array(shape, np.int64)}
        else:
            parts["weight"] = q.astype(np.int8)
        if not args["symmetric"]:
            parts["weight_zero_point"] = pack_words((z + half).T, bits).T
        groups = np.arange(cols) // width
        return parts, s.astype(np.float32)[:, groups] * (q - z[:, groups]).astype(np.float32)

    return make


def write_compressed(directory: Path, case: str, **shapes: int) -> dict[str, np.ndarray]:
    weights, *_ = COMPRESSED[case]
    kind = "int-quantized" if "W8A8" in case else "float-quantized" if "FP8" in case else "pack-quantized"
    return write_quantised(directory, compressed_settings(kind, **weights), compressed_parts(case), **shapes)


@pytest.mark.parametrize("case", COMPRESSED)
def test_compressed_tensors(case: str, tmp_path: Path) -> None:
    check_all(tmp_path, write_compressed(tmp_path, case), COMPRESSED[case][2])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", COMPRESSED)
def test_compressed_tensors_equals_its_library(case: str, tmp_path: Path) -> None:
    """Where the scales are narrow, the library rounds to their type; so does the comparison."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("compressed_tensors", reason="not installed: pip install -e '.[verify]'")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from safetensors.torch import load_file as load_torch

    write_compressed(tmp_path, case)
    settings = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    scheme = QuantizationScheme(**settings["config_groups"]["group_0"])
    library = BaseCompressor.get_value_from_registry(settings["format"])
    whole, checkpoint = load_torch(tmp_path / "model.safetensors"), Checkpoint.open(tmp_path)
    for name in LINEAR:
        stem = name.removesuffix("weight")
        parts = {part.removeprefix(stem): value for part, value in whole.items() if part.startswith(stem)}
        theirs = library.decompress(parts, scheme)["weight"]
        ours = torch.from_numpy(checkpoint.tensor(name)).to(theirs.dtype)
        assert torch.equal(ours, theirs)


def test_widths_that_are_no_multiples(tmp_path: Path) -> None:
    """Of words, of groups, of ours or of theirs."""
    odd = {"intermediate_size": 101}
    expected = write_quantised(tmp_path / "gptq", gptq_settings(sym=True), gptq_parts(sym=True), **odd)
    check_all(tmp_path / "gptq", expected, "int4_f32")
    check_all(tmp_path / "awq", write_quantised(tmp_path / "awq", AWQ_SETTINGS, awq_parts(), **odd), "int4_f32")
    for case in ("W4A16 zeros", "W8A16", "W8A8 rows"):
        check_all(tmp_path / case, write_compressed(tmp_path / case, case, **odd), COMPRESSED[case][2])


def test_compressed_tensors_groups_by_name(tmp_path: Path) -> None:
    """The closest target counts: a name before a pattern before a class."""
    write_compressed(tmp_path, "W4A16")
    config = json.loads((tmp_path / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"]
    wrong = groups["group_0"]["weights"] | {"num_bits": 8}
    groups["group_0"] = {"targets": ["re:.*proj$"], "weights": groups["group_0"]["weights"]}
    groups["group_1"] = {"targets": ["Linear"], "weights": wrong}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert Checkpoint.open(tmp_path, ()).stored_format(LINEAR[0]) == "int4_f32"
    groups["group_1"]["targets"] = [LINEAR[1].removesuffix(".weight")]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=f"{LINEAR[1].removesuffix('weight')}.*weight_packed"):
        Checkpoint.open(tmp_path)


# Tokenizers

TEXTS = (
    "The capital of France is Paris.",
    "  two  spaces\t and\n\nlines \r\n",
    "I'll say: it's 1234567 o'clock, 3.14!",
    "naïve émigré, 日本語, 🙂",
    "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>",
    "",
)


def imported(**metadata: Any) -> tuple[Tokenizer, dict[str, Any]]:
    """Tokenizer and configuration by `tokenizer.ggml.*`."""
    fields = {f"tokenizer.ggml.{name}": value for name, value in metadata.items()}
    files = tokenizer_files(ConfigFields(fields, "test"))
    return Tokenizer.from_str(files["tokenizer.json"].decode()), json.loads(files["tokenizer_config.json"])


def test_llama3_tokenizer() -> None:
    ours = Tokenizer.from_file(str(ROOT / "models/demo/tokenizer.json"))
    ids = {name: ours.token_to_id(f"<|{token}|>") for name, token in (("bos", "begin_of_text"), ("eos", "eot_id"))}
    special = {f"{name}_token_id": i for name, i in ids.items()}
    again, config = imported(pre="llama-bpe", **metadata_of(ours), **special)
    assert (config["bos_token"], config["eos_token"]) == ("<|begin_of_text|>", "<|eot_id|>")
    for text in TEXTS:
        for add in (True, False):
            found = again.encode(text, add_special_tokens=add).ids
            assert found == ours.encode(text, add_special_tokens=add).ids
            assert again.decode(found) == ours.decode(found)


def test_whole_words() -> None:
    """In Llama 3 a word that is a token is one, whatever the merges."""
    tokens = ["a", "b", "c", "bc", "abc"]
    metadata = {"model": "gpt2", "tokens": tokens, "token_type": [1] * 5, "merges": ["b c"]}
    assert imported(pre="llama-bpe", **metadata)[0].encode("abc").tokens == ["abc"]
    assert imported(pre="smollm", **metadata)[0].encode("abc").tokens == ["a", "bc"]


def test_smollm_tokenizer() -> None:
    demo = json.loads((ROOT / "models/demo/tokenizer.json").read_text())["model"]
    theirs = Tokenizer(models.BPE(vocab=demo["vocab"], merges=[tuple(merge) for merge in demo["merges"]]))
    digits = pre_tokenizers.Digits(individual_digits=True)
    theirs.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    theirs.decoder = decoders.ByteLevel()
    again, _ = imported(pre="smollm", **metadata_of(theirs))
    for text in TEXTS:
        assert again.encode(text).ids == theirs.encode(text).ids


def test_sentencepiece_tokenizer() -> None:
    """Against SentencePiece's algorithm as it is defined: of neighbours whose union is a token, the best scored, the
    first of equals, become one."""
    words = ["▁the", "he", "▁t", "th", "in", "▁in", "ing", "▁thing", "er", "re", "▁a", "nt", "▁an", "an"]
    letters = [*"▁abcdefghijklmnopqrstuvwxyz"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *words, *letters]
    kinds = [2, 3, 3, *[6] * 256, *[1] * (len(words) + len(letters))]
    scores = [0.0] * 259 + [-float(i) for i in range(len(words) + len(letters))]
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    tokenizer, config = imported(model="llama", tokens=tokens, token_type=kinds, scores=scores, **ids)
    assert config["unk_token"] == "<unk>"

    def reference(text: str) -> list[str]:
        pieces = [*("▁" + text.replace(" ", "▁"))]
        while True:
            unions = [a + b for a, b in pairwise(pieces)]
            best = max((scores[tokens.index(u)] for u in unions if u in tokens), default=None)
            if best is None:
                return pieces
            at = next(i for i, u in enumerate(unions) if u in tokens and scores[tokens.index(u)] == best)
            pieces[at : at + 2] = [unions[at]]

    rng = np.random.default_rng(0)
    for _ in range(200):
        text = "".join(rng.choice([*"theinra "], 24)).strip() or "a"
        assert tokenizer.encode(text).tokens == ["<s>", *reference(text)]
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("é").tokens == ["<s>", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.encode("a</s>b").tokens == ["<s>", "▁a", "</s>", "▁", "b"]


def test_ends_and_chat_template() -> None:
    """Tokens that end a text by their name count too; the template reaches the runtime's file."""
    meta = {"tokens": ["a", "aa", "<|eot_id|>", "<|im_end|>"], "token_type": [1, 1, 3, 1], "eos_token_id": 0}
    meta |= {"model": "gpt2", "merges": ["a a"]}
    fields = {f"tokenizer.ggml.{name}": value for name, value in meta.items()} | {"tokenizer.chat_template": "{{ x }}"}
    assert end_tokens(ConfigFields(fields, "test"), 4) == [0, 2]
    for others, ends in (([], [0]), (["<|return|>"], [0, 1]), (["<|return|>", "<|call|>"], [1, 2])):
        tokens = ["<|end|>", *others]
        harmony = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [3] * len(tokens)}
        assert end_tokens(ConfigFields(harmony, "test"), 3) == ends
    files = tokenizer_files(ConfigFields(fields, "test"))
    assert json.loads(files["tokenizer_config.json"])["chat_template"] == "{{ x }}"


# Damaged files

Damage = Callable[[Path], Any]
BIG = 1 << 60


def read_everything(path: Path) -> None:
    checkpoint = Checkpoint.open(path, ())
    for name in checkpoint.held:
        checkpoint.tensor(name)
    container(path).tokenizer()


def refused(path: Path) -> str:
    """The one line that a checkpoint is refused with, for which little memory is enough."""
    tracemalloc.start()
    try:
        with pytest.raises(UserError) as caught:
            read_everything(path)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
    line = str(caught.value)
    assert "\n" not in line
    assert len(line) < 600
    return line


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    write_file(path, dict.fromkeys(MATRICES, "Q4_K"))
    read_everything(path)
    return path.read_bytes()


def number(size: int, value: float) -> bytes:
    return struct.pack({1: "<B", 4: "<I", 8: "<Q"}[size] if isinstance(value, int) else "<f", value)


def after(text: str, at: int, new: bytes) -> Callable[[bytes], bytes]:
    """`new` instead of what is `at` bytes behind the first place of `text`."""

    def change(data: bytes) -> bytes:
        place = data.index(text.encode()) + len(text) + at
        return data[:place] + new + data[place + len(new) :]

    return change


def metadata(key: str, value: float) -> Callable[[bytes], bytes]:
    return after(key, 4, number(4, value))


def renamed(old: str, new: str) -> Callable[[bytes], bytes]:
    assert len(old) == len(new)
    return lambda data: data.replace(old.encode(), new.encode(), 1)


def in_data(value: float) -> Callable[[bytes], bytes]:
    """As the first factor of a tensor."""

    def change(data: bytes) -> bytes:
        at = data_of("blk.0.ffn_down.weight", data)
        return data[:at] + np.float16(value).tobytes() + data[at + 2 :]

    return change


def data_of(name: str, data: bytes) -> int:
    """Where a matrix begins: its offset is behind its dimensions and type, the header ends with the norm's."""
    at = data.index(name.encode()) + len(name) + 4 + 2 * 8 + 4
    end = data.index(b"output_norm.weight") + len("output_norm.weight") + 4 + 8 + 4 + 8
    return -(-end // 32) * 32 + struct.unpack_from("<Q", data, at)[0]


GGUF_DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "magic": (lambda d: b"GGML" + d[4:], "no GGUF file"),
    "empty": (lambda d: b"", "empty"),
    "version": (lambda d: d[:4] + number(4, 9) + d[8:], "version 9"),
    "tensor count": (lambda d: d[:8] + number(8, BIG) + d[16:], f"{BIG} tensors do not fit"),
    "value count": (lambda d: d[:16] + number(8, BIG) + d[24:], f"{BIG} values do not fit"),
    "few values": (lambda d: d[:16] + number(8, 3) + d[24:], "is damaged"),
    "length of a key": (lambda d: d[:24] + number(8, BIG) + d[32:], "ends in its header"),
    "key not UTF-8": (lambda d: d[:32] + b"\xff\xff" + d[34:], "not UTF-8"),
    "kind of a value": (after("llama.block_count", 0, number(4, 99)), "llama.block_count has type 99"),
    "kind of an array": (after("ggml.tokens", 4, number(4, 77)), "array of type 77"),
    "length of an array": (after("ggml.tokens", 8, number(8, BIG)), "strings of tokenizer.ggml.tokens do not fit"),
    "array of numbers": (after("ggml.token_type", 8, number(8, BIG)), "values of tokenizer.ggml.token_type do not fit"),
    "key twice": (renamed("llama.context_length", "general.architecture"), "general.architecture is there twice"),
    "architecture": (renamed("\x05\0\0\0\0\0\0\0llama", "\x05\0\0\0\0\0\0\0rwkv7"), '"rwkv7": only ernie4_5'),
    "no width": (renamed("llama.embedding_length", "llama.embedding_lengtg"), "llama.embedding_length = null"),
    "no heads": (metadata("llama.attention.head_count", 0), "llama.attention.head_count = 0"),
    "heads": (metadata("llama.attention.head_count_kv", 3), "num_key_value_heads = 3"),
    "layers": (metadata("llama.block_count", (1 << 31) - 1), "num_hidden_layers = 2147483647"),
    "too many layers": (metadata("llama.block_count", 1 << 31), "llama.block_count = 2147483648: must be a positive"),
    "more layers": (metadata("llama.block_count", 2), "tensors are missing, first blk.1"),
    "epsilon": (metadata("llama.attention.layer_norm_rms_epsilon", float("nan")), "layer_norm_rms_epsilon = NaN"),
    "context": (metadata("llama.context_length", 0), "llama.context_length = 0"),
    "rotation": (metadata("llama.rope.dimension_count", 32), "partial_rotary_factor = 0.5: only 1"),
    "head size": (metadata("llama.attention.key_length", 63), "63"),
    "end token": (metadata("tokenizer.ggml.eos_token_id", 4000), "tokenizer.ggml.eos_token_id = 4000"),
    "dimensions": (after("token_embd.weight", 0, number(4, 9)), "token_embd.weight has 9 dimensions"),
    "size": (after("token_embd.weight", 4, number(8, BIG)), "token_embd.weight has shape"),
    "size 0": (after("token_embd.weight", 4, number(8, 0)), "token_embd.weight has shape"),
    "other size": (after("blk.0.ffn_up.weight", 4, number(8, 512)), "blk.0.ffn_up.weight has shape [512, 512]"),
    "unknown type": (after("blk.0.ffn_up.weight", 20, number(4, 99)), "blk.0.ffn_up.weight is of type 99"),
    "other type": (after("blk.0.ffn_up.weight", 20, number(4, 10)), "blk.0.ffn_up.weight is Q2_K: only F32"),
    "offset": (after("blk.0.ffn_up.weight", 24, number(8, BIG)), "blk.0.ffn_up.weight is not all in the file"),
    "tensor twice": (renamed("blk.0.ffn_gate.weight", "blk.0.ffn_down.weight"), "blk.0.ffn_down.weight is there twice"),
    "tensor missing": (renamed("blk.0.attn_k.weight", "blk.0.attn_x.weight"), "first blk.0.attn_k.weight"),
    "scale NaN": (in_data(float("nan")), "blk.0.ffn_down.weight holds a scale"),
    "scale infinite": (in_data(float("inf")), "blk.0.ffn_down.weight holds a scale"),
    "no tokens": (renamed("tokenizer.ggml.tokens", "tokenizer.ggml.tokena"), "tokenizer.ggml.tokens must be"),
    "no merges": (renamed("tokenizer.ggml.merges", "tokenizer.ggml.mergez"), "tokenizer.ggml.merges must be"),
    "merge": (renamed("\x03\0\0\0\0\0\0\0< 1", "\x03\0\0\0\0\0\0\0<+1"), "its tokenizer cannot be made"),
    "cuts": (renamed("smollm", "smallm"), 'tokenizer.ggml.pre = "smallm"'),
    "tokenizer": (renamed("gpt2", "bert"), 'tokenizer.ggml.model = "bert"'),
}


@pytest.mark.parametrize("case", GGUF_DAMAGE)
def test_damaged_gguf(case: str, gguf_bytes: bytes, tmp_path: Path) -> None:
    damage, reason = GGUF_DAMAGE[case]
    path = tmp_path / "m.gguf"
    path.write_bytes(damage(gguf_bytes))
    line = refused(path)
    assert reason in line
    assert str(path) in line


@pytest.mark.parametrize("part", range(25))
def test_truncated_gguf(part: int, gguf_bytes: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes[: len(gguf_bytes) * part // 25])
    refused(path)


@pytest.mark.parametrize("seed", range(25))
def test_a_changed_byte_in_a_gguf_header(seed: int, gguf_bytes: bytes, tmp_path: Path) -> None:
    """It is refused, or it was one that does not matter."""
    rng, data = np.random.default_rng(seed), bytearray(gguf_bytes)
    data[int(rng.integers(0, 9000))] ^= 1 << int(rng.integers(8))
    (tmp_path / "m.gguf").write_bytes(data)
    try:
        read_everything(tmp_path / "m.gguf")
    except UserError as error:
        assert "\n" not in str(error)


def edit_config(change: Callable[[dict[str, Any]], None]) -> Damage:
    def damage(directory: Path) -> None:
        path = directory / "config.json"
        config = json.loads(path.read_text())
        change(config)
        path.write_text(json.dumps(config))

    return damage


def settings(**changes: Any) -> Damage:
    """Of `quantization_config`."""
    return edit_config(lambda config: config["quantization_config"].update(changes))


def weights(**changes: Any) -> Damage:
    """Of the weights of compressed-tensors' only group."""

    return edit_config(
        lambda config: config["quantization_config"]["config_groups"]["group_0"]["weights"].update(changes)
    )


def part(name: str, change: Callable[[np.ndarray], np.ndarray] | None) -> Damage:
    """Of one projection; None takes it away."""

    def damage(directory: Path) -> None:
        path, key = directory / "model.safetensors", DAMAGED + name
        found = Tensors(directory)
        tensors = {name: np.array(found.read(name)) for name in found.entries}
        old = tensors.pop(key)
        save_file(tensors | ({key: np.ascontiguousarray(change(old))} if change else {}), path)

    return damage


def put(value: float) -> Callable[[np.ndarray], np.ndarray]:
    def change(array: np.ndarray) -> np.ndarray:
        array = array.copy()
        array.reshape(-1)[0] = value
        return array

    return change


def shorter(array: np.ndarray) -> np.ndarray:
    return array[:-1]


DAMAGED = "model.layers.0.mlp.up_proj."
NAN, INF = float("nan"), float("inf")

METHOD_DAMAGE: dict[str, dict[str, tuple[Damage, str]]] = {
    "gptq": {
        "not an object": (edit_config(lambda config: config.update(quantization_config="gptq")), "must be an object"),
        "method": (settings(quant_method="bitsandbytes"), 'quant_method = "bitsandbytes": only awq'),
        "no method": (settings(quant_method=None), "quant_method = null"),
        "bits": (settings(bits=3), "bits = 3"),
        "bits text": (settings(bits="4"), 'bits = "4"'),
        "no bits": (settings(bits=None), "bits = null"),
        "group 128": (settings(group_size=128), "q_proj.qzeros has shape [4, 32], its configuration implies [2, 32]"),
        "group 0": (settings(group_size=0), "group_size = 0"),
        "group -5": (settings(group_size=-5), "group_size = -5"),
        "group text": (settings(group_size="64"), 'group_size = "64"'),
        "group huge": (
            settings(group_size=BIG),
            "group_size = 1152921504606846976: must be a",
        ),
        "format": (settings(checkpoint_format="marlin"), 'checkpoint_format = "marlin"'),
        "symmetric": (settings(sym=True), "q_proj.qzeros has zeros that are not in the middle"),
        "symmetric text": (settings(sym="yes"), 'sym = "yes"'),
        "no zeros": (part("qzeros", None), "up_proj.qzeros is missing"),
        "no scales": (part("scales", None), "up_proj.scales is missing"),
        "no numbers": (part("qweight", None), "up_proj.weight"),
        "numbers short": (part("qweight", shorter), "up_proj.qweight has shape [31, 512]"),
        "numbers float": (part("qweight", lambda a: a.astype(np.float32)), "up_proj.qweight is F32: only I32"),
        "scales int": (part("scales", lambda a: a.astype(np.int32)), "up_proj.scales is I32"),
        "scales turned": (part("scales", lambda a: a.T), "up_proj.scales has shape [512, 4]"),
        "scale NaN": (part("scales", put(NAN)), "up_proj.scales holds a scale that is not a finite number"),
        "scale infinite": (part("scales", put(INF)), "up_proj.scales holds a scale that is not a finite number"),
        "group beyond": (part("g_idx", put(4)), "up_proj.g_idx names groups 0 to 4, there are 4"),
        "group negative": (part("g_idx", put(-1)), "up_proj.g_idx names groups -1 to 3"),
        "groups short": (part("g_idx", shorter), "up_proj.g_idx has shape [255]"),
        "groups float": (part("g_idx", lambda a: a.astype(np.float32)), "up_proj.g_idx is F32"),
        "bias": (part("bias", put(0.5)), "unexpected tensor model.layers.0.mlp.up_proj.bias"),
        "bias short": (part("bias", shorter), "up_proj.bias has shape [511]"),
    },
    "awq": {
        "version": (settings(version="gemv"), 'version = "gemv"'),
        "bits": (settings(bits=8), "bits = 8"),
        "no zeros": (settings(zero_point=False), "zero_point = false"),
        "group": (settings(group_size=32), "q_proj.qzeros has shape [4, 32], its configuration implies [8, 32]"),
        "group 0": (settings(group_size=0), "group_size = 0"),
        "zeros missing": (part("qzeros", None), "up_proj.qzeros is missing"),
        "numbers turned": (part("qweight", lambda a: a.T), "up_proj.qweight has shape [64, 256]"),
        "scale NaN": (part("scales", put(NAN)), "up_proj.scales holds a scale that is not a finite number"),
        "of GPTQ": (settings(quant_method="gptq"), "q_proj.qweight has shape [256, 32]"),
    },
    "compressed": {
        "format": (settings(format="marlin-24"), 'format = "marlin-24"'),
        "no groups": (settings(config_groups=None), "config_groups = null"),
        "groups list": (settings(config_groups=[]), "config_groups = []"),
        "group text": (settings(config_groups={"group_0": "W4A16"}), "must be an object of objects"),
        "weights text": (settings(config_groups={"g": {"weights": 4, "targets": []}}), "weights = 4"),
        "no targets": (settings(config_groups={"g": {"weights": {}}}), "targets = null"),
        "pattern": (settings(config_groups={"g": {"weights": {}, "targets": ["re:("]}}), "not a regular expression"),
        "other targets": (
            settings(config_groups={"g": {"weights": {"num_bits": 4}, "targets": ["x"]}}),
            "none targets model.layers.0",
        ),
        "bits 3": (weights(num_bits=3), "num_bits = 3"),
        "bits 8": (
            weights(num_bits=8),
            "q_proj.weight_packed has shape [256, 32], its configuration implies [256, 64]",
        ),
        "float": (weights(type="float"), "num_bits = 4: only 8"),
        "block": (weights(strategy="block"), 'strategy = "block"'),
        "group": (weights(group_size=128), "q_proj.weight_scale has shape [256, 4], group_size implies [256, 2]"),
        "group 0": (weights(group_size=0), "group_size = 0"),
        "symmetric text": (weights(symmetric=1), "symmetric = 1"),
        "zeros missing": (weights(symmetric=False), "q_proj.weight_zero_point is missing"),
        "shape": (part("weight_shape", put(7)), "up_proj.weight_shape says [7, 256]"),
        "shape float": (part("weight_shape", lambda a: a.astype(np.float32)), "up_proj.weight_shape is F32"),
        "shape long": (part("weight_shape", lambda a: np.append(a, 1)), "up_proj.weight_shape has shape [3]"),
        "packed float": (part("weight_packed", lambda a: a.astype(np.float32)), "up_proj.weight_packed is F32"),
        "packed short": (part("weight_packed", shorter), "up_proj.weight_packed has shape [511, 32]"),
        "no scales": (part("weight_scale", None), "up_proj.weight_scale is missing"),
        "scales int": (part("weight_scale", lambda a: a.astype(np.int8)), "up_proj.weight_scale is I8"),
        "scale NaN": (part("weight_scale", put(NAN)), "up_proj.weight_scale holds a scale that is not a finite number"),
        "scale infinite": (part("weight_scale", put(INF)), "up_proj.weight_scale holds a scale that is not a finite"),
    },
    "fp8": {
        "block": (settings(weight_block_size=[128, 0]), "weight_block_size = 0: must be a positive integer"),
        "block of one": (settings(weight_block_size=[128]), "weight_block_size = [128]: must be two numbers"),
        "other block": (settings(weight_block_size=[64, 64]), "q_proj.weight_scale_inv has shape [2, 2], blocks of 64"),
        "rows": (settings(weight_block_size=None), "q_proj.weight_scale_inv has shape [2, 2], blocks of"),
        "format": (settings(fmt="e5m2"), 'fmt = "e5m2": only "e4m3" is supported'),
        "not a number": (part("weight", put(NAN)), "up_proj.weight holds a value that is not a number"),
        "no scales": (part("weight_scale_inv", None), "up_proj.weight is F8_E4M3: only BF16, F16, F32"),
        "scale NaN": (part("weight_scale_inv", put(NAN)), "up_proj.weight_scale_inv holds a scale that is not"),
        "scales int": (part("weight_scale_inv", lambda a: a.astype(np.int8)), "up_proj.weight_scale_inv is I8"),
        "numbers int": (part("weight", lambda a: a.view(np.int8)), "up_proj.weight is I8: only F8_E4M3"),
        "short": (part("weight", shorter), "up_proj.weight has shape [511, 256]"),
    },
}


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A good checkpoint by each method, to be copied."""
    root = tmp_path_factory.mktemp("quantised")
    write_quantised(root / "gptq", gptq_settings(), gptq_parts(order="equal"))
    write_quantised(root / "awq", AWQ_SETTINGS, awq_parts())
    write_compressed(root / "compressed", "W4A16")
    write_quantised(root / "fp8", fp8_settings(), fp8_parts((128, 128), scale="weight_scale_inv"))
    for name in METHOD_DAMAGE:
        read_everything(root / name)
    return {name: root / name for name in METHOD_DAMAGE}


@pytest.mark.parametrize(("method", "case"), [(m, c) for m, cases in METHOD_DAMAGE.items() for c in cases])
def test_damaged_parts(method: str, case: str, quantised: dict[str, Path], tmp_path: Path) -> None:
    damage, reason = METHOD_DAMAGE[method][case]
    directory = shutil.copytree(quantised[method], tmp_path / "model")
    damage(directory)
    line = refused(directory)
    assert reason in line
    assert str(directory) in line


def test_mxfp4_of_gpt_oss(tmp_path: Path) -> None:
    """Stacked experts in blocks of 4 bits, gate's and up's rows in turns: what the same values are without blocks."""
    rng = np.random.default_rng(2)
    raw = {"architectures": ["GptOssForCausalLM"], "hidden_size": 64, "intermediate_size": 32, "num_local_experts": 3}
    raw |= {"num_experts_per_tok": 2, "num_hidden_layers": 1, "vocab_size": 300, "num_attention_heads": 2}
    raw |= {"num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64}
    shapes = {name: pieces[0][1] for name, pieces in locations(parse_config(raw, "test")).items()}
    plain = {name: rng.standard_normal(at.plain_shape, np.float32).astype(bfloat16) for name, at in shapes.items()}
    quantised = dict(plain)
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    for name in [name for name, at in shapes.items() if at.transposed]:
        experts, rows, columns = shapes[name].shape
        blocks = rng.integers(0, 256, (experts, rows, columns // 32, 16), np.uint8)
        scales = rng.integers(110, 130, (experts, rows, columns // 32), np.uint8)
        scales.reshape(-1)[:2] = 0, 250
        pairs = np.stack([table[blocks % 16], table[blocks // 16]], axis=-1).reshape(experts, rows, -1, 32)
        values = pairs * 2.0 ** (scales.astype(int) - 127)[..., None]
        plain[name] = values.reshape(experts, rows, columns).swapaxes(1, 2).astype(bfloat16)
        quantised |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        del quantised[name]
    for directory, held_in, more in ((tmp_path / "plain", plain, {}), (tmp_path / "mxfp4", quantised, MXFP4)):
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(raw | more))
        save_file({name: np.ascontiguousarray(tensor) for name, tensor in held_in.items()}, directory / SINGLE)
    checkpoint, same = Checkpoint.open(tmp_path / "mxfp4", ()), Checkpoint.open(tmp_path / "plain", ())
    for name, held in same.held.items():
        np.testing.assert_array_equal(checkpoint.tensor(name).astype(np.float32), same.tensor(name).astype(np.float32))
        assert checkpoint.held[name].shape == held.shape
    policy = held_policy(checkpoint, lambda name: True)
    assert policy.exceptions | {} == dict.fromkeys(EXPERTS, "mxfp4") | {"vocab": "bf16"}
    damaged = next(name for name in quantised if name.endswith("_scales"))
    quantised[damaged].reshape(-1)[-1] = 255
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in quantised.items()}, tmp_path / "mxfp4" / SINGLE)
    with pytest.raises(UserError, match=f"{damaged} holds a scale that is not a finite number"):
        read_everything(tmp_path / "mxfp4")


MXFP4 = {"quantization_config": {"quant_method": "mxfp4"}}
EXPERTS = ("w_gate_exps", "w_up_exps", "w_down_exps")
