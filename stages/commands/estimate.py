"""`doit estimate`: DDR traffic, arithmetic and time of every launch on the NPU, beside mlir-air's example.

Our side is counted from the modules; the other side from the tile sizes that its documents state, by the same rules:
https://github.com/Xilinx/mlir-air/tree/e972f2942d41123f161276b27f991ef10da2a2e6/programming_examples/llms/llama32_1b
(MIT licence), `docs/profile.md` for the times.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from llama_npu2.dtypes import nbytes
from llama_npu2.table import Column, Table
from stages import air
from stages.air import limits
from stages.graph import Build
from stages.model.config import Config
from stages.model.families import read_config
from stages.model.grouping import Program, chained, cover, programs
from stages.model.parts import Launch
from stages.targets.npu2.groupings import GROUPINGS
from stages.targets.npu2.modules import Module, build_module

BANDWIDTH = 60e9
"""Bytes per second of DDR that the NPU sees."""

MACS_PER_SECOND = limits.COLUMNS * limits.ROWS * 128 * 1.8e9
"""bf16 multiply-accumulates: every core, 128 a cycle (`mmul` 4x8x8), 1.8 GHz."""

EXAMPLE_MS: Mapping[str, float] = {
    "rms_gemms_rope": 7.3,
    "flash_attn": 21.6,
    "o_ffn": 41.0,
    "rms_gemv_rope": 0.9,
    "o_gemv_ffn": 3.6,
    "lm_head_gemv": 13.6,
}
"""Per call, Llama-3.2-1B, 2048 tokens, as measured by mlir-air's example."""

MIB = 1 << 20


@dataclass(frozen=True)
class Cost:
    """Bytes to and from DDR, the least that any tiling could move, multiply-accumulates."""

    bytes: int = 0
    minimum: int = 0
    macs: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.bytes + other.bytes, self.minimum + other.minimum, self.macs + other.macs)

    @property
    def ms(self) -> float:
        """The longer of moving at `BANDWIDTH` and computing at `MACS_PER_SECOND`."""
        return 1e3 * max(self.bytes / BANDWIDTH, self.macs / MACS_PER_SECOND)


@dataclass(frozen=True)
class Row:
    """One line of the table; `launch` is empty for the sum over a program, whose `ms` is that of its launches."""

    program: str
    launch: str
    tiling: str
    cost: Cost
    ms: float
    example_bytes: int | None = None
    example_ms: float | None = None


def run(build: Build) -> None:
    """Per launch and per program of the separate grouping: traffic, its minimum, arithmetic, time; then per token."""
    bucket = build.options.bucket_list()[-1]
    print_estimate(read_config(build.source.fetch() / "config.json"), bucket)


def print_estimate(config: Config, bucket: int) -> None:
    titles = ("", "MiB", "minimum", "x", "GMAC", "ms", "example MiB", "example ms")
    widths = (33, 8, 8, 5, 8, 7, 0, 0)
    table = Table([Column(title, width, right=bool(title)) for title, width in zip(titles, widths, strict=True)])
    print(table.header())
    for row in estimate(config, bucket):
        print(table.row(*_cells(row)), flush=True)
    for grouping in GROUPINGS:
        moved, weights = decode_traffic(config, grouping)
        print(
            f"\ngrouping={grouping}: a token moves {moved / MIB:.1f} MiB through DDR, {moved / weights:.4f}x its "
            f"weights, {moved / BANDWIDTH * 1e3:.1f} ms at {BANDWIDTH / 1e9:.0f} GB/s"
        )
        for what, size in host_traffic(config, grouping, bucket).items():
            print(f"  {what.replace('_', ' ')}: {size / 1024:.1f} KiB between host and device")


def _cells(row: Row) -> Iterator[str]:
    cost = row.cost
    yield f"  {row.launch}" if row.launch else row.program
    yield from (f"{cost.bytes / MIB:.1f}", f"{cost.minimum / MIB:.1f}")
    yield f"{cost.bytes / cost.minimum if cost.minimum else 1.0:.2f}"
    yield from (f"{cost.macs / 1e9:.2f}", f"{row.ms:.2f}")
    yield "" if row.example_bytes is None else f"{row.example_bytes / MIB:.1f}"
    yield "" if row.example_ms is None else f"{row.example_ms:.1f}"


def estimate(config: Config, bucket: int = 2048, grouping: str = "separate") -> list[Row]:
    """Rows of every described launch and, after them, of their program. The separate grouping has the example's."""
    rows = []
    for program in device_programs(config, grouping, bucket):
        module = build_module(program, config.dimensions())
        costs = list(launch_costs(module))
        theirs = example_bytes(program, config, bucket) if grouping == "separate" else []
        for position, (kernel, tiling, cost) in enumerate(zip(module.kernels, module.tilings, costs, strict=True)):
            example = theirs[position] if theirs else None
            rows.append(Row(program.entry, kernel.name, str(tiling), cost, cost.ms, example))
        stated = [size for size in theirs if size is not None]
        row = Row(program.entry, "", "", sum(costs, Cost()), sum(cost.ms for cost in costs))
        complete = sum(stated) if stated and len(stated) == len(costs) else None
        measured = EXAMPLE_MS.get(program.entry) if theirs else None
        rows.append(replace(row, example_bytes=complete, example_ms=measured))
    return rows


def device_programs(config: Config, grouping: str, bucket: int) -> list[Program]:
    return [p for p in programs(config.family, GROUPINGS[grouping], [bucket]) if not p.host]


def launch_costs(module: Module) -> Iterator[Cost]:
    """Per described launch: the AIR launches of one (partitions of a vocabulary) added up."""
    merged: dict[int, air.Traffic] = {}
    for traffic in air.count(module.air):
        position = int(traffic.name.partition("_")[0].removeprefix("launch"))
        merged.setdefault(position, air.Traffic(traffic.name, traffic.slots)).add(traffic)
    for position, tiling in enumerate(module.tilings):
        yield Cost(merged[position].bytes, merged[position].minimum, tiling.macs)


def decode_traffic(config: Config, grouping: str = "fused") -> tuple[int, int]:
    """(DDR bytes, weight bytes) of one token: every device program as often as a token calls it."""
    phase = chained(config.family, GROUPINGS[grouping].token, config.layers)
    calls = Counter(group.name for group, _ in cover(phase, GROUPINGS[grouping].groups) if group)
    moved = weights = 0
    for program in device_programs(config, grouping, 128):
        if count := calls[program.entry]:
            module = build_module(program, config.dimensions())
            moved += count * sum(cost.bytes for cost in launch_costs(module))
            slots = (slot for slot in module.described_slots() if slot["role"] == "weight")
            weights += count * sum(nbytes(slot["dtype"], slot["shape"]) for slot in slots)
    return moved, weights


def host_traffic(config: Config, grouping: str = "fused", bucket: int = 2048) -> dict[str, int]:
    """Bytes that cross between host and device: per prompt of `bucket` tokens, per token.

    Slots that one call makes and another reads stay on the device. The host embeds, caches K and V and takes the
    logits; in decode it also attends. It norms a prompt's last row, which `separate` hands to the device. `fused` ends
    a prompt on the host: norm and logits that it writes are flushed before those of the first token land there.
    """
    known = {name: int(size) for name, size in config.dimensions().items()}

    def rows(*shape: int) -> int:
        return nbytes("bf16", shape)

    x, layers, logits = rows(known["emb"]), config.layers, nbytes("f32", [known["vocab"]])
    prompt = [bucket * x, rows(layers, bucket, known["kv_pair_dim"]), 2 * x, logits]
    token = [x, rows(layers, known["q_dim"] + known["kv_pair_dim"]), rows(layers, known["q_dim"]), logits]
    if grouping == "separate":
        # The host's norm of the last row goes back to the device.
        token.append(2 * x)
    return {"prompt": sum(prompt), "token": sum(token)}


# The example's tile sizes, per product: rows of x and columns of out per launch step.
_EXAMPLE_GEMM = {"wq": (512, 512), "wk": (512, 512), "wv": (512, 512), "w_gate": (512, 512), "w_up": (512, 512)}
_EXAMPLE_GEMM |= {"wo": (512, 256), "w_down": (512, 256)}


def example_bytes(program: Program, config: Config, bucket: int) -> list[int | None]:
    """DDR bytes of each launch with the example's tile sizes; None where they are not stated (attention)."""
    known = {**config.dimensions(), "seq": bucket, "max_seq": bucket}
    return [_example_launch(launch, known) for part in program.parts for launch in part.launches]


def _example_launch(launch: Launch, known: Mapping[str, int | float]) -> int | None:
    size = {key: known[v] if isinstance(v, str) and v != "pos" else v for key, v in launch.scalars.items()}
    rows, cols, outs = (int(size.get(key, 1)) for key in ("rows", "cols", "out_cols"))
    moved = None
    match launch.kernel.name:
        case "gemm" | "gemm_kv":
            block_m, block_n = _EXAMPLE_GEMM[launch.args["weight"]]
            moved = rows * cols * math.ceil(outs / block_n) + cols * outs * math.ceil(rows / block_m) + rows * outs
        case "gemv" | "gemv_f32":
            step = limits.COLUMNS * (2 if cols >= 8192 else 8)
            moved = cols * outs + cols * math.ceil(outs / step) + outs
        case "rms_norm":
            moved = 2 * rows * cols + cols
        case "add" | "silu_and_mul":
            moved = 3 * rows * cols
        case "rope" | "rope_kv":
            moved = 3 * rows * int(size["heads"]) * int(size["head_dim"])
    return None if moved is None else nbytes("bf16", [moved])
