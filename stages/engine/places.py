"""Where the project is. Nothing depends on the working directory."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "kernel_src"


def kernel_files(paths: Iterable[Path]) -> list[Path]:
    """Those of `paths` that are kernel sources, which receipts follow. A compiler's headers are its fingerprint's."""
    return sorted({path for path in (p.resolve() for p in paths) if path.is_relative_to(KERNELS)})
