"""ggml's types of tensors: blocks of values, and the format of ours that holds them exactly.

The blocks are those of `ggml-common.h`, their values those of `dequantize_row_*` in `ggml-quants.c`, computed in f32:
https://github.com/ggml-org/ggml/tree/master/src
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from llama_npu2.frozen import frozen
from stages.engine.lazy import np
from stages.weights.constants import GROUP
from stages.weights.formats import int4_f32, int8_f32, int8_f32_16, mxfp4


@frozen
class BlockType:
    """A type of tensors: how a block of values lies in bytes."""

    name: str
    format: str
    """Our format that holds its values exactly."""
    bytes: int
    """Bytes of a block."""
    values: int = 1
    """Values of a block."""
    factors: tuple[int, int] = (0, 0)
    """First byte and end of the factors, which are f16, or powers of two where there is one byte."""
    stored: Callable[[np.ndarray], np.ndarray] | None = None
    """Converts blocks u8 `[rows, blocks, bytes]` to rows of the format, i8 `[rows, ...]`; None where a block is an
    element."""


_NO_POWER = 255
"""The byte that stands for NaN among powers of two (E8M0)."""


def _f16(raw: np.ndarray) -> np.ndarray:
    """Read u8 `[..., 2 n]` as f16; return f32 `[..., n]`."""
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)


def finite(kind: BlockType, blocks: np.ndarray) -> bool:
    """Whether all factors of blocks u8 `[..., bytes]` are finite."""
    raw = blocks[..., slice(*kind.factors)]
    return bool((raw < _NO_POWER).all() if raw.shape[-1] == 1 else np.isfinite(_f16(raw)).all())


def _nibbles(raw: np.ndarray, run: int) -> np.ndarray:
    """Unpack u8 `[..., n]` to `[..., 2 n]`: of each `run` bytes the low nibbles, then the high ones."""
    runs = raw.reshape(*raw.shape[:-1], -1, 1, run)
    return np.concatenate([runs & 15, runs >> 4], axis=-2).reshape(*raw.shape[:-1], -1)


def _bits(raw: np.ndarray, width: int, run: int) -> np.ndarray:
    """Unpack u8 `[..., n]` to numbers of `width` bits: of each `run` bytes the lowest bits of each, then the next."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    runs = raw.reshape(*raw.shape[:-1], -1, 1, run) >> shifts & ((1 << width) - 1)
    return runs.reshape(*raw.shape[:-1], -1)


def _fifth_bits(raw: np.ndarray) -> np.ndarray:
    """Unpack u8 `[..., 4]` to `[..., 32]`: the fifth bit of each number, times 16."""
    return np.unpackbits(raw, axis=-1, bitorder="little") << 4


def _stored4(scale: np.ndarray, minimum: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Return int4_f32 of scales f32 `[rows, groups]` and numbers u8 `[rows, any]`."""
    return int4_f32.GROUPED.scaled(np.stack([scale, minimum], axis=-1), numbers.reshape(*scale.shape, GROUP))


def _stored8(scale: np.ndarray, minimum: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Return int8_f32 of scales f32 `[rows, groups]` and numbers i8 or u8 `[rows, any]`."""
    return int8_f32.GROUPED.scaled(np.stack([scale, minimum], axis=-1), numbers.reshape(*scale.shape, GROUP))


def _q4_0(raw: np.ndarray) -> np.ndarray:
    """D f16, numbers: d (q - 8)."""
    scale = _f16(raw[..., :2])[..., 0]
    return _stored4(scale, 8 * scale, _nibbles(raw[..., 2:], 16))


def _q4_1(raw: np.ndarray) -> np.ndarray:
    """d, m f16, numbers: d q + m."""
    scale, offset = np.moveaxis(_f16(raw[..., :4]), -1, 0)
    return _stored4(scale, -offset, _nibbles(raw[..., 4:], 16))


def _q5_0(raw: np.ndarray) -> np.ndarray:
    """D f16, fifth bits, numbers: d (q - 16)."""
    scale = _f16(raw[..., :2])[..., 0]
    numbers = _nibbles(raw[..., 6:], 16) | _fifth_bits(raw[..., 2:6])
    return _stored8(scale, np.zeros_like(scale), numbers.astype(np.int8) - np.int8(16))


def _q5_1(raw: np.ndarray) -> np.ndarray:
    """d, m f16, fifth bits, numbers: d q + m."""
    scale, offset = np.moveaxis(_f16(raw[..., :4]), -1, 0)
    return _stored8(scale, -offset, _nibbles(raw[..., 8:], 16) | _fifth_bits(raw[..., 4:8]))


def _q8_0(raw: np.ndarray) -> np.ndarray:
    """D f16, numbers: d q. They are the bytes of int8."""
    return raw.reshape(len(raw), -1).view(np.int8)


def _k_scales(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Unpack d, dmin f16 and eight pairs of six bits in twelve bytes to scales and minima f32 `[rows, groups]`."""
    factors, packed = _f16(raw[..., :4]), raw[..., 4:16].reshape(*raw.shape[:-1], 3, 4)
    both = packed[..., :2, :]
    high = np.stack([packed[..., 2, :] & 15, packed[..., 2, :] >> 4], axis=-2) | (both >> 2 & 48)
    scales = np.concatenate([both & 63, high], axis=-1).astype(np.float32) * factors[..., None]
    scale, minimum = np.moveaxis(scales, -2, 0)
    return scale.reshape(len(raw), -1), minimum.reshape(len(raw), -1)


def _q4_k(raw: np.ndarray) -> np.ndarray:
    """Scales s and minima m as in `_k_scales`, numbers: d s q - dmin m."""
    return _stored4(*_k_scales(raw), _nibbles(raw[..., 16:], 32))


def _q5_k(raw: np.ndarray) -> np.ndarray:
    """Q4_K with fifth bits before the numbers."""
    numbers = _nibbles(raw[..., 48:], 32) | _bits(raw[..., 16:48], 1, 32) << 4
    return _stored8(*_k_scales(raw), numbers)


def _q6_k(raw: np.ndarray) -> np.ndarray:
    """Low nibbles, high pairs of bits, sixteen scales i8, d f16: d s (q - 32)."""
    low = _nibbles(raw[..., :128], 64)
    numbers = (low | _bits(raw[..., 128:192], 2, 32) << 4).astype(np.int8) - np.int8(32)
    scales = np.ascontiguousarray(raw[..., 192:208]).view(np.int8).astype(np.float32) * _f16(raw[..., 208:])
    form = int8_f32_16.GROUPED
    return form.scaled(scales.reshape(len(raw), -1, 1), numbers.reshape(len(raw), -1, form.group))


_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The values of IQ4's numbers."""


def _iq4(raw: np.ndarray) -> np.ndarray:
    """Unpack u8 `[..., n]` to the values of the numbers, i8 `[..., 2 n]`."""
    return np.array(_IQ4, np.int8)[_nibbles(raw, 16)]


def _iq4_nl(raw: np.ndarray) -> np.ndarray:
    """D f16, numbers: d t[q]. With their values in place of numbers it is Q8_0."""
    return (
        np.concatenate([raw[..., :2], _iq4(raw[..., 2:]).view(np.uint8)], axis=-1).reshape(len(raw), -1).view(np.int8)
    )


def _iq4_xs(raw: np.ndarray) -> np.ndarray:
    """D f16, pairs of high bits and low nibbles of eight scales s, numbers: d (s - 32) t[q]."""
    low = _nibbles(raw[..., 4:8], 1)
    scales = (low | _bits(raw[..., 2:4], 2, 1) << 4).astype(np.float32) - 32
    scale = (scales * _f16(raw[..., :2])).reshape(len(raw), -1)
    return _stored8(scale, np.zeros_like(scale), _iq4(raw[..., 8:]))


def _mxfp4(raw: np.ndarray) -> np.ndarray:
    """E u8, numbers: 2^(e - 127) t[q], `t` that of our format."""
    return mxfp4.stored(raw[..., 0], _nibbles(raw[..., 1:], 16).reshape(*raw.shape[:-1], GROUP))


TYPES: Mapping[int, BlockType] = {
    0: BlockType("F32", "f32", 4),
    1: BlockType("F16", "f16", 2),
    2: BlockType("Q4_0", "int4_f32", 18, 32, (0, 2), _q4_0),
    3: BlockType("Q4_1", "int4_f32", 20, 32, (0, 4), _q4_1),
    6: BlockType("Q5_0", "int8_f32", 22, 32, (0, 2), _q5_0),
    7: BlockType("Q5_1", "int8_f32", 24, 32, (0, 4), _q5_1),
    8: BlockType("Q8_0", "int8", 34, 32, (0, 2), _q8_0),
    12: BlockType("Q4_K", "int4_f32", 144, 256, (0, 4), _q4_k),
    13: BlockType("Q5_K", "int8_f32", 176, 256, (0, 4), _q5_k),
    14: BlockType("Q6_K", "int8_f32_16", 210, 256, (208, 210), _q6_k),
    20: BlockType("IQ4_NL", "int8", 18, 32, (0, 2), _iq4_nl),
    23: BlockType("IQ4_XS", "int8_f32", 136, 256, (0, 2), _iq4_xs),
    30: BlockType("BF16", "bf16", 2),
    39: BlockType("MXFP4", "mxfp4", 17, 32, (0, 1), _mxfp4),
}
"""Types by ggml's number."""

REFUSED: Mapping[int, str] = {
    **{9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S"},
    **{21: "IQ3_S", 22: "IQ2_S", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4"},
}
"""Names of types that are not read, for messages."""
