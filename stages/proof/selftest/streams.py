"""Probes of DDR: N streams at once, each to a core of its own, which multiplies its data and keeps the sums."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from llama_npu2.frozen import frozen
from stages import air
from stages.air import limits
from stages.kernels import BF16, Arg, Kernel, gemv

if TYPE_CHECKING:
    from stages.air import AirModule

TILE_ROWS, TILE_COLS = 8, 1024
"""The tile that a core takes at a time: 16 KiB, which it finishes before the next one has arrived."""
TILES = 256


@frozen
class Streams:
    """`count` streams, one per column, or two."""

    name: str
    count: int
    whole = True
    """Inputs are small whole numbers, whose sums of products are exact."""

    @property
    def herd(self) -> tuple[int, int]:
        columns = min(self.count, limits.COLUMNS)
        return columns, self.count // columns

    @property
    def rows(self) -> int:
        return self.count * TILES * TILE_ROWS

    @property
    def bytes(self) -> int:
        return BF16 * self.rows * TILE_COLS

    @property
    def macs(self) -> int:
        return self.rows * TILE_COLS

    @property
    def tiling(self) -> gemv.Tiling:
        """The tiling of a product with these tiles, which has the costs of a call."""
        return gemv.Tiling(self.rows, TILE_COLS, "f32", False, self.herd[1], TILE_ROWS, TILE_COLS, (1,))

    @property
    def costs(self) -> Any:
        return self.tiling.costs  # type: ignore[attr-defined, unused-ignore]

    def __str__(self) -> str:
        columns, rows = self.herd
        return f"{self.count} streams, herd {columns}x{rows}"

    def kernel(self) -> Kernel:
        args = (Arg("x"), Arg("out", "f32", written=True))
        device: dict[str, Any] = {"tiling": lambda sizes: self, "program": build}
        return Kernel(self.name, args, (), "gemv", reference, host=False, **device)

    def slots(self) -> dict[str, tuple[int, ...]]:
        return {"x": (self.rows, TILE_COLS), "out": (self.count, TILE_ROWS)}

    def expected(self, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"out": reference(values["x"])}

    def off(self, values: dict[str, np.ndarray], want: np.ndarray) -> np.ndarray:
        return np.zeros(want.shape)


def reference(x: np.ndarray) -> np.ndarray:
    """Return each tile's rows times its first, summed over a stream's tiles: f32 `[streams, TILE_ROWS]`."""
    tiles = x.astype(np.float32).reshape(-1, TILES, TILE_ROWS, TILE_COLS)
    return np.matmul(tiles, tiles[:, :, 0, :, None])[..., 0].sum(axis=1)


def build(streams: Streams) -> AirModule:
    """Build the module. Arguments: `x` bf16 `[rows][TILE_COLS]`, `out` f32 `[streams][TILE_ROWS]`."""
    slots = streams.slots()
    b = air.Builder(streams.name, {"x": air.memref_type(slots["x"]), "out": air.memref_type(slots["out"], "f32")})
    variant = streams.tiling.variant
    columns, high = streams.herd
    with b.launch(), b.segment(), b.herd(columns, high) as (tx, ty), b.alloc(air.L1, ((TILE_ROWS,), "f32")) as (acc,):
        stream = tx * high + ty if high > 1 else tx
        b.call(variant, "gemv_zero", acc)
        with b.loop(TILES) as step, b.alloc(air.L1, (TILE_ROWS, TILE_COLS)) as (a,):
            first = stream * (TILES * TILE_ROWS) + step * TILE_ROWS
            b.dma(a, b.args["x"].at((first, TILE_ROWS, TILE_COLS), (0, TILE_COLS, 1)))
            b.call(variant, "gemv_step", a, a, 0, acc, read_twice=a)
        b.dma(b.args["out"].at((stream, 1, TILE_ROWS), (0, TILE_ROWS, 1)), acc)
    return b.finish()
