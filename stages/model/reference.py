"""Computes parts and plans in numpy, by the kernels' references, wired as the parts describe.

Tensors are in plain layout. A KV cache is `[positions, kv_heads, 2, half_elements]` (`stages.kernels.kv_rows`), NaN
where nothing was written.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

from llama_npu2.artifact.plan import LAST_ROW, BufferRef, Phase, PlannedCall, Plans
from stages.engine.lazy import ml_dtypes, np
from stages.kernels import Kernel, kv_rows
from stages.kernels.unpacking import written_part
from stages.model.grouping import Program
from stages.model.part import HISTORY, Dim, Launch, Slot

Values = dict[str, "np.ndarray"]
Sizes = Mapping[str, Any]
"""Dimensions by name (`Config.dimensions`), with the run's `seq` and `pos`."""

HALVES = {
    **dict.fromkeys(("rope_kv", "norm_rope_kv"), kv_rows.KEYS),
    **dict.fromkeys(("gemm_kv", "gemm_kv_bias", "append_v"), kv_rows.VALUES),
    **dict.fromkeys(("token_attention", "norm_token_attention"), kv_rows.BOTH),
}
"""Operations whose last result goes to rows of an interleaved cache -> the halves of each head that it goes to: 0 is K,
1 is V."""


def evaluate(program: Program, sizes: Sizes, values: Values) -> None:
    """Run the launches of a program's parts. `values`, by slot, has what they read, and gets what they write."""
    for part, wired in zip(program.parts, program.wiring, strict=True):
        for launch in part.launches:
            run_launch(launch, {arg: wired[slot] for arg, slot in launch.args.items()}, sizes, values)


def run_launch(launch: Launch, slots: Mapping[str, str], sizes: Sizes, values: MutableMapping[str, np.ndarray]) -> None:
    """Run one launch.

    `values` has what it reads, and gets what it writes, by the names that `slots` binds to its arguments.
    """
    kernel = launch.kernel
    inputs = launch.numbers(sizes)
    inputs |= {arg.name: values[slots[arg.name]] for arg in kernel.args if not arg.written}
    written = [slots[arg.name] for arg in kernel.args if arg.written]
    cache = next((values[slots[arg.name]] for arg in kernel.args if arg.name == "kv"), None)
    if cache is not None:
        until = inputs["pos"] + inputs.get("seq", 1)
        # What appends to a cache has its own `k` and `v`.
        k, v = kv_rows.keys_and_values(cache[:until], kernel.stored)
        inputs = {"k": k, "v": v, "kv": cache} | inputs
    if "history" in slots:
        inputs["history"] = values[slots["history"]]
    for slot, result in zip(written, results(kernel, inputs), strict=True):
        if kernel.operation in HALVES and slot == written[-1]:
            rows = values[slot][inputs["pos"] :][: inputs.get("rows", 1)]
            halves = rows[:, :, HALVES[kernel.operation]]
            halves[...] = result.reshape(halves.shape)
        elif "apart" in inputs:
            part = written_part(values[slot], inputs)
            part[...] = result.reshape(part.shape)
        else:
            values[slot] = result


def results(kernel: Kernel, inputs: Mapping[str, Any]) -> tuple[np.ndarray, ...]:
    """Return what a kernel writes, by its reference. `inputs`: by the names of the reference's parameters."""
    if "table" in inputs:
        inputs = {**inputs, "x": np.atleast_2d(inputs["x"])}
    parameters = inspect.signature(kernel.reference).parameters
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters.values()):
        scalars = {param.name: inputs[param.name] for param in kernel.params}
        out = kernel.reference(*(inputs[arg.name] for arg in kernel.args if not arg.written), **scalars)
    else:
        out = kernel.reference(**{name: _shaped(name, inputs) for name in parameters if name in inputs})
    return out if isinstance(out, tuple) else (out,)


def _shaped(name: str, inputs: Mapping[str, Any]) -> Any:
    """Return an input; a new row of K or V for a cache by heads."""
    one_row = name in ("k", "v") and inputs[name].ndim == 1
    return inputs[name].reshape(inputs["kv_heads"], -1) if one_row else inputs[name]


def history(positions: int, cols: int, taps: int) -> np.ndarray:
    """Return the history of a convolution before the first position, bf16 `[positions + taps - 1, cols]`.

    Rows of positions are NaN, and those before them zeros.
    """
    rows = np.full((positions + taps - 1, cols), np.nan, ml_dtypes.bfloat16)
    rows[: taps - 1] = 0
    return rows


def empty_cache(positions: int, kv_heads: int, head_dim: int, stored: str = "bf16") -> np.ndarray:
    """Return a KV cache in rows in which nothing was written: all values are NaN."""
    shape = positions, kv_heads, 2, kv_rows.half_elements(head_dim, stored)
    if kv_rows.in_numbers(stored):
        return np.full(shape, -1, np.int8)  # scales of these bytes are NaN
    return np.full(shape, np.nan, ml_dtypes.bfloat16)


class Model:
    """Runs a model's phases, call by call."""

    def __init__(
        self,
        plans: Plans,
        programs: Sequence[Program],
        dimensions: Mapping[str, Any],
        tensor: Callable[[str, tuple[int, ...]], np.ndarray],
        positions: int,
    ) -> None:
        """Take a model.

        Args:
            plans: As in a manifest.
            programs: From `stages.model.grouping`.
            tensor: `tensor(name, shape)` returns a weight or table of a logical shape.
            positions: The KV caches' positions, at least as many as will be used.
        """
        self._plans, self._dimensions, self._tensor = plans, dimensions, tensor
        self._programs = {program.name: program for program in programs}
        self._positions = positions
        self._buffers: Values = {}
        self.position = 0

    def run(
        self,
        phase: Phase,
        ids: Sequence[int],
        watch: Callable[[PlannedCall, Values, Values], object] = lambda call, before, after: None,
    ) -> np.ndarray:
        """Process tokens. Return the logits, f32 `[vocab]`.

        Args:
            watch: `watch(call, before, after)` gets the content of each call's slots before and after it, without
                weights and tables.
        """
        sizes = {**self._dimensions, "seq": len(ids), "pos": self.position}
        sizes |= dict.fromkeys(("max_seq", "window"), self._positions)
        self._buffers["tokens"] = np.asarray(ids, np.int32)
        for call in self._plans[phase]:
            program = self._programs[call.program]
            bound = list(zip(program.slots, call.buffers, strict=True))
            values = {slot.name: self._read(slot, reference, sizes) for slot, reference in bound}
            kept = [slot.name for slot in program.slots if slot.role not in ("weight", "table")]
            before = {name: values[name].copy() for name in kept}
            evaluate(program, sizes, values)
            watch(call, before, {name: values[name] for name in kept})
            for slot, reference in bound:
                if slot.role in ("output", "scratch"):
                    self._buffers[reference.name] = values[slot.name]
        self.position += len(ids)
        return self._buffers["logits"]

    def _read(self, slot: Slot, reference: BufferRef, sizes: Sizes) -> np.ndarray:
        name, view = reference
        shape = tuple(int(sizes[dim]) if isinstance(dim, str) else dim for dim in slot.shape)
        if slot.role in ("weight", "table"):
            return self._tensor(name, self._logical(slot.shape, shape))
        if slot.keeps == HISTORY:
            return self._buffers.setdefault(name, history(self._positions, sizes["emb"], sizes["taps"]))
        if slot.keeps:
            heads = self._dimensions["kv_heads"], self._dimensions["head_dim"]
            return self._buffers.setdefault(name, empty_cache(self._positions, *heads, slot.format))
        size = math.prod(shape)
        first = (sizes["seq"] - 1) * size if view == LAST_ROW else 0
        content = self._buffers.get(name)
        if content is None or content.size < first + size:
            return np.full(shape, np.nan, ml_dtypes.bfloat16)
        return content.reshape(-1)[first : first + size].reshape(shape)

    def _logical(self, dims: Sequence[Dim], shape: tuple[int, ...]) -> tuple[int, ...]:
        return (self._positions, *shape[1:]) if dims[0] == "max_seq" else shape
