"""What the elements of a buffer are called in C++ and in MLIR."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Dtype:
    """What the elements of a buffer are called elsewhere. Their size is said by the runtime (`llama_npu2.dtypes`), and
    so is what safetensors call them."""

    c: str
    mlir: str


DTYPES: Mapping[str, Dtype] = {
    "bf16": Dtype("bf16", "bf16"),
    "f32": Dtype("float", "f32"),
    "i32": Dtype("int32_t", "i32"),
    "i8": Dtype("int8_t", "i8"),
}
