"""Where the project is. Nothing depends on the working directory."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "kernel_src"


def in_project(paths: list[Path]) -> list[Path]:
    """Those of `paths` that are the project's own: what receipts follow. A compiler's headers are its fingerprint's."""
    return sorted({path for path in (p.resolve() for p in paths) if path.is_relative_to(ROOT)})
