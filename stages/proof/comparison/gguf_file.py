"""Write a checkpoint as a GGUF file, in bf16 or quantised by llama.cpp, to compare with it on the same weights."""

from __future__ import annotations

import ctypes
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from llama_npu2.cli.table import amount
from llama_npu2.errors import UserError
from stages.model import families
from stages.model.checkpoint import Checkpoint
from stages.model.config import Config, inverse_frequencies
from stages.model.decoder import EMBEDDING, HEAD, MATRICES, STACKED, Attention, Rope, RopeScaling
from stages.model.families import token_tensors
from stages.model.families.gguf import FACTORS, LONG_FACTORS, Gguf
from stages.model.families.place import Location, whole
from stages.model.importers.gguf import GgufFile, location
from stages.model.importers.gguf_blocks import TYPES
from stages.model.importers.gguf_header import Place

PLAIN = "BF16"
"""llama.cpp's name for the files of `write_gguf`."""


def write_gguf(checkpoint: Checkpoint, path: Path) -> None:
    """Write a checkpoint without its tokenizer. Matrices stay bf16, vectors become f32, as by llama.cpp's converter.

    Raises UserError for a model that a GGUF file cannot describe.
    """
    import gguf

    config, temporary = checkpoint.config, path.with_suffix(".part")
    kind = families.of(config).gguf
    if kind is None:
        raise UserError(f"peers=llama.cpp: GGUF files of {config.family} are not written: leave it out")
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(temporary, kind.architecture)
    try:
        _describe(writer, config, kind)
        locations, factors = _locations(config, kind), _factors(config, kind)
        for name, pieces in locations.items():
            _announce(writer, name, *pieces[0])
        for name, values in factors.items():
            writer.add_tensor_info(name, values.shape, values.dtype, values.nbytes)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        # One after the other: a checkpoint may be larger than memory.
        for pieces in locations.values():
            tensor = whole([(at, checkpoint.tensor(weight.name)) for weight, at in pieces])
            writer.write_tensor_data(_stored(tensor, pieces[0][0]))
        for values in factors.values():
            writer.write_tensor_data(values)
        writer.close()
        _check_described(temporary, config)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _locations(config: Config, kind: Gguf) -> dict[str, list[tuple[families.Weight, Location]]]:
    """Return the tensors of a file by name, each with the weights that lie in it."""
    return families.locations(config, partial(location, kind=kind))


def _announce(writer: Any, name: str, weight: families.Weight, at: Location) -> None:
    """Say what a tensor will be, as llama.cpp's converter does: matrices are bf16, others f32."""
    import gguf

    shape = at.plain_shape
    if _is_matrix(weight):
        writer.add_tensor_info(name, shape, np.dtype(bfloat16), 2 * prod(shape), gguf.GGMLQuantizationType.BF16)
    else:
        shape = shape if weight.slot in STACKED else tuple(size for size in shape if size > 1) or shape[-1:]
        writer.add_tensor_info(name, shape, np.dtype(np.float32), 4 * prod(shape))


def _stored(tensor: np.ndarray, weight: families.Weight) -> np.ndarray:
    """Return a tensor of a checkpoint as a file holds it."""
    if _is_matrix(weight):
        return np.ascontiguousarray(tensor.astype(bfloat16, copy=False)).view(np.uint8)
    return tensor.astype(np.float32) + np.float32(weight.offset)


def _is_matrix(weight: families.Weight) -> bool:
    return weight.slot in (*MATRICES, EMBEDDING, HEAD)


def _check_described(path: Path, config: Config) -> None:
    """Raise UserError where a file says something else than the configuration that it was written of."""
    written = GgufFile(path).config.decoder
    if where := _difference(written, config.decoder, config.head_dim, "decoder"):
        raise UserError(f"peers=llama.cpp: a GGUF file cannot describe its {where}: leave it out")


def _difference(ours: Any, theirs: Any, head_dim: int, name: str) -> str | None:
    """Return the name of a value in which two parts of a description differ, beyond rounding to f32; None without."""
    if isinstance(ours, float) and isinstance(theirs, float):
        return None if math.isclose(ours, theirs, rel_tol=1e-5) else name
    if isinstance(ours, Rope) and isinstance(theirs, Rope):
        ours, theirs = (tuple(map(partial(_turns, head_dim=head_dim), r.tables.values())) for r in (ours, theirs))
    if isinstance(ours, tuple) and isinstance(theirs, tuple) and len(ours) == len(theirs):
        pairs = [(name, a, b) for a, b in zip(ours, theirs, strict=True)]
    elif is_dataclass(ours) and type(ours) is type(theirs):
        pairs = [(field.name, getattr(ours, field.name), getattr(theirs, field.name)) for field in fields(ours)]
    else:
        return None if ours == theirs else name
    return next(filter(None, (_difference(a, b, head_dim, inner) for inner, a, b in pairs)), None)


def _turns(rope: Rope, head_dim: int) -> tuple[Any, ...]:
    """Return what makes a table of rotations."""
    frequencies = tuple(inverse_frequencies(rope, head_dim).tolist())
    return frequencies, rope.scaling.attention_factor, rope.turned, rope.q_scale


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
            free = amount(shutil.disk_usage(path.parent).free)
            what = f"llama.cpp cannot quantise {source} to {kind}, with {free} free on the disk"
            raise UserError(f"peers=llama.cpp: {what}: make room, or leave it out")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def values(path: Path, config: Config) -> Callable[[str], np.ndarray]:
    """Return what returns the values in a file of the weights of a model, by their names in its own checkpoint.

    The file may be read as one of another family, whose tensors have other names. Raises UserError.
    """
    written = Checkpoint.open(path)
    pairs = zip(families.weights(config), families.weights(written.config), strict=True)
    names = {own.name: read.name for own, read in pairs}
    return lambda name: written.tensor(names[name])


def token_bytes(path: Path, config: Config) -> int:
    """Return the bytes of weights that llama.cpp reads to decode a token; of experts, those of the chosen ones."""
    kind, places, read = families.of(config).gguf, GgufFile(path).places, token_tensors(config)
    assert kind
    weights = [(name, pieces[0][0]) for name, pieces in _locations(config, kind).items()]
    experts = config.decoder.experts
    share = experts.top / experts.count if experts else 1.0
    sizes = [(_bytes([places[name]]), weight.slot) for name, weight in weights if weight.name in read]
    return round(sum(size * (share if slot in STACKED else 1) for size, slot in sizes))


def bits(path: Path) -> float:
    """Return the mean number of bits of a matrix's weight."""
    matrices = [place for place in GgufFile(path).places.values() if len(place.shape) > 1]
    return 8 * _bytes(matrices) / sum(prod(place.shape) for place in matrices)


def _bytes(places: Sequence[Place]) -> int:
    return sum(prod(place.shape) // TYPES[place.type].values * TYPES[place.type].bytes for place in places)


def _describe(writer: Any, config: Config, kind: Gguf) -> None:
    import gguf

    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(config.vocab)
    writer.add_context_length(config.max_seq)
    writer.add_embedding_length(config.emb)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(config.ffn)
    writer.add_head_count(config.heads)
    mixers = [layer.mixer for layer in config.decoder.layers]
    kv_heads = [mixer.kv_heads if isinstance(mixer, Attention) else 0 for mixer in mixers]
    writer.add_head_count_kv(kv_heads if 0 in kv_heads else config.kv_heads)
    if experts := config.decoder.experts:
        writer.add_expert_count(experts.count)
        writer.add_expert_used_count(experts.top)
        writer.add_expert_feed_forward_length(experts.expert.inner)
        if experts.by_sigmoid:
            writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        if "leading_dense_block_count" in kind.keys.values():
            networks = [layer.feed_forward for layer in config.decoder.layers]
            writer.add_leading_dense_block_count(networks.index(experts))
    if config.decoder.taps:
        writer.add_shortconv_l_cache(config.decoder.taps)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.eps)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    _describe_rope(writer, config, kind)
    _describe_scales(writer, config, kind)
    windows = [mixer.window for mixer in config.decoder.attentions]
    if any(windows) and kind.windows:
        writer.add_sliding_window(max(filter(None, windows)))
        slides = [window is not None for window in windows]
        period = slides.index(False) + 1 if False in slides else len(slides) + 1
        if "attention.sliding_window_pattern" not in kind.given:
            return
        if slides == [bool((layer + 1) % period) for layer in range(len(slides))]:
            writer.add_sliding_window_pattern(period)
        else:
            writer.add_sliding_window_pattern(slides)


def _describe_scales(writer: Any, config: Config, kind: Gguf) -> None:
    decoder = config.decoder
    scales = {
        "attention.scale": decoder.attention.scalar**-0.5,
        "embedding_scale": decoder.embed_scale,
        "residual_scale": decoder.residual_scale,
        "logit_scale": 1 / decoder.logits_scale,
    }
    for key in scales.keys() & kind.keys.values():
        writer.add_float32(f"{kind.architecture}.{key}", scales[key])


def _ropes(config: Config) -> dict[bool, Rope]:
    """Return the rotary embeddings of layers that see all positions, and of those that do not; those that turn."""
    mixers = config.decoder.attentions
    turning = [mixer for mixer in mixers if mixer.rope.turned != 0]
    return {mixer.window is None: mixer.rope for mixer in turning or mixers}


def _rope(config: Config) -> Rope:
    ropes = _ropes(config)
    return ropes.get(True) or ropes[False]


def _describe_rope(writer: Any, config: Config, kind: Gguf) -> None:
    rope, ropes = _rope(config), _ropes(config)
    writer.add_rope_freq_base(rope.theta)
    writer.add_rope_dimension_count(rope.turned or config.head_dim)
    if "rope.scaling.finetuned" in kind.given:
        writer.add_rope_scaling_finetuned(rope.turned != 0)
    if "rope.freq_base_swa" in kind.keys.values() and False in ropes:
        writer.add_float32(f"{kind.architecture}.rope.freq_base_swa", ropes[False].theta)
    if rope.q_scale and "attention.temperature_scale" in kind.given:
        writer.add_attn_temperature_scale(rope.q_scale.beta)
    _describe_scaling(writer, rope.scaling, kind)


def _describe_scaling(writer: Any, scaling: RopeScaling, kind: Gguf) -> None:
    import gguf

    if scaling.type == "linear" and not kind.factors:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(scaling.factor)
    if scaling.type == "longrope":
        writer.add_rope_scaling_orig_ctx_len(scaling.original_max_position)
        writer.add_rope_scaling_attn_factors(scaling.attention_factor)
    if scaling.type == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling.factor)
        writer.add_rope_scaling_orig_ctx_len(scaling.original_max_position)
        writer.add_rope_scaling_yarn_beta_fast(scaling.beta_fast)
        writer.add_rope_scaling_yarn_beta_slow(scaling.beta_slow)
        # With this llama.cpp has no factor of its own.
        writer.add_rope_scaling_yarn_log_mul(1.0)
        writer.add_rope_scaling_attn_factors(scaling.attention_factor)


def _factors(config: Config, kind: Gguf) -> dict[str, np.ndarray]:
    """Return what llama.cpp divides the unscaled rotations by, float32 `[pairs that turn]`, by tensor."""
    rope, factors = _rope(config), {}
    if kind.factors == LONG_FACTORS and rope.scaling.type == "longrope":
        longer = rope.scaling.long_factors or rope.scaling.factors
        factors = dict(zip(LONG_FACTORS, (longer, rope.scaling.factors), strict=True))
    elif kind.factors == (FACTORS,) and rope.scaling.type not in ("default", "yarn"):
        scaled = inverse_frequencies(rope, config.head_dim)
        factors = {FACTORS: inverse_frequencies(Rope(rope.theta), config.head_dim) / scaled}
    return {name: np.array(values, np.float32) for name, values in factors.items()}
