"""Checkpoints of every kind: what is read equals what the format's own library reads, element by element, what is stored is
kept bit for bit, and a damaged file is one line."""

from __future__ import annotations

import dataclasses
import json
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16
from safetensors.numpy import load_file, save_file

from llama_npu2.errors import UserError
from stages.commands.gguf_file import write_gguf
from stages.model.checkpoint import Checkpoint, container
from stages.model.config import inverse_frequencies
from stages.model.families import parse_config, tensors
from stages.model.importers.gguf import rotary_order, tensor_name
from stages.model.importers.gguf_blocks import TYPES
from stages.model.sources import resolve
from stages.weights.formats import formats
from tests.conftest import CONFIG, random_tensors, write_checkpoint

gguf = pytest.importorskip("gguf", reason="gguf is not installed: pip install -e '.[test]'")

SHAPES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "head_dim": 64}
CONFIG_OF_TESTS = CONFIG | SHAPES
MATRICES = [name for name, shape in tensors(parse_config(CONFIG_OF_TESTS, "test")).items() if len(shape) == 2]
LINEAR = [name for name in MATRICES if "_proj" in name]


def check_stored(checkpoint: Checkpoint, name: str) -> None:
    """What is stored gives the values again, in every bit, and has the shape that packing counts on."""
    form, values = formats()[checkpoint.stored_format(name)], checkpoint.tensor(name)
    stored = checkpoint.stored(name)
    assert stored.shape == form.stored_shape(values.shape)
    again = form.dequantise(stored, values.shape[-1])
    np.testing.assert_array_equal(again.view(np.uint32), values.astype(np.float32).view(np.uint32))


# GGUF

TOKENS = [chr(c) for c in range(ord("a"), ord("z") + 1)]


def write_file(path: Path, types: dict[str, str], seed: int = 0, metadata: dict[str, Any] | None = None) -> dict:
    """A GGUF file of random blocks: `types` of matrices by name, F32 where none is said. Returns values by name."""
    config = parse_config(CONFIG_OF_TESTS, "test")
    writer = gguf.GGUFWriter(path, "llama")
    fields: dict[str, Any] = {
        "context_length": 128,
        "embedding_length": 256,
        "block_count": 1,
        "feed_forward_length": 512,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 64,
        "rope.dimension_count": 64,
        "vocab_size": config.vocab,
    }
    for name, value in fields.items():
        writer.add_uint32(f"llama.{name}", value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_eos_token_id(2)
    for name, value in (metadata or {}).items():
        getattr(writer, f"add_{'string' if isinstance(value, str) else 'uint32'}")(name, value)
    rng, values = np.random.default_rng(seed), {}
    for name, shape in tensors(config).items():
        kind = gguf.GGMLQuantizationType[types.get(name, "F32")]
        raw = random_blocks(rng, kind, shape)
        writer.add_tensor(tensor_name(name), raw, raw_dtype=kind)
        wide = gguf.dequantize(raw, kind).reshape(shape)
        order = rotary_order(name, shape[0], config.head_dim)
        values[name] = wide if order is None else wide[np.argsort(order)]
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def random_blocks(rng: np.random.Generator, kind: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Any numbers, with factors of both signs that are neither tiny nor huge."""
    type_ = TYPES[kind]
    if type_.stored is None:
        dtype = {"F32": np.float32, "F16": np.float16, "BF16": bfloat16}[type_.name]
        values = rng.standard_normal(shape, np.float32).astype(dtype)
        return values.view(np.uint8).reshape(*shape[:-1], -1) if type_.name == "BF16" else values
    raw = rng.integers(0, 256, (*shape[:-1], shape[-1] // type_.values, type_.bytes), np.uint8)
    first, end = type_.factors
    factors = rng.standard_normal((*raw.shape[:-1], (end - first) // 2), np.float32).astype(np.float16)
    raw[..., first:end] = factors.view(np.uint8)
    return raw.reshape(*shape[:-1], -1)


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
    same = {"rope_scaling": config.rope_scaling, "eos": config.eos, "eps": config.eps}
    assert dataclasses.replace(after.config, **same) == config
    assert after.config.eps == pytest.approx(config.eps, rel=1e-6)
    frequencies = inverse_frequencies(after.config)
    np.testing.assert_allclose(frequencies, inverse_frequencies(config), rtol=1e-6)


def test_gguf_tensors_of_two_types_and_f16(tmp_path: Path) -> None:
    types = dict.fromkeys(MATRICES, "Q4_K") | {MATRICES[0]: "Q6_K", LINEAR[0]: "F16"}
    write_file(tmp_path / "m.gguf", types)
    checkpoint = Checkpoint.open(tmp_path / "m.gguf")
    found = [checkpoint.stored_format(name) for name in (MATRICES[0], LINEAR[0], LINEAR[1], "model.norm.weight")]
    assert found == ["int8_f32_16", "f16", "int4_f32", "f32"]
    assert checkpoint.tensor(LINEAR[0]).dtype == np.float16


def test_gguf_is_a_source(tmp_path: Path) -> None:
    write_file(tmp_path / "Some model Q8_0.gguf", {})
    source = resolve(str(tmp_path / "Some model Q8_0.gguf"), tmp_path / "artifacts")
    assert (source.name, source.fetch()) == ("Some-model-Q8_0", tmp_path / "Some model Q8_0.gguf")
    assert source.files() == [source.fetch()]


# Tensors in parts


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
    directory: Path, settings: dict[str, Any], parts: Callable[[np.random.Generator, tuple[int, int]], tuple[Parts, Any]]
) -> dict[str, np.ndarray]:
    """A checkpoint whose projections are made by `parts`: (generator, shape) -> parts and values."""
    write_checkpoint(directory, **SHAPES, quantization_config=settings)
    config, rng = parse_config(CONFIG_OF_TESTS, "test"), np.random.default_rng(3)
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
        q, z = rng.integers(0, 16, shape), rng.integers(0, 16, (rows, cols // size))
        s = random_scales(rng, z.shape, np.float16)
        parts = {"qweight": pack_words(q.T, 4, order), "qzeros": pack_words(z.T, 4, order), "scales": s.T}
        return parts, s.astype(np.float32).repeat(size, 1) * (q - z.repeat(size, 1)).astype(np.float32)

    return make


AWQ_SETTINGS = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True}


@pytest.mark.parametrize("size", [32, 64, 128])
def test_awq(size: int, tmp_path: Path) -> None:
    expected = write_quantised(tmp_path, AWQ_SETTINGS | {"group_size": size}, awq_parts(size))
    check_all(tmp_path, expected, "int4_f32")


def compressed_settings(kind: str = "pack-quantized", **weights: Any) -> dict[str, Any]:
    args = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 64} | weights
    groups = {"group_0": {"targets": ["Linear"], "weights": args, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": kind, "ignore": ["lm_head"], "config_groups": groups}


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
    "W8A8 rows": ({"num_bits": 8, "strategy": "channel", "group_size": None}, bfloat16, "int8_f32"),
    "W8A8 rows f32": ({"num_bits": 8, "strategy": "channel", "group_size": None}, np.float32, "int8_f32"),
    "W8A8 tensor": ({"num_bits": 8, "strategy": "tensor", "group_size": None}, np.float32, "int8_f32"),
}


def compressed_parts(case: str) -> Callable[[np.random.Generator, tuple[int, int]], tuple[Parts, np.ndarray]]:
    weights, dtype, _ = COMPRESSED[case]
    args = compressed_settings(**weights)["config_groups"]["group_0"]["weights"]
    bits, half, packed = args["num_bits"], 1 << args["num_bits"] - 1, "W8A8" not in case

    def make(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[Parts, np.ndarray]:
        rows, cols = shape
        width = args["group_size"] or cols
        q = rng.integers(-half, half, shape)
        s = random_scales(rng, (1, 1) if args["strategy"] == "tensor" else (rows, cols // width), dtype)
        z = np.zeros(s.shape, int) if args["symmetric"] else rng.integers(-half, half, s.shape)
        parts = {"weight_scale": s.reshape(-1) if s.size == 1 else s}
        if packed:
            parts |= {"weight_packed": pack_words(q + half, bits), "weight_shape": np.array(shape, np.int64)}
        else:
            parts["weight"] = q.astype(np.int8)
        if not args["symmetric"]:
            parts["weight_zero_point"] = pack_words((z + half).T, bits).T
        wide = s.astype(np.float32).repeat(width, 1) * (q - z.repeat(width, 1)).astype(np.float32)
        return parts, wide

    return make


def write_compressed(directory: Path, case: str) -> dict[str, np.ndarray]:
    weights, *_ = COMPRESSED[case]
    kind = "int-quantized" if "W8A8" in case else "pack-quantized"
    return write_quantised(directory, compressed_settings(kind, **weights), compressed_parts(case))


@pytest.mark.parametrize("case", COMPRESSED)
def test_compressed_tensors(case: str, tmp_path: Path) -> None:
    check_all(tmp_path, write_compressed(tmp_path, case), COMPRESSED[case][2])


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
