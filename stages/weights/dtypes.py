"""What the elements of a buffer are called in C++, in MLIR and in safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Dtype:
    """What the elements of a buffer are called elsewhere. Their size is said by the runtime (`llama_npu2.dtypes`)."""

    c: str
    mlir: str
    safetensors: str


DTYPES: Mapping[str, Dtype] = {
    "bf16": Dtype("bf16", "bf16", "BF16"),
    "f32": Dtype("float", "f32", "F32"),
    "i32": Dtype("int32_t", "i32", "I32"),
    "i8": Dtype("int8_t", "i8", "I8"),
}
