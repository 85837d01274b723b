"""The host programs of the NPU targets in numpy, for a machine on which the native ones cannot be loaded.

Arithmetic is f32; results are rounded to bf16 where the native kernels round. Slower, and nothing else is different.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from llama_npu2.artifact.dtypes import DTYPES
from llama_npu2.artifact.storage import File
from llama_npu2.devices import Binding, Call, Declared, HostBuffer
from llama_npu2.devices.spans import Recorder, Timer
from llama_npu2.errors import UserError

Arrays = Mapping[str, np.ndarray]
Model = Mapping[str, Any]
"""Section `model` of the manifest."""

_ROWS_AT_ONCE = 4096
"""Of the vocabulary matrix: widened to f32 it would take twice its memory."""


def wide(x: np.ndarray) -> np.ndarray:
    """bf16 -> f32. Several times faster than `astype`."""
    return (x.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def embed_token_rows(slots: Arrays, pos: int, model: Model) -> None:
    """`tokens` i32 `[seq]`, `w_embed` bf16 `[vocab, emb]` -> `x` bf16 `[seq, emb]`; zeros for what is no token."""
    tokens, table = slots["tokens"], slots["w_embed"]
    known = (tokens >= 0) & (tokens < len(table))
    slots["x"][:] = np.where(known[:, None], table[np.where(known, tokens, 0)], bfloat16(0))


def decode_attn_kv(slots: Arrays, pos: int, model: Model) -> None:
    """Put `k`, `v` bf16 `[kv_dim]` into row `pos` of `kv` bf16 `[positions, kv_heads, 2, head_dim]`, then attend over
    rows 0 to `pos`: `q` -> `attn_out`, bf16 `[heads * head_dim]`."""
    kv_heads, head_dim = model["kv_heads"], model["head_dim"]
    cache = slots["kv"].reshape(-1, kv_heads, 2, head_dim)
    for i, new in enumerate(("k", "v")):
        cache[pos, :, i] = slots[new].reshape(kv_heads, head_dim)
    k, v = (wide(cache[: pos + 1, :, i]).transpose(1, 0, 2) for i in (0, 1))
    q = wide(slots["q"]).reshape(kv_heads, -1, head_dim)
    scores = (q @ k.transpose(0, 2, 1)) * np.float32(head_dim**-0.5)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    out = wide(weights.astype(bfloat16)) @ v / weights.sum(axis=-1, keepdims=True)
    slots["attn_out"][:] = out.reshape(-1)


def final_norm(slots: Arrays, pos: int, model: Model) -> None:
    """RMS norm: `x`, `final_norm_w` bf16 `[emb]` -> `normed` bf16 `[emb]`."""
    x = wide(slots["x"])
    scale = 1 / np.sqrt(np.mean(x * x) + np.float32(model["eps"]))
    slots["normed"][:] = wide((x * scale).astype(bfloat16)) * wide(slots["final_norm_w"])


def lm_head_rows(slots: Arrays, pos: int, model: Model) -> None:
    """`w_vocab` bf16 `[vocab, emb]` @ `x` bf16 `[emb]` -> `logits` f32 `[vocab]`."""
    weight, x = slots["w_vocab"], wide(slots["x"])
    for row in range(0, len(weight), _ROWS_AT_ONCE):
        part = slice(row, row + _ROWS_AT_ONCE)
        slots["logits"][part] = wide(weight[part]) @ x


HostProgram = Callable[[Arrays, int, Model], None]
PROGRAMS: dict[str, HostProgram] = {
    program.__name__: program for program in (embed_token_rows, decode_attn_kv, final_norm, lm_head_rows)
}

_DTYPES = {"tokens": "i32", "logits": "f32"}
"""Of slots; the others are bf16."""
_SLOTS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "embed_token_rows": {"tokens": ("seq",), "w_embed": ("vocab", "emb"), "x": ("seq", "emb")},
    "decode_attn_kv": {
        **{"q": ("q_dim",), "k": ("kv_dim",), "v": ("kv_dim",)},
        **{"kv": ("max_seq", "kv_pair_dim"), "attn_out": ("q_dim",)},
    },
    "final_norm": {"x": ("emb",), "final_norm_w": ("emb",), "normed": ("emb",)},
    "lm_head_rows": {"x": ("emb",), "w_vocab": ("vocab", "emb"), "logits": ("vocab",)},
}
"""Of each program, in order, and their shapes in sizes of the model."""


class NumpyDevice:
    """The device interface for host programs."""

    description = "numpy"

    def __init__(self, model: Model) -> None:
        self._model = model
        self._timed = Timer()

    def alloc(self, nbytes: int, host: bool = True) -> HostBuffer:
        return HostBuffer(np.zeros(nbytes, np.uint8))

    def load_weights(self, file: File, offset: int, nbytes: int, host: bool = True) -> HostBuffer:
        """Mapped, not read."""
        return HostBuffer(np.memmap(file.container, np.uint8, "r", file.start + offset, (nbytes,)))

    def array(self, buffer: HostBuffer, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
        return buffer.bytes.view(dtype).reshape(shape)

    def load_program(self, file: File, entry: str, host: bool = True) -> HostProgram:
        weights = self._model.get("weights", "bf16")
        if entry not in PROGRAMS or weights != "bf16":
            what = f"program {entry}" + ("" if weights == "bf16" else f" for weights in {weights}")
            raise UserError(f"{file.path}: {what} exists only natively: rebuild it here with doit compile")
        return PROGRAMS[entry]

    def declared(self, program: HostProgram) -> Declared:
        model = self._model
        q_dim, kv_dim = (model[heads] * model["head_dim"] for heads in ("heads", "kv_heads"))
        known = {
            **model,
            "q_dim": q_dim,
            "kv_dim": kv_dim,
            "kv_pair_dim": 2 * kv_dim,
            "seq": "seq",
            "max_seq": "max_seq",
        }
        return Declared(
            [
                {"name": name, "shape": [known[size] for size in shape], "dtype": _DTYPES.get(name, "bf16")}
                for name, shape in _SLOTS[program.__name__].items()
            ]
        )

    def prepare(self, calls: Sequence[Call]) -> NumpySubmission:
        return NumpySubmission(self._model, calls, self._timed)

    def record(self, recorder: Recorder | None) -> None:
        self._timed.recorder = recorder

    def close(self) -> None:
        """Holds nothing."""


class NumpySubmission:
    def __init__(self, model: Model, calls: Sequence[Call], timed: Timer) -> None:
        self._model, self._calls, self._timed = model, calls, timed

    def run(self, seq: int, pos: int) -> None:
        for call in self._calls:
            bound = zip(call.slots, call.bindings, strict=True)
            slots = {slot["name"]: _slot(slot, binding, seq, pos) for slot, binding in bound}
            self._timed("program", call.name, call.program, slots, pos, self._model, about=call.about)

    def suspend(self) -> None:
        """Holds nothing that is scarce."""


def _slot(slot: Mapping[str, Any], binding: Binding, seq: int, pos: int) -> np.ndarray:
    """A slot as an array: `seq` rows where its shape says so, all that the buffer has where it says `max_seq`."""
    items = binding.buffer.bytes[binding.offset(seq, pos) :].view(DTYPES[slot["dtype"]])
    if "max_seq" in slot["shape"]:
        return items
    shape = [seq if dim == "seq" else dim for dim in slot["shape"]]
    return items[: math.prod(shape)].reshape(shape)
