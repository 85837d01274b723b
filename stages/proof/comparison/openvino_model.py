"""Convert a GGUF file to OpenVINO's own format, with weights in 4 or 8 bits, and run it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from llama_npu2.errors import UserError, first_line

PLAIN = "F16"
"""The format of the GGUF files that OpenVINO reads, and of the models that it makes of them."""
INT4, INT8 = "INT4", "INT8"
"""Weights as `optimum-cli export openvino --weight-format` stores them."""
WIDE = "activations=16-bit"
"""The switch that keeps OpenVINO from rounding activations to 8 bits, as it does for weights of 4 and 8 bits."""

_MODEL = "openvino_model.xml"


def convert(gguf: Path, directory: Path) -> None:
    """Convert a GGUF file in f16 to a model in f16.

    Raises UserError for a model that OpenVINO does not read.
    """
    import openvino_genai

    with TemporaryDirectory(dir=directory.parent) as temporary:
        # The pipeline saves its model beside the file, then fails for want of a tokenizer, which is not needed here.
        made = Path(temporary, "made")
        made.mkdir()
        (made / "model.gguf").symlink_to(gguf.absolute())
        try:
            openvino_genai.LLMPipeline(str(made / "model.gguf"), "CPU", enable_save_ov_model=True)
        except Exception as error:  # whatever the library raises
            if not (made / _MODEL).exists():
                why = first_line(error)
                raise UserError(f"peers=openvino: OpenVINO does not read this model: {why}: leave it out") from None
        made.rename(directory)


def compress(source: Path, directory: Path, kind: str) -> None:
    """Round the weights of a converted model.

    Args:
        kind: `INT4`: layers in 4 bits, 128 weights with a scale and a zero point, embedding and head in 8 bits.
            `INT8`: all in 8 bits, a scale and a zero point for each row.
    """
    import nncf
    import openvino

    nncf.set_log_level(logging.ERROR)
    modes = nncf.CompressWeightsMode
    options = {"mode": modes.INT4_ASYM, "group_size": 128, "ratio": 1.0} if kind == INT4 else {"mode": modes.INT8_ASYM}
    model = nncf.compress_weights(openvino.Core().read_model(source / _MODEL), **options)
    with TemporaryDirectory(dir=directory.parent) as temporary:
        openvino.save_model(model, Path(temporary, "made", _MODEL))
        Path(temporary, "made").rename(directory)


def token_bytes(directory: Path, tied: bool, vocab: int) -> int:
    """Return the bytes of weights that OpenVINO reads to decode a token.

    Args:
        tied: Whether the head's weights are the embedding's. Of an embedding alone a token reads one row.
    """
    import openvino

    operations = openvino.Core().read_model(directory / _MODEL).get_ops()
    sizes = [(op.get_byte_size(), op.shape) for op in operations if op.get_type_name() == "Constant"]
    # The embedding and the head are stored alike.
    unread = 0 if tied else sum(size for size, shape in sizes if len(shape) > 1 and shape[0] == vocab) // 2
    return sum(size for size, _ in sizes) - unread


class OpenVino:
    """OpenVINO on the CPU with its default settings, but for the number of threads.

    The switch `WIDE` keeps activations in 16 or 32 bits. The context has no bound of its own.
    """

    def __init__(self, directory: Path, threads: int, context: int, *switches: str) -> None:
        import openvino

        settings: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads}
        if WIDE in switches:
            settings["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = 0
        self._request = openvino.Core().compile_model(directory / _MODEL, "CPU", settings).create_infer_request()
        self._ids: list[int] = []

    def rewind(self, depth: int) -> None:
        """Process the first `depth` tokens of the context again."""
        kept, self._ids = self._ids[:depth], []
        self._request.reset_state()
        if kept:
            self.step(kept)

    def step(self, ids: Sequence[int]) -> np.ndarray:
        """Append tokens; returns float32 logits `[vocab]` of the last one."""
        before = len(self._ids)
        self._ids += ids
        after = len(self._ids)
        given = {
            "input_ids": np.array([list(ids)], np.int64),
            "attention_mask": np.ones((1, after), np.int64),
            "position_ids": np.arange(before, after, dtype=np.int64)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        logits: np.ndarray = self._request.infer(given)["logits"][0, -1]
        return logits.copy()
