"""Faults of a device that diagnosis has to name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from llama_npu2 import Llama
from llama_npu2.artifact.plan import Phase
from llama_npu2.devices import Submission
from stages.graph import Build
from stages.proof.diagnosis.ops import Op, ops

Change = Callable[[np.ndarray], None]


def sign(values: np.ndarray) -> None:
    values[..., 1] *= -1


def index(values: np.ndarray) -> None:
    values[...] = np.roll(values, 1, axis=-1)


def not_a_number(values: np.ndarray) -> None:
    values[...] = np.nan


def scale(values: np.ndarray) -> None:
    values *= values.dtype.type(1 + 2**-6)


def rounding(values: np.ndarray) -> None:
    """Half of what is rounded to the nearest is cut off to the number below."""
    lower = np.arange(values.size).reshape(values.shape) % 2
    values.view(np.uint16)[...] -= (lower * (values != 0)).astype(np.uint16)


@dataclass(frozen=True)
class Fault:
    """A change of the values that one launch of one call left in a slot."""

    change: Change
    phase: str
    kernel: str
    layer: int | None

    def __str__(self) -> str:
        return f"{self.change.__name__}: {self.kernel} in {self.phase}"

    def __call__(self, build: Build, llm: Llama) -> Op:
        """Makes it; returns where it is."""
        phase = Phase.parse(self.phase)
        of_phase = ops(build, llm.manifest)[phase]
        op = next(s for call in of_phase for s in call if (s.kernel.name, s.layer) == (self.kernel, self.layer))
        slot = next(slot for slot in llm.manifest.programs[op.program]["slots"] if slot["name"] == self.slot(op))
        memory, calls = llm.unaliased
        prepare, call = llm.device.prepare, calls[phase][op.call]
        buffer = memory.array(op.buffers[op.written[0].name])

        def prepared(calls: list[Any]) -> Submission:
            made = prepare(calls)
            return Tampered(made, self.change, buffer, slot["shape"]) if calls[0] is call else made

        llm.device.prepare = prepared
        return op

    def slot(self, op: Op) -> str:
        return op.names[op.written[0].name]


@dataclass(frozen=True)
class Tampered:
    """A submission of one call, behind which a buffer is changed: the rows of a call in plain layout."""

    made: Submission
    change: Change
    buffer: np.ndarray
    shape: list[int | str]

    def run(self, seq: int, pos: int) -> None:
        self.made.run(seq, pos)
        shape = [seq if size == "seq" else int(size) for size in self.shape]
        values = self.buffer.reshape(-1)[: int(np.prod(shape))].reshape(shape)
        self.change(values)

    def suspend(self) -> None:
        self.made.suspend()


ON_HOST = [
    Fault(sign, "prefill", "gemm_silu", 1),
    Fault(sign, "decode", "rope", 1),
    Fault(index, "prefill", "flash_attention_panels", 1),
    Fault(index, "decode", "gemv_qkv", 0),
    Fault(scale, "prefill", "rms_norm", 1),
    Fault(scale, "decode", "decode_attention_panels", 1),
    Fault(rounding, "prefill", "gemm_add", 1),
    Fault(rounding, "decode", "gemv_silu", 1),
    Fault(rounding, "prefill", "flash_attention_panels", 0),
    Fault(rounding, "decode", "decode_attention_panels", 1),
]


ON_ARRAY = [
    Fault(sign, "prefill@64", "silu_and_mul", 2),
    Fault(index, "prefill@64", "flash_attention", 1),
    Fault(scale, "decode", "add", 3),
    Fault(rounding, "decode", "gemv", 2),
]
