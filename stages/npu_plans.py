"""Derives the buffers and the execution plans of the NPU targets from the modules of a grouping.

Their programs have static shapes: a prompt runs in the smallest bucket that holds it, at position 0. K and V of a layer
lie interleaved by head in one cache, which prefill writes on the device and decode attention reads on the host.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from stages.buffers import Buffer
from stages.config import LlamaConfig, read_config
from stages.elfs import all_elfs, host_elfs
from stages.files import write_json
from stages.npu_modules import Group, NpuSlot, groups, module_slots
from stages.plans import LAYER_WEIGHTS, PlannedCall, Plans

MODEL_WEIGHTS = {"final_norm_w": "model.norm.weight", "w_embed": "model.embed_tokens.weight"}


@dataclass(frozen=True)
class NpuProgram:
    """A module to compile: `name` is unique in an artifact directory, the function's name is the group's."""

    name: str
    group: Group
    bucket: int


def npu_programs(grouping: str, buckets: Sequence[int]) -> list[NpuProgram]:
    """Every module of a grouping; prefill's once per bucket."""
    programs = []
    for group in groups(grouping):
        if group.prefill:
            programs += [NpuProgram(f"{group.name}.{bucket}", group, bucket) for bucket in buckets]
        else:
            programs.append(NpuProgram(group.name, group, min(buckets)))
    return programs


def write_npu_plan(directory: Path, work: Path, grouping: str, buckets: Sequence[int]) -> None:
    """Step action: the plan of the configuration in the artifact `directory`, as JSON."""
    plans = NpuPlanner(read_config(directory / "build/config.json"), grouping, buckets).build()
    write_json(work / "build/plan.json", asdict(plans))


class NpuPlanner:
    """Buffers are at least as long as the longest bucket: positions past the model's context are only ever padding."""

    def __init__(self, config: LlamaConfig, grouping: str, buckets: Sequence[int]) -> None:
        self.config, self.buckets = config, sorted(buckets)
        rows = max(config.max_seq, self.buckets[-1])
        self.dimensions: Mapping[str, float] = config.dimensions() | {
            "max_seq": rows,
            "seq": self.buckets[-1],
            "pos": 0,
        }
        self.groups = {group.name: group for group in groups(grouping)}
        self.host = {elf.name: elf for elf in host_elfs("npu")}
        self.plans = Plans()

    def build(self) -> Plans:
        """Plans `prefill@<bucket>` and `decode`; all end with the logits of the last row."""
        layers = range(self.config.layers)
        start = self._host_call("embed_token_rows", {"x": "x.0"})
        for bucket in self.buckets:
            body = [call for i in layers for call in self._prefill_layer(i, bucket)]
            self.plans.calls[f"prefill@{bucket}"] = [start, *body, *self._logits()]
        self.plans.calls["decode"] = [start, *(call for i in layers for call in self._decode_layer(i))]
        if "decode_last" not in self.groups:
            self.plans.calls["decode"] += self._logits()
        return self.plans

    def _prefill_layer(self, i: int, bucket: int) -> Iterator[PlannedCall]:
        for group in self.groups.values():
            if group.prefill:
                yield self._device_call(group, i, bucket)

    def _decode_layer(self, i: int) -> Iterator[PlannedCall]:
        """`decode_layer` ends with the projections of the next layer, so only the first layer starts with its own."""
        fused = "decode_layer" in self.groups
        if i == 0 or not fused:
            yield self._device_call(self.groups["rms_gemv_rope"], i)
        yield self._host_call("decode_attn_kv", {"q": "q_roped", "k": "k_roped", "v": "v", "kv": f"kv_cache.{i}"})
        last = i + 1 == self.config.layers
        name = ("decode_last" if last else "decode_layer") if fused else "o_gemv_ffn"
        yield self._device_call(self.groups[name], i)

    def _logits(self) -> list[PlannedCall]:
        """Norm and LM head of the last row, by the host unless the grouping has a program for the latter."""
        x = f"x.{self.config.layers % 2}@last"
        norm = self._host_call("final_norm", {"x": x, "normed": "final_normed"})
        if group := self.groups.get("lm_head_gemv"):
            return [norm, self._device_call(group, self.config.layers, x="final_normed")]
        return [norm, self._host_call("lm_head_rows", {"x": "final_normed", "w_vocab": self._vocabulary})]

    @property
    def _vocabulary(self) -> str:
        return MODEL_WEIGHTS["w_embed"] if self.config.tied else "lm_head.weight"

    def _device_call(self, group: Group, i: int, bucket: int | None = None, **bound: str) -> PlannedCall:
        known = {**self.dimensions, "seq": bucket or self.buckets[0], "max_seq": bucket or self.buckets[0]}
        layers = _layer_of_slots(group, i)
        references = []
        for slot in module_slots(group, known):
            reference = bound.get(slot.name) or self._reference(group, slot.name, layers[slot.name])
            references.append(self._buffer(slot, reference))
        name = f"{group.name}.{bucket}" if bucket else group.name
        return (name, references, i) if i < self.config.layers else (name, references)

    def _reference(self, group: Group, slot: str, layer: int) -> str:
        """The buffer of a module's slot. `x.0` and `x.1` take turns, so that no launch reads and writes one buffer."""
        if slot in LAYER_WEIGHTS:
            return f"model.layers.{layer}.{LAYER_WEIGHTS[slot]}.weight"
        if slot == "w_vocab":
            return self._vocabulary
        if slot == "q" and group.name == "flash_attn":
            return "q_roped"
        turn = {"x_in": layer, "x_residual": layer, "output": layer + 1}
        named = {"lut_q": "rope_table@pos", "lut_k": "rope_table@pos", "kv": f"kv_cache.{layer}"}
        return MODEL_WEIGHTS.get(slot) or named.get(slot) or (f"x.{turn[slot] % 2}" if slot in turn else slot)

    def _host_call(self, name: str, bound: Mapping[str, str]) -> PlannedCall:
        references = []
        for slot in self.host[name].slots:
            shape = tuple(int(self.dimensions[d]) if isinstance(d, str) else d for d in slot.shape)
            reference = bound.get(slot.name) or MODEL_WEIGHTS.get(slot.name) or slot.name
            references.append(self._buffer(NpuSlot(slot.name, shape, slot.role, slot.dtype), reference))
        return name, references

    def _buffer(self, slot: NpuSlot, reference: str) -> str:
        name, _, view = reference.partition("@")
        new = self._describe(slot, name, bool(view))
        old = self.plans.buffers.setdefault(name, new)
        if old.dtype != new.dtype:
            raise TypeError(f"buffer {name}: slot {slot.name} needs {new.dtype}, it is {old}")
        if new.kind == "activation" and math.prod(new.shape) > math.prod(old.shape):
            old.shape = new.shape
        if new.kind == "weight" and new.layout != old.layout:
            # The vocabulary matrix is wanted with padded rows by the LM head, as it is by the embedding.
            old.layout = "padded" if "padded" in (old.layout, new.layout) else old.layout
        return reference

    def _describe(self, slot: NpuSlot, name: str, view: bool) -> Buffer:
        dimension = {key: int(value) for key, value in self.dimensions.items() if isinstance(value, int)}
        if name.startswith("kv_cache."):
            return Buffer("cache", slot.dtype, (dimension["max_seq"], 2 * dimension["kv_dim"]))
        if name == "rope_table":
            return Buffer("table", slot.dtype, (dimension["max_seq"], dimension["head_dim"]), name, "plain")
        if slot.role == "weight":
            shape = self.config.tensor_shapes()[name]
            layout = "padded" if slot.name == "w_vocab" else slot.layout
            return Buffer("weight", slot.dtype, shape, name, layout)
        shape = (dimension["seq"], *slot.shape[-1:]) if view else slot.shape
        return Buffer("activation", slot.dtype, shape)


def _layer_of_slots(group: Group, i: int) -> dict[str, int]:
    """Which layer each slot of a call for layer `i` belongs to: parts behind a feed-forward belong to the next one."""
    layer, found = i, dict[str, int]()
    for name, renamed in group.parts:
        for slot in all_elfs()[name].slots:
            found.setdefault(renamed.get(slot.name, slot.name), layer)
        layer += name in ("o_ffn", "o_gemv_ffn")
    return found
