"""Derives the buffers and the execution plans of a target from the ELF descriptions and the model's dimensions.

A plan is a list of calls, each a program and the buffer bound to each of its slots. Naming is the mechanism: two calls
that name one buffer share it, so results stay where the next call reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from stages.buffers import Buffer
from stages.config import LlamaConfig, read_config
from stages.elfs import Dim, Elf, Slot, all_elfs
from stages.files import write_json

PREFILL_ROWS = 512
"""Rows of a prefill call on `cpu`; longer prompts run in such chunks against the KV cache.

Large enough that reading the weights once per chunk is a few percent of the arithmetic, small enough that activations
stay a few percent of the weights.
"""

LAYER_WEIGHTS = {
    "norm_w": "input_layernorm",
    "wq": "self_attn.q_proj",
    "wk": "self_attn.k_proj",
    "wv": "self_attn.v_proj",
    "wo": "self_attn.o_proj",
    "ffn_norm_w": "post_attention_layernorm",
    "w_gate": "mlp.gate_proj",
    "w_up": "mlp.up_proj",
    "w_down": "mlp.down_proj",
}


PlannedCall = tuple[str, list[str]] | tuple[str, list[str], int]


@dataclass
class Plans:
    """`calls[phase]`: (program, buffer reference per slot) in order, programs of the NPU with their layer behind.

    A reference is `name`, `name@pos` or `name@last`: `@pos` is the view from the row of the call's first position on,
    `@last` the view of its last row.
    """

    buffers: dict[str, Buffer] = field(default_factory=dict)
    calls: dict[str, list[PlannedCall]] = field(default_factory=dict)


def write_plan(directory: Path, target: str, work: Path) -> None:
    """Step action: the plan of the configuration in the artifact `directory`, as JSON."""
    plans = Planner(read_config(directory / "build/config.json"), target).build()
    write_json(work / "build/plan.json", asdict(plans))


class Planner:
    def __init__(self, config: LlamaConfig, target: str, prefill_rows: int = PREFILL_ROWS) -> None:
        self.config, self.target = config, target
        self.dimensions: Mapping[str, float] = config.dimensions() | {"seq": min(prefill_rows, config.max_seq)}
        self.elfs = all_elfs()
        self.plans = Plans()

    def build(self) -> Plans:
        """Plans `prefill_chunk` (no logits), `prefill` and `decode` (both end with the logits of the last row)."""
        layers = range(self.config.layers)
        body = [call for i in layers for call in self._prefill_layer(i)]
        start = [self._call("embed_tokens", {"w_embed": "model.embed_tokens.weight", "x": "x.0"})]
        head = self._logits(f"x.{self.config.layers % 2}")
        self.plans.calls["prefill_chunk"] = start + body
        self.plans.calls["prefill"] = start + body + head
        self.plans.calls["decode"] = start + [call for i in layers for call in self._decode_layer(i)] + head
        return self.plans

    def _prefill_layer(self, i: int) -> list[PlannedCall]:
        return [
            self._project(i, "rms_gemms_rope"),
            self._attend(i, "flash_attn_panels"),
            self._feed_forward(i, "o_ffn"),
        ]

    def _decode_layer(self, i: int) -> list[PlannedCall]:
        return [
            self._project(i, "rms_gemv_rope"),
            self._attend(i, "decode_attn_panels"),
            self._feed_forward(i, "o_gemv_ffn"),
        ]

    def _project(self, i: int, elf: str) -> PlannedCall:
        return self._call(elf, {"x_in": f"x.{i % 2}", "lut_q": "rope_table", "lut_k": "rope_table"}, i)

    def _attend(self, i: int, elf: str) -> PlannedCall:
        caches = {slot: f"{slot}.{i}" for slot in ("k_cache", "v_cache")}
        return self._call(elf, {"q": "q_roped", "k": "k_roped"} | caches)

    def _feed_forward(self, i: int, elf: str) -> PlannedCall:
        # Two activations in turn, so that no launch reads and writes the same one.
        return self._call(elf, {"x_residual": f"x.{i % 2}", "output": f"x.{(i + 1) % 2}"}, i)

    def _logits(self, x: str) -> list[PlannedCall]:
        head = "model.embed_tokens.weight" if self.config.tied else "lm_head.weight"
        norm = {"x": f"{x}@last", "final_norm_w": "model.norm.weight", "normed": "final_normed"}
        return [self._call("final_norm", norm), self._call("lm_head_gemv", {"x": "final_normed", "w_vocab": head})]

    def _call(self, elf_name: str, bound: Mapping[str, str], layer: int | None = None) -> PlannedCall:
        """Bind an ELF's slots: as told, else to the layer's weight, else to the buffer named like the slot."""
        elf = self.elfs[elf_name]
        if unknown := bound.keys() - {slot.name for slot in elf.slots}:
            raise TypeError(f"ELF {elf_name} has no slots {sorted(unknown)}")
        references = []
        for slot in elf.slots:
            reference = bound.get(slot.name, slot.name)
            if layer is not None and slot.name in LAYER_WEIGHTS:
                reference = f"model.layers.{layer}.{LAYER_WEIGHTS[slot.name]}.weight"
            references.append(self._buffer(elf, slot, reference))
        return elf_name, references

    def _buffer(self, elf: Elf, slot: Slot, reference: str) -> str:
        name, _, view = reference.partition("@")
        new = self._describe(elf, slot, name, bool(view))
        old = self.plans.buffers.setdefault(name, new)
        if (old.dtype, old.layout) != (new.dtype, new.layout):
            raise TypeError(f"buffer {name}: {elf.name}.{slot.name} needs {new.dtype} {new.layout}, it is {old}")
        if new.kind == "activation" and _elements(new) > _elements(old):
            old.shape = new.shape
        return reference

    def _describe(self, elf: Elf, slot: Slot, name: str, view: bool) -> Buffer:
        if name.startswith(("k_cache.", "v_cache.")):
            return Buffer("cache", slot.dtype, self.shape(slot.shape))
        if slot.role in ("weight", "table"):
            return Buffer(slot.role, slot.dtype, self.shape(slot.shape), name, elf.layout_of(slot.name, self.target))
        return Buffer("activation", slot.dtype, self.shape(("seq", *slot.shape) if view else slot.shape))

    def shape(self, dims: tuple[Dim, ...]) -> tuple[int, ...]:
        return tuple(int(self.dimensions[d]) if isinstance(d, str) else d for d in dims)


def _elements(buffer: Buffer) -> int:
    count = 1
    for size in buffer.shape:
        count *= size
    return count
