"""Estimates for a model on the NPU: DDR traffic, arithmetic and time of every launch, beside the system of the spec.

Our side is counted from the modules; the other side from the tile plans that system states, by the same rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from stages.air.estimate import BANDWIDTH, Traffic, count
from stages.elfs import Launch, all_elfs
from stages.npu_modules import Dimensions, NpuModule, groups, modules

MEASURED_MS: Mapping[str, float] = {
    "rms_gemms_rope": 7.3,
    "flash_attn": 21.6,
    "o_ffn": 41.0,
    "rms_gemv_rope": 0.9,
    "o_gemv_ffn": 3.6,
    "lm_head_gemv": 13.6,
}
"""Per call, Llama-3.2-1B, 2048 tokens: what the measured system takes."""


@dataclass(frozen=True)
class Row:
    """One line of the table; `launch` is empty for the sum over an ELF. Bytes, MACs, milliseconds."""

    elf: str
    launch: str
    plan: str
    bytes: int
    minimum: int
    macs: int
    ms: float
    spec_bytes: int | None = None
    measured_ms: float | None = None


def estimate(dimensions: Dimensions, grouping: str = "spec", bucket: int = 2048) -> list[Row]:
    """Rows of every described launch and, after them, of their ELF. `grouping=spec` fills the spec's columns."""
    rows = []
    for module in modules(dimensions, grouping, bucket):
        launches = described_launches(module)
        spec: list[int | None] = spec_bytes(module.name, dimensions, bucket) if grouping == "spec" else []
        for position, traffic in enumerate(launches):
            plan, theirs = str(module.plans[position]), spec[position] if spec else None
            rows.append(_row(module.name, traffic.name, plan, [traffic], theirs))
        stated = [size for size in spec if size is not None]
        total = sum(stated) if stated and len(stated) == len(launches) else None
        row = _row(module.name, "", "", launches, total)
        rows.append(replace(row, measured_ms=MEASURED_MS.get(module.name) if spec else None))
    return rows


def described_launches(module: NpuModule) -> list[Traffic]:
    """Traffic per described launch: the AIR launches of one (partitions of a vocabulary) added up."""
    merged: dict[int, Traffic] = {}
    for traffic in count(module.program):
        position = int(traffic.name.partition("_")[0].removeprefix("launch"))
        merged.setdefault(position, Traffic(str(module.plans[position]).split()[0], traffic.slots)).add(traffic)
    return [merged[position] for position in sorted(merged)]


def _row(elf: str, launch: str, plan: str, parts: list[Traffic], spec: int | None) -> Row:
    moved, least, macs = (sum(getattr(part, name) for part in parts) for name in ("bytes", "minimum", "macs"))
    return Row(elf, launch, plan, moved, least, macs, 1e3 * sum(part.seconds for part in parts), spec)


def decode_traffic(dimensions: Dimensions, grouping: str = "fused") -> tuple[int, int]:
    """(DDR bytes, weight bytes) of one token: every decode module as often as a token calls it."""
    moved = weights = 0
    layers = int(dimensions["layers"])
    times = {"spec": {"lm_head_gemv": 1}, "fused": {"rms_gemv_rope": 1, "decode_layer": layers - 1, "decode_last": 1}}
    prefill = {group.name for group in groups(grouping) if group.prefill}
    for module in modules(dimensions, grouping, 128):
        if module.name in prefill:
            continue
        calls = times[grouping].get(module.name, layers)
        moved += calls * sum(traffic.bytes for traffic in count(module.program))
        weights += calls * sum(_slot_bytes(slot.shape, slot.dtype) for slot in module.slots if slot.role == "weight")
    return moved, weights


def host_traffic(dimensions: Dimensions, grouping: str = "fused", bucket: int = 2048) -> dict[str, int]:
    """Bytes that cross between host and device, derived from slot roles: per prompt of `bucket` tokens, per token.

    Slots that one call makes and another reads stay on the device. The host embeds, caches K and V and takes the
    logits; in decode it also attends. `fused` ends a prompt on the host: it reads the last row, and the logits that it
    writes are flushed before the device's for the first token land on them.
    """
    emb, layers, vocab, q_dim, kv_dim = (int(dimensions[n]) for n in ("emb", "layers", "vocab", "q_dim", "kv_dim"))
    prompt = {"x": 2 * bucket * emb, "kv": layers * 4 * bucket * kv_dim}
    prompt |= {"last row": 2 * emb, "logits": 4 * vocab}
    token = {"x": 2 * emb, "q, k, v": layers * 2 * (q_dim + 2 * kv_dim)}
    token |= {"attention": layers * 2 * q_dim, "logits": 4 * vocab}
    if grouping == "spec":
        prompt["final norm"] = 2 * emb
        token["final norm"] = 4 * emb
    return {"prompt": sum(prompt.values()), "token": sum(token.values())}


def _slot_bytes(shape: tuple[int, ...], dtype: str) -> int:
    size = 4 if dtype in ("f32", "i32") else 2
    for dim in shape:
        size *= dim
    return size


# The tile plans of the measured system, per product: rows of x and columns of out per launch step.
_SPEC_GEMM = {"wq": (512, 512), "wk": (512, 512), "wv": (512, 512), "w_gate": (512, 512), "w_up": (512, 512)}
_SPEC_GEMM |= {"wo": (512, 256), "w_down": (512, 256)}


def spec_bytes(elf: str, dimensions: Dimensions, bucket: int) -> list[int | None]:
    """DDR bytes of each launch by the plans of the measured system; None where its plan is not stated (attention)."""
    known = {**dimensions, "seq": bucket, "max_seq": bucket}
    return [_spec_launch(launch, known) for launch in all_elfs()[elf].launches]


def _spec_launch(launch: Launch, known: Mapping[str, int | float]) -> int | None:
    size = {key: known[v] if isinstance(v, str) and v != "pos" else v for key, v in launch.scalars.items()}
    rows, cols, outs = (int(size.get(key, 1)) for key in ("rows", "cols", "out_cols"))
    match launch.kernel.name:
        case "gemm":
            block_m, block_n = _SPEC_GEMM[launch.args["weight"]]
            again_x, again_w = -(-outs // block_n), -(-rows // block_m)
            return 2 * (rows * cols * again_x + cols * outs * again_w + rows * outs)
        case "gemv" | "gemv_f32":
            step = 8 * (2 if cols >= 8192 else 8)
            return 2 * (cols * outs + cols * -(-outs // step) + outs)
        case "rms_norm":
            return 2 * (2 * rows * cols + cols)
        case "add" | "silu_and_mul":
            return 2 * 3 * rows * cols
        case "rope":
            width = int(size["heads"]) * int(size["head_dim"])
            return 2 * 3 * rows * width
    return None


__all__ = ["BANDWIDTH", "MEASURED_MS", "Row", "decode_traffic", "estimate", "host_traffic", "spec_bytes"]
