"""Prints what a model costs on the NPU: the table of `doit estimate`."""

from __future__ import annotations

from stages.air.estimate import BANDWIDTH
from stages.config import LlamaConfig
from stages.npu_estimate import Row, decode_traffic, estimate, host_traffic

MIB = 1 << 20


def print_estimate(config: LlamaConfig, bucket: int) -> None:
    """Per launch and per ELF of the six-file grouping: traffic, its minimum, arithmetic, time; then per token."""
    dimensions = config.dimensions() | {"layers": config.layers}
    print(f"{'':36}{'MiB':>9}{'minimum':>9}{'x':>6}{'GMAC':>9}{'ms':>8}{'spec MiB':>10}{'spec ms':>9}")
    for row in estimate(dimensions, "spec", bucket):
        print(_line(row), flush=True)
    for grouping in ("spec", "fused"):
        moved, weights = decode_traffic(dimensions, grouping)
        print(
            f"\ngrouping={grouping}: a token moves {moved / MIB:.1f} MiB through DDR, {moved / weights:.4f}x its "
            f"weights, {moved / BANDWIDTH * 1e3:.1f} ms at {BANDWIDTH / 1e9:.0f} GB/s"
        )
        for what, size in host_traffic(dimensions, grouping, bucket).items():
            print(f"  {what.replace('_', ' ')}: {size / 1024:.1f} KiB between host and device")


def _line(row: Row) -> str:
    name = f"  {row.launch}" if row.launch else row.elf
    spec = "" if row.spec_bytes is None else f"{row.spec_bytes / MIB:.1f}"
    measured = "" if row.measured_ms is None else f"{row.measured_ms:.1f}"
    ratio = row.bytes / row.minimum if row.minimum else 1.0
    sizes = f"{row.bytes / MIB:9.1f}{row.minimum / MIB:9.1f}{ratio:6.2f}"
    return f"{name:36}{sizes}{row.macs / 1e9:9.2f}{row.ms:8.2f}{spec:>10}{measured:>9}"
