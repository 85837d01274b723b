"""Small files of quantised checkpoints, and the metadata of their tokenizers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16
from tokenizers import Tokenizer

from stages.model.families import parse_config, tensors, weights
from stages.model.families.llama import GGUF
from stages.model.importers.gguf_blocks import TYPES
from tests.conftest import CONFIG

gguf = pytest.importorskip("gguf", reason="gguf is not installed: pip install -e '.[test]'")


SHAPES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "head_dim": 64}


CONFIG_OF_TESTS = CONFIG | SHAPES


MATRICES = [name for name, shape in tensors(parse_config(CONFIG_OF_TESTS, "test")).items() if len(shape) == 2]


def write_file(path: Path, types: dict[str, str], split: int = 0, **changes: Any) -> dict[str, np.ndarray]:
    """A GGUF file of random blocks: `types` of matrices by name, F32 where none is said. `split`: the most tensors of
    a part, where it is in parts. `changes`: to its configuration. Returns values by name."""
    config = parse_config(CONFIG_OF_TESTS | changes, "test")
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=split)
    fields: dict[str, Any] = {
        "context_length": 128,
        "embedding_length": 256,
        "block_count": config.layers,
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
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["<", "1", "<1", *(f"<{i}>" for i in range(3, config.vocab))])
    writer.add_token_types([1] * config.vocab)
    writer.add_token_merges(["< 1"])
    rng, values = np.random.default_rng(0), {}
    for weight in weights(config):
        kind = gguf.GGMLQuantizationType[types.get(weight.name, "F32")]
        shape = tensors(config)[weight.name]
        raw = random_blocks(rng, kind, shape)
        writer.add_tensor(GGUF.tensors[weight.slot].tensor.format(layer=weight.layer), raw, raw_dtype=kind)
        wide = gguf.dequantize(raw, kind).reshape(shape)
        if weight.slot in ("wq", "wk"):
            # Rows 2 d and 2 d + 1 of a head turn together, in a directory rows d and d + head_dim / 2.
            wide = wide.reshape(-1, config.head_dim // 2, 2, shape[-1]).swapaxes(1, 2).reshape(shape)
        values[weight.name] = wide
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
    if end - first == 1:  # powers of two
        raw[..., first:end] = rng.integers(110, 135, (*raw.shape[:-1], 1))
        return raw.reshape(*shape[:-1], -1)
    factors = rng.standard_normal((*raw.shape[:-1], (end - first) // 2), np.float32).astype(np.float16)
    raw[..., first:end] = factors.view(np.uint8)
    return raw.reshape(*shape[:-1], -1)


def metadata_of(tokenizer: Tokenizer, vocab: int = 0) -> dict[str, Any]:
    """What llama.cpp's converter writes of a byte-level tokenizer, for at least `vocab` tokens."""
    inner, added = json.loads(tokenizer.to_str())["model"], tokenizer.get_added_tokens_decoder()
    ids = range(tokenizer.get_vocab_size())
    kinds = [(3 if added[i].special else 4) if i in added else 1 for i in ids]
    merges = [" ".join(merge) for merge in inner["merges"]]
    tokens = [tokenizer.id_to_token(i) for i in ids]
    more = range(len(tokens), vocab)
    tokens, kinds = [*tokens, *(f"[PAD{i}]" for i in more)], [*kinds, *(5 for _ in more)]
    return {"model": "gpt2", "tokens": tokens, "token_type": kinds, "merges": merges}


@contextlib.contextmanager
def with_tokenizer(tokenizer: Tokenizer, pre: str, eos: int, vocab: int = 0) -> Iterator[None]:
    """`write_gguf` writes this byte-level tokenizer, too, which it leaves out otherwise."""
    name_it = gguf.GGUFWriter.add_tokenizer_model

    def add_tokenizer(writer: Any, _: str) -> None:
        metadata = metadata_of(tokenizer, vocab)
        name_it(writer, "gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(metadata["tokens"])
        writer.add_token_types(metadata["token_type"])
        writer.add_token_merges(metadata["merges"])
        writer.add_eos_token_id(eos)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gguf.GGUFWriter, "add_tokenizer_model", add_tokenizer)
        yield
