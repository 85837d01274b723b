"""Object variants: a C++ source compiled with a set of macros, with the names of its object and its symbols.

Tile functions have compile-time shapes, so a shape is part of the name and two shapes in one module never clash.
"""

from __future__ import annotations

from llama_npu2.frozen import frozen


@frozen
class Variant:
    """The object of `kernel_src/aie2p/<stem>.cc`, compiled with some macros."""

    stem: str
    defines: tuple[tuple[str, int], ...]
    """Macro and value, sorted by macro."""

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
        """Return the compiler flags. `VARIANT` is the suffix that the source appends to its function names."""
        return [f"-D{name}={value}" for name, value in self.defines] + [f"-DVARIANT={self.suffix}"]
