"""What every launch of a run read and wrote, taken from a trace as tensors in plain layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from llama_npu2 import Llama
from llama_npu2.artifact.plan import FROM_POSITION, Phase
from llama_npu2.engine.chunks import Chunk
from llama_npu2.engine.trace import TracedCall
from stages.kernels import Arg
from stages.kernels.append_kv import rows_of_panels
from stages.kernels.unpacking import written_part
from stages.model.reference import HALVES
from stages.proof.diagnosis.sites import Site
from stages.weights.formats import bfp16, formats

STALE = 0x44
"""Every byte of the caches before a run, so that a row that should have been written shows: 785 as bf16, 68 as i8.
Finite, because kernels multiply what they mask by zero."""

Values = dict[str, np.ndarray]


@dataclass(frozen=True)
class Sample:
    """A launch in one call of `rows` tokens from `position` on. `values`: by the kernel's arguments, without weights
    and tables; of what goes into a cache the new rows, of a cache that is read the values of all up to the last, as `k`
    and `v`, f32 or bf16 `[positions, kv_heads * head_dim]`."""

    rows: int
    position: int
    values: Values


@dataclass
class Recorder:
    """A `trace.Watch`. `dimensions`: of the model. `tables`: those that launches read, by buffer."""

    sites: Mapping[Phase, Sequence[Sequence[Site]]]
    dimensions: Mapping[str, Any]
    samples: dict[Site, list[Sample]] = field(default_factory=dict)
    tables: Values = field(default_factory=dict)
    _at: dict[Phase, int] = field(default_factory=dict)

    def __call__(self, call: TracedCall) -> None:
        of_phase = self.sites[call.phase]
        at = self._at.get(call.phase, 0)
        self._at[call.phase] = (at + 1) % len(of_phase)
        for site in of_phase[at]:
            values: Values = {}
            for arg in site.kernel.args:
                role = call.role(site.names[arg.name])
                if role == "table":
                    self.tables.setdefault(site.buffers[arg.name], call[site.names[arg.name]])
                elif role != "weight":
                    values |= self._values(site, arg, call)
            self.samples.setdefault(site, []).append(Sample(call.rows, call.position, values))

    def sizes(self, site: Site, rows: int, position: int) -> dict[str, Any]:
        """Values of dimensions in a call."""
        return {**self.dimensions, "seq": rows, "pos": position, "max_seq": position + rows, "window": site.window or 0}

    def _values(self, site: Site, arg: Arg, call: TracedCall) -> Values:
        slot, held = site.slots[arg.name], call.view(site.names[arg.name])
        if slot.keeps:
            return self._of_cache(site, arg, call, held)
        sizes = self.sizes(site, call.rows, call.position)
        shape = tuple(int(sizes[dim]) if isinstance(dim, str) else dim for dim in slot.shape)
        form, layout = formats()[slot.format], arg.layout(site.kernel_set)
        if slot.format != bfp16.FORMAT.name:
            return {arg.name: self._part(site, arg, form.layout(layout).unpack(held, shape).copy())}
        # Its values are bf16's.
        return {arg.name: self._part(site, arg, form.unpack(held, layout, shape).astype(bfloat16))}

    @staticmethod
    def _part(site: Site, arg: Arg, values: np.ndarray) -> np.ndarray:
        """What a launch writes of a matrix where it does not write all."""
        scalars = site.launch.scalars
        whole = "apart" not in scalars or not arg.written
        return values if whole else written_part(values, scalars).reshape(-1, values.shape[-1])

    def _of_cache(self, site: Site, arg: Arg, call: TracedCall, held: np.ndarray) -> Values:
        sizes, until = self.dimensions, call.position + call.rows
        if arg.name.endswith("_panels"):
            return self._of_panels(site, arg, call, until)
        rows = held.reshape(-1, sizes["kv_heads"], 2, sizes["head_dim"])
        if not arg.written:
            return {which: rows[:until, :, half].reshape(until, -1).copy() for half, which in enumerate("kv")}
        # New rows may be a slot of their own.
        first = 0 if site.slots[arg.name].view == FROM_POSITION else call.position
        new = rows[first : first + call.rows]
        return {arg.name: new[:, :, HALVES.get(site.base, slice(0, 2))].copy()}

    def _of_panels(self, site: Site, arg: Arg, call: TracedCall, until: int) -> Values:
        """Both caches are taken apart at once, when the first is asked for."""
        if arg.name != "k_panels":
            return {}
        k, v = (call.view(site.names[f"{which}_panels"]) for which in "kv")
        first = call.position if arg.written else 0
        rows = rows_of_panels(k, v, self.dimensions["head_dim"], until, site.format)
        names = [f"{which}_panels" if arg.written else which for which in "kv"]
        return {name: each[first:].reshape(until - first, -1) for name, each in zip(names, rows, strict=True)}

    def states(self) -> dict[int, dict[int, np.ndarray]]:
        """Outputs of layers: by layer from 0 and position, f32 `[emb]`."""
        found: dict[int, dict[int, np.ndarray]] = {}
        for site, samples in self.samples.items():
            if (arg := site.ends_layer) and site.layer is not None:
                for sample in samples:
                    rows = np.atleast_2d(sample.values[arg]).astype(np.float32)
                    found.setdefault(site.layer, {}).update(enumerate(rows, sample.position))
        return found


def run(llm: Llama, recorder: Recorder, ids: Sequence[int], tokens: int, chunks: Sequence[Chunk] = ()) -> list[int]:
    """A prompt, in `chunks` where they are said, and greedily as many tokens behind it, recorded; returns the ids of
    all. What runs before left in the caches is not there; on an NPU, whose caches the host does not write, that is so
    for the first run alone."""
    llm.reset()
    if llm.manifest.target["device"] != "xrt":
        for name in _caches(llm):
            llm.memory.array(name)[: len(ids) + tokens].view(np.uint8)[...] = STALE
    text = list(ids)
    with llm.trace(recorder):
        logits = llm.prefill(text, chunks)
        for _ in range(tokens):
            text.append(int(np.argmax(logits)))
            logits = llm.decode(text[-1])
    return text


def _caches(llm: Llama) -> Iterator[str]:
    return (name for name, spec in llm.manifest.buffers.items() if spec["kind"] == "cache")
