"""Programs of kernels for the NPU in shapes that models have."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from stages import air
from stages.kernels import (
    Tiling,
    bias,
    elementwise,
    flash_attention,
    gemm,
    gemv,
    kernels,
    rms_norm,
    rope,
    short_conv,
    token_attention,
)
from stages.kernels.tokens import Tokens

TILINGS: dict[str, Callable[[], Tiling]] = {
    "add rows": lambda: elementwise.tile("add", 128, 960),
    "add vector": lambda: elementwise.tile("add", 1, 576),
    "silu": lambda: elementwise.tile("silu_and_mul", 512, 5632),
    "rms_norm": lambda: rms_norm.tile(2048, 3072, rms_norm.Norm(1e-5)),
    "norm added": lambda: rms_norm.tile(512, 2560, rms_norm.Norm(1e-6, offset=1.0, once=1), adds=True),
    "norm added to a row": lambda: rms_norm.tile(1, 1152, rms_norm.Norm(1e-6, offset=1.0, once=1), adds=True),
    "rope": lambda: rope.tile(128, 24, 128),
    "rope into KV": lambda: rope.tile(128, 3, 64, rope.KEYS),
    "rope of queries": lambda: rope.tile(128, 3, 64, rope.QUERIES),
    "short convolution": lambda: short_conv.tile(512, 2048, 3),
    "short convolution of a row": lambda: short_conv.tile(1, 1536, 3),
    "rope of norms": lambda: rope.tile(512, 16, 128, rope.QUERIES, rms_norm.Norm(1e-6)),
    "rope of norms into KV": lambda: rope.tile(128, 8, 128, rope.KEYS, rms_norm.Norm(1e-6)),
    "rope of norms of a token": lambda: rope.tile(1, 16, 128, norm=rms_norm.Norm(1e-6)),
    "token attention of norms": lambda: token_attention.tile(512, 16, 8, 128, rms_norm.Norm(1e-6)),
    "rope into KV in 8 bits": lambda: rope.tile(128, 8, 64, rope.KEYS, stored="int8_rows"),
    "token attention in 8 bits": lambda: token_attention.tile(512, 32, 8, 64, stored="int8_rows"),
    "attention in 8 bits": lambda: flash_attention.tile(512, 32, 8, 64, 4096, "int8_rows"),
    "attention of tokens": lambda: token_attention.several(token_attention.tile(512, 32, 8, 64), Tokens(4)),
    "attention of tokens in a column": lambda: token_attention.several(token_attention.tile(512, 4, 2, 64), Tokens(4)),
    "attention of two tokens": lambda: token_attention.several(token_attention.tile(512, 32, 8, 64), Tokens(2)),
    "attention of eight tokens": lambda: token_attention.several(token_attention.tile(512, 9, 3, 64), Tokens(8)),
    "attention of tokens of norms": lambda: token_attention.several(
        token_attention.tile(512, 16, 8, 128, rms_norm.Norm(1e-6)), Tokens(4)
    ),
    "gemv": lambda: gemv.tile(576, 576),
    "gemv wide": lambda: gemv.tile(2048, 8192),
    "vocabulary": lambda: gemv.tile(49152, 960, "f32", blocked=False),
    "gemm": lambda: gemm.tile(2048, 3072, 3072),
    "gemm into KV": lambda: gemm.tile(512, 960, 320, head_dim=64),
    "gemm wide": lambda: gemm.tile(2048, 8192, 2048),
    "gemm, bias": lambda: bias.biased(gemm.tile(512, 896, 896), 512, 896),
    "gemm into KV, bias": lambda: bias.biased(gemm.tile(128, 896, 128, 64), 128, 128, 64),
    "gemv, bias": lambda: bias.biased(gemv.tile(256, 1536), 1, 256),
    "attention": lambda: flash_attention.tile(2048, 32, 8, 64),
    "attention over a window": lambda: flash_attention.tile(128, 32, 8, 64, 4096),
    "attention 128": lambda: flash_attention.tile(2048, 24, 8, 128),
    "attention, many KV heads": lambda: flash_attention.tile(512, 32, 32, 64),
    "attention, wide groups": lambda: flash_attention.tile(512, 32, 4, 64),
}


def _program(name: str) -> air.AirModule:
    tiling = TILINGS[name]()  # its text begins with its kernel
    build = kernels()[str(tiling).split()[0]].program
    assert build is not None
    return build(tiling)


PROGRAMS: dict[str, Callable[[], air.AirModule]] = {name: partial(_program, name) for name in TILINGS}


def norm_twice() -> air.AirModule:
    """Two object variants in one function."""
    parts = [rms_norm.build(rms_norm.tile(rows, 64, rms_norm.Norm(1e-5))) for rows in (1, 32)]
    wirings = [{name: f"{name}{n}" for name in ("x", "weight", "out")} for n in range(2)]
    slots = [slot for wiring in wirings for slot in wiring.values()]
    return air.stitch("norm_twice", slots, list(zip(parts, wirings, strict=True)))
