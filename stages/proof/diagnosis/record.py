"""Record what every launch of a run reads and writes, taken from a trace as tensors in plain layout."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from llama_npu2 import Llama, UserError
from llama_npu2.artifact.plan import FROM_POSITION, Phase
from llama_npu2.engine.chunks import Chunk
from llama_npu2.engine.row_logits import logits_phase
from llama_npu2.engine.trace import TracedCall
from llama_npu2.frozen import frozen
from stages.kernels import HOST_SET, Arg, kv_rows
from stages.kernels.append_kv import rows_of_panels
from stages.kernels.unpacking import written_part
from stages.model.part import HISTORY
from stages.model.reference import HALVES
from stages.proof.diagnosis.ops import Op
from stages.weights.formats import bfp16, formats

STALE = 0x44
"""Every byte of the caches before a run, so that a row that is not written shows: 785 as bf16, 68 as i8. It is finite,
because kernels multiply what they mask by zero."""

Values = dict[str, np.ndarray]


@frozen
class Sample:
    """A launch in one call of `rows` tokens from `position` on."""

    rows: int
    position: int
    values: Values
    """Values of the kernel's arguments, without weights and tables: of a history, the rows that the call sees and those
    that it adds; of another cache that is written, the new rows; of one
    that is read, all rows up to the last as `k` and `v`, f32 or bf16 `[positions, kv_heads * head_dim]`."""


@dataclass
class Recorder:
    """A `trace.Watch` that keeps samples of all launches."""

    ops: Mapping[Phase, Sequence[Sequence[Op]]]
    dimensions: Mapping[str, Any]
    """The model's."""
    samples: dict[Op, list[Sample]] = field(default_factory=dict)
    tables: Values = field(default_factory=dict)
    """Tables that launches read, by buffer."""
    _at: dict[Phase, int] = field(default_factory=dict)

    def __call__(self, call: TracedCall) -> None:
        of_phase = self.ops[call.phase]
        at = self._at.get(call.phase, 0)
        self._at[call.phase] = (at + 1) % len(of_phase)
        for op in of_phase[at]:
            values: Values = {}
            for arg in op.kernel.args:
                role = call.role(op.names[arg.name])
                if role == "table":
                    self.tables.setdefault(op.buffers[arg.name], call[op.names[arg.name]])
                elif role != "weight":
                    values |= self._values(op, arg, call)
            self.samples.setdefault(op, []).append(Sample(call.rows, call.position, values))

    def sizes(self, op: Op, rows: int, position: int) -> dict[str, Any]:
        """Return the value of each dimension in a call."""
        return {**self.dimensions, "seq": rows, "pos": position, "max_seq": position + rows, "window": op.window or 0}

    def _values(self, op: Op, arg: Arg, call: TracedCall) -> Values:
        slot, content = op.slots[arg.name], call.view(op.names[arg.name])
        if slot.keeps:
            return self._of_cache(op, arg, call, content)
        sizes = self.sizes(op, call.rows, call.position)
        shape = tuple(int(sizes[dim]) if isinstance(dim, str) else dim for dim in slot.shape)
        form, layout = formats()[slot.format], arg.layout(op.kernel_set)
        if slot.format != bfp16.FORMAT.name:
            return {arg.name: self._part(op, arg, form.layout(layout).unpack(content, shape).copy())}
        # Block floating point comes from bf16 values.
        return {arg.name: self._part(op, arg, form.unpack(content, layout, shape).astype(bfloat16))}

    @staticmethod
    def _part(op: Op, arg: Arg, values: np.ndarray) -> np.ndarray:
        """Return the part of a matrix that a launch writes."""
        scalars = op.launch.scalars
        complete = "apart" not in scalars or not arg.written
        return values if complete else written_part(values, scalars).reshape(-1, values.shape[-1])

    def _of_cache(self, op: Op, arg: Arg, call: TracedCall, content: np.ndarray) -> Values:
        sizes, until = self.dimensions, call.position + call.rows
        if op.slots[arg.name].keeps == HISTORY:
            # The array sees it from the call's first position on.
            first = call.position if op.kernel_set == HOST_SET else 0
            rows = content.reshape(-1, sizes["emb"])[first:]
            return {arg.name: rows[: call.rows + sizes["taps"] - 1].copy()}
        if arg.name.endswith("_panels"):
            return self._of_panels(op, arg, call, until)
        stored = op.slots[arg.name].format
        rows = content.reshape(-1, sizes["kv_heads"], 2, kv_rows.half_elements(sizes["head_dim"], stored))
        if not arg.written:
            # Of positions before a view nothing is seen.
            before = call.first_row(op.names[arg.name])
            read = np.zeros((until, *rows.shape[1:]), rows.dtype)
            read[before:] = rows[: until - before]
            values = kv_rows.held(read, stored)
            return {which: values[:, :, half].reshape(until, -1) for half, which in enumerate("kv")}
        # New rows may have an argument of their own.
        first = 0 if op.slots[arg.name].view == FROM_POSITION else call.position
        new = kv_rows.held(rows[first : first + call.rows], stored)
        return {arg.name: new[:, :, HALVES.get(op.operation, kv_rows.BOTH)].copy()}

    def _of_panels(self, op: Op, arg: Arg, call: TracedCall, until: int) -> Values:
        """Unpack both caches at once, when the first is asked for."""
        if arg.name != "k_panels":
            return {}
        k, v = (call.view(op.names[f"{which}_panels"]) for which in "kv")
        first = call.position if arg.written else 0
        rows = rows_of_panels(k, v, self.dimensions["head_dim"], until, op.format)
        names = [f"{which}_panels" if arg.written else which for which in "kv"]
        return {name: each[first:].reshape(until - first, -1) for name, each in zip(names, rows, strict=True)}

    def histories(self) -> set[str]:
        """Return the buffers of histories."""
        ops = (op for of_phase in self.ops.values() for call in of_phase for op in call)
        return {op.buffers[arg] for op in ops for arg, slot in op.slots.items() if slot.keeps == HISTORY}

    def states(self) -> dict[int, dict[int, np.ndarray]]:
        """Return outputs of layers f32 `[emb]`, by layer from 0 and position."""
        states: dict[int, dict[int, np.ndarray]] = {}
        for op, samples in self.samples.items():
            if (arg := op.ends_layer) and op.layer is not None:
                for sample in samples:
                    rows = np.atleast_2d(sample.values[arg]).astype(np.float32)
                    states.setdefault(op.layer, {}).update(enumerate(rows, sample.position))
        return states


def record(llm: Llama, recorder: Recorder, ids: Sequence[int], tokens: int, chunks: Sequence[Chunk] = ()) -> list[int]:
    """Run and record a prompt, decode `tokens` tokens after it greedily, and compute the logits of all of that at once.

    Caches hold stale bytes before, except on an NPU, whose caches the host does not write: there an earlier run's rows
    stay.

    Args:
        chunks: The prompt's chunks, instead of the runtime's own.

    Returns:
        The ids of the prompt and of all tokens.
    """
    llm.reset()
    if llm.manifest.target["device"] != "xrt":
        histories, taps = recorder.histories(), recorder.dimensions["taps"]
        for name in _caches(llm):
            # What comes before the first position in a history is zeros.
            first = taps - 1 if name in histories else 0
            llm.memory.array(name)[first : first + len(ids) + tokens].view(np.uint8)[...] = STALE
    text = list(ids)
    with llm.trace(recorder):
        logits = llm.prefill(text, chunks)
        for _ in range(tokens):
            text.append(int(np.argmax(logits)))
            logits = llm.decode(text[-1])
        if logits_phase(llm.manifest) and len(text) > 2:
            with contextlib.suppress(UserError):  # logits that are no numbers have no scores, but all is recorded
                llm.score(text)
    return text


def _caches(llm: Llama) -> Iterator[str]:
    return (name for name, spec in llm.manifest.buffers.items() if spec["kind"] == "cache")
