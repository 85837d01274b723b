"""Write a checkpoint as a GGUF file, in bf16 or quantised by llama.cpp, to compare with it on the same weights."""

from __future__ import annotations

import ctypes
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from llama_npu2.errors import UserError
from stages.model.checkpoint import Checkpoint
from stages.model.config import Config, inverse_frequencies
from stages.model.decoder import Rope
from stages.model.families import tensors, token_tensors
from stages.model.importers.gguf import ROPE_FACTORS, rotary_order, tensor_name
from stages.model.importers.gguf_blocks import TYPES
from stages.model.importers.gguf_header import Header

PLAIN = "BF16"
"""llama.cpp's name for the files of `write_gguf`."""


def write_gguf(checkpoint: Checkpoint, path: Path) -> None:
    """Write a checkpoint without its tokenizer. Matrices stay bf16, vectors become f32, as by llama.cpp's converter."""
    import gguf

    config, temporary = checkpoint.config, path.with_suffix(".part")
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(temporary, "llama")
    try:
        _describe(writer, config)
        for name in tensors(config):
            tensor = checkpoint.tensor(name)
            order = rotary_order(name, len(tensor), config.head_dim)
            if tensor.ndim == 1:
                writer.add_tensor(tensor_name(name), tensor.astype(np.float32))
            else:
                inside = tensor.astype(bfloat16)[slice(None) if order is None else order]
                raw = inside.view(np.uint8).reshape(len(inside), -1)
                writer.add_tensor(tensor_name(name), raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
        if config.decoder.attention.rope.scaling.type != "default":
            writer.add_tensor(ROPE_FACTORS, _frequency_factors(config))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def silenced() -> Any:
    """Return the API of llama.cpp, after switching off its log."""
    import llama_cpp

    llama_cpp.llama_log_set(_SILENCE, None)
    return llama_cpp


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def _SILENCE(level: int, text: bytes, user_data: int) -> None:
    """Ignore a line of the log. The function stays alive for as long as llama.cpp may call it."""


def quantise_gguf(source: Path, path: Path, kind: str) -> None:
    """Quantise a GGUF file by `llama_model_quantize`, without an importance matrix.

    Args:
        kind: The name of `llama-quantize`, as in Q4_K_M.

    Raises UserError if llama.cpp fails.
    """
    llama_cpp, temporary = silenced(), path.with_suffix(".part")
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    try:
        if llama_cpp.llama_model_quantize(bytes(source), bytes(temporary), ctypes.byref(params)):
            raise UserError(f"peers=llama.cpp: llama.cpp cannot quantise {source} to {kind}: leave it out")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def token_bytes(path: Path, config: Config) -> int:
    """Return the bytes of weights that llama.cpp reads to decode a token."""
    tensors = Header(path).tensors
    places = [tensors[tensor_name(name)] for name in token_tensors(config)]
    kinds = [(TYPES[place.type], prod(place.shape)) for place in places]
    return sum(values // kind.values * kind.bytes for kind, values in kinds)


def bits(path: Path) -> float:
    """Return the mean number of bits of a matrix's weight."""
    entries = [entry for entry in Header(path).tensors.values() if len(entry.shape) == 2]
    matrices = [(TYPES[entry.type], prod(entry.shape)) for entry in entries]
    return 8 * sum(values // kind.values * kind.bytes for kind, values in matrices) / sum(n for _, n in matrices)


def _describe(writer: Any, config: Config) -> None:
    import gguf

    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(config.vocab)
    writer.add_context_length(config.max_seq)
    writer.add_embedding_length(config.emb)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(config.ffn)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.decoder.attention.rope.theta)
    writer.add_layer_norm_rms_eps(config.eps)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)


def _frequency_factors(config: Config) -> np.ndarray:
    """Return what llama.cpp divides the unscaled rotations by, float32 `[head_dim / 2]`."""
    rope = config.decoder.attention.rope
    scaled = inverse_frequencies(rope, config.head_dim)
    factors: np.ndarray = inverse_frequencies(Rope(rope.theta), config.head_dim) / scaled
    return factors.astype(np.float32)
