"""RMS norm over the last axis (Zhang & Sennrich 2019): `out = weight * x / sqrt(mean(x^2) + eps)`.

It rounds where Hugging Face's LlamaRMSNorm rounds: before and after the product with the weight, or with `once` only
after it, as Gemma does, whose weights are stored less one (`offset`). `norm_add` adds a norm to the residual stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from llama_npu2.frozen import frozen
from stages import air
from stages.air import limits
from stages.engine.lazy import ml_dtypes, np
from stages.kernels import BF16, Cost, Sizes, add, elementwise, lanes, signature

if TYPE_CHECKING:
    from stages.air import AirModule, Number, Variant


def reference(
    x: np.ndarray, weight: np.ndarray, eps: float, offset: float = 0.0, once: int | bool = False
) -> np.ndarray:
    """Return the norm of each row, bf16 `[rows, cols]`. `x`: bf16 `[rows, cols]`; `weight`: bf16 `[cols]`."""
    wide = x.astype(np.float32)
    scale = 1.0 / np.sqrt(np.mean(wide * wide, axis=-1, keepdims=True) + np.float32(eps))
    normed = wide * scale
    if not once:
        normed = normed.astype(ml_dtypes.bfloat16).astype(np.float32)
    return (normed * (weight.astype(np.float32) + np.float32(offset))).astype(ml_dtypes.bfloat16)


def reference_add(
    x: np.ndarray, residual: np.ndarray, weight: np.ndarray, eps: float, offset: float = 0.0, once: int | bool = False
) -> np.ndarray:
    """Return `residual` plus the rounded norm of each row of `x`, bf16 `[rows, cols]`."""
    return add.reference(residual, reference(x, weight, eps, offset, once))


@frozen
class Norm:
    """The scalars of a norm."""

    eps: float
    offset: float = 0.0
    once: int | bool = False

    @staticmethod
    def of(sizes: Sizes) -> Norm:
        """Return that of a launch with these scalars."""
        return Norm(float(sizes["eps"]), sizes.get("offset", 0.0), sizes.get("once", False))

    @property
    def macros(self) -> dict[str, int]:
        """The macros with which `kernel_src/aie2p/rms_norm.h` is compiled. Raises UserError."""
        limits.require_multiple("rms_norm", "the offset of its weight", self.offset, 1)
        return {name: int(value) for name, value in (("OFFSET", self.offset), ("ONCE", self.once)) if value}

    def vectors(self, cols: int) -> int:
        """Return the vector operations that the norm of a row takes."""
        return cols // lanes(cols) * (10 + 3 * bool(self.once) + 7 * bool(self.offset)) + 15


@frozen
class Tiling:
    """How a norm is divided: each core has an equal share of the rows. The weight stays in L1.

    With a residual it does not: a core has two input streams, so the weight comes on that of the residual. A stream
    that brings a buffer once and others many times is none that the compiler knows, so the rows of each step are a step
    of the launch, to which the weight comes again.
    """

    rows: int
    cols: int
    norm: Norm
    columns: int
    """Columns of the herd, which has one row."""
    tile_rows: int
    """Rows that a core processes at a time."""
    adds: bool = False
    """Whether the norm is added to a residual."""

    @property
    def variant(self) -> Variant:
        adds = {"ADD": 1} if self.adds else {}
        return air.Variant.of("rms_norm", COLS=self.cols, ROWS=self.tile_rows, **adds, **self.norm.macros)

    @property
    def macs(self) -> int:
        return 0

    @property
    def costs(self) -> Mapping[str, Cost]:
        if self.adds:
            return {"norm_add": Cost(vectors=self.tile_rows * (self.norm.vectors(self.cols) + add.vectors(self.cols)))}
        return {"rms_norm": Cost(vectors=self.tile_rows * self.norm.vectors(self.cols))}

    def __str__(self) -> str:
        name = "norm_add" if self.adds else "rms_norm"
        return f"{name} {self.rows}x{self.cols}: herd {self.columns}x1, {self.tile_rows} rows at a time"


def tile(rows: int, cols: int, norm: Norm, adds: bool = False) -> Tiling:
    """Divide a norm so that a core processes as many rows at a time as fit L1, with the output and the weight.

    The compiler's copies of the buffers count (`limits.copies`). A core makes an even number of steps if the shape
    allows it (`limits.steady`).
    """
    what = f"{'norm_add' if adds else 'rms_norm'} {rows}x{cols}"
    limits.require_multiple(what, "cols", cols, limits.VECTOR // 2)
    columns = elementwise.divisors_of_herd(rows)[0]
    row, share = BF16 * cols, rows // columns
    if adds:
        # The result overwrites the rows.
        fitting = (r for r in limits.divisors(share) if limits.fits_l1(r * row, r * row, row))
        return Tiling(rows, cols, norm, columns, limits.require_any(what, limits.IN_L1, fitting)[0], adds)
    heights = limits.divisors(share, 1, 4)
    fitting = (r for r in heights if limits.fits_l1(2 * limits.copies(share // r) * r * row, row))
    heights = limits.require_any(what, limits.IN_L1, fitting)
    return Tiling(rows, cols, norm, columns, limits.steady_first(what, heights, lambda r: share // r)[0])


def build(tiling: Tiling) -> AirModule:
    """Build the AIR program of a norm without a residual.

    Its arguments are `x`, `out`: bf16 `[rows][cols]` (`[cols]` for one row); `weight`: bf16 `[cols]`.
    """
    p = tiling
    wide = air.memref_type((p.rows, p.cols) if p.rows > 1 else (p.cols,))
    b = air.Builder("rms_norm", {"x": wide, "weight": air.memref_type((p.cols,)), "out": wide})
    share = p.rows // p.columns
    with b.launch(), b.segment(), b.herd(p.columns, 1) as (tx, _), b.alloc(air.L1, (p.cols,)) as (weight,):
        b.dma(weight, b.args["weight"].at((0, p.cols, 1)))
        with b.loop(share // p.tile_rows) as i, b.alloc(air.L1, *[(p.tile_rows, p.cols)] * 2) as (x, out):
            place: list[tuple[Number, int, int]] = [(0, p.cols, 1)]
            if p.rows > 1:
                place.insert(0, (tx * share + i * p.tile_rows, p.tile_rows, p.cols))
            b.dma(x, b.args["x"].at(*place))
            b.call(p.variant, "rms_norm", x, weight, out, p.norm.eps)
            b.dma(b.args["out"].at(*place), out)
    return b.finish()


def build_add(tiling: Tiling) -> AirModule:
    """Build the AIR program of a norm that is added to a residual.

    Its arguments are `x`, `residual`, `out`: bf16 `[rows][cols]` (`[cols]` for one row); `weight`: bf16 `[cols]`.
    """
    p = tiling
    # The rows of a step lie together: the compiler takes no steps that reach over those of others.
    together = p.columns * p.tile_rows
    wide = air.memref_type((p.rows, p.cols) if p.rows > 1 else (p.cols,))
    b = air.Builder("norm_add", {"x": wide, "residual": wide, "weight": air.memref_type((p.cols,)), "out": wide})

    def rows(first: Number) -> list[tuple[Number, int, int]]:
        return [(first, p.tile_rows, p.cols)] * (p.rows > 1) + [(0, p.cols, 1)]

    with b.launch(p.rows // together) as (step, _), b.segment():
        beside = b.channel((p.columns, 1), (p.columns, 1))
        for column in range(p.columns):
            b.put(beside, (column, 0), b.args["weight"].at((0, p.cols, 1)))
            b.put(beside, (column, 0), b.args["residual"].at(*rows(step * together + column * p.tile_rows)))
        with (
            b.herd(p.columns, 1) as tile,
            b.alloc(air.L1, *[(p.tile_rows, p.cols)] * 2, (p.cols,)) as (x, residual, weight),
        ):
            b.get(beside, tile, weight)
            b.get(beside, tile, residual)
            first = step * together + tile[0] * p.tile_rows
            b.dma(x, b.args["x"].at(*rows(first)))
            b.call(p.variant, "norm_add", x, weight, residual, p.norm.eps)
            b.dma(b.args["out"].at(*rows(first)), x)
    return b.finish()


PARAMS = "eps:float offset:float once"
"""The scalars of a norm."""

KERNELS = (
    signature(
        "rms_norm",
        ("x", "weight"),
        f"rows cols {PARAMS}",
        reference,
        tiling=lambda s: tile(s["rows"], s["cols"], Norm.of(s)),
        program=build,
    ),
    signature(
        "norm_add",
        ("x", "residual", "weight"),
        f"rows cols {PARAMS}",
        reference_add,
        source="rms_norm",
        tiling=lambda s: tile(s["rows"], s["cols"], Norm.of(s), adds=True),
        program=build_add,
    ),
)
