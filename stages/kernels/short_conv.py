"""A gated causal convolution over positions, each channel by itself, as LFM2 mixes positions (Liquid AI 2025).

A product makes three rows of a position: B, C and x. B * x, rounded, is appended to a history, whose last rows are
multiplied with the taps, summed up in f32 from the oldest on and rounded; C times that is the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from llama_npu2.errors import UserError
from llama_npu2.frozen import frozen
from stages import air
from stages.air import limits
from stages.engine.lazy import ml_dtypes, np
from stages.kernels import BF16, Arg, Cost, elementwise, lanes, signature

if TYPE_CHECKING:
    from stages.air import AirModule, Builder, Channel, Number, Variant


def reference(
    bcx: np.ndarray, weight: np.ndarray, history: np.ndarray, pos: int, taps: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return a copy of `history` with the new rows, and the results bf16 `[rows, cols]`.

    Products of two bf16 are exact in f32.

    Args:
        bcx: bf16 `[rows, 3 * cols]`.
        weight: bf16 `[cols, 1, taps]`; the last tap is for a position's own row.
        history: bf16 `[positions + taps - 1, cols]`. The row of position p is `p + taps - 1`; those before the first
            position are zeros.
        pos: The first row's position.
    """
    gate, after, x = np.split(np.atleast_2d(bcx).astype(np.float32), 3, axis=-1)
    rows, history = len(x), history.copy()
    history[pos + taps - 1 :][:rows] = (gate * x).astype(ml_dtypes.bfloat16)
    seen, factors = history[pos:].astype(np.float32), weight.astype(np.float32)[:, 0].T
    total = seen[:rows] * factors[0]
    for tap in range(1, taps):
        total += seen[tap : tap + rows] * factors[tap]
    mixed = after * total.astype(ml_dtypes.bfloat16).astype(np.float32)
    return history, mixed.astype(ml_dtypes.bfloat16).reshape(*bcx.shape[:-1], -1)


@frozen
class Tiling:
    """How a convolution is divided: each core has an equal share of the channels, and all rows of them in turn.

    It keeps the taps, and the rows that the next ones look back at.
    """

    rows: int
    cols: int
    taps: int
    columns: int
    """Columns of the herd, which has one row."""
    tile_rows: int
    """Rows that a core processes at a time."""

    @property
    def share(self) -> int:
        """Channels of a core."""
        return self.cols // self.columns

    @property
    def steps(self) -> int:
        """Steps of a core's loop over the rows."""
        return self.rows // self.tile_rows

    @property
    def variant(self) -> Variant:
        return air.Variant.of("short_conv", COLS=self.share, ROWS=self.tile_rows, TAPS=self.taps)

    @property
    def macs(self) -> int:
        return 0

    @property
    def costs(self) -> Mapping[str, Cost]:
        """Return the cost of a call: of each vector of each row, and of the rows that are kept for the next."""
        width = lanes(self.share, 64)
        lines = -(-width // limits.VECTOR)
        # Each row: B, C, x, seen and taps in, three rows out; products, sums and roundings.
        row = lines * (5 + 2 * self.taps) + self.taps + 5
        kept = lines * 2 * (self.taps - 1)
        return {"short_conv": Cost(vectors=self.share // width * (self.tile_rows * row + kept))}

    def __str__(self) -> str:
        rows = f"{self.tile_rows} rows at a time"
        return f"short_conv {self.rows}x{self.cols}, {self.taps} taps: herd {self.columns}x1, {rows}"


def tile(rows: int, cols: int, taps: int) -> Tiling:
    """Divide a convolution so that a core processes as many rows at a time as fit L1, with taps and rows before them.

    The compiler's copies of the buffers count (`limits.copies`). A core makes an even number of steps if the shape
    allows it (`limits.steady`).
    """
    what = f"short_conv {rows}x{cols}, {taps} taps"
    limits.require_multiple(what, "cols", cols, limits.VECTOR // 2)
    if taps < 2:
        raise UserError(f"{what}: a convolution of one position needs no history, the NPU has no kernel for it")
    step = limits.VECTOR if cols % limits.VECTOR == 0 else limits.VECTOR // 2
    herds = [columns for columns in elementwise.divisors_of_herd(cols) if cols // columns % step == 0]
    columns = limits.require_any(what, "the columns", herds)[0]
    tilings = [Tiling(rows, cols, taps, columns, height) for height in limits.divisors(rows, 1, 16)]
    fitting = limits.require_any(what, limits.IN_L1, (p for p in tilings if limits.fits_l1(BF16 * p.share * _kept(p))))
    return limits.steady_first(what, fitting, lambda p: p.steps)[0]


def _kept(p: Tiling) -> int:
    """Return the rows of a core's channels in L1.

    They are the taps, the rows before and those of a step; then B, C and x, what is appended to the history and the
    results, which the compiler copies.
    """
    return p.taps + (p.taps - 1 + p.tile_rows) + limits.copies(p.steps) * 5 * p.tile_rows


def build(tiling: Tiling) -> AirModule:
    """Build the AIR program with the arguments `bcx`, `weight`, `history` and `out`.

    `bcx`: bf16 `[rows][3 * cols]`; `weight`: bf16 `[taps][cols]`; `history`: bf16 `[rows + taps - 1][cols]`, of which
    the first `taps - 1` rows are read and the others written; `out`: bf16 `[rows][cols]`. With one row, `bcx` and `out`
    have no first dimension.
    """
    p = tiling
    rows = (p.rows,) if p.rows > 1 else ()
    shapes = {
        "bcx": (*rows, 3 * p.cols),
        "weight": (p.taps, p.cols),
        "history": (p.rows + p.taps - 1, p.cols),
        "out": (*rows, p.cols),
    }
    b = air.Builder("short_conv", {name: air.memref_type(shape) for name, shape in shapes.items()})
    with b.launch(), b.segment():
        kept = b.channel((p.columns, 1), (p.columns, 1))
        for column in range(p.columns):
            for name, count in (("weight", p.taps), ("history", p.taps - 1)):
                b.put(kept, (column, 0), b.args[name].at((0, count, p.cols), (column * p.share, p.share, 1)))
        with b.herd(p.columns, 1) as (tx, ty):
            _convolve(b, p, kept, tx, ty)
    return b.finish()


def _convolve(b: Builder, p: Tiling, kept: Channel, tx: Number, ty: Number) -> None:
    """Compute all rows of a core's channels."""
    step, channels = (p.tile_rows, p.share), (tx * p.share, p.share, 1)
    with b.alloc(air.L1, (p.taps, p.share), (p.taps - 1 + p.tile_rows, p.share)) as (weight, seen):
        b.get(kept, (tx, ty), weight)
        b.get(kept, (tx, ty), seen.at((0, (p.taps - 1) * p.share, 1)))
        with b.loop(p.steps) as i, b.alloc(air.L1, (p.tile_rows, 3, p.share), step, step) as (bcx, fresh, out):
            first = i * p.tile_rows
            rows = {width: [(first, p.tile_rows, width)] if p.rows > 1 else [] for width in (p.cols, 3 * p.cols)}
            b.dma(bcx, b.args["bcx"].at(*rows[3 * p.cols], (0, 3, p.cols), channels))
            b.call(p.variant, "short_conv", bcx, weight, seen, fresh, out)
            b.dma(b.args["history"].at((first + (p.taps - 1), p.tile_rows, p.cols), channels), fresh)
            b.dma(b.args["out"].at(*rows[p.cols], channels), out)


KERNELS = (
    signature(
        "short_conv",
        ("bcx", Arg("weight", layouts={"cpu": "taps", "aie2p": "taps"})),
        "rows pos cols taps",
        reference,
        writes=(Arg("history", written=True), "out"),
        tiling=lambda s: tile(s["rows"], s["cols"], s["taps"]),
        program=build,
        paged=True,
    ),
)
