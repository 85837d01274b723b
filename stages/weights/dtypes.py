"""Names of element types in C++ and in MLIR."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Dtype:
    """An element type's names. Its size and its name in safetensors are in `llama_npu2.artifact.dtypes`."""

    c: str
    mlir: str


DTYPES: Mapping[str, Dtype] = {
    "bf16": Dtype("bf16", "bf16"),
    "f32": Dtype("float", "f32"),
    "i32": Dtype("int32_t", "i32"),
    "i8": Dtype("int8_t", "i8"),
}
