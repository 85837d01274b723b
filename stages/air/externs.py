"""Object variants: one C++ source compiled with a set of macros, and how its objects and symbols are called.

Tile functions have compile-time shapes, so a shape is part of the name and two shapes in one module never clash.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Variant:
    """`kernel_src/aie2p/<stem>.cc` compiled with `defines` (macro, value), sorted by macro."""

    stem: str
    defines: tuple[tuple[str, int], ...]

    @staticmethod
    def of(stem: str, **defines: int) -> Variant:
        return Variant(stem, tuple(sorted(defines.items())))

    @property
    def suffix(self) -> str:
        return "_".join(f"{name.lower()}{value}" for name, value in self.defines)

    @property
    def object(self) -> str:
        return f"{self.stem}_{self.suffix}.o"

    def symbol(self, function: str) -> str:
        return f"{function}_{self.suffix}"

    def flags(self) -> list[str]:
        """Compiler flags; `VARIANT` is the symbol suffix the source appends to its function names."""
        return [f"-D{name}={value}" for name, value in self.defines] + [f"-DVARIANT={self.suffix}"]
