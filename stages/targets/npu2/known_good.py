"""The versions of the NPU's tools that this project is written against. Others may do; `doit doctor` compares."""

from __future__ import annotations

KNOWN_GOOD: dict[str, str] = {
    "mlir-air": "2026-05-08, commit 4216fa496",
    "mlir-aie": "2026-04-23, commit 979629649",
    "LLVM": "22.1",
    "AIE API": "2026.1",
    "XRT": "2.23",
    "Linux": "6.14",
}
"""What was checked: the passes of mlir-air and mlir-aie accept every module; the AIE API and XRT by their declarations.
No NPU has run this yet."""

LEAST: dict[str, tuple[str, str]] = {
    "XRT": ("2.23", "hardware contexts from ELF files in its Python bindings"),
    "Linux": ("6.14", "the amdxdna driver; older kernels need the driver package that comes with XRT"),
}
"""Oldest that can work, and for what."""

NPU2_DEVICES: dict[tuple[str, str], str] = {
    ("0x17f0", "0x10"): "Strix",
    ("0x17f0", "0x11"): "Strix Halo",
    ("0x17f0", "0x20"): "Krackan",
}
"""PCI device and revision -> what it is. All have 8 columns."""

NPU1_DEVICE = "0x1502"
NPU2_COLUMNS = 8


def version(text: str) -> tuple[int, ...]:
    """`2.23.0-rc1` -> (2, 23, 0): the leading numbers."""
    numbers = []
    for part in text.split("-")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
